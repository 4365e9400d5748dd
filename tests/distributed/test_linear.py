"""The parallel linears against the reference, on every rank of groups of 1 to 4."""

import copy
import functools
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rank_helpers import comm_counts, device_of, drawn, part
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp import AlignPolicy, PaddedSeqMeta, seq_meta
from padded_sp.alignment import RECIPES
from padded_sp.backends import reference
from padded_sp.gradients import reduce_replicated_gradients
from padded_sp.linear import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)

K, O, T = 24, 48, 24  # noqa: E741
LAYOUTS = {
    "padded": ([5, 0, 1, 7], [6, 2, 4, 12]),
    "tail": ([5, 8, 4], [5, 8, 11]),
    "unpadded": ([20, 4], [20, 4]),
    "only pads": ([0, 0], [12, 12]),
}


def meta_of(group, layout="padded"):
    seq_lens, padded_lens = LAYOUTS[layout]
    return PaddedSeqMeta.from_seq_lens(
        seq_lens, padded_lens=padded_lens, tp_size=group.size(), device=device_of(group)
    )


def build(kind, group, *, seed=3, **arguments):
    """The layer on this rank, and the same on one rank, with a bias that is not zero."""
    layers = []
    for tp_group in (group, None):
        torch.manual_seed(seed)
        arguments = {"device": device_of(group), **arguments}
        layers.append(kind(K, O, tp_group=tp_group, **arguments))
    layer, whole = layers
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.copy_(drawn(group, *parameter.shape, seed=5))
                mine, dim = getattr(layer, name), layer.partition_dim(name)
                mine.copy_(parameter if dim is None else part(parameter, group, dim))
    return layer, whole


def assert_sums_equal(actual, expected, group):
    """A sum over two ranks has one order; over more, the transport chooses it.

    Another order rounds each of size - 1 additions differently, by at most one eps of a partial
    sum; twice that leaves room for partial sums that are larger than every result.
    """
    if group.size() <= 2 or not actual.numel():
        assert torch.equal(actual, expected)
    else:
        error = (actual.double() - expected.double()).abs().max()
        eps = torch.finfo(actual.dtype).eps
        assert error <= 2 * (group.size() - 1) * eps * expected.double().abs().max()


# --- Against the reference -----------------------------------------------------------------------


