"""Inductor, torch.compile's default: what it fuses on the CPU keeps pads inert as well."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from padded_sp import LayerNormColumnParallelLinear, PaddedSeqMeta, RowParallelLinear

needs_a_compiler = pytest.mark.skipif(
    not shutil.which("c++") or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="Inductor needs a C++ compiler and Python's headers",
)


@needs_a_compiler
def test_one_block_serves_two_packs(tmp_path, monkeypatch):
    import torch._inductor.config as inductor  # takes a while, and warns

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    up = LayerNormColumnParallelLinear(8, 16, normalization="RMSNorm")
    down = RowParallelLinear(16, 8)
    parameters = [*up.parameters(), *down.parameters()]

    def block(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        return down(up(x, meta).relu(), meta)

    def results(call: Callable[..., Tensor], meta: PaddedSeqMeta, pad: float) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, grad = (
            torch.randn(meta.num_rows, 8, generator=generator)
            .masked_fill_(meta.padding_mask[:, None], pad)
            .requires_grad_(i == 0)
            for i in range(2)
        )
        y = call(x, meta)
        return [y, *torch.autograd.grad(y, [x, *parameters], grad)]

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with inductor.patch(compile_threads=1):
        for seq_lens, padded_lens in [([5, 0, 1, 7], [6, 2, 4, 12]), ([3, 2], [5, 12])]:
            meta = PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=padded_lens)
            clean, *poisoned = (results(compiled, meta, pad) for pad in (0.0, float("nan"), 1e4))
            for others in poisoned:
                assert all(map(torch.equal, clean, others))
            torch.testing.assert_close(clean, results(block, meta, 0.0))
