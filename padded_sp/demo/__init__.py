"""The demo: a small language model trained without padding, with padded_sp, and as others do."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

import padded_sp
from padded_sp.alignment import AlignPolicy, Recipe
from padded_sp.demo import report
from padded_sp.demo.arms import Arm, all_arms
from padded_sp.demo.batch import Pack
from padded_sp.demo.launch import Rank, backend_for, launch
from padded_sp.demo.model import LlamaConfig
from padded_sp.demo.progress import Progress, StepDone
from padded_sp.demo.text import VOCAB_SIZE, token_packs
from padded_sp.demo.train import Run, train

NUM_RANKS = 2


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        steps: of each arm.
        tokens: at most so many real tokens a step.
        text: files to train on; none: Python's standard library.
        recipe: whose alignment every sequence gets. The arithmetic is float32 in any case.
        learning_rate: of AdamW.
        seed: of the weights and of the order of the text.
    """

    steps: int = 40
    tokens: int = 1536
    text: tuple[Path, ...] = ()
    recipe: Recipe = "fp8_current"
    learning_rate: float = 3e-3
    seed: int = 0


def run(settings: Settings, output: Path, figures: Path | None, console: Console) -> int:
    """Trains every arm, prints the table, writes the plot, and says whether (a) and (b) agree.

    Args:
        output: of the plot, a PNG.
        figures: of a JSON file with every step; None: none.

    Returns: an exit status, 0 if padded_sp's steps were the unpadded ones.
    Raises: ValueError: settings that cannot be run. RuntimeError: a rank failed.
    """
    if settings.steps < 1:
        raise ValueError(f"the demo takes at least one step, got steps={settings.steps}")
    packs = token_packs(
        settings.text or None,
        num_packs=settings.steps,
        tokens_per_pack=settings.tokens,
        seed=settings.seed,
    )
    padded = AlignPolicy(settings.recipe, tp_size=NUM_RANKS, placement="each_sequence")
    arms = all_arms(padded)
    source = "your text" if settings.text else "functions of Python's standard library"
    backend = backend_for(NUM_RANKS)
    console.print(
        f"Training on {sum(map(len, packs))} sequences, {source}, "
        f"on {NUM_RANKS} ranks of {'GPUs' if backend == 'nccl' else 'CPU'} ({backend})"
    )
    with Progress(console, [arm.name for arm in arms], settings.steps) as progress:
        shares = launch(_train_share, NUM_RANKS, arms, packs, settings, on_news=progress.show)
    by_name = {run.arm.name: run for share in shares for run in share}
    runs = [by_name[arm.name] for arm in arms]

    console.print(report.table(runs))
    report.plot(runs, output)
    console.print(f"Plot: {output}")
    if figures is not None:
        report.write_json(runs, _plain(settings), versions(), figures)
        console.print(f"Figures: {figures}")
    return _verdict(runs[0], runs[1], console)


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "padded_sp": padded_sp.__version__,
    }


def _verdict(unpadded: Run, ours: Run, console: Console) -> int:
    differences = report.disagreements(unpadded, ours)
    if not differences:
        console.print(
            f"[bold green]{ours.arm.name} on {ours.arm.num_ranks} ranks took the unpadded steps:"
            f"[/] loss and gradient norm of all {len(ours.steps)} agree to "
            f"{report.largest_difference(unpadded, ours):.1e} (allowed: {report.TOLERANCE:g})"
        )
        return 0
    console.print(
        f"[bold red]{ours.arm.name} did not take the unpadded steps[/] "
        f"(relative tolerance {report.TOLERANCE:g}):"
    )
    for line in differences[:10]:
        console.print(f"  {line}", highlight=False)
    return 1


def _train_share(
    rank: Rank, arms: Sequence[Arm], packs: Sequence[Pack], settings: Settings
) -> list[Run]:
    """The arms of all ranks together first, then each rank its share of those of one rank."""
    torch.backends.cuda.matmul.allow_tf32 = False  # arms are compared in float32
    together = [arm for arm in arms if arm.num_ranks > 1]
    alone = [arm for arm in arms if arm.num_ranks == 1][rank.index :: NUM_RANKS]
    config = LlamaConfig(vocab_size=VOCAB_SIZE)
    runs = []
    for arm in together + alone:
        tells = arm.num_ranks == 1 or rank.index == 0
        runs.append(
            train(
                arm,
                config,
                packs,
                group=rank.group if arm.num_ranks > 1 else None,
                device=rank.device,
                seed=settings.seed,
                learning_rate=settings.learning_rate,
                on_step=lambda step, name=arm.name, tells=tells: (
                    rank.tell(StepDone(name, step.loss, step.gradient_norm)) if tells else None
                ),
            )
        )
    return runs


def _plain(settings: Settings) -> dict[str, object]:
    return {**asdict(settings), "text": [str(path) for path in settings.text]}
