"""How fast an arm trains, measured while nothing else of the demo runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise

from torch import Tensor

from padded_sp.demo.arms import Arm
from padded_sp.demo.batch import Batch, Pack
from padded_sp.demo.launch import Rank
from padded_sp.demo.losses import model_of
from padded_sp.demo.model import LlamaConfig
from padded_sp.demo.train import train

#: Steps that are timed, after one that warms up.
TIMED_STEPS = 12


def tokens_per_second(
    arm: Arm, config: LlamaConfig, weights: dict[str, Tensor], packs: Sequence[Pack], rank: Rank
) -> float | None:
    """Real tokens per second: the median over some steps of forward, backward and update.

    The model is the arm's own, but without poison, which is no part of training. Ranks that the
    arm does not need wait, so that it has the machine to itself.

    Communicates: every rank calls it, with the arms in the same order.
    Returns: None on ranks that the arm does not need.
    """
    rank.wait_for_all()
    rate = None
    if rank.index < arm.num_ranks:
        group = rank.group if arm.num_ranks > 1 else None
        batches = [
            Batch.of(pack, arm.policy, rank.device)
            for pack in islice(cycle(packs), TIMED_STEPS + 1)
        ]
        ends: list[float] = []
        train(
            model_of(replace(arm, poisoned=False), config, weights, rank.device, group),
            batches,
            group=group,
            learning_rate=1e-3,
            on_step=lambda step: ends.append(time.perf_counter()),
        )
        seconds = [end - start for start, end in pairwise(ends)]
        rate = statistics.median(
            batch.meta.num_tokens / s for batch, s in zip(batches[1:], seconds, strict=True)
        )
    rank.wait_for_all()
    return rate
