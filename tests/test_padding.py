"""pad, unpad, roll and the zeroing of pads, against plain loops over the rows."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from layouts import corner_cases, layouts, rows_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import PaddedSeqMeta
from padded_sp.padding import (
    pad,
    pad_part,
    roll,
    unpad,
    unpad_part,
    zero_padding,
    zero_padding_,
    zero_padding_copy,
    zero_rows_,
)
from padded_sp.rows import gather_rows, zero_row_list_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORNERS = list(corner_cases())
SHIFTS = [-1, 1, 0, -2, 5, -1000, 10**30]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
quick = settings(max_examples=60, deadline=None)


def packed(seq_lens: list[int], padded_lens: list[int]) -> PaddedSeqMeta:
    return PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=padded_lens, device=DEVICE)


def example() -> PaddedSeqMeta:
    return packed([3, 0, 1, 5, 2], [4, 0, 4, 8, 2])


def with_room(meta: PaddedSeqMeta) -> PaddedSeqMeta:
    """The same boundaries with capacity, and three rows more."""
    return meta.with_capacity(meta.num_sequences + 2, meta.num_rows + 3, meta.num_rows + 3)


def real_rows_of(meta: PaddedSeqMeta) -> list[int]:
    rows = rows_of(meta.seq_lens, meta.padded_lens)
    return [i for i, row in enumerate(rows) if row.is_real]


def sources_of(meta: PaddedSeqMeta, shifts: int) -> list[int | None]:
    """The row that each row receives in a roll, by one loop over the rows."""
    rows = rows_of(meta.seq_lens, meta.padded_lens)
    sources: list[int | None] = []
    for i, row in enumerate(rows):
        j = i - shifts
        is_there = 0 <= j < len(rows) and rows[j].sequence == row.sequence and rows[j].is_real
        sources.append(j if row.is_real and is_there else None)
    return sources


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    return torch.equal(raw_bytes(x.contiguous()), raw_bytes(y.contiguous()))


def raw_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits (bool knows only two), so NaN and infinity are among the floats."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(DEVICE).view(dtype).reshape(shape)


@pytest.mark.parametrize("lens", CORNERS, ids=lambda lens: f"{len(lens[0])}-{sum(lens[1])}")
def test_corner_cases(lens: tuple[list[int], list[int]]) -> None:
    assert_moves_rows_like_the_loop(packed(*lens))


@quick
@given(layouts())
def test_moves_rows_like_the_loop(lens: tuple[list[int], list[int]]) -> None:
    assert_moves_rows_like_the_loop(packed(*lens))


def assert_moves_rows_like_the_loop(meta: PaddedSeqMeta) -> None:
    tokens = list(range(1, meta.num_tokens + 1))
    x = [-7] * meta.num_rows
    for token, row in zip(tokens, real_rows_of(meta), strict=True):
        x[row] = token
    as_tensor = partial(torch.tensor, device=DEVICE, dtype=torch.int64)
    assert pad(as_tensor(tokens), meta, fill=-7).tolist() == x
    assert unpad(as_tensor(x), meta).tolist() == tokens
    for shifts in SHIFTS:
        expected = [-100 if j is None else x[j] for j in sources_of(meta, shifts)]
        assert roll(as_tensor(x), meta, shifts).tolist() == expected
    zeroed = [0 if value == -7 else value for value in x]
    assert zero_padding(as_tensor(x), meta).tolist() == zeroed
    assert zero_padding_(as_tensor(x), meta).tolist() == zeroed


@quick
@given(layouts(tp_size=2))
def test_capacity_moves_rows_like_the_loop(lens: tuple[list[int], list[int]]) -> None:
    """Pads come from the device's arrays, and those of a later pack after copy_."""
    first, second = packed([4], [sum(lens[1]) + 4]), packed(*lens)
    meta = first.with_capacity(len(lens[0]) + 1, first.num_rows, first.num_rows)
    meta.copy_(second)
    rest = meta.num_rows - second.num_rows
    x = torch.arange(1, meta.num_rows + 1, device=DEVICE)
    for shifts in SHIFTS:
        sources = sources_of(second, shifts) + [None] * rest
        expected = [-100 if j is None else j + 1 for j in sources]
        assert roll(x, meta, shifts).tolist() == expected
    real = set(real_rows_of(second))
    zeroed = [row + 1 if row in real else 0 for row in range(meta.num_rows)]
    assert zero_padding(x, meta).tolist() == zeroed
    assert zero_padding_(x.clone(), meta).tolist() == zeroed
    half = meta.num_rows // 2
    assert zero_rows_(x.clone()[half:], meta, half).tolist() == zeroed[half:]
    assert zero_padding_copy(x[half:], meta, half).tolist() == zeroed[half:]