def column_counts(size, sequence_parallel):
    """The collectives of a column-parallel linear, forward and backward."""
    if size == 1:
        return {}, {}
    if sequence_parallel:
        return (
            {"all_gather_into_tensor": 1},
            {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
        )
    return {}, {"all_reduce": 1}


def column_matches(group, meta, dtype, bias, sequence_parallel, middle=()):
    size = group.size()
    layer, whole = build(
        ColumnParallelLinear,
        group,
        bias=bias,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )
    x_full = drawn(group, meta.num_rows, *middle, K, dtype=dtype).requires_grad_()
    x = (part(x_full, group) if sequence_parallel else x_full).detach().requires_grad_()
    grad_full = drawn(group, meta.num_rows, *middle, O, seed=2, dtype=dtype)

    with CommDebugMode() as forward:
        y = layer(x, meta)
    with CommDebugMode() as backward:
        y.backward(part(grad_full, group, -1).clone())

    expected = reference.column_parallel_linear(
        x_full.chunk(size) if sequence_parallel else [x_full],
        whole.weight.chunk(size),
        whole.bias.chunk(size) if bias else None,
        meta,
    )
    torch.autograd.backward(expected, grad_full.chunk(size, -1))
    assert y.shape == (meta.num_rows, *middle, O // size)
    assert y.dtype == dtype
    assert torch.equal(y, expected[group.rank()])
    assert torch.equal(layer.weight.grad, part(whole.weight.grad, group))
    if bias:
        assert torch.equal(layer.bias.grad, part(whole.bias.grad, group))
    grad_x = part(x_full.grad, group) if sequence_parallel else x_full.grad
    assert_sums_equal(x.grad, grad_x, group)
    assert (comm_counts(forward), comm_counts(backward)) == column_counts(size, sequence_parallel)


def row_matches(group, meta, dtype, bias, sequence_parallel, middle=()):
    size = group.size()
    layer, whole = build(
        RowParallelLinear,
        group,
        bias=bias,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
    )
    x_full = drawn(group, meta.num_rows, *middle, K, dtype=dtype)
    x = part(x_full, group, -1).detach().clone().requires_grad_()
    grad_full = drawn(group, meta.num_rows, *middle, O, seed=2, dtype=dtype)

    with CommDebugMode() as forward:
        y = layer(x, meta)
    with CommDebugMode() as backward:
        y.backward((part(grad_full, group) if sequence_parallel else grad_full).clone())

    # Each shard in memory of its own, as a rank has it: a GEMM on a slice of columns may be another
    # kernel, with other bits.
    x_shards, weight_shards = (
        [shard.detach().clone().requires_grad_() for shard in whole_tensor.chunk(size, -1)]
        for whole_tensor in (x_full, whole.weight)
    )
    expected = reference.row_parallel_linear(
        x_shards, weight_shards, whole.bias if bias else None, meta
    )
    torch.autograd.backward(expected, reference.scatter(grad_full, size))
    y_expected = expected[group.rank()] if sequence_parallel else torch.cat(expected)
    assert y.shape == y_expected.shape
    assert y.dtype == dtype
    assert_sums_equal(y, y_expected, group)
    assert torch.equal(x.grad, x_shards[group.rank()].grad)
    assert torch.equal(layer.weight.grad, weight_shards[group.rank()].grad)
    if bias:
        # The reference sums whole; the yardstick of a sum over ranks is the same terms.
        grad_shards = reference.zero_pads_of_shards(reference.scatter(grad_full, size), meta)
        if not sequence_parallel:
            grad_shards = [torch.cat(grad_shards)] * size
        terms = [grad.flatten(0, -2).sum(0) for grad in grad_shards]
        assert torch.equal(layer.bias.grad, terms[group.rank()])
        if sequence_parallel:
            reduce_replicated_gradients(layer, group)
            assert_sums_equal(layer.bias.grad, reference.all_reduce(terms), group)
        if dtype == torch.float32:
            torch.testing.assert_close(layer.bias.grad, whole.bias.grad)
    if size == 1:
        expected_counts = {}, {}
    elif sequence_parallel:
        expected_counts = {"reduce_scatter_tensor": 1}, {"all_gather_into_tensor": 1}
    else:
        expected_counts = {"all_reduce": 1}, {}
    assert (comm_counts(forward), comm_counts(backward)) == expected_counts


def all_layouts_match(group, check, dtype, bias, sequence_parallel):
    for layout in LAYOUTS:
        check(group, meta_of(group, layout), dtype, bias, sequence_parallel)
    for middle in ((1,), (2, 3)):
        check(group, meta_of(group), dtype, bias, sequence_parallel, middle)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check", [column_matches, row_matches])
def test_matches_reference(ranks, check, dtype, bias, sequence_parallel):
    ranks.run(
        all_layouts_match, check=check, dtype=dtype, bias=bias, sequence_parallel=sequence_parallel
    )


def planned_pack_matches(group, seq_lens, policy):
    policy = AlignPolicy(tp_size=group.size(), **policy)
    meta = PaddedSeqMeta.from_seq_lens(seq_lens, policy, device=device_of(group))
    column_matches(group, meta, torch.float32, True, True)
    row_matches(group, meta, torch.float32, True, True)


def policy_of(recipe, placement, **sizes):
    return {"recipe": recipe, "placement": placement, **sizes}


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example([5, 38], policy_of("fp8_blockwise", "tail", fp8_wire=True))
@example([5, 38], policy_of("fp8_blockwise", "own_entry", fp8_wire=False, cp_size=2))
@example([33], policy_of("mxfp8", "each_sequence", cp_size=2))
@given(
    seq_lens=st.lists(st.sampled_from([0, 1, 2, 7, 33]), min_size=1, max_size=6),
    policy=st.fixed_dictionaries(
        {
            "recipe": st.sampled_from(list(RECIPES)),
            "placement": st.sampled_from(["tail", "own_entry", "each_sequence"]),
            "fp8_wire": st.booleans(),
            "cp_size": st.sampled_from([1, 2]),
        }
    ),
)
def test_any_pack(ranks, seq_lens, policy):
    ranks.run(planned_pack_matches, seq_lens=seq_lens, policy=policy)


def test_thousand_sequences(ranks):
    ranks.run(planned_pack_matches, seq_lens=[i % 3 for i in range(1000)], policy={})


def norm_column_matches(group, normalization, sequence_parallel, return_bias, return_normed):
    size, meta = group.size(), meta_of(group)
    layer, whole = build(
        LayerNormColumnParallelLinear,
        group,
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        return_layernorm_output=return_normed,
        return_bias=return_bias,
    )
    shards = size if sequence_parallel else 1
    mine = group.rank() if sequence_parallel else 0
    x_full = drawn(group, T, K).requires_grad_()
    x = x_full.chunk(shards)[mine].detach().clone().requires_grad_()
    grad_y, grad_normed = drawn(group, T, O, seed=2), drawn(group, T, K, seed=3)

    with CommDebugMode() as forward:
        returned = layer(x, meta)
    outputs = list(returned) if return_bias or return_normed else [returned]
    if return_bias:
        assert torch.equal(outputs.pop(1), layer.bias)
    incoming = [part(grad_y, group, -1).clone(), grad_normed.chunk(shards)[mine].clone()]
    with CommDebugMode() as backward:
        torch.autograd.backward(outputs, incoming[: len(outputs)])
    assert (comm_counts(forward), comm_counts(backward)) == column_counts(size, sequence_parallel)

    norm = {"LayerNorm": reference.layer_norm, "RMSNorm": reference.rms_norm}[normalization]
    expected_normed = norm(
        x_full.chunk(shards), whole.layer_norm_weight, whole.layer_norm_bias, layer.eps, meta
    )
    biases = None if return_bias else whole.bias.chunk(size)
    expected = reference.column_parallel_linear(
        expected_normed, whole.weight.chunk(size), biases, meta
    )
    torch.autograd.backward(
        [*expected, *(expected_normed if return_normed else ())],
        [*grad_y.chunk(size, -1), *(grad_normed.chunk(shards) if return_normed else ())],
    )
    assert len(outputs) == 1 + return_normed
    for output, at_rank in zip(
        outputs, (expected[group.rank()], expected_normed[mine]), strict=False
    ):
        assert torch.equal(output, at_rank)
    assert torch.equal(layer.weight.grad, part(whole.weight.grad, group))
    if return_bias:
        assert layer.bias.grad is None
    else:
        assert torch.equal(layer.bias.grad, part(whole.bias.grad, group))
    torch.testing.assert_close(x.grad, x_full.grad.chunk(shards)[mine])
    reduce_replicated_gradients(layer, group)
    torch.testing.assert_close(layer.layer_norm_weight.grad, whole.layer_norm_weight.grad)
    if normalization == "LayerNorm":
        torch.testing.assert_close(layer.layer_norm_bias.grad, whole.layer_norm_bias.grad)
    else:
        assert layer.layer_norm_bias is None


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_and_column_match_reference(ranks, normalization, sequence_parallel):
    for return_bias, return_normed in itertools.product([False, True], repeat=2):
        ranks.run(
            norm_column_matches,
            normalization=normalization,
            sequence_parallel=sequence_parallel,
            return_bias=return_bias,
            return_normed=return_normed,
        )


def tolerance_sees_a_lost_term(group):
    partials = [drawn(group, 100, seed=seed) for seed in range(3)]
    total = reference.all_reduce(partials)
    three = type("Three", (), {"size": lambda _: 3})()
    assert_sums_equal(partials[2] + partials[1] + partials[0], total, three)
    with pytest.raises(AssertionError):
        assert_sums_equal(total * (1 + 1e-5), total, three)


def test_tolerance_can_fail(ranks):
    ranks.run(tolerance_sees_a_lost_term)


def test_without_a_process_group():
    meta = PaddedSeqMeta.from_seq_lens([5, 0, 1, 7], padded_lens=[6, 2, 4, 12])
    generator = torch.Generator().manual_seed(1)
    for kind, check in (
        (ColumnParallelLinear, reference.column_parallel_linear),
        (RowParallelLinear, reference.row_parallel_linear),
    ):
        layer = kind(K, O)
        twin = copy.deepcopy(layer)
        x = torch.randn(T, K, generator=generator)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        biases = [twin.bias] if kind is ColumnParallelLinear else twin.bias
        y, (expected,) = layer(mine, meta), check([theirs], [twin.weight], biases, meta)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected)
        assert torch.equal(mine.grad, theirs.grad)
        for parameter, twin_parameter in zip(layer.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad, twin_parameter.grad)
        reduce_replicated_gradients(layer, None)
        assert torch.equal(layer.bias.grad, twin.bias.grad)


# --- Inert pads ----------------------------------------------------------------------------------

ALL_LAYERS = {
    "column": (ColumnParallelLinear, {}),
    "column, replicated": (ColumnParallelLinear, {"sequence_parallel": False}),
    "row": (RowParallelLinear, {}),
    "row, replicated": (RowParallelLinear, {"sequence_parallel": False}),
    "layer norm": (LayerNormColumnParallelLinear, {}),
    "rms norm": (LayerNormColumnParallelLinear, {"normalization": "RMSNorm"}),
}


def input_of(layer, full, group):
    """This rank's part of x [T, K], for either kind of layer."""
    if isinstance(layer, RowParallelLinear):
        return part(full, group, -1)
    return part(full, group) if layer.sequence_parallel else full


def output_of(layer, full, group):
    if isinstance(layer, RowParallelLinear):
        return part(full, group) if layer.sequence_parallel else full
    return part(full, group, -1)


def poison_changes_nothing(group, name, inplace, expanded, activation):
    kind, arguments = ALL_LAYERS[name]
    meta = meta_of(group)
    pads = meta.padding_mask[:, None]
    outcomes = []
    for poison in (0.0, float("nan"), 1e4):
        layer, _ = build(kind, group, inplace=inplace, **arguments)
        x_full = drawn(group, T, K).masked_fill(pads, poison)
        grad_full = drawn(group, T, 1 if expanded else O, seed=2).masked_fill(pads, poison)
        leaf = input_of(layer, x_full, group).clone().requires_grad_()
        x = leaf * 1 if activation else leaf
        grad_y = output_of(layer, grad_full.expand(T, O), group)
        grad_y = grad_y if expanded else grad_y.clone()
        x_before, grad_before = x.detach().clone(), grad_y.clone()
        y = layer(x, meta)
        y.backward(grad_y)
        outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters())])

        my_pads, grad_pads = (
            input_of(layer, pads.expand(T, K), group),
            output_of(layer, pads.expand(T, O), group),
        )
        for now, before, where in ((x, x_before, my_pads), (grad_y, grad_before, grad_pads)):
            assert torch.equal(now[~where], before[~where])
            if not inplace:
                assert torch.equal(now.nan_to_num(7), before.nan_to_num(7))
        assert (y[grad_pads] == 0).all()
        assert (leaf.grad[my_pads] == 0).all()
    for outcome in outcomes[1:]:
        for poisoned, clean in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(poisoned, clean)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", ALL_LAYERS)
