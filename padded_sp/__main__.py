"""``python -m padded_sp``: the demo, a plan for a pack's padding, and what this machine offers."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

_MISSING = [name for name in ("tyro", "rich", "matplotlib") if find_spec(name) is None]
if _MISSING:
    sys.exit(
        f"python -m padded_sp needs {', '.join(_MISSING)}: python -m pip install 'padded_sp[cli]'"
    )

import torch  # noqa: E402
import tyro  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from padded_sp import __version__  # noqa: E402
from padded_sp.alignment import AlignPolicy, Placement, Recipe  # noqa: E402
from padded_sp.presets import PRESETS, preset  # noqa: E402

_console = Console()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the chosen subcommand; the caller's mistakes become one line and exit status 2.

    Args: args: None: the command line's.
    """
    commands = {"demo": demo, "plan": plan, "doctor": doctor}
    try:
        return tyro.extras.subcommand_cli_from_dict(
            commands, args=args, prog="python -m padded_sp", description=__doc__
        )
    except ValueError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2


def demo(
    *,
    steps: int = 40,
    warm_up: int = 250,
    tokens: int = 1024,
    text: tuple[Path, ...] = (),
    recipe: Recipe = "mxfp8",
    learning_rate: float = 1e-3,
    seed: int = 0,
    output: Path = Path("demo.png"),
    json: Path | None = None,
) -> int:
    """Train a small language model without padding, with padded_sp, and as others do.

    Exit status 1 if padded_sp on 2 ranks did not take the steps of the unpadded run on one.

    Args:
        steps: Training steps of each arm.
        warm_up: Steps without padding before that, which all arms have in common.
        tokens: At most so many real tokens per step.
        text: Files to train on; without any, functions of Python's standard library.
        recipe: Pad every sequence as this recipe would have it. The arithmetic is float32.
        learning_rate: Of the arms.
        seed: Of the weights and of the order of the text.
        output: Where the plot goes, a PNG.
        json: Where every figure goes; by default nowhere.
    """
    from padded_sp.demo.run import Settings, run

    settings = Settings(steps, warm_up, tokens, text, recipe, learning_rate, seed)
    return run(settings, output, json, _console)


def plan(
    seq_lens: Annotated[tuple[int, ...], tyro.conf.Positional],
    /,
    *,
    recipe: Recipe = "bf16",
    tp_size: int = 1,
    cp_size: int = 1,
    fp8_wire: bool = True,
    placement: Placement = "tail",
) -> int:
    """Print the least legal padding of a pack, and that of other frameworks beside it.

    Args:
        seq_lens: Real lengths, in tokens.
        recipe: Of the linears.
        tp_size: Ranks that share the rows.
        cp_size: Ranks that share each sequence.
        fp8_wire: Whether blockwise FP8 is gathered as FP8.
        placement: Where the rows go that only the total needs.
    """
    ours = AlignPolicy(recipe, tp_size, cp_size, fp8_wire, placement=placement)
    policies = {"padded_sp": ours}
    policies |= {name: preset(name, recipe, tp_size, cp_size) for name in PRESETS}
    shown = Table(
        title=f"{sum(seq_lens)} tokens, {recipe}, tp {tp_size}, cp {cp_size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("as padded by")
    for heading in ("rows", "rows per rank", "pads"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("padded lengths")
    for name, policy in policies.items():
        layout = policy.plan(seq_lens)
        shown.add_row(
            name,
            str(layout.num_rows),
            f"{layout.num_rows / (tp_size * cp_size):g}",
            f"{layout.waste():.1%}",
            _shortened(layout.padded_lens),
        )
    _console.print(shown)
    if note := ours.plan(seq_lens).note:
        _console.print(f"padded_sp: {note}")
    return 0


def doctor() -> int:
    """Print versions, devices and backends, and what attention runs on here."""
    from padded_sp.demo.launch import available_backends, backend_for

    rows = {
        "padded_sp": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "PyTorch": torch.__version__,
        "Triton": _version("triton"),
        "Transformer Engine": _version("transformer_engine"),
        "devices": "\n".join(_devices()),
        "torch.distributed": ", ".join(available_backends()) or "not built in",
        "the demo's 2 ranks": backend_for(2),
        "attention": _attention(),
    }
    shown = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        shown.add_row(f"[bold]{name}", value)
    _console.print(shown)
    return 0


def _shortened(lengths: tuple[int, ...], most: int = 8) -> str:
    shown = " ".join(map(str, lengths[:most]))
    return shown if len(lengths) <= most else f"{shown} ... ({len(lengths)} in all)"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return [f"CPU, {torch.get_num_threads()} threads"]
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"cuda:{i} {p.name}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(properties)
    ]


def _attention() -> str:
    from padded_sp.backends.torch_attention import uses_flash

    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = []
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.empty(1, 1, 64, dtype=dtype, device=device)
        path = "FlashAttention, whole pack" if uses_flash(q, q) else "one sequence after another"
        paths.append(f"torch, {str(dtype).removeprefix('torch.')} on {device}: {path}")
    return "\n".join(paths)


if __name__ == "__main__":
    sys.exit(main())
