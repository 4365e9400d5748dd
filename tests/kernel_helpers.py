"""Our attention kernels in tests: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch

import padded_sp.kernels
from padded_sp import PaddedSeqMeta
from padded_sp.backends import reference, triton_attention
from padded_sp.backends.tiles import Blocks

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ARGUMENTS = ("out", "dq", "dk", "dv")
# Blocks and launches that the interpreter gets through; a GPU runs the real ones, too.
SMALL = [Blocks(0, 32, 16, 32, 16), Blocks(16, 16, 16, 32, 32), Blocks(64, 32, 32, 16, 16)]

# Real lengths, pads, and the same of keys where they differ.
PACKS = {
    "one": ([33], [0], None, None),
    "short ones": ([3, 16, 1, 7, 20, 16], [0, 0, 15, 9, 2, 0], None, None),
    "one long with a tail": ([70, 5, 1, 0, 33], [10, 3, 15, 4, 0], None, None),
    "other keys": ([20, 0, 33, 5], [4, 16, 0, 0], [3, 7, 40, 0], [5, 0, 0, 12]),
    "nothing at the ends": ([0, 40, 0], [8, 0, 8], [0, 17, 0], [0, 7, 0]),
}
# Heads, KV heads, head size, value size.
HEADS = {"mha": (2, 2, 16, 16), "gqa": (4, 1, 32, 16), "groups of 3": (6, 2, 24, 24)}
WINDOWS = [(-1, 0), (-1, -1), (8, 0), (8, 4), (-1, 3), (0, 0)]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the backend finds a second copy of the kernels, interpreted."""
    if HAS_GPU:
        return
    triton = pytest.importorskip("triton")  # imported as it is, before its variable is set
    monkeypatch.setattr(triton_attention, "reason_against", lambda *_, **__: "")
    monkeypatch.setattr(padded_sp.kernels, "attention", interpreted(), raising=False)
    # Triton's own library is written in Triton, and was imported to be compiled.
    from triton.runtime.interpreter import InterpretedFunction

    for name in ("max", "sum", "zeros"):
        function = getattr(triton.language, name)
        monkeypatch.setattr(triton.language, name, InterpretedFunction(function.fn))


def forget_the_copy() -> None:
    sys.modules.pop("interpreted_attention_kernels", None)


def interpreted():
    name = "interpreted_attention_kernels"
    if name not in sys.modules:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            path = padded_sp.kernels.__path__[0] + "/attention.py"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def with_blocks(monkeypatch: pytest.MonkeyPatch, blocks: Blocks) -> None:
    config = triton_attention.Config(blocks, (4, 1), (4, 1), (4, 1))
    monkeypatch.setattr(triton_attention, "_CONFIGS", {256: ((math.inf, config),)})


def metas_of(real, pads, k_real, k_pads):
    def meta(lengths, extra):
        padded = [n + more for n, more in zip(lengths, extra, strict=True)]
        return PaddedSeqMeta.from_seq_lens(lengths, padded_lens=padded, device=DEVICE)

    q_meta = meta(real, pads)
    return q_meta, q_meta if k_real is None else meta(k_real, k_pads)


def drawn(meta, kv_meta, heads, dtype=torch.float16, poison=0.0):
    """q, k, v and the gradient of the result, pad rows filled with ``poison``.

    float16, since the interpreter multiplies bfloat16 as if it were integers.
    """
    num_heads, kv_heads, width, v_width = heads
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for rows, *shape in (
        (meta, num_heads, width),
        (kv_meta, kv_heads, width),
        (kv_meta, kv_heads, v_width),
        (meta, num_heads, v_width),
    ):
        x = torch.randn(rows.num_rows, *shape, generator=generator).to(DEVICE, dtype)
        x[rows.padding_mask] = poison
        tensors.append(x)
    return tensors


def run(q, k, v, grad, meta, kv_meta, window, scale=0.3, backend=triton_attention, **options):
    """The result and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = backend.dot_product_attention(
        *leaves, meta, kv_meta, window=window, dropout=0.0, softmax_scale=scale, **options
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(q, k, v, grad, meta, kv_meta, window, scale=0.3):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = reference.dot_product_attention(
        *leaves, meta=meta, kv_meta=kv_meta, mask="full", window=window, softmax_scale=scale
    )
    grads = torch.autograd.grad(out, leaves, grad.double().view_as(out))
    return [out.detach().view(grad.shape), *grads]


def assert_close(actual, expected, limit):
    for name, a, b in zip(ARGUMENTS, actual, expected, strict=True):
        # A gradient that is zero but for rounding is compared with one of unit variance.
        distance = (a.double() - b).norm() / max(b.norm().item(), b.numel() ** 0.5 / 10)
        assert distance <= limit, f"{name} is {distance:.1e} off"
