"""The ranks of a group share one verdict: the worst of theirs, whatever each had found before."""

import pytest
import torch.distributed as dist
from rank_helpers import device_of
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp import verdict as verdicts
from padded_sp import verify
from padded_sp.verify import Verdict

LIMITS = {"output": 0.1, "pads": 0.0}


@pytest.fixture(autouse=True)
def _nothing_known(ranks):
    ranks.run(forget)


def forget(group):
    verdicts._found.clear()
    verdicts._agreed.clear()


def found(output, pads=0.0):
    figures = {"output": output, "pads": pads}
    return Verdict("a layer", output <= 0.1 and pads == 0, figures, LIMITS)


def agree(group, wrong=(), key="key"):
    """Rank r is off by (r + 1) / 100, the wrong ones by 0.3 more."""
    rank = group.rank()
    mine = found((rank + 1) / 100 + 0.3 * (rank in wrong))
    with CommDebugMode() as comms:
        verdict = verify.agreed(lambda: mine, key, group)
    assert comms.get_total_counts() == 0  # over the host channel, not over the device
    return verdict


def test_the_worst_figures_are_everyones(ranks):
    size = ranks.world_size
    expected = found(size / 100)
    assert ranks.run(agree) == [expected] * size


@pytest.mark.parametrize("wrong", [(0,), (-1,), (0, -1)])
def test_one_that_fails_fails_on_all(ranks, wrong):
    size = ranks.world_size
    wrong = sorted({rank % size for rank in wrong})
    answers = ranks.run(agree, wrong=wrong)
    assert answers == [answers[0]] * size
    assert not answers[0].passed
    assert answers[0].figures["output"] == (wrong[-1] + 1) / 100 + 0.3
    phrase = "ranks " if len(wrong) > 1 else "rank "
    phrase = f"on {phrase}{' and '.join(map(str, wrong))} of {size}" if size > 1 else ""
    assert answers[0].reason == phrase
    assert f"output {0.3 + (wrong[-1] + 1) / 100:.2g} (at most 0.1)" in str(answers[0])


def knows_already(group):
    """The last rank has checked by itself, without a group; the others must not wait for it."""
    calls = []

    def check():
        calls.append(group.rank())
        return found(0.01)

    if group.rank() == group.size() - 1:
        verify.agreed(check, "known", None)
    agreed = verify.agreed(check, "known", group)
    assert len(calls) == 1
    with pytest.MonkeyPatch.context() as patch:  # what was agreed on is not asked again
        patch.setattr(verdicts, "exchange_on_host", None)
        assert verify.agreed(check, "known", group) is agreed
    assert len(calls) == 1


def test_a_rank_that_knows_already(ranks):
    ranks.run(knows_already)


def raises_on_the_last(group):
    is_last = group.rank() == group.size() - 1

    def check():
        if is_last:
            raise KeyError("odd")
        return found(0.01)

    if is_last:
        with pytest.raises(KeyError, match="odd"):
            verify.agreed(check, "raises", group)
        return None
    return verify.agreed(check, "raises", group)


def test_a_check_that_raises_keeps_nobody_waiting(ranks):
    size = ranks.world_size
    *others, _ = ranks.run(raises_on_the_last)
    for verdict in others:
        assert verdict.subject == "a layer"
        assert not verdict.passed
        assert verdict.reason == f"on rank {size - 1} of {size}: KeyError: 'odd'"


def check_different_layers(group):
    subject = f"layer {group.rank()}"
    if group.size() == 1:
        return
    with pytest.raises(ValueError, match="check different layers: layer 0; layer 1"):
        verify.agreed(lambda: Verdict(subject, True, {}, {}), "different", group)


def test_different_layers(ranks):
    ranks.run(check_different_layers)


def in_halves(group):
    """The half of the even ranks passes, whatever the odd ones find; the whole does not."""
    rank, size = group.rank(), group.size()
    halves = [dist.new_group(list(range(half, size, 2))) for half in range(min(2, size))]
    mine = found(0.3 if rank % 2 else 0.01)
    verdict = verify.agreed(lambda: mine, "halves", halves[rank % 2])
    assert verdict.passed == (rank % 2 == 0)
    assert verify.agreed(lambda: mine, "halves", group).passed == (size == 1)


def test_groups_agree_apart(ranks):
    ranks.run(in_halves)


def infinity_travels(group):
    wrong = found(float("inf"), pads=float("inf"))
    verdict = verify.agreed(lambda: wrong if group.rank() == 0 else found(0.01), "inf", group)
    assert verdict.figures == {"output": float("inf"), "pads": float("inf")}


def test_infinite_figures(ranks):
    ranks.run(infinity_travels)


def check_for_real(group):
    device = device_of(group)
    attention = verify.agreed(
        lambda: verify.verify_attention("torch", num_heads=2, head_dim=32, device=device),
        "attention",
        group,
    )
    linear = verify.agreed(lambda: verify.verify_linear("torch", device=device), "linear", group)
    return attention, linear


def test_real_checks(ranks):
    answers = ranks.run(check_for_real)
    assert answers == [answers[0]] * ranks.world_size
    assert all(verdict.passed for verdict in answers[0])
