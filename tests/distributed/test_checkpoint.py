"""Saved at one tp size, loaded at another, through torch.distributed.checkpoint."""

import shutil
import tempfile
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_helpers import device_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from padded_sp.checkpoint import sharded_state_dict
from padded_sp.linear import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from padded_sp.normalization import RMSNorm
from padded_sp.vocabulary import VocabParallelEmbedding


def model_of(tp_group, device, seed):
    torch.manual_seed(seed)
    arguments = {"tp_group": tp_group, "device": device}
    model = nn.ModuleDict(
        {
            "embedding": VocabParallelEmbedding(24, 12, **arguments),
            "qkv": LayerNormColumnParallelLinear(
                12, 48, parameters_split={"q": 24, "k": 12, "v": 12}, **arguments
            ),
            "proj": RowParallelLinear(48, 12, **arguments),
            "head": ColumnParallelLinear(12, 24, bias=False, **arguments),
            "norm": RMSNorm(12, **arguments),
            "other": nn.Linear(12, 5, device=device),
        }
    )
    model.register_buffer("steps", torch.tensor(seed, device=device))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # replicated parameters that tell models apart
        for name in ("proj.bias", "norm.weight", "qkv.layer_norm_weight"):
            parameter = model.get_parameter(name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@contextmanager
def shared_directory(group):
    path = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(path, group=group, group_src=0)
    try:
        yield path[0]
    finally:
        dist.barrier(group)
        if group.rank() == 0:
            shutil.rmtree(path[0])


def save(model, path, group):
    """Together over ``group``, or alone for None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            sharded_state_dict(model),
            checkpoint_id=path,
            process_group=group,
            no_dist=group is None,
        )


def load(model, path, group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            sharded_state_dict(model),
            checkpoint_id=path,
            process_group=group,
            no_dist=group is None,
        )


def assert_equal_models(model, expected):
    for (name, mine), theirs in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def subgroup_of(group, size):
    """This rank's group among groups of ``size`` neighbours; None for 1."""
    if size == 1:
        return None
    starts = range(0, group.size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    return groups[group.rank() // size]


def reloads_at_another_size(group, saved_size, loaded_size):
    device = device_of(group)
    saved_group, loaded_group = subgroup_of(group, saved_size), subgroup_of(group, loaded_size)
    saved = model_of(saved_group, device, seed=1)
    loaded = model_of(loaded_group, device, seed=2)
    expected = model_of(loaded_group, device, seed=1)
    assert not torch.equal(loaded["proj"].weight, expected["proj"].weight)
    with shared_directory(group) as path:
        # At tp 1 there may be no process group at all: one rank alone writes, each alone reads.
        if saved_size > 1:
            save(saved, path, group)
        elif group.rank() == 0:
            save(saved, path, None)
        dist.barrier(group)
        load(loaded, path, group if loaded_size > 1 else None)
    assert_equal_models(loaded, expected)


def test_reloads_at_another_size(ranks):
    sizes = [size for size in (1, 2, 3, 4) if ranks.world_size % size == 0]
    for saved_size in sizes:
        for loaded_size in sizes:
            ranks.run(reloads_at_another_size, saved_size=saved_size, loaded_size=loaded_size)


def shards_are_named_and_alias(group):
    device = device_of(group)
    model = model_of(group, device, seed=1)
    state = sharded_state_dict(model, prefix="model.")
    assert list(state) == [f"model.{name}" for name in model.state_dict()]
    placements = {
        "embedding.weight": Shard(0),
        "qkv.q_weight": Shard(0),
        "qkv.q_bias": Shard(0),
        "qkv.layer_norm_weight": Replicate(),
        "proj.weight": Shard(1),
        "proj.bias": Replicate(),
        "head.weight": Shard(0),
        "norm.weight": Replicate(),
    }
    for name, placement in placements.items():
        dtensor = state[f"model.{name}"]
        assert isinstance(dtensor, DTensor)
        assert dtensor.placements == (placement,)
        assert dtensor.to_local().data_ptr() == model.get_parameter(name).data_ptr()
        assert not dtensor.requires_grad
    assert state["model.embedding.weight"].shape == (24, 12)
    assert state["model.proj.weight"].shape == (12, 48)
    assert not isinstance(state["model.other.weight"], DTensor)
    own = model["qkv"].sharded_state_dict("model.qkv.")
    assert list(own) == [name for name in state if name.startswith("model.qkv.")]


def test_shards_are_named_and_alias(ranks):
    ranks.run(shards_are_named_and_alias)


def test_without_a_group():
    model = model_of(None, "cpu", seed=1)
    state = sharded_state_dict(model)
    assert not any(isinstance(tensor, DTensor) for tensor in state.values())
    assert_equal_models(model, model)
    layer = ColumnParallelLinear(4, 4, tp_size=2)
    with pytest.raises(ValueError, match="set_tensor_parallel_group"):
        layer.sharded_state_dict()
