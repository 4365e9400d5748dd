"""The arms of the demo: the same text trained without padding, with padded_sp, and as others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from padded_sp.alignment import AlignPolicy
from padded_sp.demo.batch import Batch
from padded_sp.demo.plain import Spans
from padded_sp.demo.text import END, PAD
from padded_sp.meta import PaddedSeqMeta


@dataclass(frozen=True)
class Arm:
    """One line of the demo's table.

    Attributes:
        name: as printed.
        what: what happens to pad rows, and a public report of it, in one line.
        num_ranks: 1, or 2 with padded_sp.
        policy: the layout.
        handling: None: padded_sp's layers; else the plain model, handled so.
        poisoned: NaN in every pad row of every layer's output, and of its gradient.
    """

    name: str
    what: str
    num_ranks: int
    policy: AlignPolicy
    handling: Handling | None = None
    poisoned: bool = False


def own_labels(batch: Batch) -> Tensor:
    """The next real token of the same sequence."""
    return batch.labels


def labels_with_pads(batch: Batch) -> Tensor:
    """Pads, and what follows a sequence's last token, are the padding token."""
    return batch.labels.masked_fill(batch.labels == -100, PAD)


def labels_of_unpadded_rows(batch: Batch) -> Tensor:
    """Those of the unpadded pack, row by row: right for the first sequence only."""
    right = batch.labels[batch.meta.real_rows]
    return torch.cat((right, right.new_full((batch.meta.num_rows - right.shape[0],), -100)))


def labels_without_end(batch: Batch) -> Tensor:
    """The end of each sequence taken for a pad."""
    return batch.labels.masked_fill(batch.labels == END, -100)


def padded_spans(meta: PaddedSeqMeta) -> Spans:
    """Pads belong to the sequence in front of them."""
    return _spans(meta.padded_lens, meta.padded_lens)


def real_spans(meta: PaddedSeqMeta) -> Spans:
    """Pads belong to no sequence."""
    return _spans(meta.padded_lens, meta.seq_lens)


def mixed_spans(meta: PaddedSeqMeta) -> Spans:
    """The real boundaries, taken for offsets into padded rows."""
    return _spans(meta.seq_lens, meta.seq_lens)


def _spans(distances: tuple[int, ...], lengths: tuple[int, ...]) -> Spans:
    """Sequences of ``lengths`` whose starts lie ``distances`` apart; empty ones left out."""
    starts = list(accumulate(distances, initial=0))[:-1]
    return [(start, rows) for start, rows in zip(starts, lengths, strict=True) if rows]


@dataclass(frozen=True)
class Handling:
    """What others do with a padded batch; by default what is right.

    Attributes:
        attended: the sequences as attention sees them; see :func:`plain_logits`.
        positions: the sequences as RoPE sees them.
        unwritten: what attention leaves in rows of no sequence.
        labels: what is trained on, int64 [T], -100 where nothing is.
        over_all_rows: divide the loss by the rows, instead of the labels.
        zero_pad_embedding: the padding token's embedding starts as zeros.
    """

    attended: Callable[[PaddedSeqMeta], Spans] = real_spans
    positions: Callable[[PaddedSeqMeta], Spans] = real_spans
    unwritten: float = 0.0
    labels: Callable[[Batch], Tensor] = own_labels
    over_all_rows: bool = False
    zero_pad_embedding: bool = False


def all_arms(padded: AlignPolicy) -> list[Arm]:
    """The arms in the order of the table; ``padded`` is the layout of all but the first."""
    return [
        Arm("unpadded", "no pads, one rank", 1, AlignPolicy()),
        Arm("padded_sp", "pads hold NaN in every layer, both ways", 2, padded, poisoned=True),
        *(Arm(name, what, 1, padded, handling) for name, what, handling in _OTHERS),
    ]


_OTHERS = [
    (
        "pads hold NaN",
        "attention never writes pad rows (TE PR #3116)",
        Handling(unwritten=float("nan")),
    ),
    (
        "pad loss kept",
        "pads are tokens to predict (TE #2892's norms)",
        Handling(padded_spans, padded_spans, labels=labels_with_pads),
    ),
    (
        "zero pads, loss kept",
        "and embedded as zeros: RMSNorm's 1/sqrt(eps)",
        Handling(padded_spans, padded_spans, labels=labels_with_pads, zero_pad_embedding=True),
    ),
    (
        "RoPE on real bounds",
        "rotated as TE 2.20 MultiheadAttention does",
        Handling(positions=mixed_spans),
    ),
    (
        "boundaries mixed up",
        "for attention too (cuDNN-frontend #737)",
        Handling(mixed_spans, mixed_spans),
    ),
    (
        "labels shifted",
        "labels of unpadded rows (as Megatron #4495)",
        Handling(labels=labels_of_unpadded_rows),
    ),
    (
        "mean over all rows",
        "pads count in the mean (open-instruct #756)",
        Handling(over_all_rows=True),
    ),
    (
        "length by token id",
        "the end taken for a pad (Megatron-Bridge)",
        Handling(labels=labels_without_end),
    ),
]
