"""Megatron-Core, 0.16.1 or newer. It is imported when its own classes are asked for, not before."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from padded_sp.integrations.megatron.packed_seq_params import (
    from_packed_seq_params,
    to_packed_seq_params,
)
from padded_sp.integrations.megatron.recompute import carry_meta_through_recompute

if TYPE_CHECKING:
    from padded_sp.integrations.megatron.attention import DotProductAttention
    from padded_sp.integrations.megatron.gpt_model import wrap_gpt_model
    from padded_sp.integrations.megatron.layer_spec import padded_sp_layer_spec
    from padded_sp.integrations.megatron.layers import (
        ColumnParallelLinear,
        LayerNormColumnParallelLinear,
        Linear,
        Norm,
        RowParallelLinear,
    )

__all__ = [
    "ColumnParallelLinear",
    "DotProductAttention",
    "LayerNormColumnParallelLinear",
    "Linear",
    "Norm",
    "RowParallelLinear",
    "carry_meta_through_recompute",
    "from_packed_seq_params",
    "padded_sp_layer_spec",
    "to_packed_seq_params",
    "wrap_gpt_model",
]

# What needs megatron-core and Transformer Engine -> the module that has it.
_OVER_TE = {
    "ColumnParallelLinear": "layers",
    "DotProductAttention": "attention",
    "LayerNormColumnParallelLinear": "layers",
    "Linear": "layers",
    "Norm": "layers",
    "RowParallelLinear": "layers",
    "padded_sp_layer_spec": "layer_spec",
    "wrap_gpt_model": "gpt_model",
}


def __getattr__(name: str) -> Any:
    if name not in _OVER_TE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_OVER_TE[name]}"), name)
    except ImportError as error:
        raise ImportError(
            f"{name} needs megatron-core and Transformer Engine ({error}): python -m pip install "
            "'padded_sp[megatron,te]'"
        ) from error
