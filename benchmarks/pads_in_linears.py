"""What pad rows do to a linear layer: plain Transformer Engine in each recipe, and padded_sp.

    python benchmarks/pads_in_linears.py --output benchmarks/results/pads_in_linears.json

One GPU, one linear 1024 -> 2048, 256 rows of which 100..127 are pads whose output gradient is
exactly 0, as behind a masked loss. The pads hold zeros, then NaN, then 1e4: how far do the real
rows of the output and the weight gradient move? Each figure is relative, in the 2-norm, and each
candidate is compared with itself on zero pads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformer_engine
import transformer_engine.pytorch as te
from timing import provenance
from torch import Tensor
from transformer_engine.common import recipe

from padded_sp import ColumnParallelLinear, PaddedSeqMeta

ROWS, PADS, K, O = 256, slice(100, 128), 1024, 2048  # noqa: E741
RECIPES = {
    "bf16": None,
    "fp8_delayed": recipe.DelayedScaling,
    "fp8_current": recipe.Float8CurrentScaling,
    "fp8_blockwise": recipe.Float8BlockScaling,
}
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def te_step(name: str) -> Step:
    """Output and weight gradient of a fresh te.Linear; the same weights at every call."""

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        linear = te.Linear(K, O, bias=False, params_dtype=torch.bfloat16)
        make = RECIPES[name]
        fp8 = make() if make else None
        for _ in range(2):  # delayed scaling takes its scales from the step before
            linear.weight.grad = None
            with te.fp8_autocast(enabled=fp8 is not None, fp8_recipe=fp8):
                y = linear(x)
            y.backward(grad)
        return y.detach(), linear.weight.grad

    return step


def our_step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    meta = PaddedSeqMeta.from_seq_lens([100, 128], padded_lens=[128, 128], device="cuda")
    linear = ColumnParallelLinear(K, O, bias=False, params_dtype=torch.bfloat16, device="cuda")
    y = linear(x, meta)
    y.backward(grad)
    return y.detach(), linear.weight.grad


def moved(step: Step, pads: float) -> dict[str, float | str]:
    """How far the pads' content moves the real outputs and the weight gradient."""
    generator = torch.Generator("cuda").manual_seed(2)
    x, grad = (
        torch.randn(ROWS, n, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (K, O)
    )
    grad[PADS] = 0
    poisoned = x.clone()
    x[PADS], poisoned[PADS] = 0, pads
    (y, dw), (y_poisoned, dw_poisoned) = step(x, grad.clone()), step(poisoned, grad.clone())
    real = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    real[PADS] = False
    return {
        "real_outputs": distance(y_poisoned[real], y[real]),
        "weight_gradient": distance(dw_poisoned, dw),
    }


def distance(a: Tensor, b: Tensor) -> float | str:
    if a.isnan().any():
        return f"NaN in {a.isnan().double().mean().item():.0%}"
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    candidates: dict[str, Step] = {f"te {name}": te_step(name) for name in RECIPES}
    candidates["padded_sp bf16"] = our_step
    figures = {
        name: {"nan": moved(step, float("nan")), "1e4": moved(step, 1e4)}
        for name, step in candidates.items()
    }
    for name, figure in figures.items():
        print(f"{name:18}", figure)
    versions = {"transformer_engine": transformer_engine.__version__}
    if arguments.output:
        report = {"moved": figures, **versions, **provenance()}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
