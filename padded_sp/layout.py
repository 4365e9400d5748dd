"""Which row is what: index tensors of a padded layout, computed on the device from its boundaries.

Only ``meta.py`` calls this. Nothing here reads the device: sizes come as host integers.
Letters: B sequences, T rows, N real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(cu_seqlens_padded: Tensor, num_rows: int) -> Tensor:
    """int32 [T]: the sequence that each row lies in."""
    return _owners(cu_seqlens_padded, num_rows)


def position_ids(cu_seqlens_padded: Tensor, owners: Tensor) -> Tensor:
    """int64 [T]: rows since the padded start of the own sequence."""
    rows = torch.arange(owners.shape[0], device=owners.device)
    return rows - cu_seqlens_padded.index_select(0, owners)


def rows_left(cu_seqlens: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
    """int64 [T]: real rows of the own sequence from this row on; 0 or less on pads."""
    return cu_seqlens.diff().index_select(0, owners) - positions


def real_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, num_tokens: int) -> Tensor:
    """int64 [N]: a token lies as far behind its padded start as behind its real one."""
    owners = _owners(cu_seqlens, num_tokens)
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens + (cu_seqlens_padded - cu_seqlens).index_select(0, owners)


def pad_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, num_pads: int) -> Tensor:
    """int64 [T - N]: a pad lies behind the pads before it, its sequence and those before that."""
    owners = _owners(cu_seqlens_padded - cu_seqlens, num_pads)
    pads = torch.arange(num_pads, device=cu_seqlens.device)
    return pads + cu_seqlens[1:].index_select(0, owners)


def _owners(running_counts: Tensor, total: int) -> Tensor:
    """int32 [total]: for each counted thing, the sequence that it was counted in."""
    things = torch.arange(total, dtype=torch.int32, device=running_counts.device)
    ends = running_counts[1:].contiguous()
    return torch.searchsorted(ends, things, right=True, out_int32=True)
