"""``LayerNorm`` and ``RMSNorm``, in float32 inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, each row by itself."""

    _has_bias = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,  # its older name
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        hidden_size = normalized_shape or hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        factory = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        one = float(not zero_centered_gamma)
        self.weight = nn.Parameter(torch.full((hidden_size,), one, **factory))
        if self._has_bias:
            self.bias = nn.Parameter(torch.zeros(hidden_size, **factory))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x.float(), self.weight.float() + self.zero_centered_gamma).to(x.dtype)

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, scale.shape, scale, self.eps)


class LayerNorm(RMSNorm):
    """(x - mean(x)) / std(x) * weight + bias, each row by itself."""

    _has_bias = True

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x, scale.shape, scale, self.bias.float(), self.eps)
