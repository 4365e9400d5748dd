"""``python -m padded_sp``: the demo, a plan for a pack's padding, and what this machine offers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from json import dumps
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

_MISSING = [name for name in ("tyro", "rich", "matplotlib") if find_spec(name) is None]
if _MISSING:
    sys.exit(
        f"python -m padded_sp needs {', '.join(_MISSING)}: python -m pip install 'padded_sp[cli]'"
    )

import tyro  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from padded_sp import PaddedSeqMeta, __version__  # noqa: E402
from padded_sp.alignment import AlignPolicy, Placement, Plan, Recipe  # noqa: E402
from padded_sp.demo.launch import RankFailure, available_backends, backend_for  # noqa: E402
from padded_sp.doctor import checks, machine, traps  # noqa: E402
from padded_sp.presets import PRESETS, framework_plan  # noqa: E402
from padded_sp.verdict import Verdict  # noqa: E402

_PROG = "python -m padded_sp"
_console = Console()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the chosen subcommand.

    Exit status 2 and one line is the caller's mistake, 3 and a traceback a failure; 1 is left to
    what the subcommand found out.

    Args: args: None: the command line's.
    """
    args = sys.argv[1:] if args is None else args
    commands = {"demo": demo, "plan": plan, "doctor": doctor}
    try:
        if args and args[0] in commands:
            # By itself, so that its messages speak of its own options alone.
            return tyro.cli(commands[args[0]], prog=f"{_PROG} {args[0]}", args=args[1:])
        if "--version" in args:
            print(f"padded_sp {__version__}")
            return 0
        description = f"{__doc__}\n\n--version prints the version."
        return tyro.extras.subcommand_cli_from_dict(
            commands, prog=_PROG, args=args, description=description
        )
    except (ValueError, OSError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except RankFailure as failure:  # holds the traceback that matters, the rank's
        print(f"error: {failure}", file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 3


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

    Exit status 1 if padded_sp on 2 ranks did not take the steps of the unpadded run on one, 2 for
    options that cannot be run, 3 if a rank failed.

    Args:
        steps: Training steps of each arm.
        warm_up: Steps without padding before that, which all arms have in common.
        tokens: At most so many real tokens per step.
        text: Files to train on; without any, functions of Python's standard library.
        recipe: Pad every sequence as this recipe would have it. The arithmetic is float32.
        learning_rate: Of the arms.
        seed: Of the weights and of the order of the text.
        output: Where the plot goes, a .png; its folder is created if that alone is missing.
        json: Where every figure goes, a .json; by default nowhere.
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
    """Print the least legal padding of a pack, and other frameworks' beside it, legal or not.

    Args:
        seq_lens: Real lengths, in tokens.
        recipe: Of the linears.
        tp_size: Ranks that share the rows.
        cp_size: Ranks that share each sequence.
        fp8_wire: Whether blockwise FP8 is gathered as FP8.
        placement: Where the rows go that only the total needs.
    """
    policy = AlignPolicy(recipe, tp_size, cp_size, fp8_wire, placement=placement)
    plans = {"padded_sp": policy.plan(seq_lens)}
    plans |= {name: framework_plan(name, seq_lens, recipe, tp_size, cp_size) for name in PRESETS}
    shown = Table(
        title=f"{sum(seq_lens)} tokens, {recipe}, tp {tp_size}, cp {cp_size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("as padded by")
    for heading in ("rows", "rows per rank", "pads", "legal"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("padded lengths")
    notes = [f"padded_sp: {note}"] if (note := plans["padded_sp"].note) else []
    for name, layout in plans.items():
        problem = _problem(layout, policy)
        if problem:
            notes.append(f"{name}: illegal for {problem}")
        shown.add_row(
            name,
            str(layout.num_rows),
            f"{layout.num_rows / (tp_size * cp_size):g}",
            f"{layout.waste():.1%}",
            "no" if problem else "yes",
            _shortened(layout.padded_lens),
        )
    _console.print(shown)
    for note in notes:
        _console.print(note, highlight=False, soft_wrap=True)
    return 0


def doctor(*, verify: bool = False, json: Path | None = None) -> int:
    """Print what this machine has, what runs on it, and known traps with their cures.

    Exit status 1 if a check of --verify finds wrong numbers, or a backend that is installed and
    cannot be imported.

    Args:
        verify: Compare every backend here with float64, over head sizes, masks, pads and recipes.
        json: Where all of it goes, a .json; by default nowhere.
    """
    if json is not None and json.suffix != ".json":
        raise ValueError(f"--json must name a .json file, got {json}")
    has = {"padded_sp": __version__, **machine.facts()}
    has["torch.distributed"] = ", ".join(available_backends()) or "not built in"
    has["the demo's 2 ranks"] = backend_for(2)
    runs = {f"attention by {name}": how for name, how in machine.attention().items()}
    runs |= {f"linears by {name}": how for name, how in machine.linears().items()}
    recipes = {name: why or "yes" for name, why in machine.recipes().items()}
    known = traps.applying()
    _console.print(_pairs(has))
    _console.print(_pairs(runs, title="What runs here"))
    _console.print(_pairs(recipes, title="FP8 of Transformer Engine's linears"))
    _console.print(
        _pairs(dict(known), title="Known traps and their cures") if known else "No traps."
    )

    verdicts = []
    if verify:
        with _console.status("comparing with float64"):
            verdicts = list(checks.verdicts())
        _print_verdicts(verdicts)
    if json is not None:
        report = {"machine": has, "runs": runs, "recipes": recipes}
        report |= {"traps": [trap._asdict() for trap in known]}
        report |= {"checks": [_as_json(verdict) for verdict in verdicts]}
        json.write_text(dumps(report, indent=2) + "\n")
    return 1 if any(_outcome(verdict) in _FAILURES for verdict in verdicts) else 0


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    shown = Table(title="Compared with float64", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "worst figure", "at most", "verdict"):
        shown.add_column(heading, justify="right" if heading == "at most" else "left")
    for verdict in verdicts:
        name = verdict.worst
        figure = f"{name} {verdict.figures[name]:.2g}" if name else ""
        limit = f"{verdict.limits[name]:.2g}" if name else ""
        outcome = _outcome(verdict)
        style = "bold red" if outcome in _FAILURES else None
        shown.add_row(verdict.subject, figure, limit, outcome, style=style)
    _console.print(shown)
    subjects_of: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.reason:
            subjects_of.setdefault(verdict.reason, []).append(verdict.subject)
    for reason, (subject, *more) in subjects_of.items():
        others = f" and {len(more)} more" if more else ""
        note = f"{subject}{others}: {reason.removeprefix('ValueError: ')}"
        _console.print(note, highlight=False, markup=False, soft_wrap=True)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """JSON has no infinity."""
    figures = {name: x if isfinite(x) else str(x) for name, x in verdict.figures.items()}
    return {**asdict(verdict), "figures": figures, "outcome": _outcome(verdict)}


_FAILURES = ("WRONG", "FAILS")  # in numbers, or before there are any


def _outcome(verdict: Verdict) -> str:
    if verdict.passed:
        return "right"
    if verdict.is_refusal:
        return "not supported"
    return "WRONG" if verdict.figures else "FAILS"


def _pairs(rows: dict[str, str], title: str | None = None) -> Table:
    shown = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for name, value in rows.items():
        shown.add_row(f"[bold]{name}", escape(value))
    return shown


def _problem(layout: Plan, policy: AlignPolicy) -> str:
    """Why the policy's recipe refuses a layout; empty where it does not."""
    meta = PaddedSeqMeta.from_seq_lens(layout.seq_lens, padded_lens=layout.padded_lens)
    problem = policy.problem(meta)
    if problem and not replace(policy, fp8_wire=False).problem(meta):
        return f"{problem}; legal where gathers travel as BF16"
    return problem


def _shortened(lengths: tuple[int, ...], most: int = 8) -> str:
    shown = " ".join(map(str, lengths[:most]))
    return shown if len(lengths) <= most else f"{shown} ... ({len(lengths)} in all)"


if __name__ == "__main__":
    sys.exit(main())
