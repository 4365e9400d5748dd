"""The Triton kernels against plain torch: on a GPU where there is one, else interpreted on the CPU."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import padded_sp.kernels
from padded_sp import rows
from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import zero_rows_

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
given_lens = given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 5)).map(lambda p: (p[0], p[0] + p[1])),
        min_size=1,
        max_size=9,
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
    assert torch.equal(bits(out), bits(torch.cat([src[5:6], src[1:2], src[:1] * 0, src[:1]])))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_row_list_writes_the_listed_rows_only(kernels, dtype, shape):
    wide = random_bits((8, *shape, 3), dtype)
    x = wide[2:7, ..., 0].unsqueeze(-1) if not shape else wide[2:7, 1 : shape[0]]
    listed = torch.tensor([4, 0, 2], device=DEVICE)
    before = wide.clone()
    if kernels.takes(x):
        kernels.zero_row_list_(bits(x), listed)
    else:
        assert False, x.stride()
    expected = before.clone()
    target = expected[2:7, ..., 0] if not shape else expected[2:7, 1 : shape[0]]
    bits(target)[listed] = 0
    assert torch.equal(bits(wide), bits(expected))
