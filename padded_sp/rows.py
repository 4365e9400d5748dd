"""The row operations under ``padding.py``: torch on every device, Triton on CUDA where that gains.

All work on the bits of a row: exact for every dtype, NaN and float8 included. Those with a kernel
are registered with torch.library: torch.compile keeps them whole and knows shape and gradient.
"""

import math
import sys
from functools import lru_cache

import torch
from torch import Tensor
from torch.types import Number


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
    """Zero the listed rows of x, ``rows`` int64 in [0, S), x [S, ...].

    Torch's own operation, in elements of 16 bytes as fast as a kernel, costs the host a third of a
    Triton launch, and a layer calls it up to four times a step.
    """
    _wide_bits(x).index_fill_(0, rows, 0)


def contiguous_copy(x: Tensor) -> Tensor:
    """x in new, contiguous memory, unseen by autograd. Slices of columns are copied in elements of
    up to 16 bytes: torch's copy takes them one by one."""
    return _wide_bits(x.data).clone(memory_format=torch.contiguous_format).view(x.dtype)


def zero_pads_(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int) -> None:
    """Zero the pad rows of x, found on the device from the boundaries. No version bump.

    x                              [S, ...]   rows [first_row, first_row + S) of the pack
    cu_seqlens, cu_seqlens_padded  [B + 1]    int32
    """
    torch.ops.padded_sp.zero_pads_(x, cu_seqlens, cu_seqlens_padded, first_row)


def beside(mask: Tensor, x: Tensor) -> Tensor:
    """A mask over rows, shaped to broadcast over the other dimensions of x."""
    return mask.view(-1, *[1] * (x.dim() - 1))


# Torch, on every device: also what the kernels are tested against.


def _gather_rows_torch(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    if src.shape[0] == 0:  # index_select would refuse row 0 of nothing
        return src.new_full((index.shape[0], *src.shape[1:]), fill)
    out = _bits(src).index_select(0, index.clamp(min=0))
    out.masked_fill_(beside(index < 0, src), _fill_bits(fill, src.dtype))
    return out.view(src.dtype)


def _zero_pads_torch(
    x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int
) -> None:
    rows = torch.arange(first_row, first_row + x.shape[0], device=x.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_padded[1:], rows, right=True)
    is_pad = rows - cu_seqlens_padded[sequence] >= cu_seqlens.diff()[sequence]
    _bits(x).masked_fill_(beside(is_pad, x), 0)


# Triton, on CUDA: imported when the first kernel runs. Strides it does not take go to torch.


def _gather_rows_cuda(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    from padded_sp.kernels import padding as kernels

    if not kernels.takes(src):
        return _gather_rows_torch(src, index, inverse, fill)
    bits = int(_fill_bits(fill, src.dtype))
    out = src.new_empty((index.shape[0], *src.shape[1:]))
    kernels.gather_rows(_bits(src), index.contiguous(), bits, _bits(out))
    return out


def _zero_pads_cuda(
    x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int
) -> None:
    from padded_sp.kernels import padding as kernels

    zero = kernels.zero_pads_ if kernels.takes(x) else _zero_pads_torch
    zero(_bits(x), cu_seqlens, cu_seqlens_padded, first_row)


def _bits(x: Tensor) -> Tensor:
    """x as integers of its width; itself where there are none so wide (complex128)."""
    return x.view(_INTEGER[x.itemsize]) if x.itemsize in _INTEGER else x


def _wide_bits(x: Tensor) -> Tensor:
    """x as integers, or pairs of floats, as wide as its rows, strides and address allow."""
    if type(x) is not Tensor or x.dim() < 2 or x.stride(-1) != 1 or not x.numel():
        return _bits(x)
    elements = math.gcd(x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    width = math.gcd(elements * x.itemsize, x.data_ptr(), 16)
    return x.view(_WIDE.get(width, x.dtype)) if width > x.itemsize else _bits(x)


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
_WIDE = _INTEGER | {16: torch.complex128}


# The gradient of a gather, and shapes for the compiler.


def _keep_indices(ctx, inputs, output) -> None:
    _, index, inverse, _ = inputs
    ctx.save_for_backward(index, inverse)


def _gather_back(ctx, grad: Tensor):
    index, inverse = ctx.saved_tensors
    return gather_rows(grad, inverse, index, 0), None, None, None


def _gathered_shape(src: Tensor, index: Tensor, inverse: Tensor, fill: Number) -> Tensor:
    return src.new_empty((index.shape[0], *src.shape[1:]))


def _no_shape(*args) -> None:
    """Of an operation that returns nothing."""


_LIBRARY = torch.library.Library("padded_sp", "FRAGMENT")  # its operations die with it


def _register(schema: str, on_any_device, on_cuda, shape) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_any_device, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"padded_sp::{name}", shape, lib=_LIBRARY)


_register(
    "gather_rows(Tensor src, Tensor index, Tensor inverse, Scalar fill) -> Tensor",
    _gather_rows_torch,
    _gather_rows_cuda,
    _gathered_shape,
)
_register(
    "zero_pads_(Tensor(a!) x, Tensor cu_seqlens, Tensor cu_seqlens_padded, SymInt first_row) -> ()",
    _zero_pads_torch,
    _zero_pads_cuda,
    _no_shape,
)
torch.library.register_autograd(
    "padded_sp::gather_rows", _gather_back, setup_context=_keep_indices, lib=_LIBRARY
)