def test_pads_are_inert(ranks, name, inplace, expanded):
    for activation in (True, False):
        ranks.run(
            poison_changes_nothing,
            name=name,
            inplace=inplace,
            expanded=expanded,
            activation=activation,
        )


def follows(group, activation):
    """Functions that save their output: a layer's write to its pad rows must not break them."""
    meta, grads = meta_of(group), []
    for inplace in (True, False):
        layer, _ = build(RowParallelLinear, group, inplace=inplace)
        leaf = part(drawn(group, T, K), group, -1).clone().requires_grad_()
        layer(activation(leaf), meta).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    "activation", [torch.relu, torch.exp, functools.partial(torch.softmax, dim=-1)]
)
def test_after_a_function_that_saves_its_output(ranks, activation):
    ranks.run(follows, activation=activation)


# --- Training ------------------------------------------------------------------------------------


def accumulation_adds(group, kind):
    packs = [meta_of(group, "padded"), meta_of(group, "tail")]

    def gradients(*indices):
        layer, _ = build(kind, group)
        for i in indices:
            x = input_of(layer, drawn(group, T, K, seed=i), group)
            layer(x, packs[i]).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    for both, first, second in zip(gradients(0, 1), gradients(0), gradients(1), strict=True):
        assert torch.equal(both, first + second)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_gradients_accumulate_over_packs(ranks, kind):
    ranks.run(accumulation_adds, kind=kind)


