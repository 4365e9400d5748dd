"""The linears over Transformer Engine beside its own, on every rank.

On GPUs with the real one. On CPU ranks against the double in ``tests/fake_te``, which shows what
our layers do around it and nothing of Transformer Engine itself.
"""

import copy
import io
import logging
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_helpers import device_of, part
from te_helpers import (
    FP8_RECIPES,
    RECIPES,
    Wire,
    assert_same_steps,
    device_and_dtype,
    fp8_state,
    on_te,
    only_the_real_one,
    random,
    recipe_of,
    train,
)
from test_checkpoint import shared_directory
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from padded_sp import (
    AlignPolicy,
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RowParallelLinear,
    carry_meta,
    reduce_replicated_gradients,
    seq_meta,
    verify,
)
from padded_sp import verdict as verdict_of_ranks
from padded_sp.backends import te_linear
from padded_sp.backends.te import (
    FP8GlobalStateManager,
    autocast,
    make_recipe,
    recipe_name,
    recipes,
    te,
    unavailable,
)
from padded_sp.checkpoint import FP8State, sharded_state_dict

# Two ranks show most of it; what depends on their number says so.
pytestmark = pytest.mark.max_ranks(2)

KINDS = (ColumnParallelLinear, RowParallelLinear, LayerNormColumnParallelLinear)
K = O = 384  # noqa: E741  3 * 128: blocks of 128 travel, and 1, 2, 3 and 4 ranks divide it


def rows(group):
    """T: 128 rows a rank, which every recipe takes."""
    return 128 * group.size()


def unpadded(group):
    return PaddedSeqMeta.from_seq_lens(
        [rows(group) - 56, 56], tp_size=group.size(), device=device_of(group)
    )


def padded(group):
    total = rows(group)
    return PaddedSeqMeta.from_seq_lens(
        [37, 5, 0, total - 105, 11],
        padded_lens=[48, 16, 8, total - 96, 24],
        tp_size=group.size(),
        device=device_of(group),
    )


def ours(kind, group, *, seed=3, **arguments):
    torch.manual_seed(seed)
    arguments = {"tp_group": group, **device_and_dtype(group), **arguments}
    return kind(K, O, backend="te", **arguments)


def theirs(kind, group, **arguments):
    """Transformer Engine's own of the same kind."""
    arguments = {
        "parallel_mode": "row" if kind is RowParallelLinear else "column",
        "sequence_parallel": True,
        "tp_group": group,
        **device_and_dtype(group),
        **arguments,
    }
    module = te.LayerNormLinear if kind is LayerNormColumnParallelLinear else te.Linear
    return module(K, O, **arguments)


def data(kind, group, steps=3, sequence_parallel=True):
    """Inputs of this rank, and gradients of its outputs."""
    total, inputs, gradients = rows(group), [], []
    for step in range(steps):
        # Other magnitudes in every step: scales that do not follow show.
        x = random(group, total, K, seed=step) * (step + 1)
        gradient = random(group, total, O, seed=10 + step) / (step + 1)
        if kind is RowParallelLinear:
            x = part(x, group, -1)
            gradient = part(gradient, group) if sequence_parallel else gradient
        else:
            x = part(x, group) if sequence_parallel else x
            gradient = part(gradient, group, -1)
        inputs.append(x.contiguous())
        gradients.append(gradient.contiguous())
    return inputs, gradients


def steps_of(layer, meta, kind, recipe, group, steps=3, **options):
    inputs, gradients = data(kind, group, steps, **options)
    call = layer if meta is None else lambda x: layer(x, meta)
    return train(layer, call, inputs, gradients, recipe, group)


def randomise(layer, group):
    """Biases and norms that are neither zero nor one."""
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            if "bias" in name or "norm" in name:
                value = random(group, *parameter.shape, seed=20 + seed)
                parameter.copy_(value if "norm" not in name else 1 + 0.1 * value)


# --- As te.Linear itself -------------------------------------------------------------------------


@on_te
def equals_theirs(group, kind, recipe, sequence_parallel, bias):
    options = {"sequence_parallel": sequence_parallel, "bias": bias}
    layer, plain = ours(kind, group, **options), theirs(kind, group, **options)
    randomise(layer, group)
    plain.load_state_dict(layer.state_dict())
    of_data = {"sequence_parallel": sequence_parallel}
    actual = steps_of(layer, unpadded(group), kind, recipe, group, **of_data)
    # One after the other: histories roll for every module of the process at once.
    FP8GlobalStateManager.reset()
    assert_same_steps(actual, steps_of(plain, None, kind, recipe, group, **of_data))
    if recipe == "fp8_delayed":
        scales = [step["scaling_fwd.scale"] for step in actual]
        assert not torch.equal(scales[0], scales[1])
        assert not torch.equal(scales[1], scales[2])
    else:
        assert not fp8_state(layer)


