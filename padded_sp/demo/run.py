"""The demo from its settings to its exit status."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import padded_sp
from padded_sp.alignment import AlignPolicy, Recipe
from padded_sp.boundaries import check_size
from padded_sp.demo import report
from padded_sp.demo.arms import Arm, all_arms
from padded_sp.demo.batch import Batch, Pack
from padded_sp.demo.launch import Rank, backend_for, launch
from padded_sp.demo.losses import PaddedModel, model_of
from padded_sp.demo.model import Llama, LlamaConfig
from padded_sp.demo.progress import Progress, StepDone
from padded_sp.demo.speed import tokens_per_second
from padded_sp.demo.text import MAX_TOKENS, VOCAB_SIZE, token_packs
from padded_sp.demo.train import Run, Step, train

NUM_RANKS = 2
CONFIG = LlamaConfig(vocab_size=VOCAB_SIZE)

_WARM_UP = "warm-up"
_WARM_UP_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        steps: of each arm. The last one sees the text of the first.
        warm_up: steps without padding before that, to start the arms from a trained model.
        tokens: at most so many real tokens a step.
        text: files to train on; none: Python's standard library.
        recipe: whose alignment every sequence gets. The arithmetic is float32 in any case
            (float64 on GPUs).
        learning_rate: of the arms' AdamW.
        seed: of the weights and of the order of the text.

    Raises: ValueError: what cannot be run, before anything has.
    """

    steps: int = 40
    warm_up: int = 250
    tokens: int = 1024
    text: tuple[Path, ...] = ()
    recipe: Recipe = "mxfp8"
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_size(self.steps, "--steps")
        check_size(self.warm_up, "--warm-up", least=0)
        check_size(self.tokens, "--tokens", least=MAX_TOKENS)
        check_size(self.seed, "--seed", least=0)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"--learning-rate must be a finite number above 0, got {self.learning_rate}"
            )


def run(settings: Settings, output: Path, figures: Path | None, console: Console) -> int:
    """Trains every arm, prints the table, writes the plot, and says whether padded_sp agrees.

    Args:
        output: of the plot, a PNG.
        figures: of a JSON file with every step; None: none.

    Returns: an exit status, 0 if padded_sp's steps were the unpadded ones, else 1.
    Raises: ValueError: settings that cannot be run. RankFailure: a rank failed.
    """
    packs = token_packs(
        settings.text or None,
        num_packs=settings.warm_up + settings.steps,
        tokens_per_pack=settings.tokens,
        seed=settings.seed,
    )
    warm_up, packs = packs[: settings.warm_up], packs[settings.warm_up :]
    packs[-1] = packs[0]  # so that the last step shows what the steps between have taught
    report.make_way("--output", output, ".png")
    if figures is not None:
        report.make_way("--json", figures, ".json")
    arms = all_arms(AlignPolicy(settings.recipe, tp_size=NUM_RANKS, placement="each_sequence"))

    console.print(_introduction(packs, settings))
    lengths = {_WARM_UP: len(warm_up)} | {arm.name: len(packs) for arm in arms}
    with Progress(console, lengths) as progress:
        weights = _train_from_scratch(warm_up, settings.seed, progress.show)
        shares = launch(
            _train_share, NUM_RANKS, arms, weights, packs, settings, on_news=progress.show
        )
    by_name = {run.arm.name: run for share in shares for run in share}
    runs = [by_name[arm.name] for arm in arms]

    console.print(report.table(runs))
    report.plot(runs, output)
    console.print(f"Plot: {output}", highlight=False)
    if figures is not None:
        report.write_json(runs, _plain(settings), versions(), figures)
        console.print(f"Figures: {figures}", highlight=False)
    message, status = report.verdict(runs[0], runs[1])
    console.print(message, highlight=False)
    return status


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "padded_sp": padded_sp.__version__,
    }


def _introduction(packs: Sequence[Pack], settings: Settings) -> str:
    source = "your text" if settings.text else "functions of Python's standard library"
    backend = backend_for(NUM_RANKS)
    where = "GPUs" if backend == "nccl" else "CPU"
    return (
        f"{sum(map(len, packs))} sequences ({source}) in {report.steps_in_words(len(packs))}, "
        f"{NUM_RANKS} ranks on {where} ({backend})"
    )


def _train_from_scratch(
    packs: Sequence[Pack], seed: int, show: Callable[[StepDone], None]
) -> dict[str, Tensor]:
    """The weights of the whole model after training without padding, on CPU in this process."""
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    model = PaddedModel(CONFIG, Llama(CONFIG, None, cpu).state_dict(), cpu)
    with _one_thread():
        train(
            model,
            [Batch.of(pack, AlignPolicy(), cpu) for pack in packs],
            learning_rate=_WARM_UP_LEARNING_RATE,
            on_step=lambda step: show(StepDone.of(_WARM_UP, step)),
        )
    return model.llama.state_dict()


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the ranks have it: at this size, threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train_share(
    rank: Rank,
    arms: Sequence[Arm],
    weights: dict[str, Tensor],
    packs: Sequence[Pack],
    settings: Settings,
) -> list[Run]:
    """The arms of all ranks together first, then each rank its share of those of one rank.

    Speeds are measured before that, while no arm runs beside another.
    """
    speeds = {
        arm.name: tokens_per_second(arm, CONFIG, weights, packs, rank)
        for arm in arms
        if arm.handling is None
    }
    if rank.device.type == "cuda":
        # On 2 H200, 1 and 2 ranks agreed to 3e-15 in float64. In float32 their gradient norms
        # drifted apart by up to 4.4e-4; the cause was not measured.
        torch.set_default_dtype(torch.float64)
    together = [arm for arm in arms if arm.num_ranks > 1]
    alone = [arm for arm in arms if arm.num_ranks == 1][rank.index :: NUM_RANKS]
    runs = []
    for arm in together + alone:
        group = rank.group if arm.num_ranks > 1 else None
        batches = [Batch.of(pack, arm.policy, rank.device) for pack in packs]

        def tell(step: Step, arm: Arm = arm) -> None:
            if arm.num_ranks == 1 or rank.index == 0:
                rank.tell(StepDone.of(arm.name, step))

        steps = train(
            model_of(arm, CONFIG, weights, rank.device, group),
            batches,
            group=group,
            learning_rate=settings.learning_rate,
            on_step=tell,
        )
        tokens, rows = zip(*((b.meta.num_tokens, b.meta.num_rows) for b in batches), strict=True)
        runs.append(Run(arm, steps, list(tokens), list(rows), speeds.get(arm.name)))
    return runs


def _plain(settings: Settings) -> dict[str, object]:
    return {**asdict(settings), "text": [str(path) for path in settings.text]}
