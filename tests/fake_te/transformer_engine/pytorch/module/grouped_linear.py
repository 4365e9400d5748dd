"""``GroupedLinear``: one linear for each expert, of the rows that were sent to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i W_i^T + b_i; in the parameters' dtype alone."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        **others: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        self.rng_tracker_name = rng_tracker_name
        factory = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        for i in range(num_gemms):
            self.register_parameter(
                f"weight{i}",
                nn.Parameter(torch.empty(out_features, in_features, **factory)),
                init_fn=init_method or partial(nn.init.normal_, std=0.023),
                get_rng_state_tracker=get_rng_state_tracker,
            )
            if bias:
                empty = nn.Parameter(torch.empty(out_features, **factory))
                self.register_parameter(f"bias{i}", empty, init_fn=nn.init.zeros_)
        self.reset_parameters(defer_init=device == "meta")

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        if FP8GlobalStateManager.is_fp8_enabled():
            raise NotImplementedError("the double's GroupedLinear has no FP8")
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms) if self.use_bias]
        adds = self.use_bias and not self.return_bias
        y = torch.cat(
            [
                F.linear(rows, getattr(self, f"weight{i}"), biases[i] if adds else None)
                for i, rows in enumerate(inp.split(list(m_splits)))
            ]
        )
        return (y, biases) if self.return_bias else y
