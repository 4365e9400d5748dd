"""Sequence-parallel layers and attention for packed batches whose sequences carry padding."""

from padded_sp.alignment import AlignPolicy
from padded_sp.attention import DotProductAttention
from padded_sp.checkpoint import sharded_state_dict
from padded_sp.collectives import check_agreement
from padded_sp.context import carry_meta, seq_meta
from padded_sp.gradients import reduce_replicated_gradients
from padded_sp.linear import ColumnParallelLinear, LayerNormColumnParallelLinear, RowParallelLinear
from padded_sp.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from padded_sp.meta import PaddedSeqMeta
from padded_sp.normalization import LayerNorm, RMSNorm
from padded_sp.padding import pad, roll, unpad, zero_padding, zero_padding_
from padded_sp.rotary import apply_rotary
from padded_sp.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "AlignPolicy",
    "ColumnParallelLinear",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormColumnParallelLinear",
    "PaddedSeqMeta",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "apply_rotary",
    "carry_meta",
    "check_agreement",
    "gather_from_sequence_parallel_region",
    "pad",
    "reduce_replicated_gradients",
    "reduce_scatter_to_sequence_parallel_region",
    "roll",
    "scatter_to_sequence_parallel_region",
    "seq_meta",
    "sharded_state_dict",
    "unpad",
    "vocab_parallel_cross_entropy",
    "zero_padding",
    "zero_padding_",
]
__version__ = "0.1.0"
