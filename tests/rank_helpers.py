"""What bodies that run on every rank need beside the package itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import (
    ColumnParallelLinear,
    DotProductAttention,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rotary,
    roll,
    vocab_parallel_cross_entropy,
)


def ranks_share_a_gpu() -> bool:
    """Whether collectives go over the host, as they do where there are fewer GPUs than ranks: then
    they wait for the device, and no graph can hold them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() < ranks


needs_own_gpu = pytest.mark.skipif(
    ranks_share_a_gpu(), reason="ranks that share a GPU communicate over the host, and wait for it"
)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where this rank's tensors live: its GPU under torchrun where there is one, else the CPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def drawn(
    group: dist.ProcessGroup, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal values of this shape, the same on every rank and on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device_of(group), dtype)


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, for which NaN equals NaN and -0.0 is not 0.0."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(by_size[x.dtype.itemsize])


def extremes(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Infinities, NaNs of several payloads, -0.0 and subnormals, on CPU: what arithmetic, be it
    ``x + 0 * x``, would not leave as it is."""
    infinity = bits(torch.tensor([float("inf")]).to(dtype))
    patterns = torch.cat([infinity + i for i in range(4)] + [infinity * 0 + i for i in range(3)])
    sign = bits(torch.tensor([-1.0]).to(dtype)) ^ bits(torch.tensor([1.0]).to(dtype))
    patterns = torch.cat([patterns, patterns ^ sign])
    generator = torch.Generator().manual_seed(seed)
    drawn = patterns[torch.randint(len(patterns), shape, generator=generator)]
    return drawn.view(dtype)


def part(tensor: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's share of a tensor that is divided along ``dim``: a view."""
    return tensor.chunk(group.size(), dim)[group.rank()]


def comm_counts(comms: CommDebugMode) -> dict[str, int]:
    """The collectives that ran, by name: {"all_gather_into_tensor": 1, ...}."""
    counts: dict[Any, int] = comms.get_comm_counts()
    return {str(op).rpartition(".")[2]: count for op, count in counts.items() if count}


class HostRead(AssertionError):
    """The host asked for what only the device knows."""


@contextmanager
def forbid_host_reads(device: torch.device) -> Iterator[None]:
    """Fails whatever waits for the device: PyTorch's own check on CUDA, a guard like it on CPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(self: Tensor, *_: Any, **__: Any) -> None:
        raise HostRead(f"a tensor of shape {tuple(self.shape)} was read on the host")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__"):
            patch.setattr(Tensor, name, refuse)
        with _RefuseReadingOperators():
            yield


class _RefuseReadingOperators(TorchDispatchMode):
    """Operators that hand a value to the host, or whose result has a shape that depends on one."""

    _READING = frozenset(
        {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        has_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in self._READING or has_mask:
            raise HostRead(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


class EveryLayer(nn.Module):
    """A language model of one block, from ids to loss, that calls every public layer once."""

    def __init__(self, tp_group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__()
        place: Any = {"tp_group": tp_group, "device": device}
        self.tp_group, heads, head_dim, hidden, vocabulary = tp_group, 12, 8, 24, 24
        self.embedding = VocabParallelEmbedding(vocabulary, hidden, **place)
        self.qkv = LayerNormColumnParallelLinear(
            hidden, 3 * heads * head_dim, parameters_split=("query", "key", "value"), **place
        )
        self.attention = DotProductAttention(heads, head_dim, tp_group=tp_group)
        self.out = RowParallelLinear(heads * head_dim, hidden, **place)
        self.norm = RMSNorm(hidden, **place)
        self.head = ColumnParallelLinear(hidden, vocabulary, bias=False, **place)
        angles = torch.arange(64, device=device)[:, None] * torch.rand(head_dim // 2, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, ids: Tensor, meta: PaddedSeqMeta) -> Tensor:
        x = self.embedding(ids, meta)
        qkv = self.qkv(x, meta).view(meta.num_rows, 3, -1, self.attention.head_dim)
        q, k, v = qkv.unbind(1)
        q, k = (apply_rotary(t, self.cos, self.sin, meta) for t in (q, k))
        x = x + self.out(self.attention(q, k, v, meta), meta)
        logits = self.head(self.norm(x, meta), meta)
        labels = roll(ids, meta)
        return vocab_parallel_cross_entropy(logits, labels, meta, tp_group=self.tp_group)
