"""``LayerNormLinear``: a norm of each row, then a column-parallel linear."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.pytorch.module.linear import Linear


class LayerNormLinear(Linear):
    """The norm is computed in float32; pad rows of zeros come out as its bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **linear: Any,
    ) -> None:
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        assert "rng_tracker_name" not in linear, "unexpected keyword argument 'rng_tracker_name'"
        if linear.get("parallel_mode") == "row":
            raise NotImplementedError("Normalization does not support row parallelism.")
        self._norm = (eps, normalization, zero_centered_gamma, return_layernorm_output)
        super().__init__(in_features, out_features, **linear)

    def _register_own(self, in_features: int, factory: dict[str, Any]) -> None:
        self.eps, self.normalization, self.zero_centered_gamma, returns = self._norm
        self.return_layernorm_output = returns
        one = partial(nn.init.constant_, val=float(not self.zero_centered_gamma))
        weight = nn.Parameter(torch.empty(in_features, **factory))
        self.register_parameter("layer_norm_weight", weight, init_fn=one)
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
            return
        bias = nn.Parameter(torch.empty(in_features, **factory))
        self.register_parameter("layer_norm_bias", bias, init_fn=nn.init.zeros_)

    def _normed(self, x: Tensor) -> Tensor:
        scale = self.layer_norm_weight.float() + float(self.zero_centered_gamma)
        if self.normalization == "RMSNorm":
            normed = F.rms_norm(x.float(), scale.shape, scale, self.eps)
        else:
            normed = F.layer_norm(
                x.float(), scale.shape, scale, self.layer_norm_bias.float(), self.eps
            )
        return normed.to(self.activation_dtype)
