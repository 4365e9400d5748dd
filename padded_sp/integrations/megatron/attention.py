"""Megatron's attention over Transformer Engine, its place taken by padded_sp's.

A subclass of Megatron's own, which checkpoints and whoever looks for Transformer Engine's class
find. It computes nothing by itself: the surrounding meta says both boundaries, which
``packed_seq_params`` must agree with, and padded_sp's ``DotProductAttention`` picks a backend.

Source: megatron-core 0.16.1 and 0.19.2, megatron/core/extensions/transformer_engine.py.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from padded_sp import attention
from padded_sp.context import resolve_meta
from padded_sp.integrations.megatron.packed_seq_params import from_packed_seq_params
from padded_sp.meta import PaddedSeqMeta

_MASKS = {"causal": "causal", "padding_causal": "causal", "no_mask": "full", "padding": "full"}

# Options of Megatron's config that attention here has not, and the value that asks for nothing.
_UNSUPPORTED = {
    "context_parallel_size": (1, "context parallelism"),
    "softmax_type": ("vanilla", "attention sinks"),
    "qk_clip": (False, "QK-clip"),
    "log_max_attention_logit": (False, "the largest logit"),
    "batch_invariant_mode": (False, "batch-invariant kernels"),
    "attn_logit_softcapping": (None, "a soft cap on scores"),
}


class DotProductAttention(TEDotProductAttention):
    """Megatron's ``TEDotProductAttention`` for packed batches, with inert pads.

        query  [T, heads / R, D]
        key    [T_kv, kv_heads / R, D]      T = meta.num_rows
        value  [T_kv, kv_heads / R, D_v]
        out    [T, heads / R * D_v]

    Real boundaries mask, padded ones place. Constructor and checkpoints are Megatron's. Each pack
    is computed by the backend that padded_sp's "auto" picks, or by those that the class attribute
    ``backend`` allows (see :class:`padded_sp.DotProductAttention`).

    Raises: ValueError: at construction: context parallelism, attention sinks, QK-clip or anything
        else that attention here does not have. At the call: no surrounding meta; no
        ``packed_seq_params``, or one of other boundaries; an ``attention_bias`` or ``num_splits``;
        a mask that is not causal or full; no backend that takes the heads.
    """

    #: What padded_sp's attention is built with.
    backend: str | tuple[str, ...] = "auto"

    @functools.wraps(TEDotProductAttention.__init__)
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        for name, (nothing, what) in _UNSUPPORTED.items():
            asked = getattr(config, name, nothing)
            if asked not in (nothing, None):
                raise ValueError(
                    f"{name}={asked!r} asks for {what}, which padded_sp's attention does not have; "
                    "leave it out, or keep TEDotProductAttention in this layer's spec"
                )
        super().__init__(config, *args, **kwargs)
        given = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        self._options = {
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_query_groups,
            "head_dim": given.get("k_channels") or config.kv_channels,
            "softmax_scale": given.get("softmax_scale"),
            "dropout": _first(given.get("attention_dropout"), config.attention_dropout),
            "window": _window(config, given["layer_number"]),
        }
        # By mask and size of values: Megatron tells both at the call. In a dictionary, so that no
        # key of theirs comes into checkpoints.
        self._built: dict[tuple[str, int], attention.DotProductAttention] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """[T, heads / R * D_v]. ``attention_mask`` is ignored: the boundaries say all."""
        for name, given in (("attention_bias", attention_bias), ("num_splits", num_splits)):
            if given is not None:
                raise ValueError(f"{name} is not supported by padded_sp's attention; leave it out")
        meta = resolve_meta(None)
        kv_meta = _kv_meta(meta, packed_seq_params)
        mask = _MASKS.get(attn_mask_type.name)
        if mask is None:
            raise ValueError(
                f"attn_mask_type={attn_mask_type.name!r} is not supported on packed sequences: use "
                "causal or no_mask"
            )
        own = self._attention(mask, value.shape[-1])
        own.train(self.training)
        return own(query, key, value, meta, kv_meta)

    def _attention(self, mask: str, v_head_dim: int) -> attention.DotProductAttention:
        key = mask, v_head_dim
        if key not in self._built:
            tracker: Any = get_cuda_rng_tracker
            self._built[key] = attention.DotProductAttention(
                **self._options,
                v_head_dim=v_head_dim,
                mask=mask,
                tp_group=self._tp_group,
                get_rng_state_tracker=tracker if tracker().is_initialized() else None,
                backend=self.backend,
            )
        return self._built[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_built": {}}  # made again at the next call


_PARAMETERS = (
    "layer_number",
    "attn_mask_type",
    "attention_type",
    "attention_dropout",
    "softmax_scale",
)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    skip: Any = getattr(config, "window_attn_skip_freq", None)
    windowed = is_layer_window_attention(config.window_size, skip, layer_number)
    return tuple(config.window_size) if windowed else None


def _kv_meta(meta: PaddedSeqMeta, params: Any) -> PaddedSeqMeta:
    """The keys' boundaries, which ``params`` tells; the queries' must be those of ``meta``.

    The arrays of one object made from the other are the same objects, so that nothing is read.
    Raises: ValueError: they are not, or there are none.
    """
    if params is None:
        raise ValueError(
            "packed_seq_params is None, by which Megatron restarts positions at each sequence: "
            "pass to_packed_seq_params(meta) to the model"
        )
    if _has_arrays_of(params, meta, "q") and (
        params.cu_seqlens_kv is None or _has_arrays_of(params, meta, "kv")
    ):
        return meta
    own, kv_meta = from_packed_seq_params(
        params, meta.tp_size, return_kv=True, cp_size=meta.cp_size, num_rows=meta.num_rows
    )
    if (own.seq_lens, own.padded_lens) != (meta.seq_lens, meta.padded_lens):
        raise ValueError(
            f"packed_seq_params has other boundaries, {_lengths(own)}, than the surrounding meta, "
            f"{_lengths(meta)}: make one from the other, by from_packed_seq_params or "
            "to_packed_seq_params"
        )
    return meta if kv_meta is own else kv_meta


def _has_arrays_of(params: Any, meta: PaddedSeqMeta, side: str) -> bool:
    real = getattr(params, f"cu_seqlens_{side}")
    padded = getattr(params, f"cu_seqlens_{side}_padded")
    if real is not meta.cu_seqlens:
        return False
    return padded is meta.cu_seqlens_padded or (padded is None and not meta.has_padding)


def _lengths(meta: PaddedSeqMeta) -> str:
    shown = [f"{n} in {p}" for n, p in zip(meta.seq_lens[:4], meta.padded_lens[:4], strict=True)]
    more = f", ... ({meta.num_sequences} sequences)" if meta.num_sequences > 4 else ""
    return f"{', '.join(shown)} rows{more}"