@quick
@given(layouts(tp_size=3))
def test_shards_have_their_own_pads(lens: tuple[list[int], list[int]]) -> None:
    meta = packed(*lens)
    x = torch.arange(1.0, meta.num_rows + 1, device=DEVICE)
    whole = zero_padding(x, meta)
    share = meta.num_rows // 3
    for first_row in range(0, meta.num_rows, max(share, 1)):
        shard = x[first_row : first_row + share].clone()
        expected = whole[first_row : first_row + share]
        assert torch.equal(zero_padding_copy(shard, meta, first_row), expected)
        assert torch.equal(zero_rows_(shard, meta, first_row), expected)


@quick
@given(layouts())
def test_shards_are_unpadded_by_themselves(lens: tuple[list[int], list[int]]) -> None:
    meta = packed(*lens)
    mask = meta.padding_mask
    for parts in (1, 2, 3):
        for start, stop in pairwise(meta.num_rows * i // parts for i in range(parts + 1)):
            real = ~mask[start:stop]
            rows = torch.arange(start, stop, device=DEVICE, dtype=torch.float32)[:, None] + 1
            x = rows.clone().requires_grad_()
            tokens = unpad_part(x, meta, start)
            assert torch.equal(tokens, rows[real])
            back = pad_part(tokens, meta, start, stop - start)
            assert torch.equal(back, rows * real[:, None])
            back.backward(rows)
            assert torch.equal(x.grad, rows * real[:, None])
            assert torch.equal(pad_part(real[real], meta, start, stop - start), real)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    meta = example()
    tokens = values((meta.num_tokens, *shape), dtype)
    x = pad(tokens, meta, fill=1)
    is_pad = meta.padding_mask
    assert same_bits(x[is_pad], torch.ones_like(x[is_pad]))
    assert same_bits(unpad(x, meta), tokens)
    assert same_bits(x[~is_pad], tokens)
    zeroed = zero_padding(x, meta)
    assert same_bits(zeroed, pad(tokens, meta))
    assert same_bits(zero_padding_(x, meta), zeroed)
    assert x.dtype == zeroed.dtype == dtype
    fill = 1 if dtype == torch.uint8 else None
    assert same_bits(roll(x, meta, -1, fill)[0], x[1])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.int64, -100), (torch.int8, -100), (torch.float32, 0.0), (torch.bool, False)],
)
def test_roll_fills_by_dtype(dtype: torch.dtype, expected: Any) -> None:
    x = torch.ones(2, dtype=dtype, device=DEVICE)
    assert roll(x, packed([1], [2])).tolist() == [expected] * 2
    assert roll(x, packed([1], [2]), fill=1).tolist() == [1, 1]


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_pads_are_never_a_source(poison: float, capacity: bool) -> None:
    meta = example()
    meta = with_room(meta) if capacity else meta
    clean = torch.randn(meta.num_rows, 3, device=DEVICE)
    clean[meta.padding_mask] = 0
    poisoned = clean.clone()
    poisoned[meta.padding_mask] = poison
    assert same_bits(zero_padding(poisoned, meta), clean)
    for shifts in SHIFTS:
        assert same_bits(roll(poisoned, meta, shifts), roll(clean, meta, shifts))
    if not capacity:
        assert same_bits(unpad(poisoned, meta), unpad(clean, meta))


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_gradients_of_pads_are_exactly_zero(poison: float, capacity: bool) -> None:
    meta = example()
    meta = with_room(meta) if capacity else meta
    gradient = torch.ones(meta.num_rows, device=DEVICE)
    gradient[meta.padding_mask] = poison
    zeroed = gradient.clone().masked_fill_(meta.padding_mask, 0)
    for function in (zero_padding, lambda x, meta: zero_padding_(x * 1, meta)):
        x = torch.randn(meta.num_rows, device=DEVICE, requires_grad=True)
        function(x, meta).backward(gradient)
        assert x.grad is not None
        assert same_bits(x.grad, zeroed)
    assert gradient[meta.padding_mask].isfinite().all() == math.isfinite(poison)  # untouched


