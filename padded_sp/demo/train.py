"""The one training loop of the demo, the same for every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from padded_sp.collectives import all_reduce, group_name, group_size
from padded_sp.demo.arms import Arm
from padded_sp.demo.batch import Batch
from padded_sp.demo.losses import PaddedModel, PlainModel
from padded_sp.gradients import reduce_replicated_gradients

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


@dataclass(frozen=True)
class Step:
    """What one step of training showed.

    Attributes:
        loss: the mean over real tokens' labels, in nats, before the update.
        gradient_norm: of the whole model, of the loss that is trained on.
    """

    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class Run:
    """An arm, trained.

    Attributes:
        arm: which.
        steps: all of them.
        num_tokens: real tokens of each step.
        num_rows: rows of each step, pads included.
        tokens_per_second: real tokens, see :mod:`padded_sp.demo.speed`; None: not timed.
    """

    arm: Arm
    steps: list[Step]
    num_tokens: list[int]
    num_rows: list[int]
    tokens_per_second: float | None = None

    @property
    def padding_share(self) -> float:
        """Pads over rows, of all steps together."""
        return 1 - sum(self.num_tokens) / sum(self.num_rows)


def train(
    model: PaddedModel | PlainModel,
    batches: Sequence[Batch],
    *,
    group: ProcessGroup | None = None,
    learning_rate: float,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Trains with AdamW, one step a batch.

    Args:
        group: the ranks that share the model; None for one.
        on_step: called after each step.
    """
    # This eps keeps AdamW from blowing the rounding of tiny gradients up to whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-6)
    steps = []
    for batch in batches:
        losses = model(batch)
        optimizer.zero_grad()
        losses.trained.backward()
        reduce_replicated_gradients(model, group)
        norm = gradient_norm(model, group)
        optimizer.step()
        loss, norm = torch.stack((losses.real.detach(), norm)).tolist()  # waits for the device
        steps.append(Step(loss, norm))
        on_step(steps[-1])
    return steps


@torch.no_grad()
def gradient_norm(model: nn.Module, group: ProcessGroup | None) -> Tensor:
    """The 2-norm of the whole model's gradient, the same on each rank.

    Each rank holds a part of the divided parameters, whose squares are summed over ranks, and all
    of the replicated ones, which count once. Call it after ``reduce_replicated_gradients``.

    Communicates one number.
    """
    divided, replicated = [], []
    for parameter in model.parameters():
        if parameter.grad is not None:
            shared = getattr(parameter, "sequence_parallel", False)
            (replicated if shared else divided).append(parameter.grad.square().sum())
    squares = all_reduce(torch.stack(divided).sum(), group_name(group), group_size(group))
    return torch.stack([squares, *replicated]).sum().sqrt()
