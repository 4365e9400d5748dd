"""What ``te_block.py`` times: a network over padded_sp, and the same over plain TE."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from padded_sp import (
    ColumnParallelLinear,
    DotProductAttention,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RowParallelLinear,
    seq_meta,
)
from padded_sp.backends.te import FP8GlobalStateManager, autocast, make_recipe, te

ROWS, SLOT, MULTIPLE = 16384, 128, 16
HIDDEN, FFN = 4096, 14336
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
STEPS_TO_COMPARE = 3  # delayed scaling takes its scales from the steps before

# --- Two libraries, one network -------------------------------------------------------------------


class PaddedSp:
    """The layers of padded_sp over Transformer Engine."""

    name = "padded_sp"

    def __init__(self, meta: PaddedSeqMeta, group: dist.ProcessGroup) -> None:
        self.meta, self.group = meta, group

    def linear(self, kind: str, in_features: int, out_features: int) -> nn.Module:
        layer, options = {
            "column": (ColumnParallelLinear, {}),
            "row": (RowParallelLinear, {}),
            "norm and column": (LayerNormColumnParallelLinear, {"normalization": "RMSNorm"}),
        }[kind]
        placed = {"tp_group": self.group, "params_dtype": DTYPE, "device": self.meta.device}
        return layer(in_features, out_features, bias=False, backend="te", **placed, **options)

    def attention(self) -> nn.Module:
        return DotProductAttention(HEADS, HEAD_DIM, KV_HEADS, tp_group=self.group, backend="te")

    def surroundings(self) -> AbstractContextManager[Any]:
        return seq_meta(self.meta)


class PlainTE:
    """Transformer Engine's own, as a model calls it that packs sequences with pads."""

    name = "plain_te"

    def __init__(self, meta: PaddedSeqMeta, group: dist.ProcessGroup) -> None:
        self.meta, self.group = meta, group

    def linear(self, kind: str, in_features: int, out_features: int) -> nn.Module:
        layer, options = {
            "column": (te.Linear, {"parallel_mode": "column"}),
            "row": (te.Linear, {"parallel_mode": "row"}),
            "norm and column": (
                te.LayerNormLinear,
                {"parallel_mode": "column", "normalization": "RMSNorm"},
            ),
        }[kind]
        placed = {"tp_group": self.group, "params_dtype": DTYPE, "device": self.meta.device}
        return layer(
            in_features, out_features, bias=False, sequence_parallel=True, **placed, **options
        )

    def attention(self) -> nn.Module:
        return PlainAttention(self.meta, self.group)

    def surroundings(self) -> AbstractContextManager[Any]:
        return nullcontext()


