"""State dicts that ``torch.distributed.checkpoint`` saves at one tp size and loads at another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from padded_sp.parallel_layer import ParallelLayer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def sharded_state_dict(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """``model.state_dict()`` with the parameters of parallel layers as DTensors.

    A plain tensor is taken for the same on every rank, and only one rank's is written: this
    rank's part of a divided weight has to say that it is one. So each parameter of a layer with a
    group is ``Shard(dim)`` or ``Replicate()`` over that group. Everything else, layers without a
    group included (tp 1 has the whole parameters), stays a plain tensor. The tensors share memory
    with the parameters: what is loaded into them is loaded into the model.

        dcp.save(sharded_state_dict(model), checkpoint_id=path)
        dcp.load(sharded_state_dict(model_at_another_tp_size), checkpoint_id=path)

    Names are those of ``state_dict()``, behind ``prefix``, without Transformer Engine's
    ``_extra_state``: scales and amax histories are this rank's own and fit no other tp size.
    Delayed scaling starts them anew; to keep them, save ``state_dict()`` of each rank.
    Communicates nothing.

    Raises: ValueError: a layer built with ``tp_size`` > 1 has no group yet.
    """
    placed = {
        id(parameter): (layer, name)
        for layer in model.modules()
        if isinstance(layer, ParallelLayer)
        for name, parameter in layer.named_parameters(recurse=False)
    }
    meshes: dict[tuple[str, str], DeviceMesh] = {}
    state = model.state_dict(prefix=prefix, keep_vars=True)
    for key, tensor in list(state.items()):
        if key.endswith("_extra_state"):
            del state[key]
        elif id(tensor) in placed:
            state[key] = _as_dtensor(tensor.detach(), *placed[id(tensor)], meshes)
        elif isinstance(tensor, Tensor):
            state[key] = tensor.detach()
    return state


def _as_dtensor(
    part: Tensor, layer: ParallelLayer, name: str, meshes: dict[tuple[str, str], DeviceMesh]
) -> Tensor:
    # Imported here: it takes most of a second, and training without checkpoints needs none of it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    layer.require_group()
    if layer.tp_group is None:
        return part
    group: ProcessGroup = layer.tp_group
    where = (group.group_name, part.device.type)
    if where not in meshes:
        meshes[where] = DeviceMesh.from_group(group, part.device.type)
    dim = layer.partition_dim(name)
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(part, meshes[where], [placement], run_check=False)
