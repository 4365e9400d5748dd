"""Parameters of a fused linear (query, key, value; gate, up): apart by name, one in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

ParametersSplit = Sequence[str] | Mapping[str, int]


def split_features(split: ParametersSplit | None, out_features: int) -> dict[str, int]:
    """The prefix of each part's parameters, and its share of the whole layer's features.

    Raises: ValueError: no names, a name twice or not fit for an attribute, parts that do not add up
        to ``out_features``.
    """
    if split is None:
        return {"": out_features}
    if isinstance(split, str) or not split:
        raise ValueError(
            f"parameters_split takes names, or a dict of name -> features, got {split!r}"
        )
    if isinstance(split, Mapping):
        sizes = dict(split)
    elif out_features % len(split):
        raise ValueError(
            f"parameters_split names {len(split)} equal parts, which do not divide "
            f"{out_features} features: give a dict of name -> features"
        )
    else:
        sizes = dict.fromkeys(split, out_features // len(split))
    if not all(isinstance(name, str) and name.isidentifier() for name in sizes):
        raise ValueError(f"parameters_split names attributes, so letters and digits, got {split!r}")
    parts = {f"{name.rstrip('_')}_": features for name, features in sizes.items()}
    if len(parts) != len(split) or sum(parts.values()) != out_features:
        raise ValueError(
            f"parameters_split must name parts of different names that add up to "
            f"{out_features} features, got {split!r}"
        )
    return parts


@torch.no_grad()
def lay_side_by_side(parameters: Sequence[nn.Parameter]) -> None:
    """Moves the values into one buffer, one parameter's rows behind the other's.

    Conversions (``.to(...)``, ``copy.deepcopy``) take parameters apart; do it again after them.
    """
    if all(map(_is_plain, parameters)) and not _are_side_by_side(parameters):
        buffer = torch.cat(list(parameters))
        rows = [parameter.shape[0] for parameter in parameters]
        for parameter, part in zip(parameters, buffer.split(rows), strict=True):
            parameter.data = part


def joined(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters [n_i, ...] as one tensor [sum of n_i, ...], differentiable.

    Nothing is copied where they lie side by side; otherwise, and under torch.compile, this is
    ``torch.cat``.
    """
    if len(parameters) == 1:
        return parameters[0]
    if torch.compiler.is_compiling() or not _are_side_by_side(parameters):
        return torch.cat(list(parameters))
    return _Joined.apply(*parameters)


def watch_parts(y: Tensor, whole: Tensor, parts: Sequence[Tensor]) -> None:
    """Lets the backward of ``y`` refuse parts that were written since, as autograd does.

    ``whole = joined(parts)`` is a view of the first, and that one is all that autograd watches.
    Call it where the backward of ``y`` reads ``whole``.
    """
    if len(parts) == 1 or torch.compiler.is_compiling() or y.grad_fn is None:
        return
    if not _is_plain(whole) or whole.data_ptr() != parts[0].data_ptr():  # a copy
        return
    versions = [part._version for part in parts]

    def check(grad_outputs: tuple[Tensor, ...]) -> None:
        for i, (part, version) in enumerate(zip(parts, versions, strict=True)):
            if part._version != version:
                raise RuntimeError(
                    f"part {i} of a fused parameter, needed for gradient computation, has been "
                    f"modified by an inplace operation: it is at version {part._version}; "
                    f"expected version {version} instead. Write parameters after backward"
                )

    y.grad_fn.register_prehook(check)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.rows = [parameter.shape[0] for parameter in parameters]
        first = parameters[0]
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.rows)


def _are_side_by_side(parameters: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one storage."""
    return all(map(_is_plain, parameters)) and all(
        a.dtype == b.dtype
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairwise(parameters)
    )


def _is_plain(parameter: Tensor) -> bool:
    """Not a DTensor or another subclass, whose memory is its own business."""
    return type(parameter) in (nn.Parameter, Tensor) and parameter.is_contiguous()