def skips_what_needs_no_gradient(group, kind, frozen, x_needs_grad, expected):
    layer, _ = build(kind, group)
    meta = meta_of(group)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = input_of(layer, drawn(group, T, K), group).clone().requires_grad_(x_needs_grad)
    y = layer(x, meta)
    with CommDebugMode() as comms:
        y.sum().backward()
    assert comm_counts(comms) == (expected if group.size() > 1 else {})
    assert (x.grad is not None) == x_needs_grad
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == (name not in frozen)


@pytest.mark.parametrize(
    ("kind", "frozen", "x_needs_grad", "expected"),
    [
        (ColumnParallelLinear, ["weight"], True, {"reduce_scatter_tensor": 1}),
        (ColumnParallelLinear, [], False, {"all_gather_into_tensor": 1}),
        (ColumnParallelLinear, ["weight"], False, {}),
        (RowParallelLinear, ["weight"], True, {"all_gather_into_tensor": 1}),
        (RowParallelLinear, [], False, {"all_gather_into_tensor": 1}),
        (RowParallelLinear, ["weight"], False, {}),
    ],
)
def test_skips_what_needs_no_gradient(ranks, kind, frozen, x_needs_grad, expected):
    ranks.run(
        skips_what_needs_no_gradient,
        kind=kind,
        frozen=frozen,
        x_needs_grad=x_needs_grad,
        expected=expected,
    )


