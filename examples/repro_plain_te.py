"""What plain Transformer Engine makes of the reported sequences: one line of it a process.

    python examples/repro_plain_te.py "Linear, BF16, NaN in pad rows"

``repro_fp8_padding_bug.py`` runs each of ``LINES`` so, and shows what came of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from repro_case import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    NAN,
    PADDED,
    REAL,
    attend_exactly,
    distance,
    rows,
)
from torch import Tensor

from padded_sp import PaddedSeqMeta, unpad


def attention(recipe: str = "", mask: str = "padding_causal", *third: int) -> str:
    """DotProductAttention of the packed rows, forward and backward."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    fp8 = getattr(recipes, recipe)(fp8_dpa=True) if recipe else None
    meta = PaddedSeqMeta.from_seq_lens(REAL, padded_lens=PADDED, device="cuda")
    attend = te.DotProductAttention(HEADS, HEAD_DIM, *third)
    q, k, v = (rows(seed, meta).view(-1, HEADS, HEAD_DIM).requires_grad_() for seed in range(3))
    with te.autocast(enabled=fp8 is not None, recipe=fp8):
        out = attend(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type=mask,
            cu_seqlens_q=meta.cu_seqlens,
            cu_seqlens_kv=meta.cu_seqlens,
            cu_seqlens_q_padded=meta.cu_seqlens_padded,
            cu_seqlens_kv_padded=meta.cu_seqlens_padded,
            max_seqlen_q=meta.max_seq_len,
            max_seqlen_kv=meta.max_seq_len,
        )
    out.backward(torch.ones_like(out))
    if len(out) != meta.num_rows:
        return f"runs, but returns {len(out)} of {meta.num_rows} rows"
    exact = attend_exactly(*(unpad(x.detach(), meta).double() for x in (q, k, v)))
    error = distance(unpad(out.detach(), meta), exact)
    largest_pad = out.detach()[meta.padding_mask].abs().max().item()
    return f"runs: {len(out)} rows, {error:.1e} from float64, pad rows at most {largest_pad:g}"


def linear(recipe: str, fill: float) -> str:
    """te.Linear whose pad rows hold ``fill``, beside zeros there; no gradient comes from them."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    meta = PaddedSeqMeta.from_seq_lens(REAL, padded_lens=PADDED, device="cuda")
    fp8 = getattr(recipes, recipe)() if recipe else None

    def results(pads: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16)
        for _ in range(2):  # delayed scaling takes its scales from the step before
            layer.weight.grad = None
            with te.autocast(enabled=fp8 is not None, recipe=fp8):
                y = layer(rows(0, meta, pads))
            y.backward(rows(1, meta))
        return unpad(y.detach(), meta), layer.weight.grad

    (y, grad), (clean_y, clean_grad) = results(fill), results(0.0)
    if grad.isnan().any():
        return f"runs, but the weight gradient is NaN in {grad.isnan().double().mean().item():.0%}"
    moved = f"{distance(y, clean_y):.1e}", f"{distance(grad, clean_grad):.1e}"
    return f"runs: real outputs move by {moved[0]}, the weight gradient by {moved[1]}"


def te_recipe() -> str:
    import transformer_engine.pytorch as te

    return f"is {te.recipe}"


#: What is shown -> what runs; "..." goes on from packed rows and mask padding_causal.
LINES: dict[str, Callable[[], str]] = {
    "te.recipe": te_recipe,
    "DotProductAttention(32, 48, 48)": partial(attention, "", "padding_causal", 48),
    'DotProductAttention(32, 48), mask "causal"': partial(attention, "", "causal"),
    '..., mask "padding_causal", BF16': attention,
    "... with NVTE_FUSED_ATTN=0": attention,
    "... with DelayedScaling(fp8_dpa=True)": partial(attention, "DelayedScaling"),
    "... with Float8CurrentScaling(fp8_dpa=True)": partial(attention, "Float8CurrentScaling"),
    "... with Float8BlockScaling(fp8_dpa=True)": partial(attention, "Float8BlockScaling"),
    "Linear, BF16, NaN in pad rows": partial(linear, "", NAN),
    "Linear, delayed scaling, 1e4 in pad rows": partial(linear, "DelayedScaling", 1e4),
    "Linear, current scaling, 1e4 in pad rows": partial(linear, "Float8CurrentScaling", 1e4),
    "Linear, blockwise scaling, 1e4 in pad rows": partial(linear, "Float8BlockScaling", 1e4),
    "Linear, MXFP8": partial(linear, "MXFP8BlockScaling", 1e4),
}
ENVIRONMENT = {"... with NVTE_FUSED_ATTN=0": {"NVTE_FUSED_ATTN": "0"}}


# --- One line a process ---------------------------------------------------------------------------

_MARK = "outcome: "


def outcomes(seconds: float = 180) -> dict[str, str]:
    """What came of each line: an error, a signal or no end within ``seconds`` show as well."""
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(partial(outcome, seconds=seconds), LINES)
        return dict(zip(LINES, found, strict=True))


def outcome(line: str, seconds: float, script: str = __file__) -> str:
    """What came of one line in a process of its own."""
    environment = os.environ | ENVIRONMENT.get(line, {})
    try:
        done = subprocess.run(
            [sys.executable, script, line],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no end within {seconds:g} s"
    said = [text for text in done.stdout.splitlines() if text.startswith(_MARK)]
    if done.returncode < 0:
        return f"crashes: {signal.Signals(-done.returncode).name}"
    if done.returncode or not said:
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return f"ends with status {done.returncode}: {last[0]}"
    return said[-1].removeprefix(_MARK)


def main() -> None:
    """Runs the line that is named, and prints what came of it."""
    try:
        found = LINES[sys.argv[1]]()
        torch.cuda.synchronize()
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        found = f"raises {type(error).__name__}: {first_line}"
    print(f"{_MARK}{found}", flush=True)


if __name__ == "__main__":
    main()
