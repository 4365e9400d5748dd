"""Both ends of a language model, with the vocabulary divided over ranks and pads left out.

Pads are known by the meta, never by a token id: a padding id may be a word of the text as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from padded_sp import collectives
from padded_sp.backends import torch_cross_entropy
from padded_sp.boundaries import check_size
from padded_sp.context import resolve_meta
from padded_sp.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from padded_sp.meta import PaddedSeqMeta
from padded_sp.parallel_layer import InitMethod, ParallelLayer, ParameterSpec, normal_init

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_INTEGERS = {
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
}


class VocabParallelEmbedding(ParallelLayer):
    """One row of weight for each id, the vocabulary divided over the R ranks of ``tp_group``.

    Over R ranks, T = meta.num_rows, V = num_embeddings, H = embedding_dim:
        ids      [T]          integers of any dtype in [0, V), the same on each rank; pad rows may
                              hold anything
        weight   [V / R, H]
        y        [T / R, H]   this rank's rows; [T, H] without ``sequence_parallel``
        forward    y = reduce_scatter(weight[ids], zero where another rank has the id)
        backward   grad_weight[ids] += all_gather(grad_y)
    Communicates T * H elements each way; without ``sequence_parallel`` an all-reduce forward and
    nothing backward. Pad rows are never looked up: their y is zero, their grad_y is dropped.

    Args:
        num_embeddings, embedding_dim: V and H.
        tp_group, tp_size: the ranks, or their number if the group comes later.
        sequence_parallel: y is divided by rows. True by default.
        params_dtype, device: of the weight; None: torch's defaults.
        init_method: writes the whole weight in place; None: normal, standard deviation 0.023.

    Raises:
        ValueError: sizes below 1, a vocabulary that R does not divide; at the call, before
            anything is communicated: no group, ids or meta of other rows, ids that are no integers.
        RuntimeError: a real row's id is outside [0, V). On CUDA it is found on the device, without
            waiting for it, and ends the process's CUDA context.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
    ) -> None:
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
        )
        self.num_embeddings = check_size(num_embeddings, "num_embeddings")
        self.embedding_dim = check_size(embedding_dim, "embedding_dim")
        shape = (self.num_embeddings, self.embedding_dim)
        spec = ParameterSpec(shape, 0, init_method or normal_init)
        self._add_parameter("weight", spec)
        self._settle_parameters()
        self.reset_parameters()

    def forward(self, ids: Tensor, meta: PaddedSeqMeta | None = None) -> Tensor:
        """ids [T] -> [T / R, H]; [T, H] without ``sequence_parallel``."""
        meta = resolve_meta(meta)
        self.require_group()
        self._check_rows_divide(meta)
        _check_integers(ids, "ids", meta)
        self._check_device(ids, "ids", meta, self.weight)

        ids = ids.long()  # before any comparison: 300 in uint8 would be 44
        if meta.has_padding:
            ids = ids.masked_fill(meta.padding_mask, 0)
        torch.ops.aten._assert_async.msg(
            ((ids >= 0) & (ids < self.num_embeddings)).all(),
            f"VocabParallelEmbedding: a real row's id is outside [0, {self.num_embeddings})",
        )
        row = ids - self.tp_rank * self.weight.shape[0]
        absent = (row < 0) | (row >= self.weight.shape[0])
        if meta.has_padding:
            absent = absent | meta.padding_mask
        y = F.embedding(row.masked_fill(absent, 0), self.weight)
        y = y.masked_fill_(absent[:, None], 0)  # its memory is fresh
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, meta, self.tp_group)
        return reduce_from_tensor_model_parallel_region(y, self.tp_group)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, tp_size={self.tp_size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    meta: PaddedSeqMeta | None = None,
    *,
    tp_group: ProcessGroup | None = None,
    dp_group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The mean of -log softmax(logits)[label] over the real tokens of all ranks of ``dp_group``.

    Over the R ranks of ``tp_group``, T = meta.num_rows:
        logits   [T, V / R]   this rank's columns, any floating dtype; never written to
        labels   [T]          integers of any dtype in [0, V) or ``ignore_index``, the same on each
                              of these ranks; pad rows may hold anything
        returns  []           float32, float64 for float64 logits; the same on each of these ranks
    The sum over this pack's real rows whose label is not ``ignore_index``, over the number of such
    rows in the packs of all ranks of ``dp_group`` (0 if there are none). So each of *those* ranks
    has its share of the mean: values and gradients are to be *summed* over ``dp_group``. Where
    gradients are averaged instead, as DistributedDataParallel does, multiply the loss by its size.
    The gradient of every other row is exactly zero, whatever the row holds.

    Communicates two all-reduces over ``tp_group``, 3 * T numbers, and one number over ``dp_group``;
    nothing backward. Saves logits and two numbers a row, no softmax.

    Raises:
        ValueError: logits or labels of other rows, shape, dtype or device than these; nothing has
            been communicated.
        RuntimeError: a real row's label is outside [0, V) and not ``ignore_index``. On CUDA it is
            found on the device, without waiting for it, and ends the process's CUDA context.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    meta = resolve_meta(meta)
    size, rank = collectives.group_size(tp_group), collectives.group_rank(tp_group)
    _check_integers(labels, "labels", meta)
    meta.check_rows(logits, "logits")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are [T, V / {size}] of a floating dtype, got {list(logits.shape)} of "
            f"{logits.dtype}: flatten further dimensions, convert integers"
        )
    if not logits.device == labels.device == meta.device:
        raise ValueError(
            f"logits are on {logits.device}, labels on {labels.device}, their meta on "
            f"{meta.device}: move them to one device, the meta with meta.to(device)"
        )

    labels = labels.long()  # before any comparison: -100 in uint8 would be 156
    counted = labels != ignore_index
    if meta.has_padding:
        counted = counted & ~meta.padding_mask
    labels = labels.masked_fill(~counted, 0)
    vocabulary = logits.shape[1] * size
    torch.ops.aten._assert_async.msg(
        ((labels >= 0) & (labels < vocabulary)).all(),
        f"vocab_parallel_cross_entropy: a real row's label is neither in [0, {vocabulary}) nor "
        f"ignore_index={ignore_index}",
    )
    count = collectives.all_reduce(
        counted.sum(), collectives.group_name(dp_group), collectives.group_size(dp_group)
    )
    return torch_cross_entropy.cross_entropy(
        logits,
        labels,
        counted,
        count.clamp(min=1),
        collectives.group_name(tp_group),
        size,
        rank,
    )


def _check_integers(values: Tensor, name: str, meta: PaddedSeqMeta) -> None:
    meta.check_rows(values, name)
    if values.dim() != 1 or values.dtype not in _INTEGERS:
        raise ValueError(
            f"{name} are one integer a row, [T] of an integer dtype, got "
            f"{list(values.shape)} of {values.dtype}"
        )
