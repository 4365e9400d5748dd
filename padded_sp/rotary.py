"""Rotary position embedding by the positions of the padded layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from padded_sp.collectives import group_rank, group_size
from padded_sp.context import resolve_meta
from padded_sp.inert import inert_input, inert_output
from padded_sp.library import register
from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    meta: PaddedSeqMeta | None = None,
    interleaved: bool = False,
    tp_group: ProcessGroup | None = None,
    *,
    rotary_dim: int | None = None,
    inplace: bool = True,
) -> Tensor:
    """Turns each pair of features by the angle of its row's place in its own sequence.

        x    [T, *, D]             or [T / R, *, D], this rank's rows, with a tp_group of R ranks
        cos  [S, rot / 2]          row p: the cosines at position p; sin alike
        out  as x                  (a, b) -> (a cos - b sin, a sin + b cos); features from rot on
                                   pass unchanged
        backward                   turns back: (a, b) -> (a cos + b sin, b cos - a sin)

    Args:
        x: any floating dtype; computed in float32, or float64 for float64.
        cos, sin: tables of any frequencies (YaRN and llama3 ones too, their mscale multiplied in);
            they get no gradient. Tables [S, rot] with each angle twice, as ``cat(angles, angles)``
            or, interleaved, ``repeat_interleave(angles, 2)``, are taken too: by ``rotary_dim``, or
            where they are wider than D / 2 and can be nothing else.
        meta: None: that of the surrounding ``seq_meta``.
        interleaved: pairs are neighbours (2 i, 2 i + 1); else halves (i, i + rot / 2), as in NeoX.
        tp_group: given, x is a shard of rows.
        rotary_dim: rot, the features to turn. None: twice the width of the tables if D has so many,
            else their width.
        inplace: may write zeros into the pad rows of x.

    Communicates nothing. Saves the tables and one position a row. Pad rows of the result and of the
    gradient of x are exactly zero.

    Raises: ValueError: x has not the rows of meta; tables that disagree with each other or x, or
        end before the longest real sequence does.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2.
    """
    meta = resolve_meta(meta)
    size, rank = group_size(tp_group), group_rank(tp_group)
    _check(x, cos, sin, meta, size)
    cos, sin = _half_tables(cos, sin, x.shape[-1], rotary_dim, interleaved)

    first_row = rank * x.shape[0]
    positions = meta.shard(meta.position_ids, rank, size)
    if meta.max_seq_len > cos.shape[0]:  # of pads only: real rows lie inside the tables
        positions = positions.clamp(max=cos.shape[0] - 1)
    x = inert_input(x, meta, first_row=first_row, inplace=inplace)
    out = _rotate(x, cos, sin, positions, interleaved)
    return inert_output(out, meta, first_row=first_row, inplace=inplace)


def _check(x: Tensor, cos: Tensor, sin: Tensor, meta: PaddedSeqMeta, size: int) -> None:
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating [rows, *, D], got {x.dtype} {tuple(x.shape)}")
    meta.check_rows(x, "x", size)
    if not (cos.is_floating_point() and sin.is_floating_point()):
        raise ValueError(f"cos and sin must be floating, got {cos.dtype} and {sin.dtype}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.device != x.device:
        raise ValueError(
            "cos and sin must both be [S, rot / 2], on the device of x, got "
            f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}; "
            f"x is on {x.device}"
        )
    if meta.max_seq_len <= cos.shape[0]:
        return
    # Beyond the tables there may be pads alone. With capacity the host cannot know which they are.
    longest = meta.max_seq_len if meta.is_capacity else max(meta.seq_lens)
    longest = max(1, longest)  # pads alone take the last place there is
    if longest > cos.shape[0]:
        raise ValueError(
            f"the tables end at position {cos.shape[0] - 1}, the longest sequence at "
            f"{longest - 1}; make them with at least {longest} rows"
        )


def _half_tables(
    cos: Tensor, sin: Tensor, features: int, rotary_dim: int | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """[S, rot / 2] of tables that may have each angle twice."""
    width = cos.shape[1]
    rot = rotary_dim
    if rot is None:
        rot = 2 * width if 2 * width <= features else width
    if rot < 2 or rot % 2 or rot > features or width not in (rot // 2, rot):
        raise ValueError(
            f"tables of width {width} do not turn {rot} of {features} features: give [S, rot / 2], "
            "or [S, rot] and rotary_dim=rot, with rot even and at most the features"
        )
    if width == rot // 2:
        return cos, sin
    once = slice(0, None, 2) if interleaved else slice(0, rot // 2)
    return cos[:, once], sin[:, once]


class _Rotate(torch.autograd.Function):
    """Saves the tables and the positions: gathered by them, angles are as large as x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        return _turned(x, cos[positions], sin[positions], interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        cos, sin, positions = ctx.saved_tensors
        turned = _turned(grad, cos[positions], -sin[positions], ctx.interleaved)
        return turned, None, None, None, None


@register("rotate(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) -> Tensor")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return _Rotate.apply(x, cos, sin, positions, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [rows, *, D] turned by cos and sin [rows, rot / 2]."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[1]
    between = [1] * (x.dim() - 2)
    cos, sin = (t.to(compute_dtype).view(-1, *between, half) for t in (cos, sin))
    out = torch.empty_like(x)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = (x[..., part].to(compute_dtype) for part in (first, second))
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
