"""Arguments of the wrong kind: a clear ValueError, whatever torch would have made of them."""

import pytest
import torch

from padded_sp import (
    AlignPolicy,
    ColumnParallelLinear,
    DotProductAttention,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RMSNorm,
    apply_rotary,
    pad,
    roll,
)

META = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[8, 8])
PADS_ALONE = PaddedSeqMeta.from_seq_lens([0], padded_lens=[4])
TABLE, Q = torch.ones(9, 2), torch.ones(16, 2, 4)

MISTAKES = {
    "rotary_dim of 0": (lambda: apply_rotary(Q, TABLE, TABLE, META, rotary_dim=0), "turn 0 of 4"),
    "integer tables": (lambda: apply_rotary(Q, TABLE.int(), TABLE, META), "must be floating"),
    "tables without rows": (
        lambda: apply_rotary(Q[:4], TABLE[:0], TABLE[:0], PADS_ALONE),
        "at least 1 rows",
    ),
    "scale of a string": (lambda: DotProductAttention(2, 4, softmax_scale="a"), "positive number"),
    "scale of 0": (lambda: DotProductAttention(2, 4, softmax_scale=0.0), "positive number"),
    "half a head": (lambda: DotProductAttention(2.5, 4), "num_heads must be an integer"),
    "part with a dot": (
        lambda: ColumnParallelLinear(8, 8, parameters_split=["a.b", "c"]),
        "names attributes",
    ),
    "part named as the norm": (
        lambda: LayerNormColumnParallelLinear(8, 8, parameters_split=["layer_norm", "b"]),
        "has a layer_norm_weight already",
    ),
    "no features": (lambda: ColumnParallelLinear(0, 8), "in_features must be an integer"),
    "integer activations": (
        lambda: ColumnParallelLinear(8, 8)(torch.ones(16, 8, dtype=torch.int64), META),
        "floating dtype",
    ),
    "eps of None": (lambda: RMSNorm(8, eps=None), "eps must be finite"),
    "half a shift": (lambda: roll(torch.ones(16), META, shifts=1.5), "shifts must be an integer"),
    "complex fill": (lambda: pad(torch.ones(8), META, fill=1j), "cannot hold fill"),
    "recipe for a policy": (lambda: PaddedSeqMeta.from_seq_lens([3], "mxfp8"), "an AlignPolicy"),
    "list of recipes": (lambda: AlignPolicy(["mxfp8"]), "unknown recipe"),
    "no boundaries": (lambda: PaddedSeqMeta.from_cu_seqlens(None), "cu_seqlens is None"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_value_errors(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call()
