"""Triton kernels that move and zero rows.

Tensors come as integers of their elements' width, so that bits are copied and nothing is rounded.
A tensor [S, ...] is taken as S rows of ``row_elements`` adjacent elements, ``row_stride`` elements
apart: contiguous, or a slice of columns of a contiguous one. Offsets are 64 bits wide.
"""

# pyright: reportArgumentType=false
# (an int becomes a tl.constexpr at launch, which Triton's types do not say)

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program of 4 warps moves at once: 16 bytes per thread and more for every dtype.
_TILE = 2048
# Rows that a program of zero_pads_ looks up together, and columns that it writes at once.
_LOOKUP_ROWS, _LOOKUP_COLUMNS = 16, 128


def takes(x: Tensor) -> bool:
    """Whether the kernels take x: elements of up to 8 bytes, in dense rows that do not overlap."""
    if x.dim() == 0 or x.itemsize > 8:
        return False
    row_elements = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != row_elements:
            return False
        row_elements *= size
    return x.shape[0] <= 1 or x.stride(0) >= row_elements


def gather_rows(src: Tensor, index: Tensor, fill: int, out: Tensor) -> None:
    """``out[i] = src[index[i]]``, or ``fill`` where ``index[i] < 0``.

    src [S, ...] and out [M, ...] of one integer dtype, out contiguous; index int64 [M], contiguous.
    """
    row_elements = _row_elements(out)
    grid, block = _tiles(out.shape[0], row_elements)
    if out.numel():
        with torch.cuda.device_of(out):
            _gather_rows[grid](
                src, index, out, out.shape[0], row_elements, src.stride(0), fill, *block
            )


def zero_pads_(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, first_row: int) -> None:
    """Zero the pad rows among rows [first_row, first_row + S) of a pack, held by x [S, ...].

    The boundaries, int32 [B + 1], are read by the kernel: a captured graph finds the pads of the
    pack that it is replayed with. Every row of x lies in some sequence.
    """
    num_sequences = cu_seqlens.shape[0] - 1
    if x.numel():
        with torch.cuda.device_of(x):
            _zero_pads[(triton.cdiv(x.shape[0], _LOOKUP_ROWS),)](
                x,
                cu_seqlens,
                cu_seqlens_padded,
                num_sequences,
                first_row,
                x.shape[0],
                x.stride(0),
                _row_elements(x),
                num_sequences.bit_length(),
                _LOOKUP_ROWS,
                _LOOKUP_COLUMNS,
            )


def _row_elements(x: Tensor) -> int:
    return x.shape[1:].numel()


def _tiles(num_rows: int, row_elements: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block), in rows and columns: many short rows or part of a long one per program."""
    columns = min(triton.next_power_of_2(max(row_elements, 1)), _TILE)
    rows = _TILE // columns
    return (triton.cdiv(num_rows, rows), triton.cdiv(row_elements, columns)), (rows, columns)


# Counts that differ from pack to pack are not specialized on: one compilation serves them all.


@triton.jit(do_not_specialize=["num_rows", "fill"])
def _gather_rows(
    src,
    index,
    out,
    num_rows,
    row_elements,
    src_stride,
    fill,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    source = tl.load(index + row, mask=row < num_rows, other=-1)
    inside = (row < num_rows)[:, None] & (column < row_elements)[None, :]
    values = tl.load(
        src + source[:, None] * src_stride + column[None, :],
        mask=inside & (source >= 0)[:, None],
        other=fill,
    )
    tl.store(out + row[:, None] * row_elements + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def _zero_pads(
    x,
    cu_seqlens,
    cu_seqlens_padded,
    num_sequences,
    first_row,
    num_rows,
    row_stride,
    ROW_ELEMENTS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < num_rows

    # Binary search for the sequence of each row: the first one that ends above the row.
    sequence = tl.full([BLOCK_ROWS], 0, tl.int32)
    stop = tl.full([BLOCK_ROWS], 0, tl.int32) + num_sequences
    for _ in range(SEARCH_STEPS):
        middle = (sequence + stop) // 2
        end = tl.load(cu_seqlens_padded + 1 + middle, mask=middle < stop, other=0)
        is_behind = (middle < stop) & (end <= row + first_row)
        sequence = tl.where(is_behind, middle + 1, sequence)
        stop = tl.where(is_behind, stop, middle)

    inside &= sequence < num_sequences
    start = tl.load(cu_seqlens_padded + sequence, mask=inside, other=0)
    length = tl.load(cu_seqlens + sequence + 1, mask=inside, other=0)
    length -= tl.load(cu_seqlens + sequence, mask=inside, other=0)
    is_pad = inside & (row + first_row - start >= length)

    for first_column in range(0, ROW_ELEMENTS, BLOCK_COLUMNS):
        column = first_column + tl.arange(0, BLOCK_COLUMNS)
        tl.store(
            x + row[:, None] * row_stride + column[None, :],
            0,
            mask=is_pad[:, None] & (column < ROW_ELEMENTS)[None, :],
        )
