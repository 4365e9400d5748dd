"""The only file that calls torch.distributed: collectives over equal numbers of rows.

Groups travel as a name and a size, which is what an operator's schema can hold. A size of 1
communicates nothing and returns its input. Values are moved unchanged; the only arithmetic is
that of the sums and maxima asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from padded_sp.agreement import agreement_facts, raise_where_different, ranks_phrase
from padded_sp.meta import PaddedSeqMeta

# The functional forms: visible to CommDebugMode and to torch.compile, and they own their output.
_functional = torch.ops._c10d_functional

# What gloo and NCCL both carry as it is. Everything else, FP8 first of all, travels as bytes.
_REDUCED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}
_CARRIED = _REDUCED | {torch.uint8}

# How often this process has exchanged over the host channel of each group, by the channel's key.
_exchanges: Counter[str] = Counter()


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None.

    Raises:
        ValueError: this process is not a member of `group`.
    """
    return 1 if group is None else _member(group).size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in `group`, counted within the group; 0 for None.

    Raises:
        ValueError: this process is not a member of `group`.
    """
    return 0 if group is None else _member(group).rank()


def group_name(group: ProcessGroup | None) -> str:
    """The name by which the functional collectives find `group`; "" for None.

    Raises:
        ValueError: this process is not a member of `group`.
    """
    return "" if group is None else _member(group).group_name


def contains_ranks(outer: ProcessGroup, inner: ProcessGroup | None) -> bool:
    """Whether every rank of `inner` is one of `outer`. Communicates nothing."""
    if inner is None or inner is outer:
        return True
    ranks_of = dist.get_process_group_ranks
    return set(ranks_of(inner)) <= set(ranks_of(outer))


def all_gather_rows(x: torch.Tensor, name: str, size: int) -> torch.Tensor:
    """Shard(0) -> Replicate: every rank's rows, in rank order.

    Over R = `size` ranks:
        x        [rows, ...]       any dtype, the same shape on every rank
        returns  [R * rows, ...]   a new tensor; x itself where R is 1
    Communicates R * x.nbytes bytes. FP8 travels as bytes.

    Args:
        name, size: of the group, from `group_name` and `group_size`.

    Raises:
        RuntimeError: the collective failed, most often because another rank never joined it.
    """
    if size == 1:
        return x
    return _moved(
        "all_gather", x, name, lambda sent: _functional.all_gather_into_tensor(sent, size, name)
    )


def all_to_all_rows(x: torch.Tensor, name: str, size: int) -> torch.Tensor:
    """Sends the i-th block of rows to rank i; returns the blocks received, in rank order.

    Over R = `size` ranks:
        x        [rows, ...]   any dtype, the same shape on every rank, R blocks of rows / R
        returns  [rows, ...]   a new tensor; x itself where R is 1
    Communicates x.nbytes bytes. FP8 travels as bytes.

    Raises:
        ValueError: the rows do not divide into R blocks.
        RuntimeError: the collective failed, most often because another rank never joined it.
    """
    if size == 1:
        return x
    blocks = [_rows_per_rank("all_to_all", x, size)] * size
    return _moved(
        "all_to_all",
        x,
        name,
        lambda sent: _functional.all_to_all_single(sent, blocks, blocks, name),
    )


def reduce_scatter_rows(x: torch.Tensor, name: str, size: int) -> torch.Tensor:
    """Partial -> Shard(0): this rank's rows of the sum over ranks.

    Over R = `size` ranks:
        x        [rows, ...]       a term of the sum; float, int32 or int64
        returns  [rows / R, ...]   a new tensor; x itself where R is 1
    Communicates x.nbytes bytes. The sum is taken in x's dtype, by the group's backend.

    Raises:
        ValueError: the rows do not divide by R, or the dtype has no sum (FP8, bool, bytes).
        RuntimeError: the collective failed, most often because another rank never joined it.
    """
    if size == 1:
        return x
    _check_reducible("reduce_scatter", x)
    _rows_per_rank("reduce_scatter", x, size)
    return _joined(
        "reduce_scatter",
        x,
        name,
        lambda: _functional.reduce_scatter_tensor(x.contiguous(), "sum", size, name),
    )


def all_reduce(
    x: torch.Tensor, name: str, size: int, op: Literal["sum", "max"] = "sum"
) -> torch.Tensor:
    """Partial -> Replicate: the elementwise sum, or maximum, over ranks.

        x        [...]   a term of the sum; float, int32 or int64
        returns  [...]   a new tensor; x itself where `size` is 1
    Communicates 2 * x.nbytes bytes in a ring. The sum is taken in x's dtype.

    Raises:
        ValueError: `op` is neither, or the dtype has no sum (FP8, bool, bytes).
        RuntimeError: the collective failed, most often because another rank never joined it.
    """
    if op not in ("sum", "max"):
        raise ValueError(f'all_reduce takes op="sum" or op="max", got {op!r}')
    if size == 1:
        return x
    _check_reducible("all_reduce", x)
    return _joined("all_reduce", x, name, lambda: _functional.all_reduce(x.contiguous(), op, name))


def check_agreement(meta: PaddedSeqMeta, group: ProcessGroup | None) -> None:
    """Raises on every rank unless all ranks of `group` hold equal metas. Collective.

    Layers size their messages by the meta and trust it; ranks that disagree would wait for one
    another, or read each other's rows. Call this where a batch enters, or write
    ``with seq_meta(meta, check=group):``. Nothing is cached: each call compares anew.

    Compares the real and padded lengths, rows, longest sequence, tp_size, cp_size and whether the
    metas are capacity metas (of these only the capacities: their boundaries stay on the device).

    Communicates a few bytes per sequence through the group's store, on the host alone: the same
    on gloo and NCCL, and no device waits. `group` None, or of one rank, has nothing to compare.
    Messages count ranks within the group.

    Raises:
        ValueError: the metas differ, or one is no meta. The same message on every rank names the
            first field and sequence that differ, and which rank holds which value.
        RuntimeError: a rank did not make this call within the group's timeout; names it.
    """
    mine = agreement_facts(meta)
    if group is None or group_size(group) == 1:
        raise_where_different([mine])
        return
    received = exchange_on_host("check_agreement", json.dumps(mine), group)
    raise_where_different([json.loads(facts) for facts in received])


def exchange_on_host(purpose: str, text: str, group: ProcessGroup) -> list[str]:
    """Every rank's `text` in rank order, through the group's store. No device takes part.

    The n-th call of a rank meets the n-th calls of the others. A rank that reads the texts of call
    n knows that all have read those of n - 1 and withdraws its own: the store does not grow.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    me, size = group.rank(), group.size()
    # Sibling groups of one split share a name, and with it their store's prefix.
    members = repr(dist.get_process_group_ranks(group)).encode()
    channel = f"padded_sp/{purpose}/{group.group_name}/{hashlib.sha256(members).hexdigest()[:16]}"
    call = _exchanges[channel]
    _exchanges[channel] += 1

    keys = [f"{channel}/{call}/{rank}" for rank in range(size)]
    given_up = f"{channel}/{call}/given_up"
    timeout = _timeout_of(group)
    try:
        store.set(keys[me], text)
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError as error:
            absent = [rank for rank in range(size) if not store.check([keys[rank]])]
            if absent:
                store.set(given_up, str(me))
                raise RuntimeError(
                    f"{purpose} over group {group.group_name!r}: {ranks_phrase(absent)} of {size} "
                    f"did not make call {call + 1} within the group's timeout of "
                    f"{timeout.total_seconds():g} s. It probably raised, see its own traceback; "
                    f"{purpose} is collective, every rank must make the same calls"
                ) from error
        if store.check([given_up]):
            raise RuntimeError(
                f"{purpose} over group {group.group_name!r}: rank {me} of {size} made call "
                f"{call + 1} after another rank had given up waiting. This rank is slower than "
                f"the group's timeout of {timeout.total_seconds():g} s, or has left out a call"
            )
        texts = [store.get(key).decode() for key in keys]
        if call:
            store.delete_key(f"{channel}/{call - 1}/{me}")
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"{purpose} over group {group.group_name!r}: the group's store cannot be reached; the "
            f"process that hosts it, as a rule rank 0, has probably ended: see its own traceback"
        ) from error
    return texts


