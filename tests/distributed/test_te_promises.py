"""Promise 2 over Transformer Engine: what pad rows hold reaches nothing, FP8 scales included.

Every case runs three steps in each recipe, with zeros in the pad rows of inputs and of the
gradients that come in, then again, then with everything that can be there instead.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from rank_helpers import device_of, forbid_host_reads, needs_own_gpu, part
from te_helpers import (
    RECIPES,
    assert_same_steps,
    device_and_dtype,
    on_te,
    random,
    recipe_of,
    train,
)
from torch import nn

from padded_sp import (
    ColumnParallelLinear,
    DotProductAttention,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RowParallelLinear,
)
from padded_sp.backends.te import FP8GlobalStateManager, autocast, te

pytestmark = pytest.mark.max_ranks(2)

HEAD_DIM = 64
HIDDEN = 256
# Normal numbers are what uninitialised memory or a neighbour's rows hold.
FILLS = {"zeros again": 0.0, "NaN": math.nan, "inf": math.inf, "1e4": 1e4, "random": None}


def meta_of(group, layout):
    """128 rows a rank: every recipe takes them, blocks travel as FP8."""
    total = 128 * group.size()
    lengths, padded = {
        "pads at every sequence": (
            [37, 5, 0, total - 105, 11],
            [48, 16, 8, total - 96, 24],
        ),
        "tail only": ([60, total - 60 - 28], [60, total - 60]),
        "none on one rank": ([100, 33 if group.size() > 1 else 0], [100, total - 100]),
    }[layout]
    return PaddedSeqMeta.from_seq_lens(
        lengths, padded_lens=padded, tp_size=group.size(), device=device_of(group)
    )


# --- Cases: how to build one, and the shapes of what goes in and comes out ------------------------


def of(kind, group, features, out_features, **arguments):
    torch.manual_seed(features + out_features)
    layer = kind(
        features, out_features, backend="te", tp_group=group, **device_and_dtype(group), **arguments
    )
    with torch.no_grad():  # biases that are not zero: pads of zeros leave a norm as its bias
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.copy_(random(group, *parameter.shape, seed=len(name)))
    return layer


class Column(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up = of(ColumnParallelLinear, group, HIDDEN, 256 * group.size())

    def forward(self, x, meta):
        return self.up(x, meta)


class Row(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.down = of(RowParallelLinear, group, 128 * group.size(), HIDDEN)

    def forward(self, x, meta):
        return self.down(x, meta)


class Pair(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up = of(ColumnParallelLinear, group, HIDDEN, 128 * group.size())
        self.down = of(RowParallelLinear, group, 128 * group.size(), HIDDEN)

    def forward(self, x, meta):
        return self.down(F.gelu(self.up(x, meta)), meta)


class Norm(nn.Module):
    def __init__(self, group, normalization="LayerNorm"):
        super().__init__()
        self.up = of(
            LayerNormColumnParallelLinear,
            group,
            HIDDEN,
            128 * group.size(),
            normalization=normalization,
        )

    def forward(self, x, meta):
        return self.up(x, meta)


class RootNorm(Norm):
    def __init__(self, group):
        super().__init__(group, "RMSNorm")


class Attention(nn.Module):
    """[T, (2 + 1 + 1) heads of 64]: two query heads a rank that share one of K and V."""

    def __init__(self, group):
        super().__init__()
        size = group.size()
        self.attention = DotProductAttention(
            2 * size, HEAD_DIM, num_kv_heads=size, tp_group=group, backend="te"
        )

    def forward(self, qkv, meta):
        q, k, v = qkv.view(meta.num_rows, 4, HEAD_DIM).split([2, 1, 1], 1)
        return self.attention(q, k, v, meta).flatten(1)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        size = group.size()
        heads = {"query": 2 * size, "key": size, "value": size}
        split = {name: n * HEAD_DIM for name, n in heads.items()}
        self.qkv = of(
            LayerNormColumnParallelLinear,
            group,
            HIDDEN,
            4 * size * HEAD_DIM,
            parameters_split=split,
            normalization="RMSNorm",
        )
        self.attention = DotProductAttention(
            2 * size, HEAD_DIM, num_kv_heads=size, tp_group=group, backend="te"
        )
        self.out = of(RowParallelLinear, group, 2 * size * HEAD_DIM, HIDDEN)
        self.up = of(LayerNormColumnParallelLinear, group, HIDDEN, 256 * size)
        self.down = of(RowParallelLinear, group, 256 * size, HIDDEN)

    def forward(self, x, meta):
        qkv = self.qkv(x, meta).view(meta.num_rows, 4, HEAD_DIM)
        q, k, v = qkv.split([2, 1, 1], 1)
        x = self.out(self.attention(q, k, v, meta).flatten(1), meta)
        return self.down(F.gelu(self.up(x, meta)), meta)


# What holds all rows on each rank (the others hold a shard), and the features on each rank.
WHOLE, SHARD = True, False
CASES = {
    Column: ((SHARD, HIDDEN), (WHOLE, 256)),
    Row: ((WHOLE, 128), (SHARD, HIDDEN)),
    Pair: ((SHARD, HIDDEN), (SHARD, HIDDEN)),
    Norm: ((SHARD, HIDDEN), (WHOLE, 128)),
    RootNorm: ((SHARD, HIDDEN), (WHOLE, 128)),
    Attention: ((WHOLE, 4 * HEAD_DIM), (WHOLE, 2 * HEAD_DIM)),
    Block: ((SHARD, HIDDEN), (SHARD, HIDDEN)),
}


def filled(group, meta, whole, features, fill, seed):
    """This rank's part of a tensor whose pad rows hold `fill` (None: normal numbers)."""
    x = random(group, meta.num_rows, features, seed=seed)
    pads = meta.padding_mask[:, None]
    x = x.masked_fill(pads, fill) if fill is not None else torch.where(pads, 30 * x, x)
    return x if whole else part(x, group)


