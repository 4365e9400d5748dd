"""What the boundaries say of the rows: counts on the host, index tensors on the device.

Nothing here reads the device: sizes come as host integers, and index tensors are computed where
the boundaries are. Letters: B sequences, T rows, N real tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from padded_sp import boundaries

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The boundaries of packed rows, and all that follows from them. See ``PaddedSeqMeta``."""

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seq_len: int
    num_rows: int
    tp_size: int
    cp_size: int
    is_capacity: bool
    _seq_lens: tuple[int, ...]
    _padded_lens: tuple[int, ...]
    _num_tokens: int
    _cache: dict[Any, Any] = field(default_factory=dict)

    # ---- counts on the host ---------------------------------------------------------------------

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """B real lengths, in tokens."""
        return self._seq_lens if not self.is_capacity else self._stale("seq_lens")

    @property
    def padded_lens(self) -> tuple[int, ...]:
        """B padded lengths, in rows."""
        return self._padded_lens if not self.is_capacity else self._stale("padded_lens")

    @property
    def num_sequences(self) -> int:
        """B, zero-length entries included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """N, the real rows."""
        return self._num_tokens if not self.is_capacity else self._stale("num_tokens")

    @property
    def rows_per_rank(self) -> int:
        """T / tp_size, the rows that each rank holds under sequence parallelism."""
        return self.num_rows // self.tp_size

    @property
    def has_padding(self) -> bool:
        """Whether there are pad rows; with capacity there may always be."""
        return self.is_capacity or self.cu_seqlens_padded is not self.cu_seqlens

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.cu_seqlens.device

    def waste(self) -> float:
        """The share of the rows that are pads, from 0 to 1."""
        return 1 - self.num_tokens / self.num_rows if self.num_rows else 0.0

    def num_pads_in(self, start: int, stop: int) -> int:
        """How many of the rows ``start .. stop`` are pads (a host count)."""
        if (start, stop) == (0, self.num_rows):
            return self.num_rows - self.num_tokens
        key = ("num_pads_in", start, stop)
        if key not in self._cache:
            self._cache[key] = self._pads_before(stop) - self._pads_before(start)
        return self._cache[key]

    def _pads_before(self, row: int) -> int:
        if "pad_count" not in self._cache:
            self._cache["pad_count"] = boundaries.PadCount(self.seq_lens, self.padded_lens)
        return self._cache["pad_count"].before(row)

    # ---- derived tensors, computed on the device ------------------------------------------------

    @property
    def sequence_ids(self) -> Tensor:
        """int32 [T]: the sequence that each row lies in, pads included."""
        return self.cached("sequence_ids", lambda: _owners(self.cu_seqlens_padded, self.num_rows))

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: 0, 1, 2, ... from each padded start, running on through the pads."""

        def make() -> Tensor:
            rows = torch.arange(self.num_rows, device=self.device)
            return rows - self.cu_seqlens_padded.index_select(0, self.sequence_ids)

        return self.cached("position_ids", make)

    @property
    def padding_mask(self) -> Tensor:
        """bool [T], **True = pad**, as in Megatron's router and PyTorch's key_padding_mask."""
        return self.cached("padding_mask", lambda: self._rows_left() <= 0)

    @property
    def loss_mask(self) -> Tensor:
        """bool [T]: True where the row has a real next row of its own sequence to predict."""
        return self.cached("loss_mask", lambda: self._rows_left() > 1)

    def _rows_left(self) -> Tensor:
        """int64 [T]: real rows of the own sequence from this row on; 0 or less on pads."""
        lengths = self.cu_seqlens.diff()
        return lengths.index_select(0, self.sequence_ids) - self.position_ids

    @property
    def real_rows(self) -> Tensor:
        """int64 [N]: the indices of the real rows, ascending."""

        def make() -> Tensor:
            # A token lies as far behind its padded start as behind its real one.
            owners = _owners(self.cu_seqlens, self.num_tokens)
            tokens = torch.arange(self.num_tokens, device=self.device)
            return tokens + (self.cu_seqlens_padded - self.cu_seqlens).index_select(0, owners)

        return self.cached("real_rows", make)

    @property
    def pad_rows(self) -> Tensor:
        """int64 [T - N]: the indices of the pad rows, ascending."""

        def make() -> Tensor:
            # A pad lies behind the pads before it, its sequence and the sequences before that.
            pads = torch.arange(self.num_rows - self.num_tokens, device=self.device)
            owners = _owners(self.cu_seqlens_padded - self.cu_seqlens, len(pads))
            return pads + self.cu_seqlens[1:].index_select(0, owners)

        return self.cached("pad_rows", make)

    def pad_rows_in(self, start: int, stop: int) -> Tensor:
        """int64: the pad rows among the rows ``start .. stop``, counted from ``start``."""
        if (start, stop) == (0, self.num_rows):
            return self.pad_rows
        first, last = self._pads_before(start), self._pads_before(stop)
        return self.cached(("pad_rows_in", start, stop), lambda: self.pad_rows[first:last] - start)

    def real_rows_in(self, start: int, stop: int) -> Tensor:
        """int64: the real rows among the rows ``start .. stop``, counted from ``start``."""
        if (start, stop) == (0, self.num_rows):
            return self.real_rows
        first, last = (row - self._pads_before(row) for row in (start, stop))
        return self.cached(
            ("real_rows_in", start, stop), lambda: self.real_rows[first:last] - start
        )

    def cached(self, key: Any, make: Callable[[], _T]) -> _T:
        """``make()``, kept for the life of this meta.

        Under capture of a CUDA graph nothing may be made and kept: it would be filled at replay
        only. A meta with capacity derives its tensors anew at every access, so that the derivation
        is replayed with the graph; any other meta raises. torch.compile traces the derivation into
        its own graph.

        A tensor is made on the stream that asks for it first. Raises: ValueError: under capture.
        """
        if self.is_capacity or torch.compiler.is_compiling():
            return make()
        if key not in self._cache:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"{key!r} of a plain meta would be derived inside a CUDA graph and be empty "
                    "outside of it: capture with meta.with_capacity(...), and copy_ each next "
                    "batch's meta into it"
                )
            # Evaluation may come first: a tensor made in inference mode could not serve training.
            with torch.inference_mode(False):
                self._cache[key] = make()
        return self._cache[key]

    def _stale(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name} is a host count, which graph replays of a meta with capacity would find "
            "stale. Use the arrays (cu_seqlens, padding_mask, position_ids) inside the graph, and "
            "the meta that you copied in outside it"
        )


def _owners(running_counts: Tensor, total: int) -> Tensor:
    """int32 [total]: for each counted thing, the sequence that it was counted in."""
    things = torch.arange(total, dtype=torch.int32, device=running_counts.device)
    ends = running_counts[1:].contiguous()
    return torch.searchsorted(ends, things, right=True, out_int32=True)
