"""A pack as tiles for ``kernels/attention.py``: lists of what there is to compute, pads left out.

Tokens are counted without pads, over all sequences. Sequences that fit into one block several at a
time share it; longer ones are cut into blocks of their own. Lists are made once per meta, from its
host lengths, and copied to the device without waiting for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from padded_sp.meta import PaddedSeqMeta

#: Real and padded lengths of packs for ``verify.py``, which take every way that there is for packs:
#: sequences of many kinds, several that share a tile, long ones, and one that is long for any size.
PROOF_PACKS = (
    ((3, 150, 700, 333, 100), (64, 160, 704, 336, 112)),
    ((20, 17, 5, 40, 3, 20, 64, 1, 100), (32, 32, 16, 48, 16, 32, 64, 16, 112)),
    ((1000, 30), (1008, 32)),
    ((1500, 300), (1504, 304)),
)


class Blocks(NamedTuple):
    """Sizes of tiles, in tokens."""

    packed: int  # of queries, and of keys, of several short sequences together; 0: none are packed
    queries: int  # of a tile of queries, and the keys that it takes at a time
    keys_at_a_time: int
    keys: int  # of a tile of keys, and the queries that it takes at a time
    queries_at_a_time: int


class Tiles(NamedTuple):
    """int32 on the device, longest work first.

    Attributes:
        packed: [P, 4]: first query and number of queries, first key and number of keys.
        queries: [Q, 8]: first query, number of queries; the keys from .. on, that all of them see
            .. up to, that any of them sees .. up to; what to add to a query's and to a key's
            number for its row; what to add to a query's number for the key at its own place.
        keys: [K, 8]: the same with keys and queries exchanged, but that the queries from .. up to
            do not see all keys, and those from there up to the end do.
        q_rows, k_rows: [N], [N_kv]: the row of each token.
        low, high: [N]: the keys that each query of ``packed`` sees, from and up to.
    """

    packed: Tensor
    queries: Tensor
    keys: Tensor
    q_rows: Tensor
    k_rows: Tensor
    low: Tensor
    high: Tensor


def tiles_of(
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    blocks: Blocks,
    longest: int | None = None,
) -> Tiles:
    """The tiles of a pack, kept for the life of its meta. ``window`` as in ``masks.py``.

    ``longest``: longer sequences, by queries or keys, are left out.
    """

    def make() -> Tiles:
        packed, queries, keys = tile_lists(meta, kv_meta, window, blocks, longest)
        low, high = _seen_by_each(meta, kv_meta, window)
        return Tiles(
            on_device(packed, 4, meta.device),
            on_device(queries, 8, meta.device),
            on_device(keys, 8, meta.device),
            meta.real_rows.int(),
            kv_meta.real_rows.int(),
            low,
            high,
        )

    # The key holds the other meta itself, not its id: ids are used again.
    other = None if kv_meta is meta else kv_meta
    return meta.cached(("attention tiles", window, blocks, longest, other), make)


def typical_length(meta: PaddedSeqMeta, longest: int | None = None) -> float:
    """Tokens of the sequence that the average token lies in, of those up to ``longest``."""

    def make() -> float:
        lengths = [n for n in meta.seq_lens if longest is None or n <= longest]
        return sum(n * n for n in lengths) / max(1, sum(lengths))

    return meta.cached(("typical length", longest), make)


class Sequence(NamedTuple):
    """One sequence: where its tokens start among all, how many there are, and its first row."""

    q_first: int
    q_count: int
    k_first: int
    k_count: int
    q_row: int
    k_row: int

    @property
    def longest(self) -> int:
        return max(self.q_count, self.k_count)


def sequences(meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta) -> Iterator[Sequence]:
    def starts(lengths: tuple[int, ...]) -> Iterator[int]:
        return itertools.accumulate(lengths, initial=0)

    return map(
        Sequence,
        starts(meta.seq_lens),
        meta.seq_lens,
        starts(kv_meta.seq_lens),
        kv_meta.seq_lens,
        starts(meta.padded_lens),
        starts(kv_meta.padded_lens),
    )


def tile_lists(
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    blocks: Blocks,
    longest: int | None = None,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """``Tiles.packed``, ``.queries`` and ``.keys``, as lists."""
    packed: list[list[int]] = []
    queries: list[list[int]] = []
    keys: list[list[int]] = []
    is_open = False
    for sequence in sequences(meta, kv_meta):
        if longest is not None and sequence.longest > longest:
            is_open = False
            continue
        if sequence.longest > blocks.packed:
            queries += _query_tiles(sequence, window, blocks)
            keys += _key_tiles(sequence, window, blocks)
            is_open = False
            continue
        last = packed[-1] if is_open else None
        if (
            last is not None
            and last[1] + sequence.q_count <= blocks.packed
            and last[3] + sequence.k_count <= blocks.packed
        ):
            last[1] += sequence.q_count
            last[3] += sequence.k_count
        else:
            packed.append([sequence.q_first, sequence.q_count, sequence.k_first, sequence.k_count])
            is_open = True
    for tiles in (queries, keys):
        tiles.sort(key=lambda tile: tile[2] - tile[4])
    return [tile for tile in packed if tile[1] or tile[3]], queries, keys


def _query_tiles(
    sequence: Sequence, window: tuple[int, int], blocks: Blocks
) -> Iterator[list[int]]:
    left, right = window
    q_first, q_count, k_first, k_count, q_row, k_row = sequence
    q_stop, k_stop = q_first + q_count, k_first + k_count
    offset = k_stop - q_stop
    for first in range(q_first, q_stop, blocks.queries):
        stop = min(first + blocks.queries, q_stop)
        begin = k_first if left < 0 else max(k_first, first + offset - left)
        end = k_stop if right < 0 else min(k_stop, stop + offset + right)
        all_see = k_stop if right < 0 else min(k_stop, first + offset + right + 1)
        begin, end = min(begin, k_stop), max(end, k_first)
        end = max(begin, end)
        whole = (all_see - begin) // blocks.keys_at_a_time if left < 0 and all_see > begin else 0
        full_end = begin + whole * blocks.keys_at_a_time
        yield [first, stop - first, begin, full_end, end, q_row - q_first, k_row - k_first, offset]


def _key_tiles(sequence: Sequence, window: tuple[int, int], blocks: Blocks) -> Iterator[list[int]]:
    left, right = window
    q_first, q_count, k_first, k_count, q_row, k_row = sequence
    q_stop, k_stop = q_first + q_count, k_first + k_count
    offset = k_stop - q_stop
    for first in range(k_first, k_stop, blocks.keys):
        stop = min(first + blocks.keys, k_stop)
        begin = q_first if right < 0 else max(q_first, first - offset - right)
        end = q_stop if left < 0 else min(q_stop, stop - offset + left)
        begin = min(begin, q_stop)
        end = max(begin, end)
        if left >= 0:
            masked_end = end
        elif right < 0:
            masked_end = begin
        else:  # from here on each query sees all keys
            some = max(0, stop - 1 - offset - right - begin)
            steps = -(-some // blocks.queries_at_a_time)
            masked_end = min(end, begin + steps * blocks.queries_at_a_time)
        yield [
            first, stop - first, begin, masked_end, end, q_row - q_first, k_row - k_first, offset
        ]  # fmt: skip


def _seen_by_each(
    meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """int32 [N] each: the keys that a query sees, from and up to, among all of its pack."""
    left, right = window
    tokens = torch.arange(meta.num_tokens, device=meta.device, dtype=torch.int32)
    owner = meta.sequence_ids.index_select(0, meta.real_rows)
    first = kv_meta.cu_seqlens.index_select(0, owner)
    stop = kv_meta.cu_seqlens.index_select(0, owner + 1)
    place = tokens + stop - meta.cu_seqlens.index_select(0, owner + 1)
    low = first if left < 0 else torch.maximum(first, place - left)
    high = stop if right < 0 else torch.minimum(stop, place + right + 1)
    return low, high


def on_device(rows: list[list[int]], fields: int, device: torch.device) -> Tensor:
    flat = torch.tensor(
        list(itertools.chain.from_iterable(rows)),
        dtype=torch.int32,
        device="cpu",
        pin_memory=device.type == "cuda",
    )
    return flat.view(-1, fields).to(device, non_blocking=True)