@pytest.mark.parametrize(
    "function",
    [
        pad,
        unpad,
        zero_padding,
        lambda x, meta: zero_padding_(x * 1, meta),
        *(partial(roll, shifts=shifts) for shifts in SHIFTS),
    ],
)
def test_gradients_to_any_order(function: Callable[..., Tensor]) -> None:
    meta = example()
    rows = meta.num_tokens if function is pad else meta.num_rows
    x = torch.randn(rows, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.autograd.gradcheck(lambda x: function(x, meta), (x,))
    torch.autograd.gradgradcheck(lambda x: function(x, meta), (x,))


def test_strided_inputs_and_gradients() -> None:
    meta = example()
    wide = torch.randn(6, meta.num_rows, 4, device=DEVICE)
    x = wide[::2, :, 1:3].transpose(0, 1)  # neither rows nor columns are adjacent
    assert not x.is_contiguous()
    expected = zero_padding(x.contiguous(), meta)
    assert same_bits(zero_padding(x, meta), expected)
    assert same_bits(unpad(x, meta), unpad(x.contiguous(), meta))
    leaf = x.clone().requires_grad_()
    zero_padding(leaf, meta).sum().backward()  # the gradient of a sum is expanded
    assert torch.equal(leaf.grad, zero_padding(torch.ones_like(x), meta))
    before = wide.clone()
    assert zero_padding_(x, meta) is x
    assert same_bits(x, expected)
    before[::2, :, 1:3] = expected.transpose(0, 1)
    assert same_bits(wide, before)


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64])
def test_in_place_writes_pad_rows_and_nothing_else(dtype: torch.dtype, capacity: bool) -> None:
    meta = example()
    meta = with_room(meta) if capacity else meta
    memory = values((meta.num_rows + 6, 5), dtype)
    expected = memory.clone()
    raw_bytes(expected).view(meta.num_rows + 6, -1)[3:-3][meta.padding_mask] = 0
    x = memory[3:-3]
    assert zero_padding_(x, meta) is x
    assert same_bits(memory, expected)


def test_results_are_new_memory_without_pads_too() -> None:
    """So that what may be overwritten does not depend on the lengths of a batch."""
    meta = packed([3, 2], [3, 2])
    x = torch.randn(5, 2, device=DEVICE)
    for function in (pad, unpad, zero_padding, partial(roll, shifts=0)):
        y = function(x, meta)
        assert same_bits(y, x)
        assert y.data_ptr() != x.data_ptr()


def test_in_place_bumps_the_version_and_the_low_level_does_not() -> None:
    meta = example()
    x = torch.randn(meta.num_rows, device=DEVICE)
    zero_rows_(x, meta)
    zero_rows_(x, with_room_of(meta))
    assert x._version == 0
    zero_padding_(x, meta)
    assert x._version == 1
    leaf = torch.randn(meta.num_rows, device=DEVICE, requires_grad=True)
    y = leaf.exp()  # saves its output
    zero_padding_(y, meta)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = zero_rows_(leaf.exp(), meta)
    y.sum().backward()
    assert torch.equal(leaf.grad, y)


def with_room_of(meta: PaddedSeqMeta) -> PaddedSeqMeta:
    """The same rows, with pads read from the device."""
    return meta.with_capacity(meta.num_sequences, meta.num_rows, meta.num_rows)


