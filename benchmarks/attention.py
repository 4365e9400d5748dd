"""Attention on packs: padded_sp's choice beside each backend that it chooses from.

    python benchmarks/attention.py

Causal, forward and backward, BF16, on one GPU. "te" and "flash4" are Transformer Engine's and
FlashAttention-4's own functions, given both boundaries, with zeros in the pads and nothing done
about them afterwards; "torch", "triton" and "auto" are ``DotProductAttention``, whose pads are
inert. A backend that is not installed is left out. All take turns in one run and are compared with
float64 there; the exit status is 1 where ours is further off than 1.2 times Transformer Engine, or
gives other bits at a repeat under deterministic algorithms.

Times are those of the device, the host running ahead; the host's are measured by themselves. q, k
and v are results of operations, as in a model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import provenance, ratio_of_pairs, summary, time_alternating
from torch import Tensor

from padded_sp import DotProductAttention, PaddedSeqMeta, backends
from padded_sp.backends import reference
from padded_sp.backends.tiles import typical_length

MULTIPLE = 16
OURS = ("torch", "triton", "auto")
# Ours may be so much further off than Transformer Engine; both have errors of BF16's rounding.
FURTHER_OFF = 1.2


def main() -> None:
    """Measures everything, prints a line for each and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and numbers")
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar="N")
    default = Path(__file__).parent / "results" / "attention.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    start = time.perf_counter()
    figures, is_exact, pads = {}, True, {}
    for name, lengths in packs(options.seed).items():
        figures[name], agrees = measure(name, *lengths, device, options)
        is_exact &= agrees
    for name in ("short", "log-normal"):
        pads[name] = over_tight(packs(options.seed)[name][0], device, options)
        ratio = pads[name]["ratio_of_pairs_less_zeros"]["median"]
        print(f"{name}: 50 % pads, less their zeros, over none {ratio:.3f}", flush=True)
    content = {
        "benchmark": "attention",
        "heads": list(options.heads),
        "iterations": options.iterations,
        "seed": options.seed,
        "figures": figures,
        "pads_over_tight": pads,
        "seconds": time.perf_counter() - start,
        **provenance(),
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    if not is_exact:
        raise SystemExit(
            "an error is larger than allowed, or bits differ: see 'errors' and 'deterministic'"
        )


# --- Packs ---------------------------------------------------------------------------------------


def packs(seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Real and padded lengths by name. "50 % pads" has the real lengths of the pack before it."""
    draw = random.Random(seed)
    short = [draw.randrange(20, 200) for _ in range(256)]
    lognormal = [min(4096, max(16, int(draw.lognormvariate(6.19, 1)))) for _ in range(64)]
    long = [8191, 4097, 2049, 1025, 513, 257, 129, 63]
    tail = [8192, *(draw.randrange(20, 200) for _ in range(128))]
    tiny = [draw.randrange(4, 33) for _ in range(1000)]
    real = {"short": short, "log-normal": lognormal, "long": long, "one long": tail, "tiny": tiny}
    real |= {f"uniform {n}": [n] * (32768 // n) for n in (128, 256, 512, 1024, 2048)}
    found = {}
    for name, lengths in real.items():
        found[name] = lengths, [-(-n // MULTIPLE) * MULTIPLE for n in lengths]
        if name in ("short", "log-normal"):
            found[f"{name}, no pads"] = lengths, lengths
            found[f"{name}, 50 % pads"] = lengths, [2 * n for n in lengths]
    return found


# --- Candidates ----------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates(meta: PaddedSeqMeta, heads: tuple[int, int, int]) -> dict[str, Attend]:
    """Those that run here, by name."""
    num_heads, kv_heads, head_dim = heads

    def layer(backend: str) -> Attend:
        attention = DotProductAttention(num_heads, head_dim, kv_heads, backend=backend)
        return lambda q, k, v: attention(q, k, v, meta)

    found = {name: layer(name) for name in OURS}
    for name, make in (("te", _transformer_engine), ("flash4", _flash4)):
        if backends.import_error(backends.ATTENTION[name]) is None:
            found[name] = make(meta, heads)
    return found


def _transformer_engine(meta: PaddedSeqMeta, heads: tuple[int, int, int]) -> Attend:
    from padded_sp.backends.te import te

    num_heads, kv_heads, head_dim = heads
    core = te.DotProductAttention(
        num_heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="thd"
    )
    layout = {
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": meta.cu_seqlens,
        "cu_seqlens_kv": meta.cu_seqlens,
        "cu_seqlens_q_padded": meta.cu_seqlens_padded,
        "cu_seqlens_kv_padded": meta.cu_seqlens_padded,
        "max_seqlen_q": meta.max_seq_len,
        "max_seqlen_kv": meta.max_seq_len,
        "pad_between_seqs": meta.has_padding,
    }
    return lambda q, k, v: core(q, k, v, **layout)


def _flash4(meta: PaddedSeqMeta, heads: tuple[int, int, int]) -> Attend:
    from flash_attn.cute.interface import flash_attn_varlen_func

    lengths = meta.cu_seqlens.diff() if meta.has_padding else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=meta.cu_seqlens_padded,
            cu_seqlens_k=meta.cu_seqlens_padded,
            seqused_q=lengths,
            seqused_k=lengths,
            max_seqlen_q=meta.max_seq_len,
            max_seqlen_k=meta.max_seq_len,
            causal=True,
        )
        return (out[0] if isinstance(out, tuple) else out).flatten(1)

    return attend


# --- Measuring -----------------------------------------------------------------------------------


def measure(
    name: str,
    real: list[int],
    padded: list[int],
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], bool]:
    """The figures of one pack, and whether ours is as exact as it must be."""
    meta = PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device)
    inputs, grad = drawn(meta, options)
    attend = candidates(meta, options.heads)

    def forward(of: Attend) -> Callable[[], Any]:
        def run() -> None:
            with torch.no_grad():
                of(*inputs)

        return run

    def both(of: Attend) -> Callable[[], Any]:
        return forward_and_backward(of, inputs, grad)

    errors = errors_of(attend, inputs, grad, meta)
    figures: dict[str, Any] = {"tokens": meta.num_tokens, "rows": meta.num_rows}
    figures |= {"typical_length": typical_length(meta), "errors": errors}
    for kind, run in (("forward", forward), ("forward and backward", both)):
        times = time_alternating(
            {backend: run(of) for backend, of in attend.items()},
            dist.group.WORLD,
            device,
            iterations=options.iterations,
            warm_up=options.warm_up,
            head_start=head_start,
        )
        ratios = {b: ratio_of_pairs(t, times["auto"]) for b, t in times.items() if b != "auto"}
        figures[kind] = {backend: summary(t) for backend, t in times.items()}
        figures[kind] |= {"over_auto": ratios}
    figures["host_us_of_a_forward"] = {b: host_us(forward(of)) for b, of in attend.items()}
    figures["deterministic"] = deterministic(both(attend["auto"]), device, options)
    figures["zeros_ms"] = zeros_ms(meta, options.heads)
    figures |= ceilings(meta, options.heads, figures["forward and backward"]["auto"]["median_ms"])
    print(line(name, figures), flush=True)
    limit = FURTHER_OFF * max(errors["te"].values()) if "te" in errors else 1e-2
    repeats = figures["deterministic"]["same_bits"]
    return figures, repeats and max(errors["auto"].values()) <= limit


def deterministic(
    both: Callable[[], Any], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """auto's time under deterministic algorithms, and whether it gives the same bits twice."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which is not ours to time
    try:
        same_bits = all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True))
        times = time_alternating(
            {"auto": both},
            dist.group.WORLD,
            device,
            iterations=options.iterations,
            warm_up=options.warm_up,
            head_start=head_start,
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    return {"auto": summary(times["auto"]), "same_bits": same_bits}


def drawn(meta: PaddedSeqMeta, options: argparse.Namespace) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and the gradient of the result, with zeros in the pads."""
    num_heads, kv_heads, head_dim = options.heads
    torch.manual_seed(options.seed)
    tensors = []
    for size in ((num_heads, head_dim), *[(kv_heads, head_dim)] * 2, (num_heads * head_dim,)):
        x = torch.randn(meta.num_rows, *size, device=meta.device, dtype=torch.bfloat16)
        x[meta.padding_mask] = 0
        tensors.append(x)
    return [x.requires_grad_() * 1 for x in tensors[:3]], tensors[3]


def forward_and_backward(of: Attend, inputs: list[Tensor], grad: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(of(*inputs), inputs, grad)


def over_tight(
    real: list[int], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """auto's time with as many pads behind each sequence as it has tokens, over that without any,
    forward and backward; once more with what writing zeros to the pads takes taken off."""
    both, metas = {}, {}
    for name, padded in (("50 % pads", [2 * n for n in real]), ("no pads", real)):
        meta = metas[name] = PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device)
        auto = candidates(meta, options.heads)["auto"]
        both[name] = forward_and_backward(auto, *drawn(meta, options))
    times = time_alternating(
        both,
        dist.group.WORLD,
        device,
        iterations=options.iterations,
        warm_up=options.warm_up,
        head_start=head_start,
    )
    zeros = zeros_ms(metas["50 % pads"], options.heads)
    less = [t - zeros for t in times["50 % pads"]]
    return {
        "zeros_ms": zeros,
        **{name: summary(t) for name, t in times.items()},
        "ratio_of_pairs": ratio_of_pairs(times["50 % pads"], times["no pads"]),
        "ratio_of_pairs_less_zeros": ratio_of_pairs(less, times["no pads"]),
    }


def errors_of(
    attend: dict[str, Attend], inputs: list[Tensor], grad: Tensor, meta: PaddedSeqMeta
) -> dict[str, dict[str, float]]:
    """Relative errors of the first KV head and its queries' heads, on real rows, by float64."""
    q, k, v = inputs
    group, real = q.shape[1] // k.shape[1], meta.real_rows
    few = [x[:, :n].detach().double().requires_grad_() for x, n in ((q, group), (k, 1), (v, 1))]
    few_of_grad = grad.view(q.shape)[:, :group].flatten(1).double()
    out = reference.dot_product_attention(*few, meta=meta)
    exact = [out.detach(), *torch.autograd.grad(out, few, few_of_grad)]
    names, errors = ("output", "grad_q", "grad_k", "grad_v"), {}
    for backend, of in attend.items():
        out = of(*inputs)
        found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
        errors[backend] = {}
        for name, a, b in zip(names, found, exact, strict=True):
            b = b.reshape(meta.num_rows, -1)[real]
            a = a.reshape(meta.num_rows, -1)[real, : b.shape[1]].double()
            errors[backend][name] = ((a - b).norm() / b.norm()).item()
    return errors


def head_start() -> None:
    """Work for the device, for longer than the host needs to launch any candidate: 5 ms."""
    square = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        torch.mm(square, square)


def host_us(call: Callable[[], Any], calls: int = 30) -> float:
    """Median microseconds until a call returns, its work still queued."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def zeros_ms(meta: PaddedSeqMeta, heads: tuple[int, int, int]) -> float:
    """What writing the pad rows of O, dQ, dK and dV takes at this GPU's speed of memset."""
    num_heads, kv_heads, head_dim = heads
    elements = (meta.num_rows - meta.num_tokens) * head_dim * 2 * (num_heads + kv_heads)
    if not elements:
        return 0.0
    memory = torch.empty(elements, device=meta.device, dtype=torch.bfloat16)
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        head_start()
        start.record()
        memory.zero_()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def ceilings(meta: PaddedSeqMeta, heads: tuple[int, int, int], milliseconds: float) -> Any:
    """What auto reaches: of the products that causal attention asks for, and if each tensor were
    read and written once."""
    num_heads, kv_heads, head_dim = heads
    flop = sum(7 * num_heads * head_dim * n * (n + 1) for n in meta.seq_lens)
    # Forward Q K V and O; backward Q K V O dO and dQ dK dV.
    elements = meta.num_tokens * head_dim * (6 * num_heads + 6 * kv_heads)
    return {
        "tflop_per_s": flop / milliseconds / 1e9,
        "tb_per_s": 2 * elements / milliseconds / 1e9,
    }


def line(name: str, figures: dict[str, Any]) -> str:
    times = figures["forward and backward"]
    shown = "  ".join(
        f"{b} {times[b]['median_ms']:.3f} ({times['over_auto'][b]['median']:.2f})"
        for b in times["over_auto"]
    )
    auto, host = times["auto"]["median_ms"], figures["host_us_of_a_forward"]["auto"]
    return (
        f"{name:<22} {figures['typical_length']:6.0f} auto {auto:.3f} ms  {shown}  "
        f"host {host:.0f} us  error {max(figures['errors']['auto'].values()):.1e}"
    )


if __name__ == "__main__":
    main()
