"""Progress of the demo's arms: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from padded_sp.demo.train import Step

_LINES_PER_ARM = 4


@dataclass(frozen=True)
class StepDone:
    """One step of one arm."""

    arm: str
    loss: float
    gradient_norm: float

    @classmethod
    def of(cls, arm: str, step: Step) -> StepDone:
        """What is shown of a step."""
        return cls(arm, step.loss, step.gradient_norm)


class Progress:
    """Shows the steps of all arms as they are told.

    Args:
        steps: of each arm, by name, in the order to show them.
    """

    def __init__(self, console: Console, steps: Mapping[str, int]) -> None:
        self._console, self._steps = console, steps
        self._done: Counter[str] = Counter()
        self._bars = Bars(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            arm: self._bars.add_task(arm, total=total, start=False, figures="")
            for arm, total in steps.items()
        }

    def show(self, step: StepDone) -> None:
        """Takes one step's news."""
        self._done[step.arm] += 1
        done, total = self._done[step.arm], self._steps[step.arm]
        figures = f"loss {step.loss:.3f}, gradient {step.gradient_norm:.3g}"
        task = self._tasks[step.arm]
        if done == 1:
            self._bars.start_task(task)
        self._bars.update(task, completed=done, figures=figures)
        worth_a_line = done % max(1, total // _LINES_PER_ARM) == 0 or done == total
        if self._bars.disable and worth_a_line:
            self._console.print(f"{step.arm}: step {done}/{total}, {figures}", highlight=False)

    def __enter__(self) -> Progress:
        self._bars.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.__exit__(kind, error, trace)
