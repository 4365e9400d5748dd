"""From a batch to its loss: by padded_sp's layers, or by plain torch handled as others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from padded_sp.collectives import group_rank, group_size
from padded_sp.demo.arms import Arm, Handling
from padded_sp.demo.batch import Batch
from padded_sp.demo.model import Llama, LlamaConfig
from padded_sp.demo.plain import plain_logits
from padded_sp.demo.text import PAD
from padded_sp.meta import PaddedSeqMeta
from padded_sp.vocabulary import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


def model_of(
    arm: Arm,
    config: LlamaConfig,
    weights: dict[str, Tensor],
    device: torch.device,
    group: ProcessGroup | None,
) -> PaddedModel | PlainModel:
    """The model that an arm trains, with its own copy of the weights.

    Args:
        weights: of the whole model, from one rank's ``Llama.state_dict()``.
        group: the ranks of the arm; None for one.
    """
    if arm.handling is None:
        return PaddedModel(config, weights, device, group, arm.poisoned)
    return PlainModel(config, weights, device, arm.handling)


@dataclass(frozen=True)
class Losses:
    """Of one batch: what is trained on, and the mean over the real tokens' labels."""

    trained: Tensor
    real: Tensor


class PaddedModel(nn.Module):
    """``model.Llama`` and its loss.

    Args:
        poisoned: fill the pad rows of every layer's output, and of the gradient that comes back
            to it, with NaN: nothing may change.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        group: ProcessGroup | None = None,
        poisoned: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.llama = Llama(config, group, device)
        self.llama.load_whole(weights)
        self._meta: PaddedSeqMeta | None = None
        layers = [m for m in self.llama.modules() if not any(True for _ in m.children())]
        for layer in layers if poisoned else ():
            layer.register_forward_hook(self._poison)

    def forward(self, batch: Batch) -> Losses:
        """The mean over the real tokens' labels, the same on each rank."""
        self._meta = batch.meta
        logits = self.llama(batch.ids, batch.meta)
        loss = vocab_parallel_cross_entropy(logits, batch.labels, batch.meta, tp_group=self.group)
        return Losses(loss, loss)

    def _poison(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        meta = self._meta
        assert meta is not None
        mask = meta.padding_mask
        if output.shape[0] != meta.num_rows:
            mask = meta.shard(mask, group_rank(self.group), group_size(self.group))
        return _Poison.apply(output, mask[:, None])


class _Poison(torch.autograd.Function):
    """NaN where ``mask`` is set, in the values and in their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, float("nan"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (mask,) = ctx.saved_tensors
        return grad.masked_fill(mask, float("nan")), None


class PlainModel(nn.Module):
    """``plain.plain_logits`` with the same weights, and a loss as ``handling`` says."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        device: torch.device,
        handling: Handling,
    ) -> None:
        super().__init__()
        self.config, self.handling = config, handling
        self.names = list(weights)
        dtype = torch.get_default_dtype()
        self.values = nn.ParameterList(w.to(device, dtype, copy=True) for w in weights.values())
        if handling.zero_pad_embedding:
            with torch.no_grad():
                self.values[self.names.index("embedding.weight")][PAD] = 0

    def forward(self, batch: Batch) -> Losses:
        """What is trained on may count pads."""
        weights = dict(zip(self.names, self.values, strict=True))
        logits = plain_logits(
            weights,
            self.config,
            batch.ids,
            attended=self.handling.attended(batch.meta),
            positions=self.handling.positions(batch.meta),
            unwritten=self.handling.unwritten,
        )
        real = F.cross_entropy(logits, batch.labels)
        labels = self.handling.labels(batch)
        count = batch.meta.num_rows if self.handling.over_all_rows else labels.ne(-100).sum()
        trained = F.cross_entropy(logits, labels, reduction="sum")
        return Losses(trained / count, real)
