"""The parallel linears by Transformer Engine: ``te.Linear`` and ``te.LayerNormLinear``, held.

One of our layers holds one of these modules as a child and shares its parameters with it, so that
names, layouts and state dicts are Transformer Engine's, and so that whoever looks for Transformer
Engine's modules (``te.checkpoint``, FSDP) finds one. Pad rows are the caller's business.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from padded_sp import mappings
from padded_sp.alignment import travels_as_fp8
from padded_sp.backends.outside_of_graphs import eagerly as eagerly
from padded_sp.backends.te import (
    GATHERS_UNALIGNED_BLOCKS,
    FP8GlobalStateManager,
    fp8_group,
    fp8_recipe,
    gathers_square_blocks,
    recipe_name,
    te,
)
from padded_sp.collectives import contains_ranks, group_rank, group_size
from padded_sp.fused_parameters import joined
from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_log = logging.getLogger("padded_sp")

#: A recipe, and for each direction its scales and its amax history.
DelayedState = tuple[Any, dict[str, tuple[Tensor, Tensor]]]


def leave_undrawn(tensor: Tensor) -> None:
    """The initialisation of what the layer draws by itself."""


class _Held:
    """A module of Transformer Engine inside a layer that holds its parameters and its state."""

    __dict__: dict[str, Any]
    fp8_meta: dict[str, Any]
    quantizers: dict[str, list[Any]]
    param_init_meta: dict[str, Any]
    init_fp8_meta_tensors: Any

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Nothing: the layer that holds the module writes its parameters and its extra state."""
        return OrderedDict() if destination is None else destination

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing: the layer loads them."""

    def delayed_state(self) -> DelayedState | None:
        """Delayed scaling's recipe, scales and amax histories, on the host. None without any.

        Transformer Engine's own extra state is empty after a call in BF16, as in an evaluation.
        """
        states: dict[str, Any] = {name: self.fp8_meta.get(name) for name in self.quantizers}
        histories = {
            name: (state.scale.cpu(), state.amax_history.cpu())
            for name, state in states.items()
            if hasattr(state, "amax_history")
        }
        return (self.fp8_meta["recipe"], histories) if histories else None

    def load_delayed_state(self, state: DelayedState | None) -> None:
        """Goes on from a state of the same kind of linear; None leaves everything as it is.

        Source: TransformerEngine ``pytorch/module/base.py`` (set_extra_state), without its pickle.
        """
        if state is None:
            return
        recipe, histories = state
        self.fp8_meta |= {"recipe": recipe, "num_gemms": 1, "fp8_checkpoint": True}
        self.init_fp8_meta_tensors(recipe)
        for name, (scale, amax_history) in histories.items():
            self.fp8_meta[name].scale.copy_(scale)
            self.fp8_meta[name].amax_history.copy_(amax_history)

    def __getstate__(self) -> dict[str, Any]:
        """Without process groups, and without what exists once a process: amax buffers know
        modules by their place. Delayed scaling's scales and amax histories travel along."""
        plain = {n: x for n, x in self.fp8_meta.items() if isinstance(x, (bool, int, float, str))}
        return self.__dict__ | {
            "tp_group": None,
            # Without a recipe there is no extra state to ask for.
            "fp8": False,
            "fp8_calibration": False,
            "fp8_meta": plain | {"fp8_group": None, "fp8_checkpoint": False},
            "fp8_meta_tensors_initialized": False,
            "fp8_initialized": False,
            "quantizers": {name: [] for name in self.quantizers},
            "_fp8_workspaces": {},
            "param_init_meta": self._picklable_init(),
            "_delayed_state": self.delayed_state(),
        }

    def _picklable_init(self) -> dict[str, Any]:
        """How parameters are initialised, without Transformer Engine's local functions: constants
        of norms and biases, which the layer draws by itself."""
        inits = {name: copy.copy(meta) for name, meta in self.param_init_meta.items()}
        for meta in inits.values():
            if "<locals>" in getattr(meta.init_fn, "__qualname__", ""):
                meta.init_fn = leave_undrawn
        return inits

    def __setstate__(self, state: dict[str, Any]) -> None:
        delayed_state = state.pop("_delayed_state")
        super().__setstate__(state)  # pyright: ignore
        self.load_delayed_state(delayed_state)


class HeldLinear(_Held, te.Linear):
    """``te.Linear`` inside a ColumnParallelLinear or RowParallelLinear."""


class HeldLayerNormLinear(_Held, te.LayerNormLinear):
    """``te.LayerNormLinear`` inside a LayerNormColumnParallelLinear."""


def make(*, layer_norm: dict[str, Any] | None, **arguments: Any) -> Any:
    """The module that a layer holds. Arguments are Transformer Engine's.

    ``layer_norm``: None for a plain linear; else what te.LayerNormLinear takes beyond one.

    Raises: ValueError: a ``rng_tracker_name``, which te.LayerNormLinear does not take.
    """
    if layer_norm is None:
        return HeldLinear(**arguments)
    if name := arguments.pop("rng_tracker_name"):
        raise ValueError(
            f"te.LayerNormLinear takes no rng_tracker_name, got {name!r}: let "
            "get_rng_state_tracker return a tracker whose default is the one you mean"
        )
    return HeldLayerNormLinear(**arguments, **layer_norm)


