"""The layers for Megatron beside Megatron's own, on the real megatron-core.

On GPUs over Transformer Engine itself, on CPU ranks over its double.
"""

import inspect

import pytest
import torch
from megatron_helpers import (
    config_of,
    import_megatron,
    model_parallel,
    seed_everything,
    without_warnings,
)
from rank_helpers import device_of, part
from te_helpers import FP8_RECIPES, RECIPES, assert_same_steps, on_te, random, train

from padded_sp import PaddedSeqMeta, seq_meta
from padded_sp.backends.te import FP8GlobalStateManager, autocast, make_recipe
from padded_sp.integrations import megatron

pytestmark = pytest.mark.max_ranks(2)

K = O = 256  # noqa: E741
FILLS = (float("nan"), float("inf"), 1e4)
NAMES = {
    "column": "ColumnParallelLinear",
    "row": "RowParallelLinear",
    "layer norm": "LayerNormColumnParallelLinear",
    "duplicated": "Linear",
}


def theirs(name):
    return getattr(import_megatron("extensions.transformer_engine"), f"TE{name}")


def build(group, kind, ours, *, bias=True, skip_bias_add=False, is_expert=False, **options):
    """A layer of Megatron's, or ours in its place."""
    name = NAMES[kind]
    arguments = {
        "config": config_of(group, **options),
        "init_method": lambda weight: weight.normal_(std=0.1),
        "bias": bias,
        "skip_bias_add": skip_bias_add,
        "is_expert": is_expert,
    } | {
        "column": {"gather_output": False},
        "row": {"input_is_parallel": True},
        "layer norm": {"gather_output": False},
        "duplicated": {"parallel_mode": "duplicated", "skip_weight_param_allocation": False},
    }[kind]
    cls = getattr(megatron, name) if ours else theirs(name)
    seed_everything()
    layer = without_warnings(lambda: cls(K, O, **arguments))
    generator = torch.Generator().manual_seed(3)  # biases and norms are constants when built
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "weight" not in name or "norm" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn + ("norm_weight" in name))
    return layer


def padded(group):
    """128 rows a rank."""
    total = 128 * group.size()
    return PaddedSeqMeta.from_seq_lens(
        [37, 5, 0, total - 105, 11],
        padded_lens=[48, 16, 8, total - 96, 24],
        tp_size=group.size(),
        device=device_of(group),
    )


def unpadded(group):
    total = 128 * group.size()
    return PaddedSeqMeta.from_seq_lens(
        [total - 40, 40], tp_size=group.size(), device=device_of(group)
    )


