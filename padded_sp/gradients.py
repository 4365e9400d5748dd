"""The gradients that sequence parallelism leaves partial."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from padded_sp.collectives import all_reduce, group_name, group_size
from padded_sp.parallel_layer import ParallelLayer

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


@torch.no_grad()
def reduce_replicated_gradients(model: nn.Module, tp_group: ProcessGroup | None) -> None:
    """Partial -> Replicate: sums the gradients of replicated parameters over ``tp_group``.

    Under sequence parallelism each rank sees its own rows only, so the gradients of norms and of
    row-parallel biases are terms of a sum. These are the parameters of this package's layers that
    are not divided, and any parameter marked ``param.sequence_parallel = True`` as Transformer
    Engine and Megatron mark theirs.

    Call it once a step on every rank of the group, after the last backward of an accumulation and
    before clipping and the optimiser; a second call would sum the sums. Parameters without a
    gradient are left out: every rank runs the same graph, so they have none anywhere.

    Communicates one all-reduce for each dtype among these gradients, of all of them together.
    """
    size = group_size(tp_group)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in _partial_parameters(model):
        if parameter.grad is not None:
            by_kind[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
    for grads in by_kind.values() if size > 1 else ():
        flat = torch.cat([grad.flatten() for grad in grads])
        summed = all_reduce(flat, group_name(tp_group), size)
        parts = summed.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def _partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Each once, in the order of the modules, which is the same on every rank."""
    seen = set()
    for module in model.modules():
        partial = module.partial_parameters() if isinstance(module, ParallelLayer) else set()
        for name, parameter in module.named_parameters(recurse=False):
            if name in partial or getattr(parameter, "sequence_parallel", False):
                if id(parameter) not in seen:
                    yield parameter
                seen.add(id(parameter))
