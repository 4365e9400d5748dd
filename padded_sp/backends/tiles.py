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
            on_device(packed, meta.device),
            on_device(queries, meta.device),
            on_device(keys, meta.device),
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
) -> tuple[Tensor, Tensor, Tensor]:
    """``Tiles.packed``, ``.queries`` and ``.keys``, int64 on the host."""
    packed: list[list[int]] = []
    alone: list[Sequence] = []
    is_open = False
    for sequence in sequences(meta, kv_meta):
        is_left_out = longest is not None and sequence.longest > longest
        if is_left_out or sequence.longest > blocks.packed:
            if not is_left_out:
                alone.append(sequence)
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
    columns = _host_table([list(sequence) for sequence in alone], 6)
    return (
        _host_table([tile for tile in packed if tile[1] or tile[3]], 4),
        _longest_first(_query_tiles(columns, window, blocks)),
        _longest_first(_key_tiles(columns, window, blocks)),
    )


def _host_table(rows: list[list[int]], fields: int) -> Tensor:
    # On the host whatever the surrounding `with torch.device(...)` says.
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, fields)


def _longest_first(tiles: Tensor) -> Tensor:
    return tiles[(tiles[:, 2] - tiles[:, 4]).argsort(stable=True)]


def _pieces(table: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of each sequence as many rows of the table as it has pieces of ``size``; their numbers."""
    pieces = (counts + size - 1) // size
    owner = torch.arange(len(counts), device="cpu").repeat_interleave(pieces)
    before = pieces.cumsum(0) - pieces
    return table[owner], torch.arange(len(owner), device="cpu") - before[owner]


def _query_tiles(table: Tensor, window: tuple[int, int], blocks: Blocks) -> Tensor:
    left, right = window
    table, number = _pieces(table, table[:, 1], blocks.queries)
    q_first, q_count, k_first, k_count, q_row, k_row = table.T
    q_stop, k_stop = q_first + q_count, k_first + k_count
    offset = k_stop - q_stop
    first = q_first + number * blocks.queries
    stop = (first + blocks.queries).minimum(q_stop)
    begin = k_first if left < 0 else k_first.maximum(first + offset - left)
    end = k_stop if right < 0 else k_stop.minimum(stop + offset + right)
    all_see = k_stop if right < 0 else k_stop.minimum(first + offset + right + 1)
    begin, end = begin.minimum(k_stop), end.maximum(k_first)
    end = end.maximum(begin)
    whole = (all_see - begin).clamp(min=0) // blocks.keys_at_a_time
    full_end = begin + whole * blocks.keys_at_a_time if left < 0 else begin
    fields = first, stop - first, begin, full_end, end, q_row - q_first, k_row - k_first, offset
    return torch.stack(fields, 1)


def _key_tiles(table: Tensor, window: tuple[int, int], blocks: Blocks) -> Tensor:
    left, right = window
    table, number = _pieces(table, table[:, 3], blocks.keys)
    q_first, q_count, k_first, k_count, q_row, k_row = table.T
    q_stop, k_stop = q_first + q_count, k_first + k_count
    offset = k_stop - q_stop
    first = k_first + number * blocks.keys
    stop = (first + blocks.keys).minimum(k_stop)
    begin = q_first if right < 0 else q_first.maximum(first - offset - right)
    end = q_stop if left < 0 else q_stop.minimum(stop - offset + left)
    begin = begin.minimum(q_stop)
    end = end.maximum(begin)
    if left >= 0:
        masked_end = end
    elif right < 0:
        masked_end = begin
    else:  # from here on each query sees all keys
        some = (stop - 1 - offset - right - begin).clamp(min=0)
        steps = (some + blocks.queries_at_a_time - 1) // blocks.queries_at_a_time
        masked_end = end.minimum(begin + steps * blocks.queries_at_a_time)
    fields = first, stop - first, begin, masked_end, end, q_row - q_first, k_row - k_first, offset
    return torch.stack(fields, 1)


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


def on_device(table: Tensor | list[int] | list[list[int]], device: torch.device) -> Tensor:
    """int32, by a copy that nobody waits for."""
    # A list goes to the host first whatever the surrounding `with torch.device(...)` says.
    host = torch.as_tensor(table, dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
