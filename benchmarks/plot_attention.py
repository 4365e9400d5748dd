"""Draws ``results/attention.json``, which ``attention.py`` wrote, as ``results/attention.png``.

    python benchmarks/plot_attention.py

Each backend's time, forward and backward, over that of "auto": above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = {"te": "#d95f02", "flash4": "#1b9e77", "triton": "#7570b3", "torch": "#999999"}


def plotted(record: dict[str, Any]) -> Figure:
    """Bars by pack, and beside each pack what auto takes."""
    packs = record["figures"]
    figure = Figure(figsize=(9, 0.55 * len(packs) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(COLORS)
    for place, backend in enumerate(COLORS):
        ratios = [
            pack["forward and backward"]["over_auto"].get(backend, {}).get("median", 0.0)
            for pack in packs.values()
        ]
        at = [row + (place - (len(COLORS) - 1) / 2) * height for row in range(len(packs))]
        axes.barh(at, ratios, height, color=COLORS[backend], label=backend)
    labels = [
        f"{name}\nauto {pack['forward and backward']['auto']['median_ms']:.2f} ms"
        for name, pack in packs.items()
    ]
    axes.set_yticks(range(len(packs)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 4)
    heads, kv_heads, head_dim = record["heads"]
    axes.set_xlabel("time over auto's, forward and backward (bars end at 4)")
    gpu = record["gpus"][0] if record["gpus"] else "no GPU"
    axes.set_title(f"{heads}/{kv_heads} heads of {head_dim}, causal, BF16, one {gpu}", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def main() -> None:
    """Reads the record and writes the picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "attention.json"
    parser.add_argument("record", type=Path, nargs="?", default=default)
    record = parser.parse_args().record
    plotted(json.loads(record.read_text())).savefig(record.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
