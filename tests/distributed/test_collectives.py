"""The collectives: values, dtypes, what is refused before communication, and a rank that fails."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_helpers import bits, comm_counts, device_of, extremes
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp.collectives import (
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    group_name,
    group_rank,
    group_size,
    reduce_scatter_rows,
)

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
MOVED = [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64]
# Two ranks' sums of small integers are exact in every one of these.
SUMMED = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]


def rows_of(rank, rows, dtype, device, columns=3):
    """Bytes that tell rank, row and column apart, seen as `dtype`."""
    generator = torch.Generator().manual_seed(rank)
    itemsize = dtype.itemsize
    high = 2 if dtype == torch.bool else 120  # no NaN in any of the 8-bit formats
    shape = (rows, columns * itemsize)
    raw = torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)
    return raw.to(device).view(dtype)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


def gathers(group, rows, dtype):
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    x = rows_of(rank, rows, dtype, device)
    with CommDebugMode() as comms:
        full = all_gather_rows(x, group_name(group), size)
    expected = torch.cat([as_bytes(rows_of(r, rows, dtype, device)) for r in range(size)])
    assert full.dtype == dtype
    assert torch.equal(as_bytes(full), expected)
    assert comm_counts(comms) == ({"all_gather_into_tensor": 1} if size > 1 else {})


def exchanges(group, rows, dtype):
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    x = rows_of(rank, rows * size, dtype, device)
    with CommDebugMode() as comms:
        received = all_to_all_rows(x, group_name(group), size)
    sent = [as_bytes(rows_of(r, rows * size, dtype, device)) for r in range(size)]
    mine = slice(rank * rows, (rank + 1) * rows)
    assert received.dtype == dtype
    assert torch.equal(as_bytes(received), torch.cat([block[mine] for block in sent]))
    assert comm_counts(comms) == ({"all_to_all_single": 1} if size > 1 else {})


def reduces(group, rows, dtype):
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    terms = [
        torch.arange(rows * size * 2, device=device).reshape(-1, 2).remainder(7).to(dtype) + r
        for r in range(size)
    ]
    total = torch.stack(terms).sum(0).to(dtype)
    with CommDebugMode() as comms:
        shard = reduce_scatter_rows(terms[rank], group_name(group), size)
        summed = all_reduce(terms[rank], group_name(group), size)
        largest = all_reduce(terms[rank], group_name(group), size, op="max")
    assert torch.equal(shard, total[rank * rows : (rank + 1) * rows])
    assert torch.equal(summed, total)
    assert torch.equal(largest, terms[-1])
    assert {shard.dtype, summed.dtype, largest.dtype} == {dtype}
    expected = {"reduce_scatter_tensor": 1, "all_reduce": 2} if size > 1 else {}
    assert comm_counts(comms) == expected


@pytest.mark.parametrize("dtype", MOVED + FP8, ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_all_gather_moves_every_bit(ranks, rows, dtype):
    ranks.run(gathers, rows=rows, dtype=dtype)


@pytest.mark.parametrize("dtype", MOVED + FP8, ids=str)
@pytest.mark.parametrize("rows", [0, 2])
def test_all_to_all_moves_every_bit(ranks, rows, dtype):
    ranks.run(exchanges, rows=rows, dtype=dtype)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_sums_and_maxima_are_exact_on_small_integers(ranks, rows, dtype):
    ranks.run(reduces, rows=rows, dtype=dtype)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def moves_extremes(group, dtype):
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    xs = [extremes(2 * size, 50, dtype=dtype, seed=r) for r in range(size)]
    x = xs[rank].to(device)
    full = all_gather_rows(x, group_name(group), size)
    assert torch.equal(bits(full.cpu()), bits(torch.cat(xs)))
    received = all_to_all_rows(x, group_name(group), size)
    blocks = [x.chunk(size)[rank] for x in xs]
    assert torch.equal(bits(received.cpu()), bits(torch.cat(blocks)))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_infinities_and_nans_are_moved_bit_by_bit(ranks, dtype):
    ranks.run(moves_extremes, dtype=dtype)


def sums_infinities(group, dtype):
    """Each row has one rank's infinities and NaN; the other ranks add 0."""
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    infinite = torch.tensor([float("inf"), float("-inf"), 1.0], dtype=dtype)
    values = torch.cat([infinite, torch.full((1,), float("nan"), dtype=dtype)])
    terms = torch.zeros(size, 4, dtype=dtype)
    terms[(rank + 1) % size] = values
    shard = reduce_scatter_rows(terms.to(device), group_name(group), size).cpu()
    summed = all_reduce(terms.to(device), group_name(group), size).cpu()
    for rows in (shard, summed):
        assert torch.equal(bits(rows[:, :3]), bits(infinite.expand(len(rows), 3)))
        assert rows[:, 3].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_keep_infinities_and_nans(ranks, dtype):
    ranks.run(sums_infinities, dtype=dtype)


