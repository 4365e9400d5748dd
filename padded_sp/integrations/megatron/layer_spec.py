"""``padded_sp_layer_spec``: a layer spec of Megatron's with padded_sp's layers in it."""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import import_module

from padded_sp.backends.te import te
from padded_sp.integrations.megatron.attention import DotProductAttention
from padded_sp.integrations.megatron.layers import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    Linear,
    Norm,
    RowParallelLinear,
)

_Spec = TypeVar("_Spec")


def padded_sp_layer_spec(spec: _Spec) -> _Spec:
    """``spec`` with Megatron's Transformer Engine layers replaced by those with inert pads.

    Linears, norms and attention; at any depth and for any block: dense, mixture of experts,
    multi-latent attention, multi-token prediction. What Megatron builds by its own class whatever
    a spec says is left to :func:`wrap_gpt_model`: the last norm of a block, the duplicated linears
    of multi-latent attention, and a mixture of experts, which then routes real rows alone, so that
    its experts' grouped linears need no change. ``spec`` itself is left as it is.

        spec = padded_sp_layer_spec(get_gpt_layer_with_transformer_engine_spec())
        model = wrap_gpt_model(GPTModel(config, spec, ...))

    Args:
        spec: what Megatron's functions for specs return: a ``ModuleSpec``, the submodules of a
            layer or a block, a list of them.

    Raises: ValueError: nothing in it is of Transformer Engine; something in it is that pads would
        pass through unseen, such as ``TEFusedMLP``, with what to set.
    Source: megatron-core 0.16.1 and 0.19.2, megatron/core/models/gpt/gpt_layer_specs.py.
    """
    found: list[type] = []
    swapped = _swapped(spec, found)
    if not found:
        raise ValueError(
            f"there is no layer of Transformer Engine in this {type(spec).__name__}: make the spec "
            "by get_gpt_layer_with_transformer_engine_spec, or get_gpt_decoder_block_spec with "
            "use_transformer_engine=True"
        )
    return swapped


class _NormWithResidual:
    """``Norm`` where Megatron may fuse the residual connection."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return Norm(*args, has_residual=True, **kwargs)


_OURS: dict[type, type] = {
    megatron_te.TEColumnParallelLinear: ColumnParallelLinear,
    megatron_te.TERowParallelLinear: RowParallelLinear,
    megatron_te.TELayerNormColumnParallelLinear: LayerNormColumnParallelLinear,
    megatron_te.TELinear: Linear,
    megatron_te.TENorm: Norm,
    megatron_te.TEDotProductAttention: DotProductAttention,
}
if with_residual := getattr(provider, "_TENormWithResidual", None):  # 0.19
    _OURS[with_residual] = _NormWithResidual

# Packages of Megatron's whose layers mix rows of a pack in ways of their own.
_MIXES_ROWS = ("megatron.core.ssm.", "megatron.core.transformer.experimental_attention_variant.")

#: What computes on rows of the pack, so that a class unknown here would let pads in.
SEES_PADS = tuple(
    kind
    for owner, names in (
        (te, ("Linear", "LayerNormLinear", "LayerNormMLP", "DotProductAttention", "RMSNorm",
              "LayerNorm", "TransformerLayer", "MultiheadAttention")),
        (megatron_te, ("TEFusedMLP",)),
    )
    for name in names
    if isinstance(kind := getattr(owner, name, None), type)
)  # fmt: skip


def _swapped(x: Any, found: list[type]) -> Any:
    """``x`` with what it holds replaced; itself where nothing is. Adds to ``found`` what was."""
    if isinstance(x, type):
        return _class(x, found)
    if _is_path(x):  # as specs name a class without importing it
        kind = import_module(x)
        return _class(kind, found) if isinstance(kind, type) else x
    if isinstance(x, functools.partial):
        parts = [_swapped(part, found) for part in (x.func, x.args, x.keywords)]
        return functools.partial(parts[0], *parts[1], **parts[2])
    if dataclasses.is_dataclass(x):
        values: dict[str, Any] = {}
        for field in dataclasses.fields(x):
            if field.init:
                value = getattr(x, field.name)
                values[field.name] = value if _waits(x, value) else _swapped(value, found)
        return type(x)(**values)
    if isinstance(x, dict):
        return {key: _swapped(value, found) for key, value in x.items()}
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(_swapped(value, found) for value in x)
    owner = getattr(x, "__self__", None)  # a class method that builds a module
    if isinstance(owner, type):
        _class(owner, found)
    return x


def _waits(submodules: Any, kind: Any) -> bool:
    """Whether Megatron asks for this class itself; ``wrap_gpt_model`` changes what it builds."""
    return isinstance(submodules, MLASelfAttentionSubmodules) and kind is megatron_te.TELinear


def _class(kind: type, found: list[type]) -> type:
    ours = _OURS.get(kind, kind)
    if ours in _OURS.values():
        found.append(kind)
        return ours
    if issubclass(kind, SEES_PADS) or kind.__module__.startswith(_MIXES_ROWS):
        cure = ": build the spec with use_te_op_fuser=False" if "FusedMLP" in kind.__name__ else ""
        raise ValueError(
            f"{kind.__module__}.{kind.__name__} computes on every row of the pack, pads too, and "
            f"padded_sp has nothing to put in its place{cure}"
        )
    return kind


def _is_path(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, str) for part in x)
