"""check_agreement: ranks that hold different metas all hear of it, in the same words."""

import re
from datetime import timedelta

import pytest
import torch.distributed as dist
from rank_helpers import device_of
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp import PaddedSeqMeta, seq_meta
from padded_sp.agreement import agreement_facts, raise_where_different
from padded_sp.collectives import check_agreement

SEQ_LENS, PADDED_LENS = [5, 0, 7], [8, 0, 16]


def meta_of(device=None, seq_lens=SEQ_LENS, padded_lens=PADDED_LENS, **sizes):
    return PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=padded_lens, device=device, **sizes)


# What the odd rank holds, and what every rank must be told about it.
MISTAKES = {
    "a real length": (
        {"seq_lens": [5, 0, 6]},
        r"seq_lens\[2\] \(sequence 2\) is 7 on {others}, 6 on {odd}\.",
    ),
    "a padded length": (
        {"padded_lens": [16, 0, 8]},
        r"padded_lens\[0\] \(sequence 0\) is 8 on {others}, 16 on {odd}\.",
    ),
    "the number of sequences": (
        {"seq_lens": [5, 7], "padded_lens": [8, 16]},
        r"num_sequences is 3 on {others}, 2 on {odd}\.",
    ),
    "the rows": ({"padded_lens": [8, 0, 24]}, r"padded_lens\[2\] .* 16 on {others}, 24 on {odd}\."),
    "tp_size": ({"tp_size": 2}, r"tp_size is 1 on {others}, 2 on {odd}\."),
    "cp_size": ({"cp_size": 2}, r"cp_size is 1 on {others}, 2 on {odd}\."),
}


def agree_but_for_one(group, odd, wrong):
    device = device_of(group)
    meta = meta_of(device, **(wrong if dist.get_rank(group) == odd else {}))
    with CommDebugMode() as comms, pytest.raises(ValueError, match="metas disagree") as caught:
        check_agreement(meta, group)
    assert comms.get_total_counts() == 0  # over the host channel, not over the device
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_names_the_odd_one(ranks, mistake):
    if ranks.world_size == 1:
        pytest.skip("one rank agrees with itself")
    wrong, expected = MISTAKES[mistake]
    odd = ranks.world_size - 1
    messages = ranks.run(agree_but_for_one, odd=odd, wrong=wrong)
    assert len(set(messages)) == 1
    others = {2: "rank 0", 3: "ranks 0 and 1", 4: "ranks 0, 1 and 2"}.get(
        ranks.world_size, "ranks .*"
    )
    pattern = expected.format(others=others, odd=f"rank {odd}")
    assert re.search(pattern, messages[0]), messages[0]
    assert "from the same lengths and the same AlignPolicy" in messages[0]


def agrees_again_and_again(group):
    """Equal metas pass; a difference is seen at once, and forgotten at once."""
    device, rank = device_of(group), dist.get_rank(group)
    for _ in range(3):
        check_agreement(meta_of(device), group)
    if dist.get_world_size(group) > 1:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"seq_lens\[0\]"):
                check_agreement(meta_of(device, seq_lens=[rank, 0, 7]), group)
            check_agreement(meta_of(device), group)
    with seq_meta(meta_of(device), check=group):
        pass


def test_nothing_is_cached(ranks):
    ranks.run(agrees_again_and_again)


def holds_no_meta(group):
    size, device = dist.get_world_size(group), device_of(group)
    odd = dist.get_rank(group) == size - 1
    with pytest.raises(ValueError, match="list on ") as caught:
        check_agreement([5, 7] if odd else meta_of(device), group)
    with pytest.raises(ValueError, match="takes a PaddedSeqMeta, got list on every rank"):
        check_agreement([5, 7], group)
    return str(caught.value)


def test_a_rank_without_a_meta(ranks):
    messages = ranks.run(holds_no_meta)
    assert len(set(messages)) == 1
    assert f"list on rank {ranks.world_size - 1}" in messages[0] or ranks.world_size == 1


