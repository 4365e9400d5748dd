"""The Triton kernels: on a GPU where there is one, else interpreted on the CPU."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import padded_sp.kernels
from padded_sp import rows
from padded_sp.meta import PaddedSeqMeta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SHAPES = [(), (1,), (3,), (2, 5), (7, 1, 33), (2049,), (0,)]
given_packs = given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=9).map(
        lambda entries: PaddedSeqMeta.from_seq_lens(
            [real for real, _ in entries],
            padded_lens=[real + pads for real, pads in entries],
            device=DEVICE,
        )
    )
)
few_examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def kernels():
    """The kernels' module; without a GPU a second copy of it, interpreted.

    Triton decides at decoration, so the variable is set for that moment alone and neither the
    module that users import nor the compiler's own kernels in this process are interpreted.
    """
    if DEVICE == "cuda":
        from padded_sp.kernels import padding

        yield padding
        return
    pytest.importorskip("triton")  # imported as it is, before the variable is set
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        path = padded_sp.kernels.__path__[0] + "/padding.py"
        spec = importlib.util.spec_from_file_location("interpreted_padding_kernels", path)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    yield module


def bits(x):
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def random_bits(shape, dtype):
    """Any bits, NaN with its payload included; bool knows only two."""
    raw = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
    raw = raw & 1 if dtype == torch.bool else raw
    return raw.to(DEVICE).view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_copies_bits_and_fills(kernels, dtype, shape):
    src = random_bits((6, *shape), dtype)
    index = torch.tensor([5, -1, 0, 3, -1, -1, 1, 2, 4], device=DEVICE)
    fill = 0 if dtype == torch.bool else 1
    out = torch.empty((9, *shape), dtype=dtype, device=DEVICE)
    kernels.gather_rows(bits(src), index, rows._fill_bits(fill, dtype), bits(out))
    expected = torch.stack(
        [src[i] if i >= 0 else torch.full_like(src[0], fill) for i in index.tolist()]
    )
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("fill", [0, 1, 2, -100, 2**31, -(2**63), 2**63 - 1])
def test_gather_fills_any_integer(kernels, fill):
    out = torch.empty(3, 2, dtype=torch.int64, device=DEVICE)
    nothing = torch.full((3,), -1, device=DEVICE)
    kernels.gather_rows(out.new_empty(0, 2), nothing, fill, out)
    assert out.tolist() == [[fill] * 2] * 3


def test_gather_takes_a_slice_of_columns(kernels):
    wide = random_bits((6, 10), torch.float32)
    src = wide[:, 3:8]
    index = torch.tensor([5, 1, -1, 0], device=DEVICE)
    out = torch.empty(4, 5, device=DEVICE)
    assert kernels.takes(src)
    kernels.gather_rows(bits(src), index, 0, bits(out))
    expected = torch.cat([src[5:6], src[1:2], torch.zeros_like(src[:1]), src[:1]])
    assert torch.equal(bits(out), bits(expected))


@few_examples
@given_packs
def test_zero_pads_finds_the_pads_on_the_device(kernels, pack):
    meta = pack.with_capacity(len(pack.seq_lens) + 2, pack.num_rows + 3, pack.num_rows + 3)
    memory = random_bits((meta.num_rows + 2, 5), torch.float32)
    expected = bits(memory).clone()
    kernels.zero_pads_(bits(memory[1:-1]), meta.cu_seqlens, meta.cu_seqlens_padded, 0)
    expected[1:-1][meta.padding_mask] = 0
    assert torch.equal(bits(memory), expected)


@pytest.mark.parametrize("row_elements", [1, 127, 128, 300])
@pytest.mark.parametrize("first_row", [0, 5, 40])
def test_zero_pads_of_a_shard(kernels, first_row, row_elements):
    meta = PaddedSeqMeta.from_seq_lens([3, 0, 30, 0, 9], padded_lens=[8, 0, 32, 4, 20]).to(DEVICE)
    x = random_bits((24, row_elements), torch.bfloat16)
    expected = bits(x).clone()
    kernels.zero_pads_(bits(x), meta.cu_seqlens, meta.cu_seqlens_padded, first_row)
    expected[meta.padding_mask[first_row : first_row + 24]] = 0
    assert torch.equal(bits(x), expected)


def test_zero_pads_among_a_thousand_sequences(kernels):
    lengths = [i % 5 for i in range(1000)]
    meta = PaddedSeqMeta.from_seq_lens(lengths, padded_lens=[n + n % 3 for n in lengths]).to(DEVICE)
    x = torch.ones(meta.num_rows, device=DEVICE, dtype=torch.int32)
    kernels.zero_pads_(x, meta.cu_seqlens, meta.cu_seqlens_padded, 0)
    assert torch.equal(x.bool(), ~meta.padding_mask)


def test_nothing_to_do_launches_nothing(kernels):
    nothing = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    no_rows = torch.empty(0, dtype=torch.int64, device=DEVICE)
    boundaries = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    kernels.gather_rows(nothing, no_rows, 0, nothing)
    kernels.zero_pads_(nothing, boundaries, boundaries, 0)


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.empty(4, 3, 2), True),
        (torch.empty(4), True),
        (torch.empty(4, 6)[:, 1:3], True),
        (torch.empty(8, 3)[::2], True),
        (torch.empty(0, 3), True),
        (torch.empty(3, 4).t(), False),
        (torch.empty(4, 6, 2)[:, ::2], False),
        (torch.empty(1, 3).expand(4, 3), False),
        (torch.empty(4, 3, dtype=torch.complex128), False),
    ],
)
def test_takes_dense_rows(kernels, x, taken):
    assert kernels.takes(x) is taken
