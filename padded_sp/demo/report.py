"""What the demo shows for its runs: a table, a plot, a file of figures, and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from padded_sp.demo.train import Run, Step

#: Unpadded and padded_sp must agree to this, relatively, at every step: losses and gradient norms
#: in float32 (float64 on GPUs). Sums in another order differ by about 1e-7; training carries it on.
TOLERANCE = 1e-4

_HEADINGS = ("", "ranks", "pads", "loss", "ppl", "grad norm", "tok/s")
_NOTE = (
    "Loss and perplexity (ppl) are of the real tokens, the gradient is of the loss"
    "\nthat is trained on. tok/s: real tokens per second of the two arms that are"
    "\ncompared, each timed alone and without NaN; a CPU rank has one core and gloo."
)


def steps_in_words(count: int) -> str:
    """The number with its noun: 1 step, 2 steps."""
    return f"{count} step" if count == 1 else f"{count} steps"


def make_way(option: str, path: Path, suffix: str) -> None:
    """Sees to it, before anything is computed, that ``path`` can be written.

    Creates its folder if that alone is missing: a longer path is more likely a slip.

    Raises: ValueError: the folder's own folder is missing too; ``path`` is a directory, or has not
        this ``suffix``. OSError: the folder cannot be created.
    """
    if path.is_dir() or path.suffix.lower() != suffix:
        raise ValueError(f"{option} {path}: name a file that ends in {suffix}")
    folder = path.parent
    if not folder.parent.is_dir():
        raise ValueError(
            f"{option} {path}: there is no folder {folder.parent}, and the demo creates one "
            f"folder at most"
        )
    folder.mkdir(exist_ok=True)


def disagreements(expected: Run, got: Run, tolerance: float = TOLERANCE) -> list[str]:
    """One line for each figure of ``got`` that is not ``expected``'s, to a relative ``tolerance``.

    A figure that is not finite agrees with nothing, and neither do runs of different lengths.
    """
    lines = []
    if len(expected.steps) != len(got.steps):
        lines.append(f"{steps_in_words(len(got.steps))} against {len(expected.steps)}")
    for i, (right, left) in enumerate(zip(expected.steps, got.steps, strict=False), start=1):
        for figure in ("loss", "gradient_norm"):
            want, have = getattr(right, figure), getattr(left, figure)
            if not _agree(have, want, tolerance):
                what = figure.replace("_", " ")
                lines.append(f"step {i}: {what} {have:.8g} against {want:.8g}")
    return lines


def verdict(unpadded: Run, ours: Run) -> tuple[str, int]:
    """What to tell the user, in rich's markup, and the demo's exit status."""
    differences = disagreements(unpadded, ours)
    name = f"{ours.arm.name} on {ours.arm.num_ranks} ranks"
    if not differences:
        return (
            f"[bold green]{name} took the steps of the unpadded run:[/] loss and gradient norm "
            f"of {steps_in_words(len(ours.steps))} agree to "
            f"{largest_difference(unpadded, ours):.1e} (allowed: {TOLERANCE:g})"
        ), 0
    lines = [f"[bold red]{name} did not take the steps of the unpadded run[/]"]
    lines += [f"  {line} (relative tolerance {TOLERANCE:g})" for line in differences[:10]]
    return "\n".join(lines), 1


def largest_difference(expected: Run, got: Run) -> float:
    """The largest relative difference of any loss or gradient norm."""
    pairs = (
        (getattr(right, figure), getattr(left, figure))
        for right, left in zip(expected.steps, got.steps, strict=True)
        for figure in ("loss", "gradient_norm")
    )
    return max(abs(have - want) / abs(want) for want, have in pairs)


def table(runs: Sequence[Run]) -> Group:
    """One line a run with its first and its last step; then what each run is. For 80 columns.

    Figures that are not those of the first run are red.
    """
    figures = Table(
        title=_title(len(runs[0].steps)),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=0,
        title_justify="left",
        title_style="bold",
    )
    for heading in _HEADINGS:
        justify = "left" if heading == _HEADINGS[0] else "right"
        figures.add_column(heading, justify=justify, no_wrap=True)
    legend = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for run in runs:
        name = Text(run.arm.name, style="bold green" if run.arm.handling is None else "bold")
        figures.add_row(
            name,
            str(run.arm.num_ranks),
            f"{run.padding_share:.1%}",
            _ends(run, runs[0], lambda step: step.loss, "{:.3f}".format),
            _ends(run, runs[0], lambda step: _perplexity(step.loss), _three_digits),
            _ends(run, runs[0], lambda step: step.gradient_norm, _three_digits),
            "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        )
        legend.add_row(name, run.arm.what)
    return Group(figures, legend, Text(_NOTE, style="dim"))


def _title(num_steps: int) -> str:
    if num_steps == 1:
        return "The same step"
    return f"The same {num_steps} steps, first → last (both of the same text)"


def _ends(
    run: Run, right: Run, figure: Callable[[Step], float], form: Callable[[float], str]
) -> Text:
    """A figure of the first and of the last step, each red unless it is the ``right`` run's."""
    cells = []
    for i in (0, -1) if len(run.steps) > 1 else (0,):
        have, want = figure(run.steps[i]), figure(right.steps[i])
        cells.append(Text(form(have), style="" if _agree(have, want, TOLERANCE) else "red"))
    return Text("→").join(cells)


