"""What the demo shows for its runs: a table, a plot, a file of figures, and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from padded_sp.demo.train import Run

#: Unpadded and padded_sp must agree to this, relatively, at every step: losses and gradient norms
#: in float32. Sums in another order differ by about 1e-7, and training carries that along.
TOLERANCE = 1e-4


def disagreements(expected: Run, got: Run, tolerance: float = TOLERANCE) -> list[str]:
    """One line for each figure of ``got`` that is not ``expected``'s, to a relative ``tolerance``.

    A figure that is not finite agrees with nothing, and neither do runs of different lengths.
    """
    lines = []
    if len(expected.steps) != len(got.steps):
        lines.append(f"{len(got.steps)} steps against {len(expected.steps)}")
    for i, (right, left) in enumerate(zip(expected.steps, got.steps, strict=False), start=1):
        for figure in ("loss", "gradient_norm"):
            want, have = getattr(right, figure), getattr(left, figure)
            if not abs(have - want) <= tolerance * abs(want):  # so that NaN disagrees
                what = figure.replace("_", " ")
                lines.append(f"step {i}: {what} {have:.8g} against {want:.8g}")
    return lines


def largest_difference(expected: Run, got: Run) -> float:
    """The largest relative difference of any loss or gradient norm."""
    pairs = (
        (getattr(right, figure), getattr(left, figure))
        for right, left in zip(expected.steps, got.steps, strict=True)
        for figure in ("loss", "gradient_norm")
    )
    return max(abs(have - want) / abs(want) for want, have in pairs)


def table(runs: Sequence[Run]) -> Table:
    """One line a run, first and last step, for a terminal of 100 columns."""
    shown = Table(
        title=f"The same {len(runs[0].steps)} steps, first → last",
        caption="loss and perplexity of real tokens; gradient norm of the loss trained on",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("pad rows")
    for heading in ("ranks", "pads", "loss", "perplexity", "gradient norm", "tokens/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        losses = [run.steps[0].loss, run.steps[-1].loss]
        norms = [run.steps[0].gradient_norm, run.steps[-1].gradient_norm]
        ours = run.arm.handling is None
        shown.add_row(
            Text.assemble((run.arm.name, "bold green" if ours else "bold"), f"\n{run.arm.what}"),
            str(run.arm.num_ranks),
            f"{run.padding_share:.1%}",
            _first_to_last(losses, _loss),
            _first_to_last([_perplexity(loss) for loss in losses], _figure),
            _first_to_last(norms, _figure),
            f"{run.tokens_per_second:,.0f}",
        )
    return shown


def _first_to_last(pair: list[float], form: Any) -> Text:
    style = "" if all(map(math.isfinite, pair)) else "bold red"
    return Text(" → ".join(map(form, pair)), style=style)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _loss(loss: float) -> str:
    return f"{loss:.3f}"


def _figure(value: float) -> str:
    """Three digits, without an exponent while that is short."""
    if not math.isfinite(value) or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.1e}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes loss and gradient norm by step, a line each run, as a PNG."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
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
            steps = range(1, len(values) + 1)
            panel.plot(steps, values, label=_legend(run, values), **style)
        panel.set(xlabel="step", title=label)
        panel.grid(color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_yscale("log")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
