"""``PaddedSeqMeta``: how the two boundary arrays of a packed batch are made, checked and refilled.

The real boundaries say what belongs to a sequence; the padded ones say where its rows lie in
memory. Everything here is known on the host when a meta is built, so that nothing has to be read
back from the device in a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from padded_sp import boundaries
from padded_sp.layout import Layout

if TYPE_CHECKING:
    from padded_sp.alignment import AlignPolicy


@dataclass(frozen=True, eq=False, repr=False)
class PaddedSeqMeta(Layout):
    """The real and the padded boundaries of one packed batch.

    Rows ``cu_seqlens_padded[i] .. cu_seqlens_padded[i] + seq_lens[i]`` of a packed tensor are the
    real tokens of sequence ``i``; the rows from there to ``cu_seqlens_padded[i + 1]`` are its pads.
    Build one with :meth:`from_seq_lens` or :meth:`from_cu_seqlens`, once per batch and before the
    step. Letters: B sequences, T = ``num_rows``, N = ``num_tokens``.

    Attributes:
        cu_seqlens: int32 [B + 1], real boundaries: ``cu_seqlens[i + 1] - cu_seqlens[i]`` tokens.
        cu_seqlens_padded: int32 [B + 1], boundaries of the layout, the last one is T. The same
            object as ``cu_seqlens`` when nothing is padded, so that backends take their fast path.
        max_seq_len: the longest *padded* length, in rows.
        num_rows: T, rows of the packed tensors, a multiple of ``tp_size``.
        tp_size: ranks that share the rows under sequence parallelism.
        cp_size: ranks that share each sequence under context parallelism.
        is_capacity: made by :meth:`with_capacity`, for CUDA graphs.
    """

    # ---- building -------------------------------------------------------------------------------

    @classmethod
    def from_seq_lens(
        cls,
        seq_lens: Sequence[int] | Tensor,
        policy: AlignPolicy | None = None,
        *,
        padded_lens: Sequence[int] | Tensor | None = None,
        tp_size: int | None = None,
        cp_size: int | None = None,
        num_rows: int | None = None,
        device: torch.device | str | None = None,
    ) -> PaddedSeqMeta:
        """Builds a meta from the real lengths, in tokens.

        Args:
            seq_lens: B lengths, integers on the host (a list, a NumPy array, a CPU tensor), or a
                tensor on a device.
            policy: plans the least legal padding. Without a policy and without ``padded_lens`` the
                plan is that of ``AlignPolicy("bf16", tp_size, cp_size)``.
            padded_lens: B lengths of a layout that exists already; a policy then only checks it.
            tp_size, cp_size: default to the policy's, else 1.
            num_rows: rows of the packed tensors if they are more than the lengths add up to; the
                rest becomes a zero-length entry.
            device: where the arrays go, by one pinned non-blocking copy. None means CPU.

        Lengths on the host cost no synchronisation. Tensors on a device are read here, once each:
        that waits for the device, so build the meta outside the step.

        Raises:
            ValueError: no sequence; a negative length; a real length above its padded one; rows
                that ``tp_size`` does not divide; a layout that the policy does not allow.
        """
        from padded_sp.alignment import AlignPolicy

        tp_size = _size_like(policy, "tp_size", tp_size)
        cp_size = _size_like(policy, "cp_size", cp_size)
        real = boundaries.host_lengths(seq_lens, "seq_lens")
        if padded_lens is not None:
            padded = boundaries.host_lengths(padded_lens, "padded_lens")
        else:
            plan = (policy or AlignPolicy(tp_size=tp_size, cp_size=cp_size)).plan(real)
            real, padded = plan.seq_lens, plan.padded_lens
        meta = cls._build(real, padded, num_rows, tp_size, cp_size, device)
        if policy is not None:
            policy.check(meta)
        return meta

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        cu_seqlens_padded: Sequence[int] | Tensor | None = None,
        *,
        tp_size: int = 1,
        cp_size: int = 1,
        num_rows: int | None = None,
        device: torch.device | str | None = None,
    ) -> PaddedSeqMeta:
        """Builds a meta from boundary arrays, taking the layout as it is.

        Args:
            cu_seqlens: int32 [B + 1], real boundaries, from 0.
            cu_seqlens_padded: int32 [B + 1], boundaries of the layout. None: nothing is padded.
            tp_size, cp_size: ranks that share the rows, and each sequence.
            num_rows: rows of the packed tensors; more than the last boundary append a zero-length
                entry, fewer raise.
            device: where the meta's own arrays go. None means where ``cu_seqlens`` is.

        Arrays on the host cost no synchronisation. Arrays on a device are read once, here: that
        waits for the device, so build the meta outside the step.

        Raises:
            ValueError: arrays that do not start at 0, decrease, differ in length or are not int32;
                a real length above its padded one; ``num_rows`` below the last padded boundary;
                rows that ``tp_size`` does not divide.
        """
        if device is None and isinstance(cu_seqlens, Tensor):
            device = cu_seqlens.device
        real, padded = boundaries.lengths_from_cu_seqlens(cu_seqlens, cu_seqlens_padded)
        return cls._build(real, padded, num_rows, tp_size, cp_size, device)

    @classmethod
    def _build(
        cls,
        seq_lens: tuple[int, ...],
        padded_lens: tuple[int, ...],
        num_rows: int | None,
        tp_size: int,
        cp_size: int,
        device: torch.device | str | None,
    ) -> PaddedSeqMeta:
        tp_size = boundaries.check_size(tp_size, "tp_size")
        cp_size = boundaries.check_size(cp_size, "cp_size")
        boundaries.check_lengths(seq_lens, padded_lens)
        seq_lens, padded_lens = boundaries.fill_up_to(num_rows, seq_lens, padded_lens)
        rows = sum(padded_lens)
        boundaries.check_shards(rows, tp_size)
        real, padded = boundaries.to_device(seq_lens, padded_lens, torch.device(device or "cpu"))
        return cls(
            cu_seqlens=real,
            cu_seqlens_padded=padded,
            max_seq_len=max(padded_lens),
            num_rows=rows,
            tp_size=tp_size,
            cp_size=cp_size,
            is_capacity=False,
            _seq_lens=seq_lens,
            _padded_lens=padded_lens,
            _num_tokens=sum(seq_lens),
        )

    def to(self, device: torch.device | str) -> PaddedSeqMeta:
        """This meta with its arrays on ``device``; itself if they are there already.

        The arrays are made anew from the host lengths: nothing is read from the old device.
        """
        if self._lives_on(torch.device(device)):
            return self
        return self._build(
            self.seq_lens, self.padded_lens, None, self.tp_size, self.cp_size, device
        )

    def _lives_on(self, device: torch.device) -> bool:
        here = self.device
        if here.type == device.type == "cuda" and device.index is None:
            return here.index == torch.cuda.current_device()  # which "cuda" means to PyTorch
        return here == device or (here.type == device.type and device.index is None)

    # ---- rows -----------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, tp_rank: int, tp_size: int | None = None) -> Tensor:
        """The rows of ``tensor`` [T, ...] that rank ``tp_rank`` holds: a view, [T / tp_size, ...].

        Raises: ValueError: ``tensor`` has not T rows; no such rank; T % tp_size.
        """
        tp_size = self.tp_size if tp_size is None else tp_size
        self.check_rows(tensor, "tensor")
        boundaries.check_shards(self.num_rows, tp_size)
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank must be in 0..{tp_size - 1}, got {tp_rank}")
        rows = self.num_rows // tp_size
        return tensor[tp_rank * rows : (tp_rank + 1) * rows]

    def check_rows(self, tensor: Tensor, name: str, shards: int = 1) -> None:
        """Raises ValueError unless ``tensor`` has ``num_rows / shards`` rows."""
        if shards != 1:
            boundaries.check_shards(self.num_rows, shards)
        rows = tensor.shape[0] if tensor.dim() else "no"
        if rows != self.num_rows // shards:
            share = f" / {shards} ranks = {self.num_rows // shards}" if shards > 1 else ""
            raise ValueError(
                f"{name} has {rows} rows, its meta has {self.num_rows}{share}. "
                "Pass the meta that the tensor was packed with; pad(tokens, meta) packs real rows, "
                "from_cu_seqlens(..., num_rows=) takes a longer buffer"
            )

    # ---- capacity for CUDA graphs ---------------------------------------------------------------

    def with_capacity(self, num_sequences: int, num_rows: int, max_seq_len: int) -> PaddedSeqMeta:
        """A meta of fixed shape and address that holds this one's boundaries, for CUDA graphs.

        Capture a step with it, then :meth:`copy_` the meta of each next batch into it between
        replays. Unused rows belong to zero-length entries of at most ``max_seq_len`` rows.

        Args:
            num_sequences: entries, zero-length ones included.
            num_rows: rows of every packed tensor of the captured step.
            max_seq_len: bound of every padded length, in rows.

        Raises: ValueError: the present boundaries do not fit.
        """
        num_sequences = boundaries.check_size(num_sequences, "num_sequences")
        num_rows = boundaries.check_size(num_rows, "num_rows", least=0)
        max_seq_len = boundaries.check_size(max_seq_len, "max_seq_len")
        boundaries.check_shards(num_rows, self.tp_size)
        real, padded = boundaries.fit(
            self.seq_lens, self.padded_lens, num_sequences, num_rows, max_seq_len
        )
        # Never one object for both: the next batch may be padded where this one is not.
        cu_seqlens, cu_seqlens_padded = boundaries.to_device(
            real, padded, self.device, share_equal=False
        )
        return PaddedSeqMeta(
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens_padded,
            max_seq_len=max_seq_len,
            num_rows=num_rows,
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            is_capacity=True,
            _seq_lens=(),
            _padded_lens=(),
            _num_tokens=0,
        )

    def copy_(self, other: PaddedSeqMeta) -> PaddedSeqMeta:
        """Refills a meta with capacity from ``other``, keeping its tensors' addresses.

        One pinned non-blocking copy on the current stream; call it between graph replays.

        Raises: ValueError: this meta has no capacity, or ``other`` does not fit into it or is made
            for another ``cp_size``.
        """
        if not self.is_capacity:
            raise ValueError(
                "copy_ refills metas made by with_capacity; any other meta is frozen: build a new "
                "one for each batch"
            )
        if other.cp_size != self.cp_size:
            raise ValueError(
                f"a meta for cp_size={other.cp_size} does not fit a capacity for "
                f"cp_size={self.cp_size}: plan it for that"
            )
        real, padded = boundaries.fit(
            other.seq_lens, other.padded_lens, self.num_sequences, self.num_rows, self.max_seq_len
        )
        boundaries.refill(self.cu_seqlens, self.cu_seqlens_padded, real, padded)
        return self

    def __repr__(self) -> str:
        what = f"{self.num_sequences} sequences"
        if self.is_capacity:
            what += f", capacity of {self.num_rows} rows"
        else:
            what += f", {self.num_tokens} tokens in {self.num_rows} rows ({self.waste():.1%} pads)"
        return f"PaddedSeqMeta({what}, tp {self.tp_size}, cp {self.cp_size}, {self.device})"


def _size_like(policy: AlignPolicy | None, name: str, given: int | None) -> int:
    """``tp_size`` or ``cp_size``: given, or the policy's; the two must not contradict."""
    from padded_sp.alignment import AlignPolicy

    if policy is None:
        return 1 if given is None else given
    if not isinstance(policy, AlignPolicy):
        raise ValueError(f"policy must be an AlignPolicy, got {policy!r}: AlignPolicy(recipe=...)")
    planned = getattr(policy, name)
    if given is not None and given != planned:
        raise ValueError(f"{name}={given} contradicts the policy's {name}={planned}; pass one")
    return planned