def autocast_computes_in_bfloat16(group, kind):
    layer, _ = build(kind, group)
    low, _ = build(kind, group, params_dtype=torch.bfloat16)
    with torch.no_grad():
        for mine, theirs in zip(low.parameters(), layer.parameters(), strict=True):
            mine.copy_(theirs)
    meta = meta_of(group)
    x = input_of(layer, drawn(group, T, K), group).clone().requires_grad_()
    x_low = x.detach().bfloat16().requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = layer(x, meta)
    y_low = low(x_low, meta)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, y_low)
    y.float().square().sum().backward()
    y_low.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, x_low.grad.float())
    for mine, theirs in zip(low.parameters(), layer.parameters(), strict=True):
        assert torch.equal(mine.grad.float(), theirs.grad)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_autocast(ranks, kind):
    ranks.run(autocast_computes_in_bfloat16, kind=kind)


def compiled_equals_eager(group, kind):
    meta = meta_of(group)
    results = []
    for compiled in (False, True):
        layer, _ = build(kind, group)
        call: Any = layer
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = input_of(layer, drawn(group, T, K), group).clone().requires_grad_()
        y = call(x, meta)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(
    "kind", [ColumnParallelLinear, RowParallelLinear, LayerNormColumnParallelLinear]
)
def test_compiles_in_one_graph(ranks, kind):
    ranks.run(compiled_equals_eager, kind=kind)


def addresses_saved_by(call):
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return saved


def fused_weight_is_not_copied(group):
    meta, split = meta_of(group), ("gate", "up")
    built, _ = build(ColumnParallelLinear, group, parameters_split=split)
    for layer in (built, built.double().float(), copy.deepcopy(built)):
        x = part(drawn(group, T, K), group).clone().requires_grad_()
        assert layer.gate_weight.data_ptr() in addresses_saved_by(lambda: layer(x, meta))  # noqa: B023
    with torch.no_grad():
        apart = built.up_weight.clone()
    expected = built(x, meta)
    built.up_weight = torch.nn.Parameter(apart)  # as load_state_dict(assign=True) does
    assert torch.equal(built(x, meta), expected)


def test_fused_weight_is_not_copied(ranks):
    ranks.run(fused_weight_is_not_copied)


def copies_stay_parallel(group):
    layer, _ = build(RowParallelLinear, group)
    for twin in (copy.deepcopy(layer), layer.double().float(), layer):
        assert twin.tp_group is group
        assert twin.bias.sequence_parallel
        assert torch.equal(twin.weight, layer.weight)
    late = copy.deepcopy(RowParallelLinear(K, O, tp_size=group.size(), device=device_of(group)))
    late.set_tensor_parallel_group(group)
    if group.rank():
        first = late.weight.clone()
        late.tp_rank = 0
        late._draw({"weight"})
        assert not torch.equal(late.weight, first)


