"""Boundary arrays and lengths: what is legal, and their way to the device.

Lengths are tuples of Python integers; arrays are int32.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ARRAY_ALIGNMENT = 4  # int32 elements: each array starts at a multiple of 16 bytes
_INT32_MAX = 2**31 - 1


def host_lengths(lengths: Sequence[int] | Tensor, name: str) -> tuple[int, ...]:
    """Lengths as Python integers, from a list, a NumPy array or a tensor (read once)."""
    if isinstance(lengths, Tensor):
        if lengths.dtype.is_floating_point or lengths.dtype in (torch.bool, torch.complex64):
            raise ValueError(f"{name} must be integers, got {lengths.dtype}")
        lengths = lengths.tolist()
    try:
        return tuple(integer(n) for n in lengths)
    except TypeError:
        raise ValueError(f"{name} must be a sequence of integers, got {lengths!r}") from None


def lengths_from_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor, cu_seqlens_padded: Sequence[int] | Tensor | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The real and padded lengths between boundaries, checked; device arrays are read once."""
    for name, array in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if array is None and name == "cu_seqlens":
            raise ValueError("cu_seqlens is None; pass the real boundaries, int32 [B + 1]")
        dtype = getattr(array, "dtype", torch.int32)
        if str(dtype).removeprefix("torch.") != "int32":
            raise ValueError(f"{name} must be int32, got {dtype}; convert it with .to(torch.int32)")
        if getattr(array, "ndim", 1) != 1:
            raise ValueError(f"{name} must have one dimension, got {array.ndim}; flatten it")  # type: ignore[union-attr]
    real, padded = cu_seqlens, cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if len(real) != len(padded):
        raise ValueError(
            f"cu_seqlens has {len(real)} boundaries and cu_seqlens_padded {len(padded)}: both need "
            "one more than there are sequences"
        )
    if isinstance(real, Tensor) and isinstance(padded, Tensor):
        if real.device != padded.device:
            raise ValueError(
                f"cu_seqlens is on {real.device} and cu_seqlens_padded on {padded.device}: put "
                "both on one device, or both on the host"
            )
        # The one read: both arrays in one transfer.
        real, padded = torch.stack([real, padded]).tolist()
    real = host_lengths(real, "cu_seqlens")
    padded = host_lengths(padded, "cu_seqlens_padded")
    return _differences(real, "cu_seqlens"), _differences(padded, "cu_seqlens_padded")


def integer(value: object) -> int:
    """``value`` as a Python integer. Raises TypeError unless it is an integer of some library."""
    if isinstance(value, bool):
        raise TypeError("a bool is no count")
    return operator.index(value)  # type: ignore[arg-type]


def check_lengths(seq_lens: tuple[int, ...], padded_lens: tuple[int, ...]) -> None:
    """Raises ValueError unless these are lengths of a legal layout."""
    if not seq_lens:
        raise ValueError("no sequence: pass at least one length (0 is legal: an empty sequence)")
    if len(seq_lens) != len(padded_lens):
        raise ValueError(
            f"{len(seq_lens)} seq_lens but {len(padded_lens)} padded_lens: each sequence needs both"
        )
    for i, (real, padded) in enumerate(zip(seq_lens, padded_lens, strict=True)):
        if real < 0 or padded < 0:
            raise ValueError(
                f"sequence {i} has a negative length (real {real}, padded {padded}); lengths are "
                "counts of tokens, 0 or more"
            )
        if real > padded:
            raise ValueError(
                f"sequence {i} has {real} real tokens but only {padded} padded rows; padded rows "
                "hold the real ones and the pads, so they can't be fewer (arguments swapped?)"
            )
    if sum(padded_lens) > _INT32_MAX:
        raise ValueError(
            f"{sum(padded_lens)} rows do not fit into int32 boundaries (at most {_INT32_MAX}); "
            "split the pack"
        )


def check_size(size: object, name: str, least: int | None = 1) -> int:
    """``size`` as a Python integer. Raises ValueError unless it is one of at least ``least``."""
    with suppress(TypeError):
        count = integer(size)
        if least is None or count >= least:
            return count
    bound = "" if least is None else f" of at least {least}"
    raise ValueError(f"{name} must be an integer{bound}, got {size!r}")


