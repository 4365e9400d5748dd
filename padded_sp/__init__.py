"""Sequence-parallel layers and attention for packed batches whose sequences carry padding."""

from padded_sp.alignment import AlignPolicy
from padded_sp.context import carry_meta, seq_meta
from padded_sp.meta import PaddedSeqMeta

__all__ = ["AlignPolicy", "PaddedSeqMeta", "carry_meta", "seq_meta"]
__version__ = "0.1.0"
