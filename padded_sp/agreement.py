"""What the ranks of a group compare about their metas, and what they say where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padded_sp.meta import PaddedSeqMeta

# In the order compared: a wrong length also changes the rows, and the length is what to look at.
_FIELDS = (
    "type",
    "is_capacity",
    "num_sequences",
    "seq_lens",
    "padded_lens",
    "num_rows",
    "max_seq_len",
    "tp_size",
    "cp_size",
)
_HOST_LENGTHS = ("seq_lens", "padded_lens")


def agreement_facts(meta: PaddedSeqMeta) -> dict[str, Any]:
    """Every host integer of `meta` that ranks must share, ready for JSON.

    Anything but a meta yields its type alone, so that the mistake of one rank can be reported by
    all of them. A capacity meta has no host lengths; its boundaries are not read.
    """
    facts: dict[str, Any] = {"type": type(meta).__name__}
    if isinstance(meta, PaddedSeqMeta):
        absent = _HOST_LENGTHS if meta.is_capacity else ()
        facts |= {name: getattr(meta, name) for name in _FIELDS[1:] if name not in absent}
    return facts


def raise_where_different(facts_of_ranks: Sequence[dict[str, Any]]) -> None:
    """Raises one and the same error on every rank that holds the same `facts_of_ranks`.

    Args:
        facts_of_ranks: `agreement_facts` of each rank, in rank order.

    Raises:
        ValueError: a field differs; names the first such field, the sequence, and who holds what.
    """
    for field in _FIELDS:
        values = [facts.get(field) for facts in facts_of_ranks]
        if all(value == values[0] for value in values):
            continue
        where = field
        if field in _HOST_LENGTHS:
            columns = zip(*values, strict=True)
            sequence, values = next((i, c) for i, c in enumerate(columns) if len(set(c)) > 1)
            where = f"{field}[{sequence}] (sequence {sequence})"
        raise ValueError(
            f"the ranks' metas disagree: {where} is {by_value(values)}. Every rank of a tensor "
            f"parallel group works on the same batch: build its meta from the same lengths and "
            f"the same AlignPolicy, or broadcast the lengths from one rank"
        )
    if facts_of_ranks[0]["type"] != PaddedSeqMeta.__name__:
        raise ValueError(
            f"check_agreement takes a PaddedSeqMeta, got {facts_of_ranks[0]['type']} on every rank"
        )


def ranks_phrase(ranks: Sequence[int]) -> str:
    """ "rank 2", or "ranks 0, 1 and 3"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def by_value(values: Sequence[Any]) -> str:
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks_phrase(ranks)}" for value, ranks in holders.items())
