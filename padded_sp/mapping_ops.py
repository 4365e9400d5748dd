"""The operators ``torch.ops.padded_sp.*`` under the mappings: one move forward, one backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from padded_sp.collectives import (
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_rows,
)
from padded_sp.library import register


class Ranks(NamedTuple):
    """A group of more than one rank, as an operator's schema holds it."""

    name: str
    size: int
    rank: int


_RANKS = "str group_name, int group_size, int group_rank"
Move = Callable[[torch.Tensor, Ranks], torch.Tensor]


@register(f"gather(Tensor x_shard, bool partial_grad, {_RANKS}) -> Tensor")
def gather(x_shard: torch.Tensor, partial_grad: bool, *ranks: Any) -> torch.Tensor:
    """[T / R, ...] -> [T, ...]; the gradient is Partial, or else Replicate."""
    backward = _reduce_scattered if partial_grad else _own_rows
    return _Mapping.apply(x_shard, _gathered, backward, Ranks(*ranks))


@register(f"reduce_scatter(Tensor x_partial, {_RANKS}) -> Tensor")
def reduce_scatter(x_partial: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[T, ...] -> [T / R, ...], summed."""
    return _Mapping.apply(x_partial, _reduce_scattered, _gathered, Ranks(*ranks))


@register(f"scatter(Tensor x_full, {_RANKS}) -> Tensor")
def scatter(x_full: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[T, ...] -> [T / R, ...], this rank's."""
    return _Mapping.apply(x_full, _own_rows, _gathered, Ranks(*ranks))


@register(f"copy(Tensor(a) x, {_RANKS}) -> Tensor(a)")
def copy(x: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """The same values, whose gradient is Partial."""
    return _Mapping.apply(x, _same, _reduced, Ranks(*ranks))


@register(f"reduce(Tensor x_partial, {_RANKS}) -> Tensor")
def reduce(x_partial: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """The sum over ranks, whose gradient is Replicate."""
    return _Mapping.apply(x_partial, _reduced, _same, Ranks(*ranks))


@register(f"scatter_columns(Tensor x_full, {_RANKS}) -> Tensor")
def scatter_columns(x_full: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[..., H] -> [..., H / R], this rank's."""
    return _Mapping.apply(x_full, _own_columns, _gathered_columns, Ranks(*ranks))


@register(f"gather_columns(Tensor x_shard, {_RANKS}) -> Tensor")
def gather_columns(x_shard: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[..., H / R] -> [..., H]; the gradient is Replicate."""
    return _Mapping.apply(x_shard, _gathered_columns, _own_columns, Ranks(*ranks))


@register(f"rows_to_columns(Tensor x_shard, {_RANKS}) -> Tensor")
def rows_to_columns(x_shard: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[T / R, ..., H] -> [T, ..., H / R]."""
    return _Mapping.apply(x_shard, _columns_of_all_rows, _rows_of_all_columns, Ranks(*ranks))


@register(f"columns_to_rows(Tensor x_columns, {_RANKS}) -> Tensor")
def columns_to_rows(x_columns: torch.Tensor, *ranks: Any) -> torch.Tensor:
    """[T, ..., H / R] -> [T / R, ..., H]."""
    return _Mapping.apply(x_columns, _rows_of_all_columns, _columns_of_all_rows, Ranks(*ranks))


class _Mapping(torch.autograd.Function):
    """y = forward(x), grad_x = backward(grad_y): moves that are linear and each other's adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move, ranks: Ranks) -> Any:
        ctx.moves, ctx.ranks = (forward, backward), ranks
        return forward(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        forward, backward = ctx.moves
        return _Mapping.apply(grad, backward, forward, ctx.ranks), None, None, None


def _gathered(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return all_gather_rows(x, ranks.name, ranks.size)


def _reduce_scattered(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return reduce_scatter_rows(x, ranks.name, ranks.size)


def _reduced(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return all_reduce(x, ranks.name, ranks.size)


def _same(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return x.view_as(x)


# Own rows and columns are copies: a view would keep the whole tensor alive, and could not be
# written in place by what follows.


def _own_rows(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    rows = x.shape[0] // ranks.size
    return x.narrow(0, ranks.rank * rows, rows).clone(memory_format=torch.contiguous_format)


def _own_columns(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    columns = x.shape[-1] // ranks.size
    own = x.narrow(-1, ranks.rank * columns, columns)
    return own.clone(memory_format=torch.contiguous_format)


def _gathered_columns(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    blocks = _gathered(x, ranks).view(ranks.size, *x.shape)  # [R, ..., H / R]
    return blocks.movedim(0, -2).reshape(*x.shape[:-1], ranks.size * x.shape[-1])


def _columns_of_all_rows(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    rows, *rest, columns = x.shape
    blocks = x.reshape(rows, *rest, ranks.size, columns // ranks.size).movedim(-2, 0)
    sent = blocks.reshape(ranks.size * rows, *rest, columns // ranks.size)  # [T, ..., H / R]
    return all_to_all_rows(sent, ranks.name, ranks.size)


def _rows_of_all_columns(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    rows, *rest, columns = x.shape
    received = all_to_all_rows(x, ranks.name, ranks.size)
    blocks = received.view(ranks.size, rows // ranks.size, *rest, columns)
    return blocks.movedim(0, -2).reshape(rows // ranks.size, *rest, ranks.size * columns)
