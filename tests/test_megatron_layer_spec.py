"""``padded_sp_layer_spec`` on the specs of the real megatron-core."""

import dataclasses
import functools

import pytest
from megatron_helpers import import_megatron

from padded_sp.integrations import megatron


@pytest.fixture
def specs():
    return import_megatron("models.gpt.gpt_layer_specs")


def classes(x):
    """The names of all classes that a spec holds."""
    if isinstance(x, type):
        return {f"{x.__module__}.{x.__qualname__}"}
    if isinstance(x, functools.partial):
        return classes([x.func, *x.args, *x.keywords.values()])
    if dataclasses.is_dataclass(x):
        return classes([getattr(x, field.name) for field in dataclasses.fields(x)])
    if isinstance(x, dict):
        return classes(list(x.values()))
    return set().union(*map(classes, x)) if isinstance(x, (list, tuple)) else set()


def of_te(names):
    return {name.rpartition(".")[2] for name in names if ".transformer_engine." in name}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, set()),
        ({"qk_layernorm": True}, set()),
        # Megatron asks for its own class there.
        ({"multi_latent_attention": True}, {"TELinear"}),
        (
            {"num_experts": 4, "moe_grouped_gemm": True},
            {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TEActivationOp"},
        ),
        ({"num_experts": 4, "moe_grouped_gemm": False}, {"TEActivationOp"}),
    ],
)
def test_all_layers_are_swapped(specs, options, left):
    spec = specs.get_gpt_layer_with_transformer_engine_spec(**options)
    before = classes(spec)
    swapped = megatron.padded_sp_layer_spec(spec)
    assert of_te(classes(swapped)) == left
    assert "padded_sp.integrations.megatron.attention.DotProductAttention" in classes(swapped)
    assert type(swapped) is type(spec)
    assert classes(spec) == before  # left as it was
    assert classes(megatron.padded_sp_layer_spec(swapped)) == classes(swapped)  # twice is once


def test_paths_and_lists_are_swapped(specs):
    path = ("megatron.core.extensions.transformer_engine", "TERowParallelLinear")
    other = ("megatron.core.models.gpt.gpt_layer_specs", "HAVE_TE")
    assert megatron.padded_sp_layer_spec([path, (other,), None, 3]) == [
        megatron.RowParallelLinear, (other,), None, 3,
    ]  # fmt: skip


def test_what_it_cannot_swap_is_refused(specs):
    with pytest.raises(ValueError, match="no layer of Transformer Engine in this ModuleSpec"):
        megatron.padded_sp_layer_spec(specs.get_gpt_layer_local_spec())
    fused = import_megatron("extensions.transformer_engine").TEFusedMLP
    with pytest.raises(ValueError, match=r"TEFusedMLP .* use_te_op_fuser=False"):
        megatron.padded_sp_layer_spec([fused])
    with pytest.raises(ValueError, match="MambaLayer computes on every row of the pack"):
        megatron.padded_sp_layer_spec([import_megatron("ssm.mamba_layer").MambaLayer])


def test_names_are_public():
    for name in megatron.__all__:
        assert getattr(megatron, name).__doc__
    with pytest.raises(AttributeError, match="TELinear"):
        megatron.TELinear  # noqa: B018
