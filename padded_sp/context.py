"""The meta of the surrounding ``with seq_meta(meta):``, for layers called with one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_F = TypeVar("_F", bound=Callable[..., Any])


class _Entry(NamedTuple):
    """A meta, and the backward pass that it was entered in (-1: in none)."""

    meta: PaddedSeqMeta
    backward_pass: int


_current: ContextVar[_Entry | None] = ContextVar("padded_sp_meta", default=None)


@contextmanager
def seq_meta(meta: PaddedSeqMeta, check: ProcessGroup | None = None) -> Iterator[PaddedSeqMeta]:
    """Makes ``meta`` the one that layers inside take when they are called without one.

    Args:
        meta: of the batch that the layers inside work on.
        check: a process group whose ranks must agree on the meta; see
            :func:`~padded_sp.check_agreement` (collective: every rank enters with it).

    Recomputation of activations runs after the block, on CUDA even in another thread: wrap what is
    recomputed in :func:`carry_meta`.

    Raises: ValueError: ``meta`` is not a PaddedSeqMeta; the ranks of ``check`` disagree.
    """
    if not isinstance(meta, PaddedSeqMeta):
        raise ValueError(f"seq_meta takes a PaddedSeqMeta, got {type(meta).__name__}")
    if check is not None:
        from padded_sp.collectives import check_agreement

        check_agreement(meta, check)
    token = _current.set(_Entry(meta, _backward_pass()))
    try:
        yield meta
    finally:
        _current.reset(token)


def carry_meta(fn: _F) -> _F:
    """``fn`` with the surrounding meta, entered again whenever it runs.

    For activation checkpointing: ``checkpoint(carry_meta(block), x)``. Wrap anew for each batch,
    inside ``with seq_meta(meta):``.

    Raises: ValueError: there is no surrounding meta to carry.
    """
    meta = resolve_meta(None)

    @functools.wraps(fn)
    def with_meta(*args: Any, **kwargs: Any) -> Any:
        with seq_meta(meta):
            return fn(*args, **kwargs)

    return with_meta  # type: ignore[return-value]


def resolve_meta(meta: PaddedSeqMeta | None) -> PaddedSeqMeta:
    """The meta given, or the surrounding one.

    A block that is recomputed during backward must not take the meta that happens to surround the
    backward call: with several batches in flight it may be another batch's. So a meta is only
    taken in the pass that it was entered in.

    Raises: ValueError: neither is there; the surrounding one was entered outside of the backward
        pass that runs now; ``meta`` is something else.
    """
    if meta is not None:
        if not isinstance(meta, PaddedSeqMeta):
            raise ValueError(f"meta must be a PaddedSeqMeta, got {type(meta).__name__}")
        return meta
    if torch.compiler.is_compiling():
        # Dynamo can't trace a context variable, nor tell which backward pass it compiles for.
        torch._dynamo.graph_break(
            "under torch.compile(fullgraph=True) pass the meta as an argument"
        )
    if (surrounding := surrounding_meta()) is not None:
        return surrounding
    if _backward_pass() != -1:
        raise ValueError(
            "a layer was recomputed during backward without its meta: checkpoint "
            "carry_meta(block) instead of block, or pass the meta as an argument"
        )
    raise ValueError("no meta: pass one to the layer, or call it inside `with seq_meta(meta):`")


def surrounding_meta() -> PaddedSeqMeta | None:
    """The surrounding meta if it was entered in the pass that runs now."""
    entry = _current.get()
    return entry.meta if entry is not None and entry.backward_pass == _backward_pass() else None


def _backward_pass() -> int:
    """The number of the backward pass that this thread works on; -1 outside of any."""
    return torch._C._current_graph_task_id()