def test_copies_stay_parallel(ranks):
    ranks.run(copies_stay_parallel)


def bias_is_returned(group):
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer, _ = build(kind, group, return_bias=True)
        plain, _ = build(kind, group, bias=False)
        meta = meta_of(group)
        x = input_of(layer, drawn(group, T, K), group)
        y, bias = layer(x, meta)
        assert torch.equal(y, plain(x, meta))
        assert bias is layer.bias
        plain.return_bias = True
        assert plain(x, meta)[1] is None


def test_return_bias(ranks):
    ranks.run(bias_is_returned)


def meta_surrounds(group):
    layer, _ = build(ColumnParallelLinear, group)
    meta = meta_of(group)
    x = input_of(layer, drawn(group, T, K), group)
    with seq_meta(meta):
        y = layer(x)
    assert torch.equal(y, layer(x, meta))


def test_takes_the_surrounding_meta(ranks):
    ranks.run(meta_surrounds)


# --- Construction --------------------------------------------------------------------------------


def parameters_are_parts_of_one_model(group, kind, dim):
    layer, whole = build(kind, group)
    assert torch.equal(layer.weight, part(whole.weight, group, dim))
    assert layer.weight.tensor_model_parallel
    assert layer.weight.partition_dim == dim
    assert getattr(layer.bias, "sequence_parallel", False) == (kind is RowParallelLinear)

    torch.manual_seed(3)
    late = kind(K, O, tp_size=group.size(), device=device_of(group))
    after = torch.rand(())
    late.set_tensor_parallel_group(group)
    assert torch.equal(late.weight, layer.weight)

    torch.manual_seed(3)
    postponed = kind(K, O, tp_group=group, device="meta").to_empty(device=device_of(group))
    torch.manual_seed(3)
    postponed.reset_parameters()
    assert torch.equal(postponed.weight, layer.weight)
    assert torch.equal(torch.rand(()), after)  # as many draws at every size and on every device

    written = kind(K, O, tp_size=group.size(), device=device_of(group))
    written.load_state_dict({name: value + 1 for name, value in written.state_dict().items()})
    before = written.weight.clone()
    written.set_tensor_parallel_group(group)
    assert torch.equal(written.weight, before)


@pytest.mark.parametrize(("kind", "dim"), [(ColumnParallelLinear, 0), (RowParallelLinear, 1)])
def test_one_seed_one_model(ranks, kind, dim):
    ranks.run(parameters_are_parts_of_one_model, kind=kind, dim=dim)