def _agree(have: float, want: float, tolerance: float) -> bool:
    return abs(have - want) <= tolerance * abs(want)  # False where one is NaN


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # min keeps NaN, and math.exp does not overflow


def _three_digits(value: float) -> str:
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e5 else f"{value:.1e}"
    return f"{value:.3g}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes loss and gradient norm by step, a line each run, as a PNG."""
    plotted(runs).savefig(path, dpi=130)


def plotted(runs: Sequence[Run]) -> Figure:
    """What ``plot`` writes."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for panel, name, label in zip(
        panels,
        ("loss", "gradient_norm"),
        ("loss of real tokens, nats", "gradient norm"),
        strict=True,
    ):
        for i, run in enumerate(runs):
            values = [getattr(step, name) for step in run.steps]
            # The first line is wide and pale, so that one that covers it shows both.
            style: dict[str, Any] = {"color": f"C{i}", "linewidth": 1.4}
            if i == 0:
                style = {"color": "0.75", "linewidth": 6, "solid_capstyle": "round"}
            if run.arm.num_ranks > 1:
                style["zorder"] = 3  # above all that it may agree with
            if sum(map(math.isfinite, values)) == 1:  # a point draws no line
                style |= {"marker": "o", "markersize": 14 if i == 0 else 6}
            steps = range(1, len(values) + 1)
            panel.plot(steps, values, label=_legend(run, values), **style)
        panel.set(xlabel="step", title=label)
        panel.grid(color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_yscale("log")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _legend(run: Run, values: list[float]) -> str:
    ranks = f" ({run.arm.num_ranks} ranks)" if run.arm.num_ranks > 1 else ""
    lost = next((i for i, v in enumerate(values, start=1) if not math.isfinite(v)), None)
    return f"{run.arm.name}{ranks}" + (f": NaN from step {lost}" if lost else "")


def write_json(
    runs: Sequence[Run], settings: dict[str, Any], versions: dict[str, str], path: Path
) -> None:
    """Writes every figure of every step; NaN and infinity become null."""
    arms = [
        {
            "name": run.arm.name,
            "what": run.arm.what,
            "ranks": run.arm.num_ranks,
            "padding_share": run.padding_share,
            "tokens_per_second": run.tokens_per_second,
            "steps": [
                {k: v if math.isfinite(v) else None for k, v in asdict(step).items()}
                for step in run.steps
            ],
        }
        for run in runs
    ]
    content = {"settings": settings, "versions": versions, "tolerance": TOLERANCE, "arms": arms}
    path.write_text(json.dumps(content, indent=1) + "\n")
