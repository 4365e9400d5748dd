"""The surrounding meta: who sees it, who must not, and how it comes along to a recomputation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from padded_sp import ColumnParallelLinear, PaddedSeqMeta, carry_meta, collectives, seq_meta
from padded_sp.context import resolve_meta


def packed(*seq_lens: int) -> PaddedSeqMeta:
    return PaddedSeqMeta.from_seq_lens(seq_lens)


class Recorder:
    """A block that asks for its meta each time it runs, and scales by 2."""

    def __init__(self) -> None:
        self.seen: list[PaddedSeqMeta] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(resolve_meta(None))
        return (x * 2).exp()


def in_another_thread(fn: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(fn())
        except ValueError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


# ---- with seq_meta ------------------------------------------------------------------------------


def test_the_argument_goes_before_the_surrounding_meta():
    given, surrounding = packed(3), packed(5)
    with seq_meta(surrounding) as entered:
        assert entered is surrounding
        assert resolve_meta(None) is surrounding
        assert resolve_meta(given) is given


def test_blocks_nest_and_end():
    outer, inner = packed(3), packed(5)
    with seq_meta(outer):
        with seq_meta(inner):
            assert resolve_meta(None) is inner
        assert resolve_meta(None) is outer
    with pytest.raises(ValueError, match=r"no meta: .*with seq_meta\(meta\)"):
        resolve_meta(None)


def test_a_block_ends_with_an_exception_too():
    with pytest.raises(KeyError), seq_meta(packed(3)):
        raise KeyError
    with pytest.raises(ValueError, match="no meta"):
        resolve_meta(None)


def test_anything_but_a_meta_raises():
    with pytest.raises(ValueError, match="seq_meta takes a PaddedSeqMeta, got list"), seq_meta([3]):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="meta must be a PaddedSeqMeta, got Tensor"):
        resolve_meta(torch.ones(3))  # type: ignore[arg-type]


def test_check_asks_the_ranks_before_the_block_starts(monkeypatch):
    asked = []
    monkeypatch.setattr(collectives, "check_agreement", lambda *args: asked.append(args))
    meta, group = packed(3), object()
    with seq_meta(meta, check=group):  # type: ignore[arg-type]
        assert asked == [(meta, group)]

    def disagree(*_: Any) -> None:
        raise ValueError("rank 1 has 4")

    monkeypatch.setattr(collectives, "check_agreement", disagree)
    with pytest.raises(ValueError, match="rank 1 has 4"), seq_meta(meta, check=group):  # type: ignore[arg-type]
        pytest.fail("the block must not run")


# ---- threads and backward passes ----------------------------------------------------------------


def test_another_thread_does_not_see_it():
    with seq_meta(packed(3)):
        assert isinstance(in_another_thread(lambda: resolve_meta(None)), ValueError)


def test_carry_meta_takes_it_to_another_thread_and_past_the_block():
    meta = packed(3)
    with seq_meta(meta):
        carried = carry_meta(resolve_meta)
    assert carried(None) is meta
    assert in_another_thread(lambda: carried(None)) is meta
    with seq_meta(packed(5)):
        assert carried(None) is meta


def test_carry_meta_keeps_the_name_and_passes_everything():
    def block(x: int, *, scale: int = 1) -> int:
        return x * scale

    with seq_meta(packed(3)):
        carried = carry_meta(block)
    assert carried.__name__ == "block"
    assert carried(3, scale=2) == 6


def test_carry_meta_without_a_surrounding_meta_raises():
    with pytest.raises(ValueError, match="no meta"):
        carry_meta(resolve_meta)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_runs_with_the_carried_meta(use_reentrant):
    first, second = packed(3), packed(4)
    block, outputs, inputs = Recorder(), [], []
    for meta in (first, second):
        x = torch.ones(3, requires_grad=True)
        with seq_meta(meta):
            outputs.append(checkpoint(carry_meta(block), x, use_reentrant=use_reentrant))
        inputs.append(x)
    with seq_meta(second):  # where backward is called from must not matter
        outputs[0].sum().backward()
    outputs[1].sum().backward()
    assert block.seen == [first, second, first, second]
    assert torch.equal(inputs[0].grad, 2 * (2 * torch.ones(3)).exp())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_stock_checkpoint_raises_at_recompute(use_reentrant, inside):
    x = torch.ones(3, requires_grad=True)
    with seq_meta(packed(3)):
        y = checkpoint(Recorder(), x, use_reentrant=use_reentrant)
        if inside:  # the surrounding meta may be another batch's by now
            with pytest.raises(ValueError, match=r"recomputed .* carry_meta"):
                y.sum().backward()
    if not inside:
        with pytest.raises(ValueError, match=r"recomputed .* carry_meta"):
            y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_meta_as_argument_needs_nothing(use_reentrant):
    x, meta, seen = torch.ones(3, requires_grad=True), packed(3), []

    def block(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        seen.append(resolve_meta(meta))
        return x.exp()

    checkpoint(block, x, meta, use_reentrant=use_reentrant).sum().backward()
    assert seen == [meta, meta]


def test_a_block_entered_during_backward_counts_there():
    meta, seen = packed(3), []

    def hook(_: Tensor) -> None:
        with seq_meta(meta):
            seen.append(resolve_meta(None))

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [meta]


# ---- under torch.compile ------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_a_compiled_block_needs_its_meta_as_well(use_reentrant):
    layer = ColumnParallelLinear(4, 4)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(16, 4, requires_grad=True)
    first, second = (
        PaddedSeqMeta.from_seq_lens(lengths, padded_lens=[8, 8]) for lengths in ([8, 1], [1, 8])
    )

    def weight_gradient(block: Callable[..., Tensor], meta: PaddedSeqMeta) -> Tensor:
        layer.zero_grad()
        with seq_meta(meta):
            y = checkpoint(block(), x, use_reentrant=use_reentrant)
        with seq_meta(second):  # of the batch after it, in flight at the same time
            y.sum().backward()
        return layer.weight.grad

    with pytest.raises(ValueError, match="carry_meta"):
        weight_gradient(lambda: compiled, first)
    carried = weight_gradient(lambda: carry_meta(compiled), first)
    layer.zero_grad()
    layer(x, first).sum().backward()
    assert torch.equal(carried, layer.weight.grad)


def test_a_full_graph_takes_the_meta_as_an_argument():
    torch._dynamo.reset()  # what broke the graph in other tests would be skipped without a word
    layer = ColumnParallelLinear(4, 4)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    meta, x = packed(5, 3), torch.randn(8, 4)
    assert torch.equal(compiled(x, meta), layer(x, meta))
    with seq_meta(meta), pytest.raises(Exception, match="pass the meta as an argument"):
        compiled(x)
