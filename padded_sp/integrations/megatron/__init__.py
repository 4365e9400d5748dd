"""Megatron-Core, 0.16.1 or newer. It is imported when its own classes are asked for, not before."""

from padded_sp.integrations.megatron.packed_seq_params import (
    from_packed_seq_params,
    to_packed_seq_params,
)
from padded_sp.integrations.megatron.recompute import carry_meta_through_recompute

__all__ = ["carry_meta_through_recompute", "from_packed_seq_params", "to_packed_seq_params"]