@pytest.mark.parametrize("capacity", [False, True])
def test_in_place_refuses_leaves_as_torch_does(capacity: bool) -> None:
    meta = with_room_of(example()) if capacity else example()
    leaf = torch.ones(meta.num_rows, 2, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        zero_padding_(leaf, meta)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        zero_padding_(leaf[:, :1], meta)
    assert leaf.detach().eq(1).all()
    with torch.no_grad():
        zero_padding_(leaf, meta)
    assert torch.equal(leaf.detach()[:, 0] == 0, meta.padding_mask)


def test_inference_mode() -> None:
    meta = example()
    with torch.inference_mode():
        x = torch.ones(meta.num_rows, device=DEVICE)
        assert zero_padding(x, meta).sum() == zero_padding_(x, meta).sum() == meta.num_tokens
        unpad(x, meta)
    leaf = torch.ones(meta.num_rows, device=DEVICE, requires_grad=True)
    unpad(leaf, meta).sum().backward()  # with the indices that inference derived
    assert torch.equal(leaf.grad, x)


@pytest.mark.parametrize("function", [unpad, zero_padding, zero_padding_, roll])
@pytest.mark.parametrize("shape", [(), (11,), (17, 2), (0,)], ids=str)
def test_wrong_rows_raise(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    rows = shape[0] if shape else "no"
    with pytest.raises(ValueError, match=rf"x has {rows} rows, .* 18\b"):
        function(torch.zeros(shape), example())


@pytest.mark.parametrize("shape", [(), (18,), (10, 2)], ids=str)
def test_wrong_tokens_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="11 real tokens") as error:
        pad(torch.zeros(shape), example())
    assert str(shape) in str(error.value)


def test_capacity_refuses_what_needs_host_counts() -> None:
    meta = with_room(example())
    x = torch.zeros(meta.num_rows, device=DEVICE)
    with pytest.raises(ValueError, match="pad needs the number of real tokens"):
        pad(x, meta)
    with pytest.raises(ValueError, match="unpad needs the number of real tokens"):
        unpad(x, meta)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.uint8, None),
        (torch.uint8, 256),
        (torch.int64, 0.5),
        (torch.int64, 2**63),
        (torch.int32, math.nan),
        (torch.int32, math.inf),
        (torch.bool, 2),
    ],
)
def test_fill_that_the_dtype_cannot_hold_raises(dtype: torch.dtype, fill: float | None) -> None:
    meta = example()
    with pytest.raises(ValueError, match="cannot hold fill"):
        roll(torch.zeros(meta.num_rows, dtype=dtype), meta, fill=fill)
    if fill is not None:
        with pytest.raises(ValueError, match="cannot hold fill"):
            pad(torch.zeros(meta.num_tokens, dtype=dtype), meta, fill=fill)


class NoHostRead(TorchDispatchMode):
    """Fails on whatever brings device values to the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_to_copy")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket is torch.ops.aten.index else []
        is_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if is_mask or any(name in str(func) for name in self.FORBIDDEN):
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_read() -> Any:
    """Also by the means of Python, and on CUDA by the driver's word."""

    def refuse(self: Tensor, *args: Any) -> None:
        raise AssertionError("Python reads a tensor on the host")

    with pytest.MonkeyPatch.context() as patch, NoHostRead():
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):
            patch.setattr(Tensor, name, refuse)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


