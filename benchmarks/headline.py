"""The headline figures, read from recorded runs and from nothing else.

    python benchmarks/headline.py

Writes ``results/headline.json``: a flat map from name to number. A figure whose record is missing,
or was not made as the figure demands (two ranks, all rows), is left out; stderr says which and why.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

FP8 = ("fp8_delayed", "fp8_current", "fp8_blockwise")
PADS = "pads at every sequence"


class LeftOut(Exception):
    """Why a record has no such figure."""


def inert_cost(record: Record, *recipes: str) -> float:
    """The worst recipe's time over plain Transformer Engine's, minus 1: linear 4096 -> 14336 with
    pads at every sequence, forward and backward, T 16384, 2 ranks."""
    _demand(record, world_size=2, rows=16384, features=[4096, 14336])
    return _worst_ratio(record, "column", recipes) - 1


def block_over_plain(record: Record) -> float:
    """The worst recipe's time of the block, over plain Transformer Engine's on the same rows."""
    _demand(record, rows=16384, features=[4096, 14336])
    return _worst_ratio(record, "block", ("bf16", *FP8))


def test_count(record: Record, outcome: str) -> int:
    """Tests of that outcome on 2 ranks with a GPU each; ranks that share one prove no NCCL."""
    _demand(record, world_sizes=[2], backend="nccl")
    if not record.get("gpu"):
        raise LeftOut("it was recorded without a GPU")
    return record[outcome]


def attention_over_ours(record: Record, pack: str, backend: str) -> float:
    """Its time over that of what "auto" picks, forward and backward, 32/8 heads of 128, causal."""
    _demand(record, heads=[32, 8, 128])
    return record["figures"][pack]["forward and backward"]["over_auto"][backend]["median"]


def attention_pads_over_tight(record: Record) -> float:
    """auto's time with 50 % pads, less that of writing zeros to them, over that without pads."""
    _demand(record, heads=[32, 8, 128])
    pads = record["pads_over_tight"]
    return max(
        pads[pack]["ratio_of_pairs_less_zeros"]["median"] for pack in ("short", "log-normal")
    )


def attention_auto_over_best(record: Record) -> float:
    """auto's time over that of the best single backend, on the pack where that is largest."""
    _demand(record, heads=[32, 8, 128])
    ratios = [pack["forward and backward"]["over_auto"] for pack in record["figures"].values()]
    for needed in ("te", "flash4", "triton"):
        if not all(needed in pack for pack in ratios):
            raise LeftOut(f"it was recorded without {needed}")
    return max(1 / min(ratio["median"] for ratio in pack.values()) for pack in ratios)


#: name -> the record that it comes from, and how.
HEADLINE: dict[str, tuple[str, Callable[[Record], float]]] = {
    "inert_cost_fraction": ("te_block.json", lambda record: inert_cost(record, "bf16")),
    "inert_cost_fraction_fp8": ("te_block.json", lambda record: inert_cost(record, *FP8)),
    "te_block_over_plain": ("te_block.json", block_over_plain),
    "attention_short_te_over_ours": (
        "attention.json",
        lambda record: attention_over_ours(record, "short", "te"),
    ),
    "attention_short_flash4_over_ours": (
        "attention.json",
        lambda record: attention_over_ours(record, "short", "flash4"),
    ),
    "attention_lognormal_te_over_ours": (
        "attention.json",
        lambda record: attention_over_ours(record, "log-normal", "te"),
    ),
    "attention_long_te_over_ours": (
        "attention.json",
        lambda record: attention_over_ours(record, "long", "te"),
    ),
    "attention_padded50_over_tight": ("attention.json", attention_pads_over_tight),
    "attention_auto_over_best": ("attention.json", attention_auto_over_best),
    "gpu_tests_passed": ("gpu_tests.json", lambda record: test_count(record, "passed")),
    "gpu_tests_failed": ("gpu_tests.json", lambda record: test_count(record, "failed")),
}


def headline(results: Path) -> tuple[dict[str, float], dict[str, str]]:
    """The figures by name, and why each of the others is left out."""
    figures, left_out = {}, {}
    for name, (file, read) in HEADLINE.items():
        try:
            figures[name] = _number(read(_record(results / file)))
        except LeftOut as reason:
            left_out[name] = f"{file}: {reason}"
        except (KeyError, TypeError) as error:
            left_out[name] = f"{file}: it holds no such figure ({type(error).__name__}: {error})"
    return figures, left_out


def _record(path: Path) -> Record:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise LeftOut("there is no such file") from None
    except json.JSONDecodeError as error:
        raise LeftOut(f"it is not JSON ({error})") from None


def _demand(record: Record, **demanded: Any) -> None:
    for name, value in demanded.items():
        if record[name] != value:
            raise LeftOut(f"{name} must be {value}, it was recorded with {record[name]}")


def _worst_ratio(record: Record, network: str, recipes: tuple[str, ...]) -> float:
    by_recipe = record["figures"][network][PADS]
    return max(_number(by_recipe[recipe]["ratio_of_pairs"]["median"]) for recipe in recipes)


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise LeftOut(f"the figure is {value}")
    return value


def main() -> None:
    """Reads the records beside each other and writes the figures among them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=default, help="the folder of the records")
    results = parser.parse_args().results
    figures, left_out = headline(results)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    (results / "headline.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name:<24} {value:g}")


if __name__ == "__main__":
    main()