def split_equals_concatenation(group, split):
    parts = dict(split) if isinstance(split, dict) else dict.fromkeys(split, O // len(split))
    layer, _ = build(ColumnParallelLinear, group, parameters_split=split)
    names = [f"{name.rstrip('_')}_weight" for name in parts]
    assert [name for name, _ in layer.named_parameters() if "weight" in name] == names
    sizes = [features // group.size() for features in parts.values()]
    assert [getattr(layer, name).shape[0] for name in names] == sizes

    meta = meta_of(group)
    x = part(drawn(group, T, K), group)
    y = layer(x, meta)
    y.square().sum().backward()
    x_full = reference.zero_pads(drawn(group, T, K), meta)
    for name, y_part in zip(names, y.split(sizes, -1), strict=True):
        weight = getattr(layer, name)
        bias = getattr(layer, name.replace("weight", "bias"))
        expected = reference.zero_pads(F.linear(x_full, weight, bias), meta)
        torch.testing.assert_close(y_part, expected)
        torch.testing.assert_close(weight.grad, (2 * expected).detach().t() @ x_full)


@pytest.mark.parametrize(
    "split", [("gate", "up_"), {"query_": 24, "key_": 12, "value_": 12}, {"q": 36, "kv": 12}]
)
def test_parameters_split(ranks, split):
    ranks.run(split_equals_concatenation, split=split)


# --- Wrong calls ---------------------------------------------------------------------------------


def raises_before_communicating(group):
    meta = meta_of(group)
    size, device = group.size(), device_of(group)
    for kind, arguments in ALL_LAYERS.values():
        layer, _ = build(kind, group, **arguments)
        x = input_of(layer, drawn(group, T, K), group)
        wrong = {
            "rows": x[1:],
            r"takes x \[rows, \*, ": x[:, 1:],
            "convert x": x.half(),
            "move them to one device": x.to("meta"),
        }
        call = layer.forward  # CommDebugMode follows modules, and warns where one raises
        with CommDebugMode() as comms:
            for message, bad in wrong.items():
                with pytest.raises(ValueError, match=message):
                    call(bad, meta)
            with pytest.raises(ValueError, match=r"\[rows, \*, "):
                call(x[:, 0], meta)
            with pytest.raises(ValueError, match="seq_meta"):
                call(x)
            with torch.autocast(x.device.type), pytest.raises(ValueError, match="convert x"):
                call(x.double(), meta)
            if layer.sequence_parallel and size > 1:
                odd = PaddedSeqMeta.from_seq_lens([T + 1], tp_size=1, device=device)
                with pytest.raises(ValueError, match="do not divide over"):
                    call(drawn(group, T + 1, x.shape[1]), odd)
            if size > 1:
                groupless = kind(K, O, tp_size=size, device=device, **arguments)
                with pytest.raises(ValueError, match="set_tensor_parallel_group"):
                    groupless.forward(x, meta)
        assert comms.get_total_counts() == 0


def construction_raises(group):
    size = group.size()
    for kind, _ in ALL_LAYERS.values():
        for tp_size in (0, -1, 1.0):
            with pytest.raises(ValueError, match="tp_size"):
                kind(K, O, tp_size=tp_size)
        with pytest.raises(ValueError, match="ranks"):
            kind(5 * K, 5 * O, tp_size=5).set_tensor_parallel_group(group)
        with pytest.raises(ValueError, match="ranks"):
            kind(5 * K, 5 * O, tp_size=5, tp_group=group)
        with pytest.raises(ValueError, match="do not divide over"):
            kind(K + 1, O + 1, tp_size=6)
    with pytest.raises(ValueError, match="normalization"):
        LayerNormColumnParallelLinear(K, O, normalization="BatchNorm", tp_group=group)
    for split in ("qkv", (), ("a", "b", "c", "d", "e"), ("a", "a_"), {"a": 3, "b": O}):
        with pytest.raises(ValueError, match="parameters_split"):
            ColumnParallelLinear(K, O, parameters_split=split)
    if size > 1:
        with pytest.raises(ValueError, match="b_weight"):
            ColumnParallelLinear(K, O, parameters_split={"b": 1, "a": O - 1}, tp_group=group)


def test_wrong_calls_raise_before_communicating(ranks):
    ranks.run(raises_before_communicating)


def test_wrong_construction_raises(ranks):
    ranks.run(construction_raises)


# --- Parameters that are loaded, copied, pickled or written --------------------------------------


def load_data(layer, values):
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(values[name])


def load_copy(layer, values):
    layer.load_state_dict(values)


def load_assign(layer, values):
    layer.load_state_dict(values, assign=True)


def loaded_parameters_are_kept(group, kind, load):
    late = kind(K, O, tp_size=group.size(), device=device_of(group))
    values = {name: value + 1 for name, value in late.state_dict().items()}
    load(late, {name: value.clone() for name, value in values.items()})
    late.set_tensor_parallel_group(group)
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter, values[name])


@pytest.mark.parametrize("load", [load_data, load_copy, load_assign])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_loaded_parameters_are_kept(ranks, kind, load):
    ranks.run(loaded_parameters_are_kept, kind=kind, load=load)


def drawn_parameters_become_this_ranks(group):
    split = {"parameters_split": ("a", "b"), "tp_size": group.size(), "device": device_of(group)}
    torch.manual_seed(3)
    right = ColumnParallelLinear(K, O, tp_group=group, **split)

    def late():
        torch.manual_seed(3)
        return ColumnParallelLinear(K, O, **split)

    same_values = late()
    state = {name: value.clone() for name, value in same_values.state_dict().items()}
    same_values.load_state_dict(state, assign=True)
    one_loaded = late()
    one_loaded.a_weight.data.fill_(2)
    for layer in (late(), copy.deepcopy(late()), late().double(), same_values, one_loaded):
        layer.set_tensor_parallel_group(group)
        assert torch.equal(layer.b_weight, right.b_weight.to(layer.b_weight.dtype))
    assert torch.equal(same_values.a_weight, right.a_weight)
    assert (one_loaded.a_weight == 2).all()


def test_drawn_parameters_become_this_ranks(ranks):
    ranks.run(drawn_parameters_become_this_ranks)


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def saved(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickling_leaves_the_group_behind(group, name, again):
    kind, arguments = ALL_LAYERS[name]
    layer, _ = build(kind, group, parameters_split=("a", "b"), **arguments)
    meta = meta_of(group)
    x = input_of(layer, drawn(group, T, K), group)
    # As drawn, which must not be drawn anew; and of another rank, for which it must.
    untouched = ColumnParallelLinear(K, O, tp_group=group, device=device_of(group))
    twin, drawn_twin = again(layer), again(untouched)
    assert twin.tp_group is None
    assert (twin.tp_size, twin.tp_rank) == (group.size(), group.rank())
    if group.size() > 1:
        with pytest.raises(ValueError, match="set_tensor_parallel_group"):
            twin(x, meta)
    twin.set_tensor_parallel_group(group)
    drawn_twin.set_tensor_parallel_group(group)
    assert torch.equal(drawn_twin.weight, untouched.weight)
    for name, parameter in layer.named_parameters():
        theirs = getattr(twin, name)
        assert torch.equal(theirs, parameter)
        assert vars(theirs) == vars(parameter)
    assert torch.equal(twin(x, meta), layer(x, meta))
    x = x.clone().requires_grad_()
    assert twin.a_weight.data_ptr() in addresses_saved_by(lambda: twin(x, meta))


@pytest.mark.parametrize("again", [pickled, saved])
@pytest.mark.parametrize("name", ["column", "row", "rms norm"])
def test_pickling_leaves_the_group_behind(ranks, name, again):
    ranks.run(pickling_leaves_the_group_behind, name=name, again=again)


FUSED_META = PaddedSeqMeta.from_seq_lens([5, 0, 1, 7], padded_lens=[6, 2, 4, 12])


def fused_step(kind, *, frozen=False, x_grad=True, autocast=False):
    layer = kind(K, O, parameters_split=("a", "b", "c")).requires_grad_(not frozen)
    x = torch.ones(T, K, requires_grad=x_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return layer, x, layer(x, FUSED_META).sum()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["a_weight", "b_weight", "c_weight"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_backward_refuses_a_part_that_was_written(kind, name, frozen):
    layer, x, loss = fused_step(kind, frozen=frozen)
    with torch.no_grad():
        getattr(layer, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_backward_takes_writes_that_change_nothing():
    for arguments, written in (
        ({}, "b_bias"),  # no gradient is computed from it
        ({"x_grad": False}, "b_weight"),
        ({"autocast": True}, "b_weight"),  # backward computes from the bfloat16 copy
    ):
        layer, _, loss = fused_step(ColumnParallelLinear, **arguments)
        with torch.no_grad():
            getattr(layer, written).add_(1)
        loss.backward()
        assert layer.b_weight.grad is not None


@pytest.mark.parametrize("size", [0, -4, 24.0, True])
def test_features_are_counts(size):
    for kind, _ in ALL_LAYERS.values():
        with pytest.raises(ValueError, match=r"in_features must be an integer of at least 1, got"):
            kind(size, O)
        with pytest.raises(ValueError, match=r"out_features must be an integer of at least 1, got"):
            kind(K, size)
    with pytest.raises(ValueError, match=r"b_weight: each size of .* at least 1, got 0"):
        ColumnParallelLinear(K, O, parameters_split={"a": O, "b": 0})


@pytest.mark.parametrize("eps", [0.0, -1e-5, 1e-30, float("inf"), float("nan")])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_eps_keeps_zero_rows_finite(normalization, eps):
    with pytest.raises(ValueError, match=r"eps must be finite and at least 1e-24, got"):
        LayerNormColumnParallelLinear(K, O, normalization=normalization, eps=eps)