def takes_strided_input(group):
    name, size, device = group_name(group), group_size(group), device_of(group)
    x = torch.arange(4.0 * size, device=device).reshape(2, 2 * size).t() + group_rank(group)
    for call in (all_gather_rows, reduce_scatter_rows, all_to_all_rows, all_reduce):
        assert torch.equal(call(x, name, size), call(x.contiguous(), name, size)), call
    fp8 = x.to(torch.float8_e4m3fn).t().contiguous().t()
    gathered = all_gather_rows(fp8, name, size).view(torch.uint8)
    assert torch.equal(gathered, all_gather_rows(fp8.contiguous(), name, size).view(torch.uint8))


def test_strided_input_is_made_contiguous(ranks):
    ranks.run(takes_strided_input)


def leaves_input_alone(group):
    name, size = group_name(group), group_size(group)
    x = torch.ones(2 * size, 2, device=device_of(group))
    version = x._version
    outputs = [
        call(x, name, size)
        for call in (all_gather_rows, reduce_scatter_rows, all_to_all_rows, all_reduce)
    ]
    assert x._version == version
    if size == 1:
        assert all(output is x for output in outputs)
        return
    for output in outputs:
        output.fill_(-1)
    assert torch.equal(x, torch.ones_like(x))


def test_output_is_new_but_for_one_rank(ranks):
    ranks.run(leaves_input_alone)


def works_in_subgroups(group):
    """Even and odd ranks, each group on its own."""
    size, device = dist.get_world_size(group), device_of(group)
    members = [list(range(parity, size, 2)) for parity in range(min(2, size))]
    groups = [dist.new_group(ranks) for ranks in members]
    parity = dist.get_rank(group) % 2
    mine, own = groups[parity], members[parity]
    assert (group_size(mine), group_rank(mine)) == (len(own), own.index(dist.get_rank(group)))
    x = torch.full((2, 2), float(dist.get_rank(group)), device=device)
    full = all_gather_rows(x, group_name(mine), group_size(mine))
    assert full[::2, 0].tolist() == own
    assert all_reduce(x, group_name(mine), group_size(mine))[0, 0] == sum(own)
    for other in groups[:parity] + groups[parity + 1 :]:
        with pytest.raises(ValueError, match="that this rank belongs to"):
            group_size(other)


def test_subgroups(ranks):
    ranks.run(works_in_subgroups)


def refuses_before_communicating(group):
    name, size, device = group_name(group), group_size(group), device_of(group)
    odd = torch.ones(size + 1, 2, device=device)
    with CommDebugMode() as comms:
        for call in (reduce_scatter_rows, all_to_all_rows):
            if size > 1:
                with pytest.raises(ValueError, match=f"got {size + 1} rows .*AlignPolicy"):
                    call(odd, name, size)
        for dtype in (*FP8, torch.bool, torch.uint8, torch.int16, torch.complex64):
            for call in (reduce_scatter_rows, all_reduce):
                if size > 1:
                    with pytest.raises(ValueError, match=f"got {dtype}; convert"):
                        call(torch.zeros(size, 2, device=device).to(dtype), name, size)
        with pytest.raises(ValueError, match='op="sum" or op="max", got \'mean\''):
            all_reduce(odd, name, size, op="mean")
    assert comms.get_total_counts() == 0


def test_refused_before_communication(ranks):
    ranks.run(refuses_before_communicating)


def test_no_group_is_one_rank():
    assert (group_name(None), group_size(None), group_rank(None)) == ("", 1, 0)


@pytest.mark.parametrize("not_a_group", [-100, "tp", object()], ids=["non-member", "str", "object"])
def test_not_a_group(not_a_group):
    for ask in (group_name, group_size, group_rank):
        with pytest.raises(ValueError, match=r"ProcessGroup that this rank belongs to"):
            ask(not_a_group)


def last_rank_raises_early(group, collective):
    """The last rank raises before it joins; what each rank gets. Breaks a group of its own."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    all_reduce(torch.ones(1), group_name(impatient), size)  # connected: what follows is the wait
    try:
        if rank == size - 1:
            raise ValueError("an error that only this rank can see")
        collective(torch.ones(size, 2), group_name(impatient), size)
    except Exception as error:
        return type(error).__name__, str(error), error.__cause__ is not None
    finally:
        dist.barrier(group)
    return None


@pytest.mark.parametrize(
    "collective", [all_gather_rows, reduce_scatter_rows, all_to_all_rows, all_reduce]
)
def test_a_rank_that_raises_ends_the_others_with_a_stated_reason(ranks, collective):
    if ranks.backend != "gloo":
        pytest.skip("NCCL's watchdog states the reason, and ends the process")
    if ranks.world_size == 1:
        pytest.skip("one rank waits for nobody")
    *waiting, raising = ranks.run(last_rank_raises_early, collective=collective)
    assert raising == ("ValueError", "an error that only this rank can see", False)
    operation = collective.__name__.removesuffix("_rows")
    for rank, (kind, message, chained) in enumerate(waiting):
        assert kind == "RuntimeError"
        assert chained
        shape = (ranks.world_size, 2)
        assert message.startswith(f"{operation} of {shape} torch.float32 over group ")
        assert f"failed on rank {rank} of {ranks.world_size}. " in message
        assert "another rank did not join it: it probably raised" in message
