"""What tests of layers over Transformer Engine share: runs of several steps, bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine
from rank_helpers import device_of, drawn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from padded_sp.backends.te import FP8GlobalStateManager, autocast, make_recipe

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise")
FP8_RECIPES = RECIPES[1:]

IS_DOUBLE = "fake_te" in (transformer_engine.__file__ or "")

# For what the double cannot tell. On a GPU host nothing is skipped.
only_the_real_one = pytest.mark.skipif(
    IS_DOUBLE, reason="only the real Transformer Engine can tell"
)


def on_te(body: Callable[..., Any]) -> Callable[..., Any]:
    """A body between two resets of Transformer Engine's global FP8 state, deterministic inside."""

    @functools.wraps(body)
    def isolated(group: dist.ProcessGroup, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # Newer versions load delayed scales, which are pickled, from trusted sources only.
            patch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
            patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
            FP8GlobalStateManager.reset()
            try:
                return body(group, **kwargs)
            finally:
                FP8GlobalStateManager.reset()

    return isolated


def recipe_of(name: str) -> Any:
    """A short amax history, so that three steps turn it over."""
    options = {"amax_history_len": 2} if name == "fp8_delayed" else {}
    return make_recipe(name, **options)


def random(group: dist.ProcessGroup, *shape: int, seed: int) -> Tensor:
    """The same on every rank; BF16."""
    return drawn(group, *shape, seed=seed, dtype=torch.bfloat16)


def fp8_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the scales and amax histories of every Transformer Engine module inside, by the
    name of the layer that holds it."""
    state = {}
    for path, child in module.named_modules():
        meta, name = getattr(child, "fp8_meta", {}), path.removesuffix("te")
        for key in ("scaling_fwd", "scaling_bwd"):
            for kind in ("scale", "amax_history"):
                value = getattr(meta.get(key), kind, None)
                if isinstance(value, Tensor):
                    state[f"{name}{key}.{kind}"] = value.clone()
    return state


def train(
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    inputs: list[Tensor],
    gradients: list[Tensor],
    recipe: str,
    group: dist.ProcessGroup,
) -> list[dict[str, Tensor]]:
    """One step for each input: its output, all gradients, scales and histories, by name.

    Between steps the weights move, as an optimiser's do.
    """
    steps = []
    recipe_object = recipe_of(recipe)
    for x, gradient in zip(inputs, gradients, strict=True):
        leaf = x.clone().requires_grad_()
        with autocast(recipe_object, group):
            y = call(leaf.clone())  # no leaf, so that pad rows may be overwritten
        y.backward(gradient.clone())
        step = {"output": y.detach().clone(), "input gradient": leaf.grad}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, name
                step[f"gradient of {name}"] = parameter.grad
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
        steps.append(step | fp8_state(module))
    return steps


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN where NaN, and otherwise the same values."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and (torch.equal(a.nan_to_num(), b.nan_to_num()))
    )


def assert_same_steps(
    actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], when: str = ""
) -> None:
    """The same names and, bit for bit, the same values in every step."""
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert sorted(a) == sorted(b)
        different = [name for name in a if not same_bits(a[name], b[name])]
        assert not different, f"step {i}{when}: {different} differ"


class Wire(TorchDispatchMode):
    """Notes every collective inside: (name, dtype, bytes that this rank brings)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            # PyTorch's own collectives take the output first, the functional ones only the input.
            source = args[1] if func.namespace == "c10d" and "gather" in name else args[0]
            if name not in ("wait_tensor", "barrier", "monitored_barrier_"):
                for x in tree_leaves(source):
                    if isinstance(x, Tensor):
                        self.sent.append((name.strip("_"), x.dtype, x.nbytes))
        return func(*args, **(kwargs or {}))

    def gathered(self, *dtypes: torch.dtype) -> int:
        """Bytes that this rank brings to all-gathers, of these dtypes (none: of all)."""
        return sum(
            nbytes
            for name, dtype, nbytes in self.sent
            if "gather" in name and (not dtypes or dtype in dtypes)
        )


def device_and_dtype(group: dist.ProcessGroup) -> dict[str, Any]:
    return {"device": device_of(group), "params_dtype": torch.bfloat16}
