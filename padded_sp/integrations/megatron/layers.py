"""Megatron's layers over Transformer Engine, with inert pads.

Each is a subclass of Megatron's own, whose constructor, parameters, checkpoints, quantisation and
returns it keeps in every version. Only the call of Transformer Engine inside is another: the
surrounding meta is found and checked, with the recipe in force, before anything is communicated;
pad rows are zero on the way in and out, and so are those of the gradients.

Source: megatron-core 0.16.1 and 0.19.2, megatron/core/extensions/transformer_engine.py.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import Tensor

from padded_sp import verify
from padded_sp.backends import te_linear
from padded_sp.backends.te import fp8_recipe, te
from padded_sp.context import resolve_meta
from padded_sp.inert import inert_input, inert_output
from padded_sp.integrations.megatron.held_rows import first_row, held_rows, shards_of
from padded_sp.meta import PaddedSeqMeta
from padded_sp.parallel_linear import check_layout, inner_rows
from padded_sp.verdict import demand, is_enabled

__all__ = [
    "ColumnParallelLinear",
    "LayerNormColumnParallelLinear",
    "Linear",
    "Norm",
    "RowParallelLinear",
]


class InertLinear:
    """Between a class of Megatron's and that of Transformer Engine which it calls.

    Experts' linears take no meta: their rows are those that the router sent, not the pack's.
    """

    config: Any
    tp_group: Any
    parallel_mode: str | None
    in_features: int
    out_features: int
    tp_size: int
    sequence_parallel: bool
    use_bias: bool
    return_bias: bool
    is_expert = False

    _tp_group: Any
    _proof = "column"

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Transformer Engine's, called by Megatron's ``forward(x)`` in its quantisation context.

        Raises: ValueError: on every rank and before anything is communicated: no surrounding meta;
            an input of other rows, features or device; what the recipe in force does not allow;
            numbers of Transformer Engine that are wrong on this machine.
        """
        call = functools.partial(super().forward, **others)  # pyright: ignore
        if self.is_expert:
            return call(inp, is_first_microbatch=is_first_microbatch)
        meta = resolve_meta(None)
        in_row, out_row, shards = self._rows(inp, meta)
        recipe = self._check(inp, meta, shards)
        y, bias, _ = te_linear.run(
            self,
            inert_input(inp, meta, first_row=in_row),
            meta,
            self.tp_group,
            is_first_microbatch=is_first_microbatch,
            wide_gather=self._why_wide(recipe, inp, meta),
            call=call,
        )
        y = inert_output(y, meta, first_row=out_row)
        return y if bias is None else (y, bias)

    def _rows(self, inp: Tensor, meta: PaddedSeqMeta) -> tuple[int, int, int]:
        """The first row of the input, that of the output, and the ranks that divide the rows."""
        mode, group = self.parallel_mode, self._tp_group
        sequence_parallel = self.config.sequence_parallel
        in_row, shards = held_rows(
            inp,
            meta,
            f"the input of {type(self).__name__}",
            group,
            sequence_parallel=sequence_parallel,
            divided=None if mode is None else mode == "column",
        )
        if mode is None:  # it sends nothing
            return in_row, in_row, shards
        if mode == "column":
            return in_row, 0, shards
        shards = shards_of(group, sequence_parallel)
        return 0, first_row(meta, group, shards), shards

    def _check(self, inp: Tensor, meta: PaddedSeqMeta, shards: int) -> str:
        """Raises ValueError for what the recipe in force does not allow; returns its name."""
        if inp.dim() < 2 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} takes [rows, *, {self.in_features}], got {list(inp.shape)}"
            )
        divides = self.sequence_parallel and self.parallel_mode is not None
        recipe = te_linear.recipe_for(fp8_recipe(), self.tp_group if divides else None)
        check_layout(recipe, inp, meta, shards, (self.in_features, self.out_features))
        self._prove(recipe, inp.dtype, inp.device)
        return recipe

    def _prove(self, recipe: str, dtype: torch.dtype, device: torch.device) -> None:
        """The numbers of Transformer Engine's linear, proved here once a process."""
        proved = self.__dict__.setdefault("_proved", set())
        if (recipe, dtype) in proved:
            return
        if is_enabled(self._tp_group):
            demand(
                verify.verify_linear,
                "te",
                self._tp_group,
                recipe=recipe,
                layer=self._proof,
                dtype=dtype,
                device=device,
            )
        proved.add((recipe, dtype))

    def _why_wide(self, recipe: str, inp: Tensor, meta: PaddedSeqMeta) -> str:
        if recipe != "fp8_blockwise" or self.parallel_mode is None or not self.sequence_parallel:
            return ""
        features = self.in_features if self.parallel_mode == "column" else self.out_features
        rows = meta.num_rows * inner_rows(inp)
        return te_linear.why_wide(self.parallel_mode, rows, features, self.tp_size)


class _InertTELinear(InertLinear, te.Linear):
    """Comes right before te.Linear in the order in which methods are looked up."""


class _InertTELayerNormLinear(InertLinear, te.LayerNormLinear):
    """The same before te.LayerNormLinear."""

    _proof = "layer_norm_column"


def _noting_experts(constructor: Any) -> Any:
    """Megatron's constructor, signature and all; the layer notes whether it is an expert's."""

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.is_expert = bool(kwargs.get("is_expert", False))
        constructor(self, *args, **kwargs)

    return __init__


def is_built_for_expert(linear: Any) -> bool:
    """Whether Megatron built a linear for an expert: those draw from a generator of their own."""
    return getattr(linear, "rng_tracker_name", None) == get_expert_parallel_rng_tracker_name()


