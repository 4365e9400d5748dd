"""Rows in and out of the padded layout.

Padding, unpadding, rolling and the copy with zero pads are one gather with four choices of index
(``rows.py``); the in-place writers touch pad rows only. Plain torch on any device, Triton on CUDA.

Nothing here reads the device or communicates: indices are derived there from the meta, once.
"""

import torch
from torch import Tensor
from torch.types import Number

from padded_sp import boundaries
from padded_sp.meta import PaddedSeqMeta
from padded_sp.rows import beside, contiguous_copy, gather_rows, zero_pads_, zero_row_list_


def pad(tokens: Tensor, meta: PaddedSeqMeta, fill: Number = 0) -> Tensor:
    """Real tokens -> padded layout: a new tensor whose pad rows hold ``fill``.

        tokens   [N, ...]   any dtype, N = meta.num_tokens
        returns  [T, ...]   the same dtype, T = meta.num_rows
        backward grad_tokens = unpad(grad)

    Raises: ValueError: tokens has not N rows; the dtype cannot hold fill; a capacity meta, whose
        number of tokens only the device knows.
    """
    _check_tokens(tokens, meta)
    _check_fill(fill, tokens.dtype)
    return gather_rows(tokens, _token_of_row(meta), meta.real_rows, fill)


def unpad(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
    """Padded layout -> real tokens, in order: a new tensor without the pad rows.

        x        [T, ...]   any dtype, T = meta.num_rows
        returns  [N, ...]   the same dtype, N = meta.num_tokens
        backward grad_x = pad(grad), zero in pad rows

    Raises: ValueError: x has not T rows; a capacity meta, whose number of tokens only the device
        knows.
    """
    _check_counted(meta, "unpad")
    meta.check_rows(x, "x")
    return gather_rows(x, meta.real_rows, _token_of_row(meta), 0)


def roll(x: Tensor, meta: PaddedSeqMeta, shifts: int = -1, fill: Number | None = None) -> Tensor:
    """Roll each sequence by itself over its real rows, without wrapping around.

    ``shifts=-1`` brings to each row the next real row of its sequence: ids become labels.

        x        [T, ...]   any dtype, T = meta.num_rows; its pad rows are never read
        returns  [T, ...]   row i holds row i - shifts if both are real rows of one sequence,
                            else fill: by default -100 for integers, 0 (False) otherwise
        backward grad_x = roll(grad, shifts=-shifts, fill=0)

    Raises: ValueError: x has not T rows; shifts is no integer; the dtype cannot hold fill.
    """
    meta.check_rows(x, "x")
    if fill is None:
        inexact = x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool
        fill = 0 if inexact else -100
    _check_fill(fill, x.dtype)
    shifts = boundaries.check_size(shifts, "shifts", least=None)
    shifts = max(-meta.num_rows, min(meta.num_rows, shifts))
    return gather_rows(x, _source_of_row(meta, shifts), _source_of_row(meta, -shifts), fill)


def zero_padding(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
    """A copy of x with zero pad rows, whatever they held, NaN included.

        x        [T, ...]   any dtype, T = meta.num_rows
        returns  [T, ...]   a new tensor
        backward grad_x = zero_padding(grad)

    Raises: ValueError: x has not T rows.
    """
    meta.check_rows(x, "x")
    return zero_padding_copy(x, meta)


def zero_padding_(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
    """Write zeros to the pad rows of x, to nothing else, and return x.

    An in-place operation like torch's own: it bumps x's version, pad rows of the gradient come
    out zero, and a leaf that requires grad (or a view of one) raises RuntimeError.

        x        [T, ...]   any dtype, T = meta.num_rows

    Raises: ValueError: x has not T rows, or rows that share memory with others.
    """
    meta.check_rows(x, "x")
    if not torch.compiler.is_compiling() and _may_overlap(x):  # compiled, it is torch's copy_
        raise ValueError(
            f"zero_padding_ would write real rows too: x of shape {tuple(x.shape)} and strides "
            f"{x.stride()} has elements that share memory; use zero_padding, which copies"
        )
    if x.requires_grad:  # torch's own operations bring the gradient and the check of leaves
        if meta.is_capacity:
            return x.masked_fill_(beside(meta.padding_mask, x), 0)
        return x.index_fill_(0, meta.pad_rows, 0)
    if torch.compiler.is_compiling():
        return x.copy_(zero_padding_copy(x, meta))
    zero_rows_(x, meta)
    if not x.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(x)
    return x


def zero_padding_copy(x: Tensor, meta: PaddedSeqMeta, first_row: int = 0) -> Tensor:
    """``zero_padding`` of the rows [first_row, first_row + rows): unchecked, for layers.

    x        [rows, ...]   all rows of the pack, or a shard of them from first_row on
    returns  [rows, ...]   a new tensor; zero pad rows in its gradient as well
    """
    stop = first_row + x.shape[0]
    # The compiler fuses an elementwise operation; torch has this one for all but float8.
    if torch.compiler.is_compiling() and x.itemsize > 1:
        return x.masked_fill(beside(meta.padding_mask[first_row:stop], x), 0)

    def own_row_unless_pad() -> Tensor:
        rows = torch.arange(stop - first_row, device=meta.device)
        return torch.where(meta.padding_mask[first_row:stop], -1, rows)

    index = meta.cached(("zero_padding_copy", first_row, stop), own_row_unless_pad)
    return gather_rows(x, index, index, 0)


def unpad_part(x: Tensor, meta: PaddedSeqMeta, first_row: int) -> Tensor:
    """``unpad`` of the rows [first_row, first_row + rows): unchecked, for layers.

    x        [rows, ...]   all rows of the pack, or a shard of them from first_row on
    returns  [n, ...]      its real rows; x itself if all are
    """
    stop = first_row + x.shape[0]
    if not meta.num_pads_in(first_row, stop):
        return x
    real = meta.real_rows_in(first_row, stop)
    return gather_rows(x, real, _token_of_row_in(meta, first_row, stop), 0)


def pad_part(tokens: Tensor, meta: PaddedSeqMeta, first_row: int, rows: int) -> Tensor:
    """Undoes ``unpad_part``: [n, ...] -> [rows, ...], zero in pad rows; itself without any."""
    stop = first_row + rows
    if not meta.num_pads_in(first_row, stop):
        return tokens
    real = meta.real_rows_in(first_row, stop)
    return gather_rows(tokens, _token_of_row_in(meta, first_row, stop), real, 0)


def zeroed_copy(x: Tensor, meta: PaddedSeqMeta, first_row: int = 0) -> Tensor:
    """``zero_padding_copy`` for inside an autograd function, which brings its own gradient."""
    return zero_rows_(contiguous_copy(x), meta, first_row)


def zero_rows_(x: Tensor, meta: PaddedSeqMeta, first_row: int = 0) -> Tensor:
    """Write zeros to the pad rows of x, to nothing else, unseen by autograd; for layers.

    Autograd records nothing and x's version stays: only for tensors whose pad rows no saved
    tensor's gradient depends on.

        x        [rows, ...]   all rows of the pack, or a shard of them from first_row on
    """
    if meta.is_capacity:
        zero_pads_(x.data, meta.cu_seqlens, meta.cu_seqlens_padded, first_row)
    else:
        zero_row_list_(x.data, meta.pad_rows_in(first_row, first_row + x.shape[0]))
    return x


# Which row comes from where: int64, on the meta's device, -1 where nothing comes.


def _token_of_row(meta: PaddedSeqMeta) -> Tensor:
    """[T]: the number of the real token that each row holds."""

    def make() -> Tensor:
        is_pad = meta.padding_mask
        return torch.where(is_pad, -1, (~is_pad).cumsum(0) - 1)

    return meta.cached("token_of_row", make)


def _token_of_row_in(meta: PaddedSeqMeta, start: int, stop: int) -> Tensor:
    """[stop - start]: the same for a shard, its tokens numbered from 0."""
    if (start, stop) == (0, meta.num_rows):
        return _token_of_row(meta)
    before = start - meta.num_pads_in(0, start)

    def make() -> Tensor:
        tokens = _token_of_row(meta)[start:stop]
        return torch.where(tokens < 0, -1, tokens - before)

    return meta.cached(("token_of_row_in", start, stop), make)


def _source_of_row(meta: PaddedSeqMeta, shifts: int) -> Tensor:
    """[T]: the row that each row receives in a roll; the roll by -shifts is the inverse."""

    def make() -> Tensor:
        lengths = meta.cu_seqlens.diff().index_select(0, meta.sequence_ids)
        position = meta.position_ids - shifts
        is_real = (position >= 0) & (position < lengths) & ~meta.padding_mask
        rows = torch.arange(meta.num_rows, device=meta.device)
        return torch.where(is_real, rows - shifts, -1)

    return meta.cached(("source_of_row", shifts), make)


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements may share memory: a step along a dim does not clear the smaller dims."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _check_counted(meta: PaddedSeqMeta, name: str) -> None:
    if meta.is_capacity:
        raise ValueError(
            f"{name} needs the number of real tokens on the host, and a capacity meta has it on "
            f"the device alone: {name} outside the graph with the meta that you copy_() into it, "
            "or keep the padded layout and use zero_padding or roll"
        )


def _check_tokens(tokens: Tensor, meta: PaddedSeqMeta) -> None:
    _check_counted(meta, "pad")
    if tokens.dim() == 0 or tokens.shape[0] != meta.num_tokens:
        raise ValueError(
            f"pad takes the meta's {meta.num_tokens} real tokens as rows, but tokens has shape "
            f"{tuple(tokens.shape)}: pass [{meta.num_tokens}, ...], or a meta of these lengths"
        )


def _check_fill(fill: Number, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        return
    if isinstance(fill, complex):
        raise ValueError(f"{dtype} cannot hold fill={fill}: pass a real number as fill=")
    if dtype.is_floating_point:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if fill != fill or not low <= fill <= high or fill != int(fill):
        raise ValueError(
            f"{dtype} cannot hold fill={fill}: pass a whole number from {low} to {high} as fill=, "
            "or a tensor of another dtype"
        )