def run(group, case, meta, recipe, fill, seed=0):
    """Three steps; pad rows of outputs and of input gradients must be zero, and are cut off."""
    FP8GlobalStateManager.reset()
    (x_whole, features), (y_whole, out_features) = CASES[case]
    seeds = range(seed, seed + 3)
    inputs = [filled(group, meta, x_whole, features, fill, s) * (1 + s) for s in seeds]
    gradients = [filled(group, meta, y_whole, out_features, fill, 50 + s) for s in seeds]
    module = case(group)
    steps = train(module, lambda x: module(x, meta), inputs, gradients, recipe, group)
    for step in steps:
        for name, whole in (("output", y_whole), ("input gradient", x_whole)):
            pads = meta.padding_mask if whole else part(meta.padding_mask, group)
            value = step[name]
            assert torch.equal(value[pads], torch.zeros_like(value[pads])), (name, fill)
            step[name] = value[~pads]
            assert step[name].isfinite().all(), (name, fill)
    return steps


@on_te
def pads_reach_nothing(group, case, recipe, layout, fills):
    meta = meta_of(group, layout)
    clean = run(group, case, meta, recipe, 0.0)
    for name in fills:
        assert_same_steps(run(group, case, meta, recipe, FILLS[name]), clean, f", {name} in pads")
    if recipe == "fp8_delayed" and case is not Attention:
        assert sum("amax_history" in name for name in clean[-1]) >= 2
    # Other real rows do reach it: the comparison can fail.
    with pytest.raises(AssertionError, match="differ"):
        assert_same_steps(run(group, case, meta, recipe, 0.0, seed=7), clean)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_pads_reach_nothing(ranks, case, recipe):
    ranks.run(
        pads_reach_nothing,
        case=case,
        recipe=recipe,
        layout="pads at every sequence",
        fills=list(FILLS),
    )


@pytest.mark.parametrize("layout", ["tail only", "none on one rank"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [Pair, Block])
def test_pads_reach_nothing_wherever_they_are(ranks, case, recipe, layout):
    ranks.run(pads_reach_nothing, case=case, recipe=recipe, layout=layout, fills=["NaN", "1e4"])


# --- Plain Transformer Engine, on the same rows ---------------------------------------------------


@on_te
def plain_te_is_not_inert(group, recipe):
    """Gradients of pad rows are zero here, as behind a masked loss; inputs' are filled."""
    meta = meta_of(group, "pads at every sequence")

    def steps(fill):
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        module = te.Linear(
            HIDDEN,
            256 * group.size(),
            parallel_mode="column",
            sequence_parallel=True,
            tp_group=group,
            **device_and_dtype(group),
        )
        inputs = [filled(group, meta, SHARD, HIDDEN, fill, s) for s in range(3)]
        gradients = [filled(group, meta, WHOLE, 256, 0.0, 50 + s) for s in range(3)]
        found = train(module, module, inputs, gradients, recipe, group)
        for step in found:
            step["output"] = step["output"][~meta.padding_mask]
            del step["input gradient"]
        return found

    clean = steps(0.0)
    assert_same_steps(steps(0.0), clean)
    assert steps(math.nan)[0]["gradient of weight"].isnan().all()
    with pytest.raises(AssertionError, match="differ"):
        assert_same_steps(steps(1e4 if recipe != "bf16" else math.inf), clean)


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_te_is_not_inert(ranks, recipe):
    ranks.run(plain_te_is_not_inert, recipe=recipe)


# --- No host reads, and graphs -------------------------------------------------------------------


def tensors_of(group, case, meta, fill, seed):
    """This rank's input and output gradient, with `fill` in pad rows."""
    return tuple(
        filled(group, meta, whole, features, fill, seed + i).contiguous()
        for i, (whole, features) in enumerate(CASES[case])
    )


def one_step(module, x, gradient, meta, recipe, group):
    """Output, input gradient and parameter gradients; accumulates and overwrites nothing."""
    leaf = x.detach().requires_grad_()
    with autocast(recipe, group):
        y = module(leaf.clone(), meta)
    return y, *torch.autograd.grad(y, [leaf, *module.parameters()], gradient.clone())


@on_te
def step_reads_nothing(group, case, recipe):
    """The first step proves the backends, loads libraries and makes communicators; no later one
    waits for the device, whatever the pack."""
    device, module = device_of(group), case(group)
    recipe = recipe_of(recipe)
    first, later = (meta_of(group, name) for name in ("tail only", "pads at every sequence"))
    one_step(module, *tensors_of(group, case, first, 0.0, 1), first, recipe, group)
    tensors = tensors_of(group, case, later, 1e4, 3)
    with forbid_host_reads(device):
        fresh = meta_of(group, "pads at every sequence")  # nothing is derived of it yet
        results = one_step(module, *tensors, fresh, recipe, group)
    assert all(x.isfinite().all() for x in results)


@needs_own_gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [Pair, Norm, Attention, Block])
def test_a_step_reads_nothing(ranks, case, recipe):
    ranks.run(step_reads_nothing, case=case, recipe=recipe)


