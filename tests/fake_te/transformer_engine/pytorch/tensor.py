"""Tensors rounded to FP8, with their scales, and what rounds them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


class QuantizedTensorStorage:
    """One value, rounded twice: along rows for forward and dgrad, along columns for wgrad.

    ``rowwise`` and ``columnwise``: (FP8 data [rows, columns], 1 / scale broadcast over blocks).
    """

    def __init__(self, rowwise: Any, columnwise: Any, dtype: torch.dtype) -> None:
        self.rowwise, self.columnwise, self.dtype = rowwise, columnwise, dtype

    def along(self, columns: bool) -> Tensor:
        """The value in float32, as a GEMM sees it."""
        data, scale_inv = self.columnwise if columns else self.rowwise
        for dim in (0, 1) if scale_inv.dim() == 2 else ():
            if scale_inv.shape[dim] != data.shape[dim]:
                scale_inv = scale_inv.repeat_interleave(BLOCK, dim)[
                    tuple(slice(data.shape[d] if d == dim else None) for d in (0, 1))
                ]
        return data.float() * scale_inv

    def tensors(self) -> list[Tensor]:
        return [*self.rowwise, *self.columnwise]

    @classmethod
    def of(cls, tensors: Any, dtype: torch.dtype) -> QuantizedTensorStorage:
        return cls(tuple(tensors[:2]), tuple(tensors[2:]), dtype)


class QuantizedTensor(Tensor):
    """What weights built in FP8 are to the real one; here they are ordinary tensors."""


class Quantizer:
    """Rounds a tensor [rows, columns] to FP8."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.max = torch.finfo(dtype).max

    def is_quantizable(self, x: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor) -> QuantizedTensorStorage:
        scale = self.scale_of(x.float())
        rounded = (self.round(x.float() * scale), 1 / scale)
        return QuantizedTensorStorage(rounded, rounded, x.dtype)

    def scale_of(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def round(self, x: Tensor) -> Tensor:
        return x.clamp(-self.max, self.max).to(self.dtype)


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is given, the amax noted for the next."""

    def __init__(self, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.scale, self.amax = scale, amax

    def scale_of(self, x: Tensor) -> Tensor:
        self.amax.copy_(torch.maximum(self.amax, x.abs().max()))
        return self.scale.clone()  # the next step overwrites it in place


class Float8CurrentScalingQuantizer(Quantizer):
    """The scale comes from the tensor's own amax, over all ranks that hold a part of it."""

    with_amax_reduction, amax_reduction_group = False, None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"amax_reduction_group": None}

    def scale_of(self, x: Tensor) -> Tensor:
        amax = x.abs().max()
        if self.with_amax_reduction:
            maximum = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(amax, op=maximum, group=self.amax_reduction_group)
        return _scale(self.max, amax)


class Float8BlockQuantizer(Quantizer):
    """A power of two as scale, for each 128 elements of a row or column, or 128 x 128."""

    def __init__(self, dtype: torch.dtype, block_scaling_dim: int) -> None:
        super().__init__(dtype)
        self.block_scaling_dim = block_scaling_dim

    def is_quantizable(self, x: Tensor) -> bool:
        return x.shape[-1] % BLOCK == 0 and x.shape[:-1].numel() % BLOCK == 0

    def __call__(self, x: Tensor) -> QuantizedTensorStorage:
        square = self.block_scaling_dim == 2
        rowwise = self._rounded(x.float(), BLOCK if square else 1, BLOCK)
        columnwise = self._rounded(x.float(), BLOCK, BLOCK if square else 1)
        return QuantizedTensorStorage(rowwise, columnwise, x.dtype)

    def _rounded(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = _scale(self.max, blocks.abs().amax((1, 3))).log2().floor().exp2()
        data = self.round(blocks * scale[:, None, :, None]).flatten(2).flatten(0, 1)
        return data[: x.shape[0], : x.shape[1]], 1 / scale


def _scale(largest: float, amax: Tensor) -> Tensor:
    """1 where there is nothing to scale, or nothing that could be."""
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, (largest / amax).clamp(max=torch.finfo(torch.float32).max), 1.0)
