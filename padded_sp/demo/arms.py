"""The arms of the demo: the same text trained without padding, with padded_sp, and as others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from padded_sp.alignment import AlignPolicy
from padded_sp.demo.plain import Spans
from padded_sp.meta import PaddedSeqMeta


@dataclass(frozen=True)
class Arm:
    """One line of the demo's table.

    Attributes:
        name: as printed.
        what: what happens to pad rows, in one line.
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


@dataclass(frozen=True)
class Handling:
    """What others do with a padded batch.

    Attributes:
        spans: a batch's sequences as the model sees them; see :func:`plain_logits`.
        unwritten: what attention leaves in rows of no sequence.
        keeps_pad_loss: pad rows have the padding token as their label, instead of none.
        zero_pad_embedding: the padding token's embedding starts as zeros.
    """

    spans: Callable[[PaddedSeqMeta], Spans]
    unwritten: float = 0.0
    keeps_pad_loss: bool = False
    zero_pad_embedding: bool = False


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


def all_arms(padded: AlignPolicy) -> list[Arm]:
    """The arms in the order of the table; ``padded`` is the layout of all but the first."""
    return [
        Arm("unpadded", "no pads, one rank", 1, AlignPolicy()),
        Arm("padded_sp", "pad rows full of NaN, in both passes", 2, padded, poisoned=True),
        *(Arm(name, what, 1, padded, handling) for name, what, handling in _OTHERS),
    ]


_OTHERS = [
    (
        "uninitialised pads",
        "attention leaves pad rows unwritten (here: NaN); the loss is masked",
        Handling(real_spans, unwritten=float("nan")),
    ),
    (
        "pad loss kept",
        "pads count as tokens to predict",
        Handling(padded_spans, keeps_pad_loss=True),
    ),
    (
        "zero pads with gradient",
        "pads embedded as zeros, and their loss kept: RMSNorm's 1/sqrt(eps)",
        Handling(padded_spans, keeps_pad_loss=True, zero_pad_embedding=True),
    ),
    (
        "boundaries mixed up",
        "real boundaries used as offsets into padded rows",
        Handling(mixed_spans),
    ),
]
