"""Packed layouts for Hypothesis, and the plain loops that say what each of their rows is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st


class Row(NamedTuple):
    """What one row of a packed tensor is."""

    sequence: int
    position: int
    is_real: bool
    has_next: bool


def rows_of(seq_lens: Sequence[int], padded_lens: Sequence[int]) -> list[Row]:
    """Every row of a layout, one after the other."""
    return [
        Row(sequence, position, position < real, position + 1 < real)
        for sequence, (real, padded) in enumerate(zip(seq_lens, padded_lens, strict=True))
        for position in range(padded)
    ]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The boundaries that the lengths have, from 0."""
    return list(itertools.accumulate(lengths, initial=0))


@st.composite
def layouts(draw: st.DrawFn, tp_size: int = 1) -> tuple[list[int], list[int]]:
    """Real and padded lengths: empty sequences, single tokens, pads anywhere; ``tp_size`` | T."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12))
    real = [length for length, _ in pairs]
    padded = [length + pads for length, pads in pairs]
    padded[-1] += -sum(padded) % tp_size
    return real, padded


def lengths(max_size: int = 12, max_value: int = 40) -> st.SearchStrategy[list[int]]:
    """Real lengths: a few sequences, empty ones and single tokens among them."""
    length = st.one_of(st.just(0), st.just(1), st.integers(0, max_value))
    return st.lists(length, min_size=1, max_size=max_size)


def corner_cases() -> Iterator[tuple[list[int], list[int]]]:
    """Layouts that Hypothesis need not find: one of each kind, and a thousand sequences."""
    yield [0], [0]
    yield [0], [4]
    yield [1], [1]
    yield [1], [8]
    yield [7], [7]
    yield [0, 0, 5, 0], [0, 3, 5, 2]
    yield [100, 150, 120, 130], [112, 160, 128, 144]
    yield [n % 5 for n in range(1000)], [n % 5 + n % 3 for n in range(1000)]
