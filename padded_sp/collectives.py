"""The only file that calls torch.distributed: collectives over equal numbers of rows.

Groups travel as a name and a size, which is what an operator's schema can hold. A size of 1
communicates nothing and returns its input. Values are moved unchanged; the only arithmetic is
that of the sums and maxima asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The functional forms: visible to CommDebugMode and to torch.compile, and they own their output.
_functional = torch.ops._c10d_functional

# What gloo and NCCL both carry as it is. Everything else, FP8 first of all, travels as bytes.
_CARRIED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    + (torch.int64, torch.int32, torch.uint8)
)
_REDUCED = _CARRIED - {torch.uint8}


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
    return _joined(
        "all_reduce", x, name, lambda: _functional.all_reduce(x.contiguous(), op, name)
    )


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
    except Exception as error:
        raise RuntimeError(
            f"{collective} of {tuple(x.shape)} {x.dtype} over group {name!r} failed on "
            f"{_this_rank(name)}: another rank did not join it. It probably raised, see its own "
            f"traceback; otherwise it is slower than the group's timeout, or passed another shape."
        ) from error


def _this_rank(name: str) -> str:
    group = dist.distributed_c10d._resolve_process_group(name)
    return f"rank {group.rank()} of {group.size()}"
