"""A column- and row-parallel pair on 2 CPU ranks, against the same pair written by hand.

    python benchmarks/linear_gloo.py

T 4096 rows, 512 -> 2048 -> 512 features, float32, forward and backward. The hand-written pair calls
torch.distributed and torch.mm in autograd functions and knows nothing of pads. It moves and
multiplies what padded_sp does: the input's rows are gathered again for the weight's gradient.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import provenance, ratio_of_pairs, summary, time_alternating
from torch import Tensor

from padded_sp import ColumnParallelLinear, PaddedSeqMeta, RowParallelLinear
from padded_sp.demo.launch import Rank, launch

RANKS = 2
SEQUENCES, SLOT = 32, 128  # T = 4096
FEATURES, FFN_FEATURES = 512, 2048
LAYOUTS = {
    "pads at every sequence": [100 + 3 * i % 28 for i in range(SEQUENCES)],
    "no pads": [SLOT] * SEQUENCES,
}

# PyTorch 2.13 has renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main() -> None:
    """Measures both layouts, prints the ratios and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5)
    default = Path(__file__).parent / "results" / "linear_gloo.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()

    load_average = os.getloadavg()[0]  # before our own ranks add to it
    layouts = launch(measure, RANKS, options.iterations, options.warm_up)[0]
    for name, figures in layouts.items():
        print(f"{name} ({figures['padding_share']:.1%} of the rows)")
        for candidate in ("padded_sp", "by hand"):
            times = figures[candidate]
            print(
                f"  {candidate:<10} {times['median_ms']:8.2f} ms "
                f"(p20 {times['p20_ms']:.2f}, p80 {times['p80_ms']:.2f})"
            )
        pairs = figures["ratio_of_pairs"]
        print(
            f"  ratio, median of the pairs' {pairs['median']:.3f} (p20 {pairs['p20']:.3f}, "
            f"p80 {pairs['p80']:.3f}); of the medians {figures['ratio_of_medians']:.3f}"
        )
    print(f"load average before: {load_average:.2f}, on {os.cpu_count()} cores")
    content = {
        "benchmark": "linear_gloo",
        "rows": SEQUENCES * SLOT,
        "features": [FEATURES, FFN_FEATURES, FEATURES],
        "dtype": "float32",
        "ranks": RANKS,
        "iterations": options.iterations,
        "layouts": layouts,
        "load_average_before": load_average,
        **provenance(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")


def measure(rank: Rank, iterations: int, warm_up: int) -> dict[str, Any]:
    """On each rank: checks that both give the same results, then times them in turns."""
    layouts = {}
    for name, seq_lens in LAYOUTS.items():
        pairs = _pairs(rank, seq_lens)
        check(pairs)
        times = time_alternating(
            pairs, rank.group, rank.device, iterations=iterations, warm_up=warm_up
        )
        check(pairs)
        figures: dict[str, Any] = {pair: summary(values) for pair, values in times.items()}
        figures["ratio_of_pairs"] = ratio_of_pairs(times["padded_sp"], times["by hand"])
        figures["ratio_of_medians"] = (
            figures["padded_sp"]["median_ms"] / figures["by hand"]["median_ms"]
        )
        figures["padding_share"] = 1 - sum(seq_lens) / (SEQUENCES * SLOT)
        layouts[name] = figures
    return layouts


Step = Callable[[], list[Tensor]]


def _pairs(rank: Rank, seq_lens: list[int]) -> dict[str, Step]:
    """Both candidates' steps, of the same weights and inputs; pad rows hold zeros for both."""
    meta = PaddedSeqMeta.from_seq_lens(
        seq_lens, padded_lens=[SLOT] * SEQUENCES, tp_size=RANKS, device=rank.device
    )
    torch.manual_seed(0)
    placed = {"bias": False, "tp_group": rank.group, "device": rank.device}
    column = ColumnParallelLinear(FEATURES, FFN_FEATURES, **placed)
    row = RowParallelLinear(FFN_FEATURES, FEATURES, **placed)
    x_full, grad_full = torch.randn(2, meta.num_rows, FEATURES, device=rank.device)
    pads = meta.padding_mask[:, None]
    x_shard, grad_shard = (
        meta.shard(t.masked_fill(pads, 0), rank.index).clone() for t in (x_full, grad_full)
    )

    leaves = [x_shard.requires_grad_(), column.weight, row.weight]

    def ours(x: Tensor) -> Tensor:
        return row(column(x, meta), meta)

    def by_hand(x: Tensor) -> Tensor:
        hidden = ColumnByHand.apply(x, column.weight, rank.group)
        return RowByHand.apply(hidden, row.weight, rank.group)

    def step(pair: Callable[[Tensor], Tensor]) -> Step:
        def forward_and_backward() -> list[Tensor]:
            for leaf in leaves:
                leaf.grad = None
            y = pair(x_shard * 1.0)  # as from another layer: padded_sp copies leaves
            y.backward(grad_shard)
            return [y.detach(), *(leaf.grad for leaf in leaves)]

        return forward_and_backward

    return {"padded_sp": step(ours), "by hand": step(by_hand)}


def check(pairs: dict[str, Step]) -> None:
    """Raises unless both give the same output and gradients, bit for bit."""
    names = ("y", "grad of x", "grad of the column weight", "grad of the row weight")
    for name, ours, theirs in zip(names, *(pair() for pair in pairs.values()), strict=True):
        if not torch.equal(ours, theirs):
            raise RuntimeError(f"{name} differs by {(ours - theirs).abs().max():.3g}")


def gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's rows."""
    full = shard.new_empty(RANKS * shard.shape[0], shard.shape[1])
    _all_gather(full, shard.contiguous(), group=group)
    return full


def scatter_sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum."""
    shard = partial.new_empty(partial.shape[0] // RANKS, partial.shape[1])
    _reduce_scatter(shard, partial, group=group)
    return shard


class ColumnByHand(torch.autograd.Function):
    """y = all_gather(x) W^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return gather(x, group).mm(weight.t())

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x = scatter_sum(grad_y.mm(weight), ctx.group)
        return grad_x, grad_y.t().mm(gather(x, ctx.group)), None


class RowByHand(torch.autograd.Function):
    """y = reduce_scatter(x W^T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return scatter_sum(x.mm(weight.t()), group)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_full = gather(grad_y, ctx.group)
        return grad_full.mm(weight), grad_full.t().mm(x), None


if __name__ == "__main__":
    main()