READS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "nonzero": torch.nonzero,
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "mask": lambda x: x[x > 0],
    "to": lambda x: x.to("cpu", torch.float64),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_guard_can_fail(read: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(AssertionError, match="reads a tensor on the host"), no_host_read():
        read(x)


@pytest.mark.parametrize("capacity", [False, True])
def test_nothing_is_read_on_the_host(capacity: bool) -> None:
    meta = example()
    meta = with_room(meta) if capacity else meta
    x = torch.randn(meta.num_rows, 2, device=DEVICE, requires_grad=True)
    tokens = torch.randn(11, 2, device=DEVICE, requires_grad=True)
    with no_host_read():
        for _ in range(2):  # deriving the indices, then with the cache
            y = zero_padding_(roll(zero_padding(x, meta), meta, -2) * 2, meta)
            zero_rows_(y.detach()[3:9], meta, 3)
            z = zero_padding_copy(y[3:9], meta, 3).sum()
            if not capacity:
                z = z + unpad(pad(tokens, meta, fill=3.0) * y, meta).sum()
            z.backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        pad,
        unpad,
        roll,
        zero_padding,
        lambda x, meta: zero_padding_(x * 1, meta),
        lambda x, meta: zero_padding_copy(x[3:9], meta, 3),
    ],
    ids=["pad", "unpad", "roll", "zero_padding", "zero_padding_", "zero_padding_copy"],
)
def test_compiles_as_one_graph(
    function: Callable[..., Tensor], capacity: bool, dynamic: bool
) -> None:
    if capacity and function in (pad, unpad):
        return
    torch.compiler.reset()  # each case is a new function to the reader, not to the compiler
    meta = with_room(example()) if capacity else example()
    compiled = torch.compile(
        lambda x: function(x, meta) * 3, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    rows = meta.num_tokens if function is pad else meta.num_rows
    x = torch.randn(rows, 2, device=DEVICE, requires_grad=True)
    eager = function(x, meta) * 3
    gradient = torch.randn_like(eager)
    (expected,) = torch.autograd.grad(eager, x, gradient)
    y = compiled(x)
    (actual,) = torch.autograd.grad(y, x, gradient)
    assert same_bits(y.detach(), eager.detach())
    assert same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("function", [zero_padding, zero_padding_, roll])
def test_compiles_without_gradient(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.compiler.reset()
    meta = example()
    compiled = torch.compile(lambda x: function(x, meta), backend="aot_eager", fullgraph=True)
    x = values((meta.num_rows, 2), dtype)
    y, expected = x.clone(), x.clone()
    assert same_bits(compiled(y), function(expected, meta))
    assert same_bits(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_operations_pass_opcheck(dtype: torch.dtype) -> None:
    meta = example()
    wants_grad = dtype == torch.float32
    src = torch.ones(3, 2, device=DEVICE).to(dtype).requires_grad_(wants_grad)
    index = torch.tensor([2, -1, 0, -1], device=DEVICE)
    inverse = torch.tensor([2, -1, 0], device=DEVICE)
    ops = torch.ops.padded_sp
    torch.library.opcheck(ops.gather_rows.default, (src, index, inverse, 1))
    x = torch.ones(meta.num_rows, 2, device=DEVICE).to(dtype)
    boundaries = (meta.cu_seqlens, meta.cu_seqlens_padded)
    torch.library.opcheck(ops.zero_pads_.default, (x[4:], *boundaries, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("columns", "first", "taken"),
    [(16, 0, 16), (32, 8, 16), (64, 1, 8), (48, 2, 3), (9, 0, 9), (1, 0, 1), (5, 5, 0)],
)
def test_zero_row_list_writes_the_listed_rows_only(
    dtype: torch.dtype, columns: int, first: int, taken: int
) -> None:
    """Whatever elements it writes by: rows of 16 bytes and of one, apart, at any address."""
    memory = values((9, 2, columns), dtype).to(DEVICE)
    expected, written = memory.clone(), slice(first, first + taken)
    zero_row_list_(memory[2:7, :, written], torch.tensor([4, 0, 2], device=DEVICE))
    in_bytes = slice(first * dtype.itemsize, (first + taken) * dtype.itemsize)
    expected.view(torch.uint8)[[6, 2, 4], :, in_bytes] = 0
    assert same_bits(memory, expected)


def test_zero_row_list_of_no_rows_and_of_scalars() -> None:
    x = torch.arange(1.0, 5, device=DEVICE)
    zero_row_list_(x, torch.tensor([], dtype=torch.int64, device=DEVICE))
    zero_row_list_(x, torch.tensor([3, 1], device=DEVICE))
    assert x.tolist() == [1, 0, 3, 0]
    zero_row_list_(x.new_empty(0, 4), torch.tensor([], dtype=torch.int64, device=DEVICE))


def test_gather_from_nothing() -> None:
    nothing = torch.empty(0, 2, dtype=torch.float8_e5m2, device=DEVICE)
    index = torch.full((3,), -1, device=DEVICE)
    out = gather_rows(nothing, index, index[:0], 2)
    assert same_bits(out, torch.full((3, 2), 2, dtype=torch.float8_e5m2, device=DEVICE))


def test_import_leaves_triton_and_cuda_alone() -> None:
    code = (
        "import sys, torch, padded_sp.padding; "
        "assert 'triton' not in sys.modules and 'padded_sp.kernels.padding' not in sys.modules; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "x",
    [torch.ones(1, 4).expand(16, 4), torch.zeros(100).as_strided((16, 4), (1, 1))],
    ids=["expanded", "overlapping"],
)
def test_zero_padding_in_place_refuses_rows_that_share_memory(x):
    with pytest.raises(ValueError, match="elements that share memory"):
        zero_padding_(x, PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[8, 8]))


def test_compiled_unpad_serves_packs_of_other_sizes():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(unpad, fullgraph=True, backend=counter)
    for n in range(1, 12):
        meta = PaddedSeqMeta.from_seq_lens([n] + [1] * (n % 3), num_rows=16)
        x = torch.randn(16, 3)
        assert torch.equal(compiled(x, meta), unpad(x, meta))
    assert counter.frame_count <= 3
