"""What inert pads cost over Transformer Engine: padded_sp beside plain Transformer Engine.

    torchrun --standalone --nproc-per-node 2 benchmarks/te_block.py

A column linear, a column and row pair and a whole block, forward and backward, T 16384, in BF16 and
each FP8 recipe that the GPU has. Both sides compute with the same weights on the same padded rows,
whose pads hold zeros; plain Transformer Engine does nothing about pads. Their results must agree
before and after they are timed, or the exit status is 1. One GPU a rank; with a single one (plain
``python`` will do) nothing is sent, and one rank's share of the column linear is timed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Transformer Engine overlaps by it

from te_networks import (
    DTYPE,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    ROWS,
    SLOT,
    Block,
    Candidate,
    Column,
    Pair,
    candidates,
    documents,
    slots,
)
from timing import provenance, ratio_of_pairs, summary, time_alternating
from torch import nn

from padded_sp import PaddedSeqMeta
from padded_sp.backends.te import VERSION, cudnn_version, unavailable

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise")
# cuDNN adds up dQ in any order at this size: a bit of an amax may differ, and with it the grid of
# every FP8 gradient. What is exactly equal is shown on a small pack, with deterministic algorithms.
GRADIENTS_AGREE = 0.1


def main() -> None:
    """Measures everything and writes the figures; rank 0 prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the sequences' lengths")
    default = Path(__file__).parent / "results" / "te_block.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()

    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() < ranks_here:
        parser.exit(2, f"{ranks_here} ranks need a GPU each: sharing one, their times are void\n")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=device, **({} if "RANK" in os.environ else alone))
    group = dist.group.WORLD
    assert group is not None

    start = time.perf_counter()
    content = {
        "benchmark": "te_block",
        "world_size": group.size(),
        "rows": ROWS,
        "features": [HIDDEN, FFN],
        "heads": [HEADS, KV_HEADS, HEAD_DIM],
        "iterations": options.iterations,
        "seed": options.seed,
        **measure_all(group, device, options),
        "seconds": time.perf_counter() - start,
        "transformer_engine": ".".join(map(str, VERSION)),
        "cudnn": ".".join(map(str, cudnn_version())),
        **provenance(),
    }
    if group.rank() == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()


def check(ours: Candidate, plain: Candidate, what: str, gradients_agree: float = 0.0) -> float:
    """The largest relative distance of a gradient; ends the process where results differ.

    Outputs must be equal bit for bit, gradients too or within ``gradients_agree``.
    """
    distances = {}
    expected, found = plain.results(), ours.results()
    for name in expected:
        a, b = found[name].double(), expected[name].double()
        distances[name] = 0.0 if torch.equal(a, b) else ((a - b).norm() / b.norm()).item()
    allowed = {name: gradients_agree if name.startswith("gradient") else 0.0 for name in distances}
    far = {name: x for name, x in distances.items() if not x <= allowed[name]}
    if far:
        raise SystemExit(f"{what}: padded_sp differs from plain Transformer Engine: {far}")
    return max(distances.values())


def measure(
    what: str,
    build: Callable[[Any], nn.Module],
    meta: PaddedSeqMeta,
    recipe: str,
    group: dist.ProcessGroup,
    options: argparse.Namespace,
    gradients_agree: float = 0.0,
) -> dict[str, Any]:
    """Compares, times in turns, and compares again."""
    pair = candidates(build, meta, recipe, group)
    distance = check(*pair, what, gradients_agree)
    filler = torch.randn(2 * HIDDEN, 2 * HIDDEN, device=meta.device, dtype=DTYPE)
    times = time_alternating(
        {candidate.library.name: candidate.step for candidate in pair},
        group,
        meta.device,
        iterations=options.iterations,
        warm_up=options.warm_up,
        head_start=lambda: filler @ filler,
    )
    host = {c.library.name: statistics.median(c.host_ms[-options.iterations :]) for c in pair}
    distance = max(distance, check(*pair, what, gradients_agree))
    pairs = ratio_of_pairs(times["padded_sp"], times["plain_te"])
    figures: dict[str, Any] = {name: summary(values) for name, values in times.items()}
    medians = [figures[name]["median_ms"] for name in ("padded_sp", "plain_te")]
    figures |= {"ratio_of_pairs": pairs, "ratio_of_medians": medians[0] / medians[1]}
    figures |= {"host_ms": host, "largest_distance_of_gradients": distance}
    return figures


def measure_all(
    group: dist.ProcessGroup, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Every network, layout and recipe: {network: {layout: {recipe: figures}}}."""
    ranks = group.size()

    def meta_of(lengths: tuple[list[int], list[int]]) -> PaddedSeqMeta:
        real, padded = lengths
        return PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, tp_size=ranks, device=device)

    linears: dict[str, Callable[[Any], nn.Module]] = {"column": Column, "pair": Pair}
    if ranks == 1:
        linears["column, one rank's share of tp 2"] = partial(Column, out_features=FFN // 2)
    in_slots = {
        "pads at every sequence": meta_of(slots(options.seed, pads=True)),
        "no pads": meta_of(slots(options.seed, pads=False)),
    }
    packed = {"pads at every sequence": meta_of(documents(options.seed, ROWS, 4096))}
    runs = [(name, build, in_slots, 0.0) for name, build in linears.items()]
    runs.append(("block", Block, packed, GRADIENTS_AGREE))

    missing = {recipe: unavailable(recipe) for recipe in RECIPES}
    available = [recipe for recipe in RECIPES if not missing[recipe]]
    with patch.dict(os.environ, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):
        small = meta_of(documents(options.seed, SLOT * 16, 2 * SLOT))
        for recipe in available:
            check(*candidates(Block, small, recipe, group), f"small block, {recipe}")
    figures: dict[str, Any] = {}
    for name, build, layouts, agree in runs:
        for layout, meta in layouts.items():
            for recipe in available:
                what = f"{name}, {layout}, {recipe}"
                found = measure(what, build, meta, recipe, group, options, agree)
                figures.setdefault(name, {}).setdefault(layout, {})[recipe] = found
                if group.rank() == 0:
                    print(line(what, found), flush=True)
    shares = {"linears": in_slots, "block": packed}
    return {
        "figures": figures,
        "unavailable": {recipe: why for recipe, why in missing.items() if why},
        "padding_share": {k: {n: m.waste() for n, m in v.items()} for k, v in shares.items()},
    }


def line(what: str, figures: dict[str, Any]) -> str:
    pairs, host = figures["ratio_of_pairs"], figures["host_ms"]
    ours, plain = (figures[name]["median_ms"] for name in ("padded_sp", "plain_te"))
    return (
        f"{what:<64} {ours:8.3f} {plain:8.3f} ms   {pairs['median'] - 1:+7.2%} "
        f"({pairs['p20'] - 1:+.2%} .. {pairs['p80'] - 1:+.2%})   "
        f"host {host['padded_sp']:.2f} {host['plain_te']:.2f} ms"
    )


if __name__ == "__main__":
    main()