def _timeout_of(group: ProcessGroup) -> timedelta:
    """How long collectives of `group` wait for a rank; where its backend does not tell, how long
    its store waits for a key."""
    try:
        devices = group._device_types
        return max(group._get_backend(device).options._timeout for device in devices)
    except (AttributeError, RuntimeError):
        store = dist.distributed_c10d._get_process_group_store(group)
        return store.timeout  # pyright: ignore[reportAttributeAccessIssue]


def _member(group: ProcessGroup) -> ProcessGroup:
    # torch.distributed.new_group returns a bare int to the ranks that it leaves out.
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"a group is a torch.distributed.ProcessGroup that this rank belongs to, or None for "
            f"one rank; got {group!r}. Ranks outside a subgroup must not call its layers."
        )
    return group


def _rows_per_rank(collective: str, x: torch.Tensor, size: int) -> int:
    if x.shape[0] % size:
        raise ValueError(
            f"{collective} over {size} ranks needs rows that divide by {size}, got "
            f"{x.shape[0]} rows of {tuple(x.shape)}; AlignPolicy(tp_size={size}) plans such rows"
        )
    return x.shape[0] // size


def _check_reducible(collective: str, x: torch.Tensor) -> None:
    if x.dtype not in _REDUCED:
        raise ValueError(
            f"{collective} sums float64, float32, float16, bfloat16, int64 or int32, got "
            f"{x.dtype}; convert to one of these before the sum and back after it"
        )


def _moved(
    collective: str, x: torch.Tensor, name: str, move: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    sent = x.contiguous()
    if x.dtype in _CARRIED:
        return _joined(collective, x, name, lambda: move(sent))
    return _joined(collective, x, name, lambda: move(sent.view(torch.uint8))).view(x.dtype)


def _joined(
    collective: str, x: torch.Tensor, name: str, launch: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Launches and waits. On NCCL this waits on the stream, not on the host, and a rank that never
    joins is the watchdog's to report."""
    try:
        return _functional.wait_tensor(launch())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{collective} of {tuple(x.shape)} {x.dtype} over group {name!r} failed on "
            f"{_this_rank(name)}. As a rule another rank did not join it: it probably raised, see "
            f"its own traceback; else it is slower than the group's timeout, or has another shape"
        ) from error


def _this_rank(name: str) -> str:
    group = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    return f"rank {group.rank()} of {group.size()}"
