"""The row operations under ``padding.py``: torch on every device, Triton on CUDA.

Registered with torch.library, so that torch.compile keeps them whole and knows shape and gradient.
All work on the bits of a row: exact for every dtype, NaN and float8 included.
"""

import sys
from functools import lru_cache

import torch
from torch import Tensor
from torch.types import Number

_LIBRARY = torch.library.Library("padded_sp", "FRAGMENT")
_LIBRARY.define("gather_rows(Tensor src, Tensor index, Tensor inverse, Scalar fill) -> Tensor")
_LIBRARY.define("zero_row_list_(Tensor(a!) x, Tensor rows) -> ()")
_LIBRARY.define(
    "zero_pads_(Tensor(a!) x, Tensor cu_seqlens, Tensor cu_seqlens_padded, SymInt first_row) -> ()"
)


def gather_rows(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    """``out[i] = src[index[i]]``, or ``fill`` where ``index[i] < 0``.

    No row of src is read twice, so that the backward is a gather as well: by ``inverse``, which
    has ``inverse[index[i]] == i``, and -1 for the rows of src that nobody reads.

        src      [S, ...]   any dtype and strides
        index    [M]        int64, each in [-1, S)
        inverse  [S]        int64, each in [-1, M)
        returns  [M, ...]   a new contiguous tensor
    """
    return torch.ops.padded_sp.gather_rows(src, index, inverse, fill)


def zero_row_list_(x: Tensor, rows: Tensor) -> None:
    """Zero the listed rows of x, ``rows`` int64 in [0, S), x [S, ...]. No version bump."""
    torch.ops.padded_sp.zero_row_list_(x, rows)


def zero_pads_(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int) -> None:
    """Zero the pad rows of x, found on the device from the boundaries. No version bump.

        x                              [S, ...]   rows [first_row, first_row + S) of the pack
        cu_seqlens, cu_seqlens_padded  [B + 1]    int32
    """
    torch.ops.padded_sp.zero_pads_(x, cu_seqlens, cu_seqlens_padded, first_row)


# Torch, on every device: also what the kernels are tested against.


@torch.library.impl("padded_sp::gather_rows", "CompositeExplicitAutograd", lib=_LIBRARY)
def _gather_rows_torch(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    if src.shape[0] == 0:  # index_select would refuse row 0 of nothing
        return src.new_full((index.shape[0], *src.shape[1:]), fill)
    out = _bits(src).index_select(0, index.clamp(min=0))
    out.masked_fill_(_beside(index < 0, src), _fill_bits(fill, src.dtype))
    return out.view(src.dtype)


@torch.library.impl("padded_sp::zero_row_list_", "CompositeExplicitAutograd", lib=_LIBRARY)
def _zero_row_list_torch(x: Tensor, rows: Tensor) -> None:
    _bits(x).index_fill_(0, rows, 0)


@torch.library.impl("padded_sp::zero_pads_", "CompositeExplicitAutograd", lib=_LIBRARY)
def _zero_pads_torch(
    x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int
) -> None:
    rows = torch.arange(first_row, first_row + x.shape[0], device=x.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_padded[1:], rows, right=True)
    is_pad = rows - cu_seqlens_padded[sequence] >= cu_seqlens.diff()[sequence]
    _bits(x).masked_fill_(_beside(is_pad, x), 0)


# Triton, on CUDA: imported when the first kernel runs. Strides it does not take go to torch.


@torch.library.impl("padded_sp::gather_rows", "CUDA", lib=_LIBRARY)
def _gather_rows_cuda(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    from padded_sp.kernels import padding as kernels

    if not kernels.takes(src):
        return _gather_rows_torch(src, index, inverse, fill)
    out = src.new_empty((index.shape[0], *src.shape[1:]))
    kernels.gather_rows(_bits(src), index, _fill_bits(fill, src.dtype), _bits(out))
    return out


@torch.library.impl("padded_sp::zero_row_list_", "CUDA", lib=_LIBRARY)
def _zero_row_list_cuda(x: Tensor, rows: Tensor) -> None:
    from padded_sp.kernels import padding as kernels

    zero = kernels.zero_row_list_ if kernels.takes(x) else _zero_row_list_torch
    zero(_bits(x), rows)


@torch.library.impl("padded_sp::zero_pads_", "CUDA", lib=_LIBRARY)
def _zero_pads_cuda(
    x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int
) -> None:
    from padded_sp.kernels import padding as kernels

    zero = kernels.zero_pads_ if kernels.takes(x) else _zero_pads_torch
    zero(_bits(x), cu_seqlens, cu_seqlens_padded, first_row)


# Shapes and gradients, for the compiler and autograd.


@torch.library.register_fake("padded_sp::gather_rows", lib=_LIBRARY)
def _gather_rows_shape(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    return src.new_empty((index.shape[0], *src.shape[1:]))


@torch.library.register_fake("padded_sp::zero_row_list_", lib=_LIBRARY)
def _zero_row_list_shape(x: Tensor, rows: Tensor) -> None:
    pass


@torch.library.register_fake("padded_sp::zero_pads_", lib=_LIBRARY)
def _zero_pads_shape(
    x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int
) -> None:
    pass


def _keep_indices(ctx, inputs, output) -> None:
    _, index, inverse, _ = inputs
    ctx.save_for_backward(index, inverse)


def _gather_back(ctx, grad: Tensor):
    index, inverse = ctx.saved_tensors
    return gather_rows(grad, inverse, index, 0), None, None, None


torch.library.register_autograd(
    "padded_sp::gather_rows", _gather_back, setup_context=_keep_indices, lib=_LIBRARY
)


def _bits(x: Tensor) -> Tensor:
    """x as integers of its width; itself where there are none so wide (complex128)."""
    return x.view(_INTEGER[x.itemsize]) if x.itemsize in _INTEGER else x


@lru_cache
def _fill_bits(fill: Number, dtype: torch.dtype) -> Number:
    """The integer that has the bits of fill in dtype; fill itself where ``_bits`` does nothing.

    Read from the storage of a CPU tensor, so that a step calls no ``.item()``.
    """
    if dtype.itemsize not in _INTEGER:
        return fill
    storage = torch.full((1,), fill, dtype=dtype, device="cpu").untyped_storage()
    return int.from_bytes(bytes(storage), sys.byteorder, signed=True)


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    """A mask over rows, shaped to broadcast over the other dimensions of x."""
    return mask.view(-1, *[1] * (x.dim() - 1))