def check_shards(num_rows: int, shards: int) -> None:
    """Raises ValueError unless ``num_rows`` divides evenly over the ranks."""
    check_size(shards, "tp_size")
    if num_rows % shards:
        enough = -(-num_rows // shards) * shards
        raise ValueError(
            f"{num_rows} rows do not divide over {shards} ranks (tp_size); plan the pack with "
            f"AlignPolicy(tp_size={shards}), or append pads: num_rows={enough}"
        )


def fill_up_to(
    num_rows: int | None, seq_lens: tuple[int, ...], padded_lens: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives rows behind the last boundary to a zero-length entry."""
    planned = sum(padded_lens)
    if num_rows is None or num_rows == planned:
        return seq_lens, padded_lens
    rows = check_size(num_rows, "num_rows", least=0)
    if rows < planned:
        raise ValueError(
            f"num_rows={rows} is below the last padded boundary {planned}: the tensors must hold "
            "every padded row"
        )
    return (*seq_lens, 0), (*padded_lens, rows - planned)


def fit(
    seq_lens: tuple[int, ...],
    padded_lens: tuple[int, ...],
    num_sequences: int,
    num_rows: int,
    max_seq_len: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Spreads lengths over a capacity; zero-length entries of bounded size hold the rest."""
    used, longest, spare = sum(padded_lens), max(padded_lens), num_sequences - len(seq_lens)
    if longest > max_seq_len:
        raise ValueError(
            f"a padded length of {longest} exceeds the capacity max_seq_len={max_seq_len}"
        )
    if used > num_rows:
        raise ValueError(f"{used} padded rows exceed the capacity num_rows={num_rows}")
    rest = num_rows - used
    needed = -(-rest // max_seq_len) if rest else 0
    if spare < needed:
        raise ValueError(
            f"{len(seq_lens)} sequences and {needed} zero-length entries for the other {rest} rows "
            f"exceed the capacity num_sequences={num_sequences}; a capacity of "
            f"num_sequences={len(seq_lens) + needed} would hold them"
        )
    tail = [min(max_seq_len, rest - i * max_seq_len) for i in range(needed)]
    empty = (0,) * (spare - needed)
    return (*seq_lens, *(0 for _ in tail), *empty), (*padded_lens, *tail, *empty)


class PadCount:
    """Counts the pads before any row, from host lengths, in O(log B)."""

    def __init__(self, seq_lens: tuple[int, ...], padded_lens: tuple[int, ...]) -> None:
        pads = (padded - real for real, padded in zip(seq_lens, padded_lens, strict=True))
        self._seq_lens = seq_lens
        self._starts = list(itertools.accumulate(padded_lens, initial=0))[:-1]
        self._pads_before = list(itertools.accumulate(pads, initial=0))[:-1]

    def before(self, row: int) -> int:
        """The pads among the rows below ``row``."""
        i = bisect_left(self._starts, row) - 1  # the last sequence that starts below the row
        if i < 0:
            return 0
        return self._pads_before[i] + max(0, row - self._starts[i] - self._seq_lens[i])


def to_device(
    seq_lens: tuple[int, ...],
    padded_lens: tuple[int, ...],
    device: torch.device,
    share_equal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Both boundary arrays on ``device`` by one copy; one object where they are equal."""
    entries = len(seq_lens) + 1
    # A meta may be made for evaluation first: inference tensors could not serve training.
    with torch.inference_mode(False):
        packed = _packed(seq_lens, padded_lens, pin=device.type == "cuda")
        packed = packed.to(device, non_blocking=True)
        real, padded = packed[0, :entries], packed[1, :entries]
    return (real, real) if share_equal and seq_lens == padded_lens else (real, padded)


def refill(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor,
    seq_lens: tuple[int, ...],
    padded_lens: tuple[int, ...],
) -> None:
    """Writes new boundaries into the arrays that :func:`to_device` made, by one copy."""
    packed = _packed(seq_lens, padded_lens, pin=cu_seqlens.is_cuda)
    if cu_seqlens.untyped_storage().data_ptr() != cu_seqlens_padded.untyped_storage().data_ptr():
        # Unpickled: each array has memory of its own.
        for array, values in zip((cu_seqlens, cu_seqlens_padded), packed, strict=True):
            array.copy_(values[: array.shape[0]], non_blocking=True)
        return
    stride = cu_seqlens_padded.storage_offset() - cu_seqlens.storage_offset()
    both = cu_seqlens.as_strided(packed.shape, (stride, 1))
    both.copy_(packed, non_blocking=True)


def _packed(seq_lens: tuple[int, ...], padded_lens: tuple[int, ...], pin: bool) -> Tensor:
    entries = len(seq_lens) + 1
    width = -(-entries // _ARRAY_ALIGNMENT) * _ARRAY_ALIGNMENT
    rows = [
        [*itertools.accumulate(lengths, initial=0), *([0] * (width - entries))]
        for lengths in (seq_lens, padded_lens)
    ]
    # On the host whatever the surrounding `with torch.device(...)` says.
    return torch.tensor(rows, dtype=torch.int32, device="cpu", pin_memory=pin)


def _differences(boundaries: tuple[int, ...], name: str) -> tuple[int, ...]:
    if len(boundaries) < 2:
        raise ValueError(f"no sequence: {name} needs at least two boundaries, got {boundaries}")
    if boundaries[0] != 0:
        raise ValueError(f"{name} must start at 0, got {boundaries[0]}")
    lengths = tuple(b - a for a, b in itertools.pairwise(boundaries))
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name} decreases at sequence {i}: from {boundaries[i]} to {boundaries[i + 1]}; "
                "boundaries are running sums of lengths"
            )
    return lengths