# Real and padded lengths in at most 128 rows; the pack has 128 a rank.
PACKS = [
    ([37, 5, 0, 23], [48, 16, 8, 24]),
    ([128], [128]),
    ([1, 80], [24, 88]),
    ([64, 64], [64, 64]),
]
WARM_UPS = 3


def captured(step, device):
    """A function that replays the step, whose results stay where they are. On CPU the step."""
    if device.type != "cuda":
        for _ in range(WARM_UPS):
            step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay():
        graph.replay()
        return results

    return replay


@on_te
def replays_serve_other_packs(group, case, recipe):
    device, rows, recipe = device_of(group), 128 * group.size(), recipe_of(recipe)
    metas = [
        PaddedSeqMeta.from_seq_lens(
            real, padded_lens=padded, num_rows=rows, tp_size=group.size(), device=device
        )
        for real, padded in PACKS
    ]

    def with_capacity(meta):
        return meta.with_capacity(8, rows, rows)

    def tensors_in(i, meta):
        return tensors_of(group, case, meta, math.nan, 10 * i)

    def eager():
        module, found = case(group), []
        for i in (*[0] * WARM_UPS, *range(len(metas))):
            # Kernels of attention depend on the longest sequence that there may be.
            meta = with_capacity(metas[i]) if case is Block else metas[i]
            found.append(one_step(module, *tensors_in(i, meta), meta, recipe, group))
        return found[WARM_UPS:]

    def replayed():
        module, capacity, found = case(group), with_capacity(metas[0]), []
        tensors = tensors_in(0, capacity)
        replay = captured(lambda: one_step(module, *tensors, capacity, recipe, group), device)
        for i, meta in enumerate(metas):
            capacity.copy_(meta)
            for static, new in zip(tensors, tensors_in(i, capacity), strict=True):
                static.copy_(new)
            found.append([x.detach().clone() for x in replay()])
        return found

    results = []
    for run_all in (eager, replayed):
        FP8GlobalStateManager.reset()
        results.append([{str(i): x.detach() for i, x in enumerate(r)} for r in run_all()])
    assert all(x.isfinite().all() for r in results[0] for x in r.values())
    assert_same_steps(results[1], results[0])


@needs_own_gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [Pair, Block])
def test_replays_serve_other_packs(ranks, case, recipe):
    """On GPUs ``torch.cuda.graph`` captures a whole step, with the autocast and, under delayed
    scaling, its update of the scales: after some eager steps, which prove the backends, nothing in
    it asks the host. (``te.make_graphed_callables``, for modules one by one, leaves the autocast
    and that update outside of its graphs.)"""
    ranks.run(replays_serve_other_packs, case=case, recipe=recipe)


@on_te
def pads_of_a_shifted_norm_are_zero(group, bias):
    meta = PaddedSeqMeta.from_seq_lens(
        [20, 70], padded_lens=[40, 128 * group.size() - 40], tp_size=group.size(),
        device=device_of(group),
    )  # fmt: skip
    layer = LayerNormColumnParallelLinear(
        HIDDEN, HIDDEN, normalization="LayerNorm", bias=bias, tp_group=group, backend="te",
        **device_and_dtype(group),
    )  # fmt: skip
    with torch.no_grad():
        layer.layer_norm_bias.fill_(1)
    y = layer(part(random(group, meta.num_rows, HIDDEN, seed=1), group), meta)
    assert not y[meta.padding_mask].any()
    assert y[~meta.padding_mask].any()


@pytest.mark.parametrize("bias", [True, False])
def test_pads_of_a_shifted_norm_are_zero(ranks, bias):
    ranks.run(pads_of_a_shifted_norm_are_zero, bias=bias)