def builds_fp8_weights() -> bool:
    """Whether te.fp8_model_init surrounds the call: weights built now are quantised themselves."""
    return FP8GlobalStateManager.with_fp8_parameters()


def recipe_for(recipe: Any, tp_group: ProcessGroup | None) -> str:
    """The name of a recipe object for a linear whose rows are divided over ``tp_group``.

    Raises: ValueError: no rules for the recipe; delayed scaling whose amax is not reduced over all
        ranks of the group, which would quantise one gathered tensor by several scales.
    """
    name = recipe_name(recipe)
    if name == "fp8_delayed" and group_size(tp_group) > 1:
        if not recipe.reduce_amax:
            raise ValueError(
                "delayed scaling under sequence parallelism needs DelayedScaling(reduce_amax=True)"
            )
        reduced_over = fp8_group()
        if reduced_over is not None and not contains_ranks(reduced_over, tp_group):
            raise ValueError(
                "delayed scaling under sequence parallelism reduces amax over a group that has not "
                "all ranks of tp_group: pass one that has to te.autocast(amax_reduction_group=)"
            )
    return name


def why_wide(parallel_mode: str, rows: int, features: int, tp_size: int) -> str:
    """Why a gather to ``rows`` rows travels in BF16 under blockwise scaling; empty if it does not.

    Args: rows, features: of what the linear gathers, as its GEMMs see it.
    """
    if gathers_square_blocks(fp8_recipe(), parallel_mode):
        return (
            "what they bring is scaled by blocks of 128 x 128, which Transformer Engine never sends"
        )
    if not travels_as_fp8("fp8_blockwise", rows, features, tp_size):
        return (
            "a rank's rows or features are no multiple of 128; "
            'AlignPolicy("fp8_blockwise", tp_size) plans rows that travel as FP8'
        )
    return ""


def run(
    module: Any,
    x: Tensor,
    meta: PaddedSeqMeta,
    tp_group: ProcessGroup | None,
    *,
    is_first_microbatch: bool | None,
    wide_gather: str = "",
    call: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, the bias to return and the normalised x to return, as the module was built to.

    Shapes and communication as ``torch_linear``; FP8 gathers travel as FP8, but where
    ``wide_gather`` says why they do not. ``call``: what calls the module, where that is not itself.
    """

    def compute(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        returned = (call or module)(x, is_first_microbatch=is_first_microbatch)
        y, *rest = returned if isinstance(returned, tuple) else (returned,)
        bias = rest.pop(0) if module.return_bias else None
        return y, bias, rest.pop(0) if rest else None

    if wide_gather:
        _report_wide_gather(wide_gather)
        if not GATHERS_UNALIGNED_BLOCKS:
            return _run_between_our_collectives(module, compute, x, meta, tp_group)
    y, bias, normed = compute(x)
    return own(y), bias, None if normed is None else own(normed)


def own(y: Tensor) -> Tensor:
    """Not a view, which the output of a Transformer Engine module may be: hooks that a layer puts
    on it would miss the gradient once a caller goes on in place."""
    return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y


def _run_between_our_collectives(
    module: Any,
    compute: Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]],
    x: Tensor,
    meta: PaddedSeqMeta,
    tp_group: ProcessGroup | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``run`` where this version cannot gather: the module sees all rows and sends nothing."""
    if module.parallel_mode == "column":
        x_full = mappings.gather_from_sequence_parallel_region(x, meta, tp_group)
        with _without_communication(module):
            y, bias, normed = compute(x_full)
        if normed is not None:
            # By a slice, not a mapping: this rank's rows bring this rank's term of the gradient.
            normed = own(meta.shard(normed, group_rank(tp_group), module.tp_size))
        return own(y), bias, normed
    with _without_communication(module):
        partial, _, _ = compute(x)
    y = mappings.reduce_scatter_to_sequence_parallel_region(partial, meta, tp_group)
    bias = None
    if module.use_bias:
        bias = joined([getattr(module, name) for name in module.bias_names]).to(y.dtype)
    if module.return_bias:
        return y, bias, None
    return (y if bias is None else y + bias), None, None


@contextmanager
def _without_communication(module: Any) -> Iterator[None]:
    """Makes it one rank's linear for a call; backward keeps what it was called with."""
    changed: dict[str, Any] = {"parallel_mode": None, "sequence_parallel": False}
    if module.parallel_mode == "row":  # its bias is added once, to the sum
        changed |= {"return_bias": False, "apply_bias": False, "gemm_bias_unfused_add": False}
    before = {name: module.__dict__[name] for name in changed}
    module.__dict__.update(changed)
    try:
        yield
    finally:
        module.__dict__.update(before)


@functools.cache
def _report_wide_gather(why: str) -> None:
    _log.warning("blockwise FP8: gathers travel in BF16: %s", why)
