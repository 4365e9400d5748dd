"""The reported case through padded_sp, and whether the four conditions hold."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from repro_case import HEAD_DIM, HEADS, HIDDEN, NAN, PADDED, REAL, from_float64, rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from padded_sp import ColumnParallelLinear, DotProductAttention, PaddedSeqMeta, RowParallelLinear

CONDITIONS = ("no crash", "padded shape", "pads masked", "padded communication")
STEPS = 3  # delayed scaling takes its scales from the steps before
# Relative distance from float64 of what two linears and attention give; the wrong rows give 1.
NEAR, NEAR_IN_FP8 = 0.02, 0.2


@dataclass
class Outcome:
    """What one recipe did.

    Attributes:
        refused: why this GPU cannot run it; else empty.
        found: condition -> why it does not hold, empty where it does; without those that were not
            reached.
        notes: figures worth showing.
    """

    recipe: str
    refused: str = ""
    found: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def reason(self, condition: str) -> str:
        """Why the condition does not hold; empty where it does."""
        return self.found.get(condition, "not reached")


class Block(nn.Module):
    """Column linear to q, k and v, attention, row linear: x [T / R, HIDDEN] -> [T / R, HIDDEN]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        on_te: Any = {"tp_group": group, "backend": "te"}
        placed = on_te | {"params_dtype": torch.bfloat16, "device": device}
        split = ("query", "key", "value")
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, parameters_split=split, **placed)
        self.attention = DotProductAttention(HEADS, HEAD_DIM, **on_te)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, **placed)
        with torch.no_grad():  # a bias is what pads of zeros leave a plain linear as
            for name, parameter in self.named_parameters():
                if "bias" in name:
                    parameter.fill_(0.1)
        self.rows_inside: set[int] = set()

    def forward(self, x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        qkv = self.qkv(x, meta)
        q, k, v = qkv.unflatten(1, (3, -1, HEAD_DIM)).unbind(1)
        attended = self.attention(q, k, v, meta)
        self.rows_inside = {len(qkv), len(attended)}
        return self.out(attended, meta)


class Wire(TorchDispatchMode):
    """Notes what travels inside: the shapes that each collective of rows reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[set[tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and ("gather" in name or "scatter" in name):
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            self.shapes.append({tuple(x.shape) for x in tensors})
        return result


def run(recipe: str, meta: PaddedSeqMeta, group: dist.ProcessGroup, pads: float, wire: Wire) -> Any:
    """A new block's steps with ``pads`` in the pad rows of what comes in, in both directions:
    the block, and what each step gave, by name."""
    from padded_sp.backends.te import FP8GlobalStateManager, autocast, make_recipe

    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    block, fp8, steps = Block(group, meta.device), make_recipe(recipe), []
    for step in range(STEPS):
        x, grad = (
            meta.shard(rows(seed, meta, pads), group.rank()).clone() for seed in (step, 10 + step)
        )
        x.requires_grad_()
        block.zero_grad()
        with wire:
            with autocast(fp8, group):
                y = block(x.clone(), meta)  # no leaf, so that pad rows may be overwritten
            y.backward(grad)
        found = {"output": y.detach(), "input gradient": x.grad}
        found |= {f"gradient of {name}": p.grad for name, p in block.named_parameters()}
        steps.append(found | scales(block))
    return block, steps


def scales(block: nn.Module) -> dict[str, Tensor]:
    """Copies of the FP8 scales and amax histories of every module inside."""
    found = {}
    for path, module in block.named_modules():
        for key, state in getattr(module, "fp8_meta", {}).items():
            for kind in ("scale", "amax_history"):
                if isinstance(value := getattr(state, kind, None), Tensor):
                    found[f"{path} {key} {kind}"] = value.clone()
    return found


def examine(recipe: str, group: dist.ProcessGroup, device: torch.device) -> Outcome:
    """Runs one recipe and looks at the four conditions, on every rank of ``group``."""
    from padded_sp.backends.te import unavailable

    outcome = Outcome(recipe, refused=unavailable(recipe))
    if outcome.refused:
        return outcome
    size = group.size()
    meta = PaddedSeqMeta.from_seq_lens(REAL, padded_lens=PADDED, tp_size=size, device=device)
    wire = Wire()
    try:
        block, clean = run(recipe, meta, group, 0.0, wire)
        again, poisoned = (run(recipe, meta, group, pads, Wire())[1] for pads in (0.0, 1e4))
        with_nan = run(recipe, meta, group, NAN, Wire())[1]
    except Exception as error:
        traceback.print_exc()
        outcome.found["no crash"] = f"{type(error).__name__}: {str(error).strip()}"
        return outcome
    outcome.found["no crash"] = ""

    last, shard = clean[-1], (meta.num_rows // size, HIDDEN)
    shapes = {name: tuple(last[name].shape) for name in ("output", "input gradient")}
    outside = {name: shape for name, shape in shapes.items() if shape != shard}
    inside = block.rows_inside - {meta.num_rows}
    outcome.found["padded shape"] = f"{outside or inside}" if outside or inside else ""

    far = {"run again": again, "NaN in pads": with_nan, "1e4 in pads": poisoned}
    problems = [f"{what} moves {', '.join(differing(steps, clean))}"
                for what, steps in far.items() if differing(steps, clean)]  # fmt: skip
    pads = meta.shard(meta.padding_mask, group.rank())
    problems += [f"{name} is not zero in pads" for name in shapes if last[name][pads].any()]
    distances = from_float64(block, last, meta, group, seeds=(STEPS - 1, STEPS + 9))
    worst = max(distances, key=lambda name: distances[name])
    outcome.notes.append(f"{worst} is {distances[worst]:.1e} from float64")
    if not distances[worst] <= (NEAR if recipe == "bf16" else NEAR_IN_FP8):
        problems.append(outcome.notes[-1])
    outcome.found["pads masked"] = "; ".join(problems)
    outcome.found["padded communication"], note = judge(wire.shapes, meta.num_rows, size)
    outcome.notes.append(note)
    return outcome


def judge(shapes: list[set[tuple[int, ...]]], num_rows: int, size: int) -> tuple[str, str]:
    """Why what travelled does not follow the padded boundaries (empty: it does), and what did."""
    if size == 1:
        return f"one rank sent {shapes}" if shapes else "", "one rank: nothing is sent"
    both = {num_rows // size, num_rows}
    by_rows = [travelled for travelled in shapes if any(len(shape) > 1 for shape in travelled)]
    wrong = [sorted(s) for s in by_rows if {shape[0] for shape in s if len(shape) > 1} != both]
    note = f"{len(by_rows)} collectives between {num_rows // size} rows a rank and all {num_rows}"
    if len(by_rows) < 4 * STEPS:  # rows to gather and sums to scatter, in both directions
        return f"only {note}", note
    return (f"{wrong} travelled" if wrong else ""), note


def differing(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> list[str]:
    """The names whose bits differ in some step."""
    return sorted({name for x, y in zip(a, b, strict=True)
                   for name in x if not torch.equal(x[name], y[name])})  # fmt: skip
