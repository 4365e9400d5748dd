"""What ``torch.distributed.checkpoint`` saves at one tp size and loads at another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from padded_sp.linear_parameters import LinearParameters
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
    ``_extra_state``, whose size differs before and after the first step: :class:`FP8State` has what
    delayed scaling keeps there. Communicates nothing.

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


class FP8State:
    """The scales and amax histories of delayed scaling, beside the parameters of a model.

    Of layers over Transformer Engine; other recipes keep nothing. An entry of its own in what is
    saved, since checkpoints of BF16, of other recipes and of backend "torch" have none:

        dcp.save({"model": sharded_state_dict(model), "fp8": FP8State(model)}, checkpoint_id=path)
        dcp.load({"model": sharded_state_dict(fresh), "fp8": FP8State(fresh)}, checkpoint_id=path)

    ``torch.distributed.checkpoint`` calls the methods, on entries of the outermost dict alone. What
    is loaded goes on bit for bit; without it delayed scaling starts anew. The amax is that of the
    whole tensor on every rank, so that one rank's state is everyone's and fits any tp size.
    Reads the device when it saves. Communicates nothing.

    Args: prefix: goes in front of the layers' names, as in :func:`sharded_state_dict`.
    Raises: ValueError: when it saves, under ``DelayedScaling(reduce_amax=False)`` with tp > 1:
        each rank has scales of its own then, of which a checkpoint would keep one.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self._layers: dict[str, Any] = {
            prefix + name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, LinearParameters) and layer.backend == "te"
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of each layer by its name, on the host; None where it has none."""
        state = {name: layer.te.delayed_state() for name, layer in self._layers.items()}
        for name, of_layer in state.items():
            if of_layer and self._layers[name].tp_size > 1 and not of_layer[0].reduce_amax:
                raise ValueError(
                    f"{name or 'the layer'} has scales that differ between ranks, by "
                    "DelayedScaling(reduce_amax=False), and a checkpoint would keep those of one: "
                    "save state_dict() of each rank to a file of its own"
                )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives each layer its state; a layer without one is left as it is."""
        for name, layer in self._layers.items():
            layer.te.load_delayed_state(state[name])


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
