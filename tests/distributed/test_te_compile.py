"""torch.compile beside Transformer Engine: no autocast goes unnoticed by what was compiled before.

A layer of backend "torch" is traced, with the question whether FP8 is on; one of backend "te" runs
as it is between two compiled parts. Compiled by "aot_eager", which computes what PyTorch does.
"""

import copy
import warnings

import pytest
import torch
from rank_helpers import device_of, part
from te_helpers import (
    FP8_RECIPES,
    RECIPES,
    assert_same_steps,
    device_and_dtype,
    on_te,
    random,
    recipe_of,
    train,
)
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from padded_sp import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RowParallelLinear,
)
from padded_sp.backends.te import FP8GlobalStateManager, autocast

pytestmark = pytest.mark.max_ranks(2)

H, F = 128, 256
KINDS = (ColumnParallelLinear, RowParallelLinear, LayerNormColumnParallelLinear)


def padded(group):
    """128 rows a rank, which every recipe takes."""
    total = 128 * group.size()
    return PaddedSeqMeta.from_seq_lens(
        [37, total - 105], padded_lens=[48, total - 48], tp_size=group.size(),
        device=device_of(group),
    )  # fmt: skip


class Pair(nn.Module):
    def __init__(self, group, backend):
        super().__init__()
        torch.manual_seed(3)
        place = {"tp_group": group, "backend": backend, **device_and_dtype(group)}
        self.up = LayerNormColumnParallelLinear(H, F * group.size(), **place)
        self.down = RowParallelLinear(F * group.size(), H, **place)

    def forward(self, x, meta):
        return self.down(torch.relu(self.up(2 * x, meta)), meta) + 1


def compiled(module, fullgraph):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(module, fullgraph=fullgraph, backend=counter), counter


@on_te
def autocasts_are_noticed(group, kind, fullgraph):
    """By what was compiled outside of any, which serves all calls that are outside."""
    layer = kind(2 * H, 2 * H, tp_group=group, **device_and_dtype(group))
    call, counter = compiled(layer, fullgraph)
    meta = padded(group)
    x = random(group, meta.num_rows, 2 * H, seed=1)
    x = (part(x, group, -1) if kind is RowParallelLinear else part(x, group)).contiguous()
    expected = layer(x, meta)
    assert torch.equal(call(x, meta), expected)
    for recipe in FP8_RECIPES:
        with autocast(recipe_of(recipe), group):
            # PyTorch's own error, where an exception in the graph has nowhere to go.
            with pytest.raises(Unsupported if fullgraph else ValueError, match="backend='te'"):
                call(x, meta)
            if fullgraph:  # else PyTorch compiles no more of what raised once
                with autocast(None):
                    assert torch.equal(call(x, meta), expected)
    if fullgraph:
        assert torch.equal(call(x, meta), expected)
        assert counter.frame_count == 1


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_autocasts_are_noticed(ranks, kind, fullgraph):
    ranks.run(autocasts_are_noticed, kind=kind, fullgraph=fullgraph)


@on_te
def te_runs_as_it_is(group):
    """In every recipe, one after the other, by what was compiled once: steps are the eager ones."""
    pair = Pair(group, "te")
    twin = copy.deepcopy(pair)
    call, counter = compiled(pair, fullgraph=False)
    meta = padded(group)

    def tensors(seed):
        pads = part(meta.padding_mask[:, None], group)
        fills = enumerate((0.0, float("nan"), 1e4))
        drawn = ((random(group, meta.num_rows, H, seed=seed + i), fill) for i, fill in fills)
        return [part(x, group).masked_fill(pads, fill) for x, fill in drawn]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recipe type changed")
        # The compiler's, which asks for it where a tensor is no leaf.
        warnings.filterwarnings("ignore", "The .grad attribute")
        for recipe in RECIPES:
            steps = []
            for run in (twin, call):
                FP8GlobalStateManager.reset()
                arguments = tensors(1), tensors(11), recipe, group
                module = twin if run is twin else pair
                steps.append(train(module, lambda x, run=run: run(x, meta), *arguments))
            assert_same_steps(*steps, f", {recipe}")
        assert counter.frame_count > 0  # the rest of the block is compiled
        with pytest.raises(Unsupported, match="Transformer Engine"):
            compiled(pair, fullgraph=True)[0](tensors(1)[0], meta)


def test_te_runs_as_it_is(ranks):
    ranks.run(te_runs_as_it_is)


@on_te
def rules_hold_in_compiled_code(group, recipe):
    pair = Pair(group, "te")
    call, _ = compiled(pair, fullgraph=False)
    meta = PaddedSeqMeta.from_seq_lens(
        [12 * group.size()], tp_size=group.size(), device=device_of(group)
    )
    x = part(random(group, meta.num_rows, H, seed=1), group).contiguous()
    refused = pytest.raises(ValueError, match="12 rows per rank")
    with torch.no_grad():
        assert call(x, meta).isfinite().all()
        with autocast(recipe_of(recipe), group), refused:
            call(x, meta)
        assert call(x, meta).isfinite().all()


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_blockwise"])
def test_rules_hold_in_compiled_code(ranks, recipe):
    ranks.run(rules_hold_in_compiled_code, recipe=recipe)
