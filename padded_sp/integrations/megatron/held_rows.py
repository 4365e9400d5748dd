"""Which rows of the pack a tensor of Megatron's holds: all of them, or this rank's share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from padded_sp.collectives import group_rank, group_size
from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


def held_rows(
    x: Tensor,
    meta: PaddedSeqMeta,
    name: str,
    tp_group: ProcessGroup | None,
    *,
    sequence_parallel: bool,
    divided: bool | None = None,
) -> tuple[int, int]:
    """The first row that x [rows, ...] holds, and over how many ranks the rows are divided.

    ``divided``: whether they are, where x must be so under ``sequence_parallel``; None: x tells by
    its rows, as in a layer that Megatron puts in either place.

    Reads host integers only. Raises: ValueError: other rows; x and its meta on two devices.
    """
    shards = shards_of(tp_group, sequence_parallel)
    if divided is None:
        divided = not x.dim() or x.shape[0] != meta.num_rows
    shards = shards if divided else 1
    meta.check_rows(x, name, shards)
    if x.device != meta.device:
        raise ValueError(
            f"{name} is on {x.device}, its meta on {meta.device}: move the meta, meta.to(device)"
        )
    return first_row(meta, tp_group, shards), shards


def shards_of(tp_group: ProcessGroup | None, sequence_parallel: bool) -> int:
    """The ranks that divide rows where rows are divided."""
    return group_size(tp_group) if sequence_parallel else 1


def first_row(meta: PaddedSeqMeta, tp_group: ProcessGroup | None, shards: int) -> int:
    """Of this rank's share, where ``shards`` ranks divide the rows."""
    return group_rank(tp_group) * (meta.num_rows // shards) if shards > 1 else 0