def compares_capacity_metas(group):
    size, device = dist.get_world_size(group), device_of(group)
    odd = dist.get_rank(group) == size - 1
    held = meta_of(device).with_capacity(6, 48, 24)
    check_agreement(held, group)
    if size == 1:
        return
    with pytest.raises(ValueError, match=r"is_capacity is True on rank.*False on rank"):
        check_agreement(meta_of(device) if odd else held, group)
    with pytest.raises(ValueError, match=r"num_rows is 48 on rank.*64 on rank"):
        check_agreement(meta_of(device).with_capacity(6, 64, 24) if odd else held, group)


def test_capacity_metas_compare_by_capacity(ranks):
    ranks.run(compares_capacity_metas)


def leaves_no_keys(group):
    """At most one text per rank and group stays in the store."""
    store = dist.distributed_c10d._get_process_group_store(group)
    meta = meta_of(device_of(group))
    check_agreement(meta, group)
    dist.barrier(group)
    before = store.num_keys()
    dist.barrier(group)
    for _ in range(5):
        check_agreement(meta, group)
    dist.barrier(group)
    after = store.num_keys()
    dist.barrier(group)
    return after - before


def test_the_store_does_not_grow(ranks):
    # The barriers of NCCL and of gloo may leave keys of their own: fewer than five calls would.
    grown = ranks.run(leaves_no_keys)
    assert max(grown) < 5, grown


def groups_do_not_meet(group):
    """Halves that hold different metas, and the whole, which notices."""
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    halves = [dist.new_group(list(range(half, size, 2))) for half in range(min(2, size))]
    half = rank % 2
    meta = meta_of(device, seq_lens=[half, 0, 7])
    check_agreement(meta, halves[half])
    if size > 1:
        with pytest.raises(ValueError, match=r"seq_lens\[0\].*0 on rank.*1 on rank"):
            check_agreement(meta, group)
    check_agreement(meta, halves[half])
    for other in halves[:half] + halves[half + 1 :]:
        with pytest.raises(ValueError, match="that this rank belongs to"):
            check_agreement(meta, other)


def test_groups_do_not_meet(ranks):
    ranks.run(groups_do_not_meet)


def one_stays_away(group):
    """The last rank leaves out a call, then makes it too late."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    impatient = dist.new_group(timeout=timedelta(seconds=3))
    meta = meta_of(device_of(group))
    dist.barrier(group)
    check_agreement(meta, impatient)
    if rank == size - 1:
        dist.barrier(group)
    with pytest.raises(RuntimeError) as caught:
        check_agreement(meta, impatient)
    if rank != size - 1:
        dist.barrier(group)
    check_agreement(meta, impatient)  # all have made two calls: in step again
    return str(caught.value)


def test_a_rank_that_stays_away_is_named(ranks):
    if ranks.world_size == 1:
        pytest.skip("one rank waits for nobody")
    *waiting, late = ranks.run(one_stays_away)
    missing = ranks.world_size - 1
    for message in waiting:
        assert f"rank {missing} of {ranks.world_size} did not make call 2 within" in message
        assert "timeout of 3 s" in message
    assert f"rank {missing} of {ranks.world_size} made call 2 after another rank had" in late


class GoneStore:
    """What a TCPStore is once the process that hosts it has ended."""

    def set(self, key, value):
        raise dist.DistNetworkError("Broken pipe")


def loses_its_store(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: GoneStore())
        if dist.get_world_size(group) > 1:
            with pytest.raises(
                RuntimeError, match=r"store cannot be reached.* rank 0, has probabl"
            ):
                check_agreement(meta_of(device_of(group)), group)


def test_a_store_that_is_gone(ranks):
    ranks.run(loses_its_store)


def test_without_a_group_there_is_nothing_to_compare():
    check_agreement(meta_of(), None)
    with pytest.raises(ValueError, match="takes a PaddedSeqMeta, got int"):
        check_agreement(3, None)


def test_every_field_is_compared():
    facts = agreement_facts(meta_of())
    raise_where_different([facts, dict(facts)])
    for field, value in facts.items():
        other = {**facts, field: [99, *value[1:]] if isinstance(value, tuple) else 99}
        with pytest.raises(ValueError, match=f"disagree: {field}"):
            raise_where_different([facts, other, facts])