@pytest.mark.parametrize(
    ("sequence_parallel", "bias"), [(True, True), (False, True), (True, False)]
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_theirs_bit_for_bit(ranks, kind, recipe, sequence_parallel, bias):
    ranks.run(
        equals_theirs, kind=kind, recipe=recipe, sequence_parallel=sequence_parallel, bias=bias
    )


@on_te
def returns_as_theirs(group, recipe):
    kind, options = LayerNormColumnParallelLinear, {"normalization": "RMSNorm"}
    options |= {"return_bias": True, "return_layernorm_output": True, "zero_centered_gamma": True}
    layer, plain = ours(kind, group, **options), theirs(kind, group, **options)
    randomise(layer, group)
    plain.load_state_dict(layer.state_dict())
    (x,), _ = data(kind, group, steps=1)
    with autocast(recipe_of(recipe), group):
        actual = layer(x, unpadded(group))
    FP8GlobalStateManager.reset()
    with autocast(recipe_of(recipe), group):
        expected = plain(x)
    assert len(actual) == len(expected) == 3
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert actual[1] is layer.bias
    assert not any(y._is_view() for y in actual)


@pytest.mark.parametrize("recipe", RECIPES)
def test_returns_as_theirs(ranks, recipe):
    ranks.run(returns_as_theirs, recipe=recipe)


@on_te
def split_as_theirs(group, kind, recipe):
    options = {"parameters_split": {"query": 192, "key_": 96, "value": 96}}
    layer, plain = ours(kind, group, **options), theirs(kind, group, **options)
    randomise(layer, group)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert "key_weight" in layer.state_dict()
    plain.load_state_dict(layer.state_dict())
    actual = steps_of(layer, unpadded(group), kind, recipe, group)
    FP8GlobalStateManager.reset()
    assert_same_steps(actual, steps_of(plain, None, kind, recipe, group))


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, LayerNormColumnParallelLinear])
def test_split_as_theirs(ranks, kind, recipe):
    ranks.run(split_as_theirs, kind=kind, recipe=recipe)


@on_te
def middle_dimensions_as_theirs(group, kind, recipe):
    """x [rows, 4, K]: GEMMs see 4 rows for each, and take them where the rows alone won't do."""
    layer, plain = ours(kind, group), theirs(kind, group)
    randomise(layer, group)
    plain.load_state_dict(layer.state_dict())
    per_rank = 32 if recipe == "fp8_blockwise" else 4
    meta = PaddedSeqMeta.from_seq_lens(
        [per_rank * group.size()], tp_size=group.size(), device=device_of(group)
    )
    x, gradient = (random(group, meta.num_rows, 4, K, seed=seed) for seed in (1, 2))
    if kind is RowParallelLinear:
        x, gradient = part(x, group, -1), part(gradient, group)
    else:
        x, gradient = part(x, group), part(gradient, group, -1)
    inputs, gradients = [x.contiguous()], [gradient.contiguous()]
    with autocast(recipe_of(recipe), group):
        layer.prepare()
    with Wire() as wire:
        actual = train(layer, lambda x: layer(x, meta), inputs, gradients, recipe, group)
    FP8GlobalStateManager.reset()
    assert_same_steps(actual, train(plain, plain, inputs, gradients, recipe, group))
    if recipe == "fp8_blockwise":  # 32 x 4 rows on each rank: blocks of 128 straddle no ranks
        assert wire.gathered() == wire.gathered(torch.uint8, torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_middle_dimensions_as_theirs(ranks, kind, recipe):
    ranks.run(middle_dimensions_as_theirs, kind=kind, recipe=recipe)


# --- Parameters and checkpoints ------------------------------------------------------------------


@on_te
def same_weights_as_torch(group, kind):
    layer = ours(kind, group)
    torch.manual_seed(3)
    of_torch = kind(K, O, tp_group=group, **device_and_dtype(group))
    late = ours(kind, None, tp_size=group.size())
    late.set_tensor_parallel_group(group)
    for name, parameter in of_torch.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter), name
        assert torch.equal(late.get_parameter(name), parameter), name
        for attribute in ("tensor_model_parallel", "partition_dim", "sequence_parallel"):
            expected = getattr(parameter, attribute, None)
            assert getattr(layer.get_parameter(name), attribute, None) == expected
    assert dict(layer.named_parameters()).keys() == dict(of_torch.named_parameters()).keys()
    assert layer.te.weight is layer.weight
    randomise(late, group)
    randomise(layer, group)
    actual = steps_of(late, padded(group), kind, "fp8_current", group)
    assert_same_steps(actual, steps_of(layer, padded(group), kind, "fp8_current", group))


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_same_weights_as_torch_and_with_a_later_group(ranks, kind):
    ranks.run(same_weights_as_torch, kind=kind)


