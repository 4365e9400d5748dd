"""The numeric checks over head sizes, masks, pads and recipes, of every backend that is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from padded_sp import alignment, backends, verify
from padded_sp.verdict import Verdict


class Heads(NamedTuple):
    head_dim: int
    v_head_dim: int
    per_kv_head: int = 1


# 48 is odd for every kernel; 192 with 128 is that of latent attention.
_HEADS = (
    Heads(32, 32),
    Heads(48, 48),
    Heads(64, 64, per_kv_head=2),
    Heads(96, 96),
    Heads(128, 128, per_kv_head=4),
    Heads(192, 192),
    Heads(256, 256),
    Heads(192, 128),
)
_WINDOWS = ((-1, -1), (-1, 0), (128, 0))


def verdicts() -> Iterator[Verdict]:
    """One verdict after another. What a backend does not claim to compute is a refusal."""
    for kind, table, of_one in (
        ("attention", backends.ATTENTION, _attention),
        ("linears", backends.LINEAR, _linears),
    ):
        for name in table:
            try:
                backends.load(table, name)
            except Exception as error:  # loaders of CUDA libraries raise all sorts
                # What is not installed claims nothing; what is there and breaks is a failure.
                what = "cannot be imported" if backends.is_installed(name) else "ValueError"
                why = f"{what}: {error}".partition("\n")[0]
                yield Verdict(f"{kind} by {name}", False, {}, {}, why)
            else:
                yield from of_one(name)


def _attention(backend: str) -> Iterator[Verdict]:
    # Many on a GPU, as kernels there may take them apart; a CPU has time for few.
    num_heads = 8 if torch.cuda.is_available() else 4
    for heads in _HEADS:
        for window in _WINDOWS:
            for pads in (True, False):
                yield verify.verify_attention(
                    backend,
                    num_heads=num_heads,
                    num_kv_heads=num_heads // heads.per_kv_head,
                    head_dim=heads.head_dim,
                    v_head_dim=heads.v_head_dim,
                    window=window,
                    pads=pads,
                )


def _linears(backend: str) -> Iterator[Verdict]:
    computes_fp8 = hasattr(backends.load(backends.LINEAR, backend), "make")
    for recipe in alignment.RECIPES if computes_fp8 else ("bf16",):
        for layer in verify.LAYERS:
            yield verify.verify_linear(backend, recipe=recipe, layer=layer)