class ColumnParallelLinear(megatron_te.TEColumnParallelLinear, _InertTELinear):
    """Megatron's ``TEColumnParallelLinear`` with inert pads.

    Over R ranks, T = meta.num_rows:
        x       [T / R, *, K]    this rank's rows; [T, *, K] without ``sequence_parallel``
        y       [T, *, O / R]    and the bias to add later, or None: ``(y, bias)``
        weight  [O / R, K]       bias [O / R]
    Communication is Transformer Engine's: an all-gather of x, backward a reduce-scatter.

    Constructor, parameters, ``sharded_state_dict`` and quantisation are Megatron's, in every
    version. The meta is the surrounding one, ``with seq_meta(meta):``; linears of experts
    (``is_expert=True``) take none.

    Raises: ValueError: at the call, on every rank and before anything is communicated: no meta; x
        of other rows, features or device than the meta and the layer have; rows or features that
        the recipe in force does not allow; numbers that are wrong on this machine. At construction:
        what Megatron's raises.
    Source: megatron-core 0.16.1 and 0.19.2, megatron/core/extensions/transformer_engine.py.
    """

    __init__ = _noting_experts(megatron_te.TEColumnParallelLinear.__init__)


class RowParallelLinear(megatron_te.TERowParallelLinear, _InertTELinear):
    """Megatron's ``TERowParallelLinear`` with inert pads.

    Over R ranks, T = meta.num_rows:
        x       [T, *, K / R]
        y       [T / R, *, O]    this rank's rows; [T, *, O] without ``sequence_parallel``
        weight  [O, K / R]       bias [O], on each rank
    Communication is Transformer Engine's: a reduce-scatter of y, backward an all-gather. The rest
    as :class:`ColumnParallelLinear`.
    """

    __init__ = _noting_experts(megatron_te.TERowParallelLinear.__init__)


class LayerNormColumnParallelLinear(
    megatron_te.TELayerNormColumnParallelLinear, _InertTELayerNormLinear
):
    """Megatron's ``TELayerNormColumnParallelLinear`` with inert pads: a norm, then a linear.

    As :class:`ColumnParallelLinear`; the norm's parameters are ``layer_norm_weight`` [K] and, for
    LayerNorm, ``layer_norm_bias`` [K].
    """

    __init__ = _noting_experts(megatron_te.TELayerNormColumnParallelLinear.__init__)


class Linear(megatron_te.TELinear, _InertTELinear):
    """Megatron's ``TELinear`` with inert pads; "duplicated", each rank has the whole weight.

        x       [rows, *, K]    rows: T, or T / R where ``sequence_parallel`` has them divided
        y       [rows, *, O]
    It stands for the down-projections of multi-latent attention and communicates nothing. The rest
    as :class:`ColumnParallelLinear`.
    """

    __init__ = _noting_experts(megatron_te.TELinear.__init__)


# ---- norms --------------------------------------------------------------------------------------


class InertNorm:
    """Before a norm of Transformer Engine's. Rows are told by their number: a block's norms have
    this rank's, those of queries and keys all."""

    sequence_parallel: bool
    tp_group: Any = None  # None: the one of Megatron's parallel_state

    def forward(self, x: Tensor) -> Any:
        """x [rows, *, H] -> the same shape, and the residual where Megatron fuses that."""
        meta = resolve_meta(None)
        tp_group: Any = self.tp_group
        if tp_group is None:
            tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        row, _ = held_rows(
            x, meta, "the input of a norm", tp_group, sequence_parallel=self.sequence_parallel
        )
        returned = super().forward(inert_input(x, meta, first_row=row))  # pyright: ignore
        normed, *residual = returned if isinstance(returned, tuple) else (returned,)
        normed = inert_output(te_linear.own(normed), meta, first_row=row)
        return (normed, *residual) if residual else normed


class InertRMSNorm(InertNorm, te.RMSNorm):
    """``te.RMSNorm`` as :class:`Norm` makes it."""


class InertLayerNorm(InertNorm, te.LayerNorm):
    """``te.LayerNorm`` as :class:`Norm` makes it."""


#: What Megatron builds by itself -> what it may be changed into, by its class.
CHANGES: dict[type, type] = {
    te.RMSNorm: InertRMSNorm,
    te.LayerNorm: InertLayerNorm,
    megatron_te.TELinear: Linear,
    megatron_te.TEColumnParallelLinear: ColumnParallelLinear,
    megatron_te.TERowParallelLinear: RowParallelLinear,
    megatron_te.TELayerNormColumnParallelLinear: LayerNormColumnParallelLinear,
}

_fused: Any = getattr(megatron_te, "TEFusedResidualRMSNorm", None)  # 0.19
if _fused is not None:

    class InertFusedResidualRMSNorm(InertNorm, _fused):
        """Megatron's ``TEFusedResidualRMSNorm`` as :class:`Norm` makes it."""

    CHANGES[_fused] = InertFusedResidualRMSNorm


class Norm:
    """Makes what Megatron's ``TENorm`` makes, a ``te.RMSNorm`` or ``te.LayerNorm``, inert.

        x, y   [rows, *, H]    rows: T = meta.num_rows, or this rank's T / R

    Arguments are TENorm's. Communicates nothing. Raises: ValueError: no surrounding meta; x of
    other rows or on another device.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        norm = megatron_te.TENorm(*args, **kwargs)
        norm.__class__ = CHANGES[type(norm)]  # constructors of norms differ between versions
        return norm
