"""The double's linears."""

from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear

__all__ = ["LayerNormLinear", "Linear"]