class PlainAttention(nn.Module):
    """te.DotProductAttention with both boundaries given and nothing left for it to read back."""

    def __init__(self, meta: PaddedSeqMeta, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = te.DotProductAttention(
            HEADS, HEAD_DIM, num_gqa_groups=KV_HEADS, attention_dropout=0.0, tp_group=group
        )
        self.layout = {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal",
            "cu_seqlens_q": meta.cu_seqlens,
            "cu_seqlens_kv": meta.cu_seqlens,
            "cu_seqlens_q_padded": meta.cu_seqlens_padded,
            "cu_seqlens_kv_padded": meta.cu_seqlens_padded,
            "max_seqlen_q": meta.max_seq_len,
            "max_seqlen_kv": meta.max_seq_len,
            "pad_between_seqs": meta.has_padding,
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.core(q, k, v, **self.layout)


class Column(nn.Module):
    def __init__(self, library: Any, out_features: int = FFN) -> None:
        super().__init__()
        self.up = library.linear("column", HIDDEN, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Pair(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.up = library.linear("column", HIDDEN, FFN)
        self.down = library.linear("row", FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Block(nn.Module):
    """Attention and MLP with their norms and residuals; each rank's q, k and v side by side."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.heads = [n // library.group.size() for n in (HEADS, KV_HEADS, KV_HEADS)]
        self.qkv = library.linear("norm and column", HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.attention = library.attention()
        self.out = library.linear("row", HEADS * HEAD_DIM, HIDDEN)
        self.up = library.linear("norm and column", HIDDEN, FFN)
        self.down = library.linear("row", FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split(self.heads, 1)
        x = x + self.out(self.attention(q, k, v))
        return x + self.down(F.gelu(self.up(x)))


class Candidate:
    """One library's network and what goes in; a step is one forward and backward."""

    def __init__(
        self, network: nn.Module, library: Any, recipe: str, x: Tensor, grad: Tensor
    ) -> None:
        self.network, self.library, self.grad = network, library, grad
        self.recipe = make_recipe(recipe)
        self.x = x.clone().requires_grad_()
        self.host_ms: list[float] = []

    def step(self) -> Tensor:
        for leaf in (self.x, *self.network.parameters()):
            leaf.grad = None
        start = time.perf_counter()
        with self.library.surroundings(), autocast(self.recipe, self.library.group):
            y = self.network(self.x * 1.0)  # as from another layer: padded_sp copies leaves
        y.backward(self.grad)
        self.host_ms.append(1e3 * (time.perf_counter() - start))
        return y

    def results(self) -> dict[str, Tensor]:
        """Of the last of some steps, whose pad rows are cut off."""
        for _ in range(STEPS_TO_COMPARE):
            y = self.step()
        found = {"output": _real_rows(y.detach(), self.library)}
        found["gradient of the input"] = _real_rows(self.x.grad, self.library)
        for name, parameter in self.network.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
        return found


def _real_rows(x: Tensor, library: Any) -> Tensor:
    pads = library.meta.padding_mask
    if len(x) < len(pads):
        pads = pads.chunk(library.group.size())[library.group.rank()]
    return x[~pads]


def candidates(
    build: Callable[[Any], nn.Module], meta: PaddedSeqMeta, recipe: str, group: dist.ProcessGroup
) -> tuple[Candidate, Candidate]:
    """Both libraries' networks with the same weights, and the same data with zeros in pads."""
    FP8GlobalStateManager.reset()  # it would go on updating the scales of earlier networks
    torch.manual_seed(1 + group.rank())
    ours, plain = PaddedSp(meta, group), PlainTE(meta, group)
    network, twin = build(ours), build(plain)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(network.get_parameter(name))
    whole = isinstance(network, Column)
    features = network.up.weight.shape[0] if whole else HIDDEN

    def drawn(whole: bool, features: int) -> Tensor:
        rows = torch.randn(meta.num_rows, features, device=meta.device, dtype=DTYPE)
        rows = rows.masked_fill(meta.padding_mask[:, None], 0)
        return rows if whole else meta.shard(rows, group.rank(), group.size()).clone()

    data = drawn(False, HIDDEN), drawn(whole, features)
    return Candidate(network, ours, recipe, *data), Candidate(twin, plain, recipe, *data)


# --- Layouts --------------------------------------------------------------------------------------


def slots(seed: int, *, pads: bool) -> tuple[list[int], list[int]]:
    """Real and padded lengths: equal slots, each with pads at its end or none at all."""
    draw, number = random.Random(seed), ROWS // SLOT
    real = [draw.randrange(100, SLOT) if pads else SLOT for _ in range(number)]
    return real, [SLOT] * number


def documents(seed: int, rows: int, longest: int) -> tuple[list[int], list[int]]:
    """Real and padded lengths of ``rows`` rows: log-normal with median 490, each with pads."""
    draw, real, padded = random.Random(seed), [], []
    while (left := rows - sum(padded)) > 0:
        length = min(longest, max(MULTIPLE, int(draw.lognormvariate(math.log(490), 1))), left)
        real.append(length - (length % MULTIPLE == 0))
        padded.append(-(-length // MULTIPLE) * MULTIPLE)
    return real, padded
