"""Headline figures come from recorded runs, or not at all."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "headline.py"
PADS = "pads at every sequence"
RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise")


def ratios(*medians):
    figures = zip(RECIPES, medians, strict=True)
    return {PADS: {recipe: {"ratio_of_pairs": {"median": m}} for recipe, m in figures}}


TE_BLOCK = {
    "world_size": 2,
    "rows": 16384,
    "features": [4096, 14336],
    "figures": {
        "column": ratios(1.25, 1.5, 1.75, 1.0) | {"no pads": {}},
        "pair": ratios(3.0, 3.0, 3.0, 3.0),
        "block": ratios(0.875, 1.125, 1.0, 1.0),
    },
}


def pack(te, flash4, triton):
    ratios = {"te": te, "flash4": flash4, "triton": triton}
    return {"forward and backward": {"over_auto": {k: {"median": v} for k, v in ratios.items()}}}


ATTENTION = {
    "heads": [32, 8, 128],
    "figures": {
        "short": pack(2.5, 2.25, 1.0),
        "log-normal": pack(1.25, 1.0, 1.5),
        "long": pack(1.125, 0.875, 2.0),
    },
    "pads_over_tight": {
        "short": {"ratio_of_pairs_less_zeros": {"median": 0.75}},
        "log-normal": {"ratio_of_pairs_less_zeros": {"median": 1.0625}},
    },
}
GPU_TESTS = {"passed": 7, "failed": 1, "skipped": 2, "world_sizes": [2], "backend": "nccl"}
GPU_TESTS |= {"gpu": "NVIDIA H200"}


def run(folder, **records):
    """What the script writes into a folder of records, and what it says on stderr."""
    for name, record in records.items():
        text = record if isinstance(record, str) else json.dumps(record)
        (folder / f"{name}.json").write_text(text)
    command = [sys.executable, SCRIPT, "--results", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads((folder / "headline.json").read_text()), done.stderr


def test_reads_the_records(tmp_path):
    figures, said = run(tmp_path, te_block=TE_BLOCK, gpu_tests=GPU_TESTS, attention=ATTENTION)
    assert figures == {
        "inert_cost_fraction": 0.25,
        "inert_cost_fraction_fp8": 0.75,  # of the worst recipe
        "te_block_over_plain": 1.125,
        "attention_short_te_over_ours": 2.5,
        "attention_short_flash4_over_ours": 2.25,
        "attention_lognormal_te_over_ours": 1.25,
        "attention_long_te_over_ours": 1.125,
        "attention_padded50_over_tight": 1.0625,  # of the worst pack, and so below
        "attention_auto_over_best": 1 / 0.875,
        "gpu_tests_passed": 7,
        "gpu_tests_failed": 1,
    }
    assert said == ""


def test_missing_records_leave_their_figures_out(tmp_path):
    figures, said = run(tmp_path, gpu_tests=GPU_TESTS)
    assert figures == {"gpu_tests_passed": 7, "gpu_tests_failed": 1}
    assert said.count("te_block.json: there is no such file") == 3
    (tmp_path / "gpu_tests.json").unlink()
    figures, said = run(tmp_path)  # and nothing of an earlier headline stays
    assert figures == {}
    assert "left out: gpu_tests_failed: gpu_tests.json" in said


def changed(record, value, *path):
    record = copy.deepcopy(record)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


OF_THE_COLUMN = ["inert_cost_fraction", "inert_cost_fraction_fp8"]
OF_TE_BLOCK = [*OF_THE_COLUMN, "te_block_over_plain"]
FP8_OF_THE_COLUMN = ("figures", "column", PADS, "fp8_delayed")


@pytest.mark.parametrize(
    ("te_block", "left_out", "reason"),
    [
        (changed(TE_BLOCK, 1, "world_size"), OF_THE_COLUMN, "world_size must be 2"),
        (changed(TE_BLOCK, 512, "rows"), OF_TE_BLOCK, "recorded with 512"),
        (changed(TE_BLOCK, {}, *FP8_OF_THE_COLUMN), OF_THE_COLUMN[1:], "no such figure"),
        (
            changed(TE_BLOCK, float("nan"), *FP8_OF_THE_COLUMN, "ratio_of_pairs", "median"),
            OF_THE_COLUMN[1:],
            "the figure is nan",
        ),
        ("{", OF_TE_BLOCK, "not JSON"),
    ],
)
def test_unfit_records_leave_their_figures_out(tmp_path, te_block, left_out, reason):
    figures, said = run(tmp_path, te_block=te_block, gpu_tests=GPU_TESTS)
    assert [name for name in OF_TE_BLOCK if name not in figures] == left_out
    assert said.count(reason) == len(left_out)
    assert figures["gpu_tests_passed"] == 7


@pytest.mark.parametrize(
    "change", [(None, "gpu"), ([1], "world_sizes"), ("gloo, ranks share a GPU", "backend")]
)
def test_tests_count_on_two_gpu_ranks_only(tmp_path, change):
    figures, said = run(tmp_path, te_block=TE_BLOCK, gpu_tests=changed(GPU_TESTS, *change))
    assert "gpu_tests_passed" not in figures
    assert said.count("gpu_tests.json: ") == 2


def test_recorded_headline_is_what_the_records_give(tmp_path):
    results = SCRIPT.parent / "results"
    if not (results / "headline.json").exists():
        pytest.skip("nothing is recorded yet")
    records = {path.stem: path.read_text() for path in results.glob("*.json")}
    assert run(tmp_path, **records)[0] == json.loads(records["headline"])


def test_attention_that_lacks_a_backend_is_not_the_best(tmp_path):
    record = copy.deepcopy(ATTENTION)
    del record["figures"]["long"]["forward and backward"]["over_auto"]["flash4"]
    figures, said = run(tmp_path, attention=record)
    assert "attention_auto_over_best" not in figures
    assert figures["attention_long_te_over_ours"] == 1.125
    assert "recorded without flash4" in said
    figures, said = run(tmp_path, attention=record | {"heads": [8, 8, 64]})
    assert not figures
    assert "heads must be [32, 8, 128]" in said