def places(kind, group, sequence_parallel):
    """The features of x and of y on this rank, and whether their rows are divided."""
    n = group.size()
    shares = {
        "column": ((K, True), (O // n, False)),
        "row": ((K // n, False), (O, True)),
        "layer norm": ((K, True), (O // n, False)),
        "duplicated": ((K, True), (O, True)),
    }[kind]
    return [(features, divided and sequence_parallel) for features, divided in shares]


def filled(group, meta, place, fill, seed):
    """[rows, 1, features], as Megatron's activations are."""
    features, divided = place
    x = random(group, meta.num_rows, features, seed=seed)[:, None]
    x = x.masked_fill(meta.padding_mask[:, None, None], fill)
    return part(x, group) if divided else x


def run(layer, kind, group, meta, recipe, fill=0.0, check_pads=True, skip_bias_add=False):
    """Three steps; pad rows are checked and cut off."""
    FP8GlobalStateManager.reset()
    x_place, y_place = places(kind, group, layer.config.sequence_parallel)
    inputs = [filled(group, meta, x_place, fill, s) * (1 + s) for s in range(3)]
    gradients = [filled(group, meta, y_place, fill, 50 + s) for s in range(3)]

    def call(x):
        with seq_meta(meta):
            y, bias = layer(x)
        assert (bias is not None) == skip_bias_add
        return y if bias is None else y + 0 * bias.sum()

    steps = train(layer, call, inputs, gradients, recipe, group)
    for step in steps:
        for name, (_, divided) in (("output", y_place), ("input gradient", x_place)):
            pads = part(meta.padding_mask, group) if divided else meta.padding_mask
            value = step[name]
            if check_pads:
                assert not value[pads].any(), name
                assert value.isfinite().all(), name
            step[name] = value[~pads]
    return steps


# --- As Megatron's --------------------------------------------------------------------------------


@on_te
def equals_megatrons(group, kind, recipe, sequence_parallel, skip_bias_add):
    options = {"sequence_parallel": sequence_parallel, "skip_bias_add": skip_bias_add}
    with model_parallel(group):
        expected, own = (build(group, kind, ours, **options) for ours in (False, True))
        own.load_state_dict(expected.state_dict())
        arguments = kind, group, unpadded(group), recipe
        assert_same_steps(
            run(own, *arguments, skip_bias_add=skip_bias_add),
            run(expected, *arguments, check_pads=False, skip_bias_add=skip_bias_add),
        )


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NAMES)
def test_equals_megatrons_without_pads(ranks, kind, recipe, skip_bias_add):
    ranks.run(
        equals_megatrons,
        kind=kind,
        recipe=recipe,
        sequence_parallel=ranks.world_size > 1,
        skip_bias_add=skip_bias_add,
    )


@pytest.mark.parametrize("kind", NAMES)
def test_equals_megatrons_without_sequence_parallelism(ranks, kind):
    ranks.run(
        equals_megatrons, kind=kind, recipe="bf16", sequence_parallel=False, skip_bias_add=False
    )


@pytest.mark.parametrize("name", [*NAMES.values(), "DotProductAttention"])
def test_signatures_are_megatrons(name):
    original, ours = theirs(name), getattr(megatron, name)
    assert issubclass(ours, original)
    assert inspect.signature(ours) == inspect.signature(original)
    assert inspect.signature(ours.__init__) == inspect.signature(original.__init__)


def described(sharded):
    return {
        key: (getattr(x, "global_shape", None), getattr(x, "global_offset", None), type(x))
        for key, x in sharded.items()
    }


@on_te
def checkpoints_are_megatrons(group, kind):
    with model_parallel(group):
        expected, own = (build(group, kind, ours) for ours in (False, True))
        assert list(own.state_dict()) == list(expected.state_dict())
        groups = import_megatron("transformer.utils").ensure_metadata_has_dp_cp_group({})
        ours, original = (
            layer.sharded_state_dict("layer.", metadata=groups) for layer in (own, expected)
        )
        assert described(ours) == described(original)
        assert ours
        expected.load_state_dict(own.state_dict())


@pytest.mark.parametrize("kind", NAMES)
def test_checkpoints_are_megatrons(ranks, kind):
    ranks.run(checkpoints_are_megatrons, kind=kind)


# --- Pads -----------------------------------------------------------------------------------------


@on_te
def pads_are_inert(group, kind, recipe, sequence_parallel, normalization):
    options = {"sequence_parallel": sequence_parallel, "normalization": normalization}
    meta = padded(group)
    with model_parallel(group):

        def steps(fill):
            layer = build(group, kind, True, **options)
            return run(layer, kind, group, meta, recipe, fill)

        clean = steps(0.0)
        for fill in FILLS:
            assert_same_steps(steps(fill), clean, f", {fill} in pads")
        plain = run(
            build(group, kind, False, **options),
            *(kind, group, meta, recipe, float("nan")),
            check_pads=False,
        )
        assert plain[0]["gradient of weight"].isnan().any()  # Megatron's own


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NAMES)
def test_pads_are_inert(ranks, kind, recipe):
    ranks.run(
        pads_are_inert,
        kind=kind,
        recipe=recipe,
        sequence_parallel=ranks.world_size > 1,
        normalization="RMSNorm",
    )


@pytest.mark.parametrize("kind", NAMES)
def test_pads_are_inert_without_sequence_parallelism(ranks, kind):
    ranks.run(
        pads_are_inert,
        kind=kind,
        recipe="bf16",
        sequence_parallel=False,
        normalization="LayerNorm",
    )


@on_te
def norms_are_inert(group, normalization, shape, divided):
    """Of a block, and of the heads of all queries."""
    meta = padded(group)
    with model_parallel(group):
        config = config_of(group, normalization=normalization)
        norm = without_warnings(lambda: megatron.Norm(config=config, hidden_size=shape[-1]))
        original = without_warnings(lambda: theirs("Norm")(config=config, hidden_size=shape[-1]))
        assert isinstance(norm, type(original))
        assert list(norm.state_dict()) == list(original.state_dict())
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.add_(0.5)
        original.load_state_dict(norm.state_dict())

        def step(layer, fill):
            x = random(group, meta.num_rows, *shape, seed=1)
            dy = random(group, meta.num_rows, *shape, seed=2)
            pads = meta.padding_mask
            x, dy = (
                t.masked_fill(pads.view(-1, *[1] * len(shape)), fill).requires_grad_(t is x)
                for t in (x, dy)
            )
            x, dy, pads = (part(t, group) if divided else t for t in (x, dy, pads))
            x = x.detach().requires_grad_()
            with seq_meta(meta):
                y = layer(x.clone())
            y.backward(dy.clone())
            grads = [p.grad for p in layer.parameters()]
            for parameter in layer.parameters():
                parameter.grad = None
            assert layer is original or not (y[pads].any() or x.grad[pads].any())
            return [y.detach()[~pads], x.grad[~pads], *grads]

        clean = step(norm, 0.0)
        for fill in FILLS:
            found = step(norm, fill)
            assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True)), fill
        plain = step(original, 0.0)
        assert all(torch.equal(a, b) for a, b in zip(plain, clean, strict=True))
        assert step(original, float("nan"))[2].isnan().any()


@pytest.mark.parametrize(("shape", "divided"), [((1, 64), True), ((4, 64), False)])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_are_inert(ranks, normalization, shape, divided):
    ranks.run(norms_are_inert, normalization=normalization, shape=shape, divided=divided)


@on_te
def experts_take_no_meta(group):
    with model_parallel(group):
        for kind in ("column", "row"):
            options = {"is_expert": True, "bias": False}
            own, original = (build(group, kind, ours, **options) for ours in (True, False))
            x = random(group, 24, original.weight.shape[1], seed=1)
            assert torch.equal(own(x)[0], original(x)[0])


def test_experts_take_no_meta(ranks):
    ranks.run(experts_take_no_meta)


@on_te
def overlapped_experts_take_either_rows(group):
    """Shared experts that overlap communication turn off that of their linears."""
    meta = padded(group)
    with model_parallel(group):
        layer = build(group, "column", True)
        layer.parallel_mode = None
        for rows in {meta.num_rows, meta.num_rows // group.size()}:
            x = random(group, meta.num_rows, K, seed=1)
            pads = meta.padding_mask
            if rows != meta.num_rows:
                x, pads = part(x, group), part(pads, group)
            with seq_meta(meta):
                y, _ = layer(x.masked_fill(pads[:, None], float("nan")))
            assert y.isfinite().all()
            assert not y[pads].any()
            assert y[~pads].any()


def test_overlapped_experts_take_either_rows(ranks):
    ranks.run(overlapped_experts_take_either_rows)


# --- Bad input ------------------------------------------------------------------------------------


@on_te
def bad_input_is_refused(group, kind):
    meta = padded(group)
    with model_parallel(group):
        layer = build(group, kind, True)
        (place, _) = places(kind, group, layer.config.sequence_parallel)
        x = filled(group, meta, place, 0.0, seed=1)
        with pytest.raises(ValueError, match="no meta"):
            layer(x)
        with seq_meta(meta):
            with pytest.raises(ValueError, match=r"rows, its meta has"):
                layer(x[:-8])
            with pytest.raises(ValueError, match=r"takes \[rows, \*, "):
                layer(x[..., :-16])
        if group.size() > 1:
            whole = x.repeat(2, 1, 1) if place[1] else x[: len(x) // 2]
            if kind != "duplicated":
                with seq_meta(meta), pytest.raises(ValueError, match=r"rows, its meta has"):
                    layer(whole)


@pytest.mark.parametrize("kind", NAMES)
def test_bad_input_is_refused(ranks, kind):
    ranks.run(bad_input_is_refused, kind=kind)


@on_te
def rows_that_a_recipe_refuses(group, kind, recipe):
    rows = 12 * group.size()
    meta = PaddedSeqMeta.from_seq_lens(
        [rows], padded_lens=[rows], tp_size=group.size(), device=device_of(group)
    )
    with model_parallel(group):
        layer = build(group, kind, True)
        (place, _) = places(kind, group, layer.config.sequence_parallel)
        x = filled(group, meta, place, 0.0, seed=1)
        refused = pytest.raises(ValueError, match=str(rows))
        with seq_meta(meta), autocast(make_recipe(recipe), group), refused:
            layer(x)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", ["column", "row", "layer norm"])
def test_rows_that_a_recipe_refuses(ranks, kind, recipe):
    ranks.run(rows_that_a_recipe_refuses, kind=kind, recipe=recipe)
