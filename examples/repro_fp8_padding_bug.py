"""The reported FP8 case on this machine: plain Transformer Engine first, then padded_sp.

    python examples/repro_fp8_padding_bug.py
    torchrun --standalone --nproc-per-node 2 examples/repro_fp8_padding_bug.py

Sequences of 100, 150, 120 and 130 tokens, packed in 544 rows; 32 heads of 48. Each line of plain
Transformer Engine runs in a process of its own, so that an assertion, a crash or a hang of one is
shown beside the others. Then column linear, attention and row linear run through padded_sp, in BF16
and in every FP8 recipe that this GPU has. Exit status 0 if all four conditions hold in each, 1 if
not, 2 without Transformer Engine or a GPU. Ranks that share a GPU communicate over gloo.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from repro_conditions import CONDITIONS, Outcome, examine
from repro_plain_te import outcomes

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8")


def main() -> int:
    """Runs both parts, prints the table on rank 0 and returns the exit status."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Transformer Engine overlaps by it
    if reason := unable():
        print(f"cannot run the reported case: {reason}", file=sys.stderr)
        return 2
    on_rank_0 = os.environ.get("RANK", "0") == "0"
    plain = outcomes() if on_rank_0 else {}
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    backend = "gloo" if share_gpus() else "nccl"
    place: dict[str, Any] = {"timeout": timedelta(minutes=5)}
    if "RANK" not in os.environ:
        place |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, device_id=None if share_gpus() else device, **place)
    group = dist.group.WORLD
    assert group is not None
    with patch.dict(os.environ, NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):  # to compare bit for bit
        mine = [examine(recipe, group, device) for recipe in RECIPES]
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, mine, group=group)
    dist.destroy_process_group()
    ours = merged(by_rank)
    status, why = exit_status(ours)
    if on_rank_0:
        print(f"{versions()}, {len(by_rank)} rank(s)\n\n{table(plain, ours)}\n\n{why}")
    return status


def merged(by_rank: list[list[Outcome]]) -> list[Outcome]:
    """Of each recipe one outcome: a condition holds where it holds on every rank."""
    together = []
    for outcomes_of_ranks in zip(*by_rank, strict=True):
        first = outcomes_of_ranks[0]
        found = {}
        for condition in CONDITIONS if not first.refused else ():
            reasons = enumerate(outcome.reason(condition) for outcome in outcomes_of_ranks)
            found[condition] = "; ".join(f"rank {rank}: {why}" for rank, why in reasons if why)
        together.append(Outcome(first.recipe, first.refused, found, first.notes))
    return together


def table(plain: dict[str, str], ours: list[Outcome]) -> str:
    """Every line of plain Transformer Engine, then every recipe and condition of padded_sp."""
    titles = ["plain Transformer Engine", "padded_sp"]
    width = max(map(len, [*titles, *plain])) + 4
    lines = [f"{titles[0]:<{width}}what came of it"]
    lines += [f"  {line:<{width - 2}}{outcome[:110]}" for line, outcome in plain.items()]
    lines += ["", f"{titles[1]:<{width}}{'  '.join(CONDITIONS)}"]
    for outcome in ours:
        answers = [("NO" if outcome.reason(c) else "yes").ljust(len(c)) for c in CONDITIONS]
        told = [*answers, "; ".join(outcome.notes)]
        if outcome.refused:
            told = [f"refused: {outcome.refused}"]
        lines.append(f"  {outcome.recipe:<{width - 2}}{'  '.join(told)}".rstrip())
    return "\n".join(lines)


def exit_status(ours: list[Outcome]) -> tuple[int, str]:
    """0 if some recipe ran and all four conditions hold in each that did; and why, in words."""
    ran = [outcome for outcome in ours if not outcome.refused]
    failed = [
        f"{outcome.recipe}: {condition}: NO: {outcome.reason(condition)}"
        for outcome in ran
        for condition in CONDITIONS
        if outcome.reason(condition)
    ]
    if failed or not ran:
        return 1, "\n".join(failed or ["no recipe ran"])
    return 0, f"all four conditions hold in {', '.join(outcome.recipe for outcome in ran)}"


def unable() -> str:
    """Why this machine cannot run the case; empty where it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "it needs Transformer Engine: python -m pip install 'padded_sp[te]'"
    if not torch.cuda.is_available():
        return "it needs a GPU, and PyTorch finds none"
    try:
        from padded_sp.backends import te
    except ImportError as error:
        return str(error)
    if share_gpus() and not te.GATHERS_UNALIGNED_BLOCKS:
        return f"with Transformer Engine {te.VERSION} each rank needs a GPU of its own, for NCCL"
    return ""


def share_gpus() -> bool:
    """Whether there are fewer GPUs than ranks here; NCCL would refuse two ranks on one."""
    return torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def versions() -> str:
    from padded_sp.backends.te import VERSION, cudnn_version

    dotted = (".".join(map(str, version)) for version in (VERSION, cudnn_version()))
    return "{}, PyTorch {}, Transformer Engine {}, cuDNN {}".format(
        torch.cuda.get_device_name(), torch.__version__, *dotted
    )


if __name__ == "__main__":
    sys.exit(main())
