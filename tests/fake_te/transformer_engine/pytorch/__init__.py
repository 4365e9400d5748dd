"""The names of ``transformer_engine.pytorch`` that padded_sp and its tests use."""

from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.module import LayerNormLinear, Linear
from transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "LayerNormLinear",
    "Linear",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