@on_te
def checkpoints_travel(group, kind, recipe):
    """Ours, trained -> theirs -> ours: the next step is the same everywhere."""
    layer, plain, again = ours(kind, group), theirs(kind, group), ours(kind, group, seed=4)
    steps_of(layer, unpadded(group), kind, recipe, group, steps=2)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = steps_of(layer, unpadded(group), kind, recipe, group)
    assert list(state) == list(plain.state_dict())
    if recipe in ("bf16", "fp8_delayed"):  # the others' holds the recipe's name in old versions
        assert (state["_extra_state"].numel() > 0) == (recipe == "fp8_delayed")
    FP8GlobalStateManager.reset()
    plain.load_state_dict(state)
    through_theirs = {name: value.clone() for name, value in plain.state_dict().items()}
    assert_same_steps(steps_of(plain, None, kind, recipe, group), expected)
    FP8GlobalStateManager.reset()
    again.load_state_dict(through_theirs)
    assert_same_steps(steps_of(again, unpadded(group), kind, recipe, group), expected)
    # Of and to backend "torch", which has no such state.
    of_torch = kind(K, O, tp_group=group, **device_and_dtype(group))
    of_torch.load_state_dict(state)
    again.load_state_dict(of_torch.state_dict())
    assert torch.equal(again.weight, state["weight"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_travel(ranks, kind, recipe):
    ranks.run(checkpoints_travel, kind=kind, recipe=recipe)


@on_te
def copies_go_on(group, kind, recipe, copied):
    """A copy made in training continues as the original does, scales and all."""
    layer = ours(kind, group)
    randomise(layer, group)
    steps_of(layer, padded(group), kind, recipe, group, steps=2)
    if copied == "deepcopy":
        twin = copy.deepcopy(layer)
        assert twin.tp_group is group
    else:
        stored = io.BytesIO()
        torch.save(layer, stored)
        stored.seek(0)
        twin = torch.load(stored, weights_only=False, map_location=device_of(group))
        twin.set_tensor_parallel_group(group)
    assert twin.weight is not layer.weight
    assert twin.te.weight is twin.weight
    expected = steps_of(layer, padded(group), kind, recipe, group)
    FP8GlobalStateManager.reset()
    assert_same_steps(steps_of(twin, padded(group), kind, recipe, group), expected)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_on(ranks, kind, recipe, copied):
    ranks.run(copies_go_on, kind=kind, recipe=recipe, copied=copied)


@on_te
def distributed_checkpoint_travels(group):
    model = nn.ModuleDict({kind.__name__: ours(kind, group) for kind in KINDS})
    fresh = nn.ModuleDict({kind.__name__: ours(kind, group, seed=4) for kind in KINDS})
    randomise(model, group)
    state = sharded_state_dict(model)
    placements = {
        name.partition(".")[2]: value.placements for name, value in state.items()
        if isinstance(value, DTensor) and name.startswith("Row")
    }  # fmt: skip
    assert placements["weight"] == (Shard(1),)
    with shared_directory(group) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of typed storages and the like
        dcp.save(state, checkpoint_id=path, process_group=group)
        dcp.load(sharded_state_dict(fresh), checkpoint_id=path, process_group=group)
    for name, parameter in model.named_parameters():
        assert torch.equal(fresh.get_parameter(name), parameter), name


def test_distributed_checkpoint_travels(ranks):
    ranks.run(distributed_checkpoint_travels)


def three_kinds(tp_group, group, seed=3):
    return nn.ModuleDict(
        {kind.__name__: ours(kind, group, seed=seed, tp_group=tp_group) for kind in KINDS}
    )


def steps_of_each(model, group):
    """Two steps of delayed scaling of each kind, which goes on where it was."""
    steps = []
    for name, kind in zip(model, KINDS, strict=True):
        FP8GlobalStateManager.reset()  # histories roll for every module of the process at once
        layer = model[name] = copy.deepcopy(model[name])  # unknown to the buffers of before
        steps += steps_of(layer, padded(group), kind, "fp8_delayed", group, steps=2)
        # Each rank moved these by its term of the gradient.
        for parameter in sorted(layer.partial_parameters()):
            dist.broadcast(layer.get_parameter(parameter).data, 0, group=group)
    return steps


def distributed(action, path, group, **entries):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of typed storages and the like
        action(entries, checkpoint_id=path, process_group=group)


@on_te
def delayed_scaling_is_resumed(group):
    """From a checkpoint of the running job, by a new one: the next steps are the same bits."""
    model = three_kinds(group, group)
    steps_of_each(model, group)
    evaluated = model["RowParallelLinear"]
    (x,), _ = data(RowParallelLinear, group, steps=1)
    with torch.no_grad():
        evaluated(x, padded(group))  # in BF16: Transformer Engine's own extra state is empty now
    resumed, forgetful = (three_kinds(group, group, seed=4) for _ in range(2))
    with shared_directory(group) as path:
        distributed(dcp.save, path, group, model=sharded_state_dict(model), fp8=FP8State(model))
        expected = steps_of_each(model, group)
        entries = {"model": sharded_state_dict(resumed), "fp8": FP8State(resumed)}
        distributed(dcp.load, path, group, **entries)
        distributed(dcp.load, path, group, model=sharded_state_dict(forgetful))
    assert list(FP8State(model, "model.").state_dict()) == [
        f"model.{kind.__name__}" for kind in KINDS
    ]
    assert_same_steps(steps_of_each(resumed, group), expected)
    # The state is needed: the comparison can fail.
    with pytest.raises(AssertionError, match="differ"):
        assert_same_steps(steps_of_each(forgetful, group), expected)


def test_delayed_scaling_is_resumed(ranks):
    ranks.run(delayed_scaling_is_resumed)


@on_te
def delayed_scaling_fits_any_size(group):
    """Scales are those of whole tensors: the state of tp R is that of every rank at tp 1."""
    model, whole = three_kinds(group, group), three_kinds(None, group, seed=4)
    steps_of_each(model, group)
    with shared_directory(group) as path:
        distributed(dcp.save, path, group, model=sharded_state_dict(model), fp8=FP8State(model))
        entries = {"model": sharded_state_dict(whole), "fp8": FP8State(whole)}
        distributed(dcp.load, path, group, **entries)
    mine, theirs = fp8_state(model), fp8_state(whole)
    assert len(mine) == 4 * len(KINDS)
    assert_same_steps([theirs], [mine])
    assert mine["RowParallelLinear.scaling_fwd.scale"][0] != 1


def test_delayed_scaling_fits_any_size(ranks):
    ranks.run(delayed_scaling_fits_any_size)


@on_te
def checkpoints_without_delayed_scaling(group):
    """Nothing is kept there, and nothing of a model that has a state is lost to such a load."""
    model, fresh = three_kinds(group, group), three_kinds(group, group)
    assert set(FP8State(model).state_dict().values()) == {None}
    of_torch = ColumnParallelLinear(K, O, tp_group=group, **device_and_dtype(group))
    assert FP8State(of_torch).state_dict() == {}
    steps_of_each(fresh, group)
    before = fp8_state(fresh)
    with shared_directory(group) as path:
        distributed(dcp.save, path, group, fp8=FP8State(model))
        distributed(dcp.load, path, group, fp8=FP8State(fresh))
    assert_same_steps([fp8_state(fresh)], [before])


def test_checkpoints_without_delayed_scaling(ranks):
    ranks.run(checkpoints_without_delayed_scaling)


@on_te
def scales_of_single_ranks_are_not_saved(group):
    layer = ours(ColumnParallelLinear, group, sequence_parallel=False)
    (x,), _ = data(ColumnParallelLinear, group, steps=1, sequence_parallel=False)
    with autocast(make_recipe("fp8_delayed", reduce_amax=False), group):
        layer(x, unpadded(group))
    if group.size() == 1:
        assert FP8State(layer).state_dict()[""] is not None
        return
    with pytest.raises(ValueError, match=r"reduce_amax=False.*of each rank"):
        FP8State(layer).state_dict()


def test_scales_of_single_ranks_are_not_saved(ranks):
    ranks.run(scales_of_single_ranks_are_not_saved)


# --- What te.Linear can do -----------------------------------------------------------------------


@on_te
def weight_is_cached(group, kind, recipe):
    layer, meta = ours(kind, group), unpadded(group)
    inputs, gradients = data(kind, group)

    def micro_batches(*is_first):
        results = []
        with autocast(recipe_of(recipe), group):
            outputs = [
                layer(x, meta, is_first_microbatch=first)
                for x, first in zip(inputs, is_first, strict=True)
            ]
        for y, gradient in zip(outputs, gradients, strict=True):
            y.backward(gradient)
            results += [y.detach(), layer.weight.grad]
            layer.weight.grad = None
        return results

    # First, so that all three start from scales of the same history.
    micro_batches(None, None, None)
    FP8GlobalStateManager.reset()
    layer = copy.deepcopy(layer)
    state = layer.state_dict()
    uncached = micro_batches(None, None, None)
    FP8GlobalStateManager.reset()
    layer = copy.deepcopy(layer)
    layer.load_state_dict(state)
    cached = micro_batches(True, False, False)
    for a, b in zip(cached, uncached, strict=True):
        assert torch.equal(a, b)

    x = inputs[0]
    with torch.no_grad(), autocast(recipe_of(recipe), group):
        before = layer(x, meta, is_first_microbatch=True)
        layer.weight.mul_(2)
        kept = layer(x, meta, is_first_microbatch=False)
        anew = layer(x, meta, is_first_microbatch=True)
    assert torch.equal(kept, before)
    assert not torch.equal(anew, before)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_is_cached_over_micro_batches(ranks, kind, recipe):
    ranks.run(weight_is_cached, kind=kind, recipe=recipe)


@on_te
def gradients_accumulate_in_main_grad(group, kind, recipe):
    layer = ours(kind, group, fuse_wgrad_accumulation=True)
    plain = theirs(kind, group, fuse_wgrad_accumulation=True)
    plain.load_state_dict(layer.state_dict())
    results = []
    for module, meta in ((layer, (unpadded(group),)), (plain, ())):
        FP8GlobalStateManager.reset()
        module.weight.main_grad = torch.zeros(module.weight.shape, device=device_of(group))
        totals = []
        for x, gradient in zip(*data(kind, group), strict=True):
            with autocast(recipe_of(recipe), group):
                y = module(x.clone().requires_grad_(), *meta)
            y.backward(gradient)
            totals.append(module.weight.main_grad.clone())
        assert module.weight.grad is None
        results.append(totals)
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulate_in_main_grad(ranks, kind, recipe):
    ranks.run(gradients_accumulate_in_main_grad, kind=kind, recipe=recipe)


@on_te
def weights_are_built_in_fp8(group, kind, recipe):
    torch.manual_seed(3)
    of_torch = kind(K, O, tp_group=group, **device_and_dtype(group))
    with te.quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        layer = ours(kind, group)
        plain = theirs(kind, group, init_method=lambda w: w.data.copy_(of_torch.weight.data))
    assert type(layer.weight) is type(plain.weight)
    assert layer.te.weight is layer.weight
    (x,), (gradient,) = data(kind, group, steps=1)
    results = []
    for module, meta in ((layer, (unpadded(group),)), (plain, ())):
        FP8GlobalStateManager.reset()
        leaf = x.clone().requires_grad_()
        with autocast(recipe_of(recipe), group):
            y = module(leaf, *meta)
        y.backward(gradient)
        results.append([y.detach(), leaf.grad, module.weight.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_built_in_fp8(ranks, kind, recipe):
    ranks.run(weights_are_built_in_fp8, kind=kind, recipe=recipe)


@on_te
def fp8_weights_keep_what_was_drawn(group, kind):
    torch.manual_seed(3)
    of_torch = kind(K, O, tp_group=group, **device_and_dtype(group))
    current = recipe_of("fp8_current")
    with te.quantized_model_init(recipe=current, preserve_high_precision_init_val=True):
        layer = ours(kind, group)
    assert isinstance(layer.weight, te.QuantizedTensor)
    drawn = layer.weight.get_high_precision_init_val()
    assert torch.equal(drawn.to(device_of(group)), of_torch.weight)
    # A rounding to 4 bits: 2^-4 of the largest in a binade.
    error = (layer.weight.dequantize() - of_torch.weight).norm() / of_torch.weight.norm()
    assert error < 2**-4


@only_the_real_one
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_weights_keep_what_was_drawn(ranks, kind):
    ranks.run(fp8_weights_keep_what_was_drawn, kind=kind)


@on_te
def weights_come_from_the_tracker(group, kind):
    built = []
    for make in (ours, theirs):
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 100 + group.rank())
        built.append(make(kind, group, get_rng_state_tracker=lambda tracker=tracker: tracker))
    layer, plain = built
    for name, parameter in plain.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter), name
    if group.size() > 1:
        mine = layer.weight.detach().float()
        mean = mine.clone()
        dist.all_reduce(mean, group=group)
        assert not torch.equal(mine * group.size(), mean)
    steps = steps_of(layer, padded(group), kind, "bf16", group, steps=1)
    assert steps[0]["output"].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_tracker(ranks, kind):
    ranks.run(weights_come_from_the_tracker, kind=kind)


# --- Recomputation -------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up = ours(LayerNormColumnParallelLinear, group)
        self.down = ours(RowParallelLinear, group)

    def forward(self, x, meta=None):
        return self.down(torch.relu(self.up(x, meta)), meta)


def plain_call(block, x, meta, recipe):
    return block(x, meta)


def te_checkpoint(use_reentrant):
    def call(block, x, meta, recipe):
        with seq_meta(meta):
            return te.checkpoint(carry_meta(block), x, use_reentrant=use_reentrant)

    return call


def te_checkpoint_of_module(block, x, meta, recipe):
    return te.checkpoint(block, x, meta=meta)


def torch_checkpoint(use_reentrant):
    """Recomputes outside of the surrounding autocast: what is recomputed brings its own."""

    def call(block, x, meta, recipe):
        def inside(x):
            with autocast(recipe):
                return block(x)

        with seq_meta(meta):
            return checkpoint(carry_meta(inside), x, use_reentrant=use_reentrant)

    return call


@on_te
def recompute_changes_nothing(group, recipe, way, use_reentrant):
    make = {"te": te_checkpoint, "torch": torch_checkpoint}.get(way)
    # Transformer Engine rolls histories once more for a recomputation: a long one forgets nothing.
    options = {"amax_history_len": 16} if recipe == "fp8_delayed" else {}
    recipe_object = make_recipe(recipe, **options)
    results = []
    for call in (plain_call, make(use_reentrant) if make else te_checkpoint_of_module):
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        block, meta, steps = Pair(group), padded(group), []
        for step in range(3):
            x = part(random(group, rows(group), K, seed=step), group).clone().requires_grad_()
            with autocast(recipe_object, group):
                y = call(block, x, meta, recipe_object)
            y.backward(part(random(group, rows(group), O, seed=10 + step), group).clone())
            gradients = {name: p.grad for name, p in block.named_parameters()}
            scales = {k: v for k, v in fp8_state(block).items() if k.endswith("scale")}
            steps.append({"output": y.detach(), "x": x.grad, **gradients, **scales})
            for parameter in block.parameters():
                parameter.grad = None
        results.append(steps)
    assert_same_steps(*results)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_te_checkpoint_changes_nothing(ranks, recipe, use_reentrant):
    ranks.run(recompute_changes_nothing, recipe=recipe, way="te", use_reentrant=use_reentrant)


@pytest.mark.parametrize("recipe", RECIPES)
def test_te_checkpoint_of_a_module_changes_nothing(ranks, recipe):
    ranks.run(recompute_changes_nothing, recipe=recipe, way="module", use_reentrant=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_blockwise"])
def test_torch_checkpoint_changes_nothing(ranks, recipe, use_reentrant):
    ranks.run(recompute_changes_nothing, recipe=recipe, way="torch", use_reentrant=use_reentrant)


# --- Shapes, before anything is sent -------------------------------------------------------------


def refuses(group, layer, x, meta, recipe, *words):
    """Raises ValueError with these words in it, and sends nothing."""
    refused = pytest.raises(ValueError)  # noqa: PT011
    with Wire() as wire, autocast(recipe_of(recipe), group), refused as caught:
        layer(x, meta)
    assert wire.sent == []
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@on_te
def misaligned_rows_are_refused(group, kind, recipe):
    size = group.size()
    layer = ours(kind, group)
    for total, rule in ((12 * size, "12 rows per rank"), (8 * size, "rows are no multiple of 16")):
        if total == 8 * size and total % 16 == 0:
            continue
        meta = PaddedSeqMeta.from_seq_lens([total], tp_size=size, device=device_of(group))
        x = random(group, total, K, seed=0)
        x = part(x, group, -1) if kind is RowParallelLinear else part(x, group)
        least = AlignPolicy(recipe, tp_size=size, fp8_wire=False).plan([total]).num_rows
        refuses(group, layer, x, meta, recipe, rule, recipe, "least legal total is", str(least))
        # BF16 takes it.
        assert layer(x.contiguous(), meta).isfinite().all()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_misaligned_rows_are_refused(ranks, kind, recipe):
    ranks.run(misaligned_rows_are_refused, kind=kind, recipe=recipe)


@on_te
def misaligned_inner_rows_are_refused(group, kind, recipe):
    size = group.size()
    layer, meta = ours(kind, group), PaddedSeqMeta.from_seq_lens(
        [4 * size], tp_size=size, device=device_of(group)
    )  # fmt: skip
    x = random(group, 4 * size, 6, K, seed=0)
    x = (part(x, group, -1) if kind is RowParallelLinear else part(x, group)).contiguous()
    least = AlignPolicy(recipe, tp_size=size, fp8_wire=False, inner_rows=3).plan([4 * size])
    assert least.num_rows == 16 if size == 1 else 8 * size
    rule = "4 rows per rank", "x 3 in each are no multiple of 8", f"total is {least.num_rows} rows"
    refuses(group, layer, x[:, :3].contiguous(), meta, recipe, *rule)
    refuses(group, layer, x[:, 0].contiguous(), meta, recipe, "4 rows per rank")
    with autocast(recipe_of(recipe), group):
        layer(x[:, :4].contiguous(), meta)  # 16 rows of GEMMs on each rank


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("kind", KINDS)
def test_misaligned_inner_rows_are_refused(ranks, kind, recipe):
    ranks.run(misaligned_inner_rows_are_refused, kind=kind, recipe=recipe)


@on_te
def misaligned_features_are_refused(group, kind, recipe):
    size = group.size()
    is_row = kind is RowParallelLinear
    for features, others in ((40 * size, 384), (384, 40 * size)):
        mine = (features // size, others) if is_row else (features, others // size)
        odd = [n for n in mine if n % 16]
        if not odd:  # 80 features on each of 2 ranks
            continue
        layer = kind(features, others, backend="te", tp_group=group, **device_and_dtype(group))
        x = random(group, rows(group), features, seed=0)
        x = part(x, group, -1) if is_row else part(x, group)
        refuses(group, layer, x.contiguous(), unpadded(group), recipe, recipe, "of 16", str(odd[0]))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_misaligned_features_are_refused(ranks, kind, recipe):
    ranks.run(misaligned_features_are_refused, kind=kind, recipe=recipe)


@on_te
def aligned_blocks_travel_as_fp8(group, kind):
    layer, meta = ours(kind, group), padded(group)
    (x,), (gradient,) = data(kind, group, steps=1)
    with autocast(recipe_of("fp8_blockwise"), group):
        layer(x, meta)  # proves the backend, which sends a verdict
    leaf = x.clone().requires_grad_()
    with Wire() as forward, autocast(recipe_of("fp8_blockwise"), group):
        y = layer(leaf, meta)
    with Wire() as backward:
        y.backward(gradient)
    if group.size() == 1:
        assert forward.sent == backward.sent == []
        return
    # A scale of 4 bytes for each 128 elements: along rows for a GEMM with rows, along columns for
    # wgrad. A column-parallel linear gathers x twice, a row-parallel one dY both ways at once.
    elements = 128 * K
    for wire, times in ((forward, 0), (backward, 2)) if kind is RowParallelLinear else (
        (forward, 1), (backward, 1)
    ):  # fmt: skip
        assert wire.gathered() == wire.gathered(torch.uint8, torch.float32), wire.sent
        assert wire.gathered(torch.uint8) == times * elements
        assert wire.gathered(torch.float32) == times * elements // 128 * 4


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_aligned_blocks_travel_as_fp8(ranks, kind):
    ranks.run(aligned_blocks_travel_as_fp8, kind=kind)


@on_te
def straddling_blocks_travel_wide(group, kind):
    """R = 56 is no multiple of 128: gathers travel in BF16, and the log says so once."""
    size, log = group.size(), []
    total = 56 * size if size % 2 == 0 else 64 * size
    meta = PaddedSeqMeta.from_seq_lens(
        [total - 17, 8], padded_lens=[total - 8, 8], tp_size=size, device=device_of(group)
    )
    layer = ours(kind, group)
    x = random(group, total, K, seed=0)
    x = (part(x, group, -1) if kind is RowParallelLinear else part(x, group)).contiguous()
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logger = logging.getLogger("padded_sp")
    te_linear._report_wide_gather.cache_clear()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Cannot quantize input tensor")
            with autocast(recipe_of("fp8_blockwise"), group):
                layer(x, meta)
            leaf = x.clone().requires_grad_()
            with Wire() as forward, autocast(recipe_of("fp8_blockwise"), group):
                y = layer(leaf, meta)
            with Wire() as backward:
                y.backward(torch.ones_like(y))
    finally:
        logger.removeHandler(handler)
    messages = [message for message in log if "128" in message and "BF16" in message]
    assert len(messages) == (size > 1), log
    if size > 1:
        gathered = forward if kind is not RowParallelLinear else backward
        assert gathered.gathered() == gathered.gathered(torch.bfloat16) == total // size * K * 2
    pads = meta.padding_mask if kind is not RowParallelLinear else part(meta.padding_mask, group)
    assert not y[pads].any()
    # As close to BF16 as two roundings to FP8 come, 4 bits each.
    expected = layer(x, meta).float()
    assert (y.float() - expected).norm() < 0.08 * expected.norm()
    assert leaf.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_straddling_blocks_travel_wide(ranks, kind):
    ranks.run(straddling_blocks_travel_wide, kind=kind)


@on_te
def gathers_by_itself_or_by_us(group, kind):
    """An old version's way for straddling blocks, between our collectives, and the new one's."""
    meta = PaddedSeqMeta.from_seq_lens(
        [56 * group.size() - 3], tp_size=group.size(), num_rows=64 * group.size(),
        device=device_of(group),
    )  # fmt: skip
    split = {"parameters_split": ("a", "b")}
    layer, twin = (ours(kind, group, **split) for _ in range(2))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.fill_(0.5)
            twin.get_parameter(name).copy_(parameter)
    x = random(group, meta.num_rows, K, seed=0)
    x = (part(x, group, -1) if kind is RowParallelLinear else part(x, group)).contiguous()
    results = []
    for module, native in ((layer, True), (twin, False)):
        leaf = x.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Cannot quantize input tensor")
            patch.setattr(te_linear, "GATHERS_UNALIGNED_BLOCKS", native)
            with autocast(recipe_of("fp8_blockwise"), group):
                y = module(leaf, meta)
            y.backward(torch.ones_like(y))
        reduce_replicated_gradients(module, group)  # the ranks' terms differ, their sums do not
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append({"y": y.detach(), "x": leaf.grad} | gradients)
    for name, expected in results[0].items():
        error = (results[1][name].float() - expected.float()).norm()
        assert error <= 0.02 * expected.float().norm(), (name, error)


@pytest.mark.max_ranks(2)
@pytest.mark.skipif(
    not te_linear.GATHERS_UNALIGNED_BLOCKS, reason="this version has only one of the two ways"
)
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_of_straddling_blocks_agree(ranks, kind):
    ranks.run(gathers_by_itself_or_by_us, kind=kind)


#: Blocks of x, of the weight and of the output's gradient: 1 x 128, or 128 x 128.
BLOCKS = [(1, 1, 1), (2, 1, 1), (1, 1, 2)]


@on_te
def square_blocks_travel_wide(group, kind, blocks):
    """What a linear gathers travels as FP8 in blocks of 1 x 128 alone; GEMMs take all of these."""
    x_dim, w_dim, grad_dim = blocks
    recipe = make_recipe(
        "fp8_blockwise",
        x_block_scaling_dim=x_dim,
        w_block_scaling_dim=w_dim,
        grad_block_scaling_dim=grad_dim,
    )
    layer, meta = ours(kind, group), padded(group)
    (x,), (gradient,) = data(kind, group, steps=1)
    pads = meta.padding_mask
    x_pads = pads if kind is RowParallelLinear else part(pads, group)
    y_pads = pads if kind is not RowParallelLinear else part(pads, group)
    square = (x_dim if kind is not RowParallelLinear else grad_dim) == 2
    te_linear._report_wide_gather.cache_clear()
    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Cannot quantize input tensor")
        for fill in (0.0, float("nan")):
            leaf = x.masked_fill(x_pads[:, None], fill).requires_grad_()
            with autocast(recipe, group):
                layer.prepare()
                with Wire() as wire:
                    y = layer(leaf, meta)
            with wire:
                y.backward(gradient.masked_fill(y_pads[:, None], fill))
            results.append({"y": y.detach(), "x": leaf.grad, "weight": layer.weight.grad})
            layer.weight.grad = None
    assert_same_steps(results[1:], results[:1])
    wide, narrow = wire.gathered(torch.bfloat16), wire.gathered(torch.uint8)
    if group.size() > 1:
        assert (wide > 0, narrow > 0) == (square, not square), wire.sent
        assert te_linear._report_wide_gather.cache_info().currsize == square  # and it was said
    expected = layer(x.masked_fill(x_pads[:, None], 0), meta)
    assert (y - expected).float().norm() < 0.08 * expected.float().norm()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_square_blocks_travel_wide(ranks, kind, blocks):
    ranks.run(square_blocks_travel_wide, kind=kind, blocks=blocks)


@on_te
def tracker_names_of_norms_are_refused(group):
    with pytest.raises(ValueError, match="takes no rng_tracker_name, got 'mine'"):
        ours(LayerNormColumnParallelLinear, group, rng_tracker_name="mine")


@pytest.mark.max_ranks(1)
def test_tracker_names_of_norms_are_refused(ranks):
    ranks.run(tracker_names_of_norms_are_refused)


# --- Recipes -------------------------------------------------------------------------------------


@on_te
def no_fp8_without_te(group, kind):
    layer = kind(K, O, tp_group=group, **device_and_dtype(group))
    (x,), _ = data(kind, group, steps=1)
    with autocast(recipe_of("fp8_current"), group):
        with pytest.raises(ValueError, match="backend='te'"):
            layer(x, unpadded(group))
        with autocast(None):
            layer(x, unpadded(group))
    layer(x, unpadded(group))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_backend_refuses_an_fp8_autocast(ranks, kind):
    ranks.run(no_fp8_without_te, kind=kind)


@on_te
def unknown_recipes_are_refused(group):
    layer = ours(ColumnParallelLinear, group)
    (x,), _ = data(ColumnParallelLinear, group, steps=1)
    custom = recipes.CustomRecipe(qfactory=lambda *_: None)
    refused = pytest.raises(ValueError, match="CustomRecipe")
    with Wire() as wire, autocast(custom, group), refused:
        layer(x, unpadded(group))
    assert wire.sent == []
    with pytest.raises(ValueError, match="NVFP4BlockScaling"):
        recipe_name(recipes.NVFP4BlockScaling())
    with pytest.raises(ValueError, match="unknown recipe 'fp4'"):
        make_recipe("fp4")


def test_unknown_recipes_are_refused(ranks):
    ranks.run(unknown_recipes_are_refused)


@on_te
def mxfp8_needs_blackwell(group):
    reason = unavailable("mxfp8")
    if device_of(group).type == "cuda" and torch.cuda.get_device_capability() >= (10, 0):
        assert not reason
        return
    assert "10.0" in reason
    layer = ours(ColumnParallelLinear, group)
    (x,), _ = data(ColumnParallelLinear, group, steps=1)
    # By Transformer Engine itself, where its autocast begins.
    refused = pytest.raises((ValueError, RuntimeError, AssertionError), match="MXFP8")
    with refused, autocast(make_recipe("mxfp8"), group):
        layer(x, unpadded(group))


def test_mxfp8_needs_blackwell(ranks):
    ranks.run(mxfp8_needs_blackwell)


@on_te
def amax_must_be_reduced(group, kind):
    layer = ours(kind, group)
    (x,), _ = data(kind, group, steps=1)
    alone = make_recipe("fp8_delayed", reduce_amax=False)
    if group.size() == 1:
        with autocast(alone, group):
            layer(x, unpadded(group))
        return
    with Wire() as wire, autocast(alone, group), pytest.raises(ValueError, match="reduce_amax"):
        layer(x, unpadded(group))
    assert wire.sent == []


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_amax_must_be_reduced_under_sequence_parallelism(ranks, kind):
    ranks.run(amax_must_be_reduced, kind=kind)


# --- Trust ---------------------------------------------------------------------------------------


@on_te
def wrong_numbers_are_refused(group):
    figures = {"output": 0.31, "grad_x": 0.002}
    verdict = verify.Verdict("linear te fp8_current", False, figures, {"output": 0.1}, "")
    (x,), _ = data(ColumnParallelLinear, group, steps=1)
    layer = ours(ColumnParallelLinear, group)
    trusting = ours(ColumnParallelLinear, group, verify=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PADDED_SP_VERIFY", raising=False)
        patch.setattr(verdict_of_ranks, "agreed", lambda *_: verdict)
        with autocast(recipe_of("fp8_current"), group):
            with pytest.raises(ValueError, match=re.escape(str(verdict))):
                layer.prepare()
            with pytest.raises(ValueError, match=re.escape(str(verdict))):
                layer(x, unpadded(group))
            trusting(x, unpadded(group))
        patch.setenv("PADDED_SP_VERIFY", "0")
        with autocast(recipe_of("fp8_current"), group):
            layer(x, unpadded(group))


def test_wrong_numbers_are_refused(ranks):
    ranks.run(wrong_numbers_are_refused)


@on_te
def proving_disturbs_nothing(group, kind, recipe):
    """Steps with and without a proof in between are the same, and so are random numbers."""
    name = {"RowParallelLinear": "row", "ColumnParallelLinear": "column"}.get(kind.__name__)

    def prove():
        verdict = verify.verify_linear(
            "te", recipe=recipe, layer=name or "layer_norm_column", device=device_of(group)
        )
        assert verdict.passed, str(verdict)

    results = []
    for between in (None, prove):
        FP8GlobalStateManager.reset()
        layer, meta, calls = ours(kind, group, verify=False), padded(group), []

        def call(x, layer=layer, meta=meta, calls=calls, between=between):
            calls.append(x)
            if between and len(calls) == 2:
                between()
            return layer(x, meta)

        steps = train(layer, call, *data(kind, group), recipe, group)
        results.append((steps, torch.rand(3), torch.rand(3, device=device_of(group))))
    (steps, *numbers), (expected, *other_numbers) = results
    assert_same_steps(steps, expected)
    for a, b in zip(numbers, other_numbers, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_proving_disturbs_nothing(ranks, kind, recipe):
    ranks.run(proving_disturbs_nothing, kind=kind, recipe=recipe)
