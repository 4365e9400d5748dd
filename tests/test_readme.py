"""What README shows is run: its Python, its torchrun line, its commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from megatron_helpers import import_megatron

import padded_sp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = (ROOT / "examples/column_row.py").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_it_shows_the_example_as_it_is():
    assert blocks("python")[0] == EXAMPLE
    lines = (line.strip() for line in EXAMPLE.splitlines())
    assert sum(not line.startswith(("#", "import", "from")) for line in lines if line) <= 15


def test_the_other_python_runs():
    namespace: dict[str, object] = {}
    shown = blocks("python")[1:]
    assert len(shown) == 4
    import_megatron("packed_seq_params")
    for block in shown:
        if not torch.cuda.is_available():  # the tests' double of Transformer Engine needs none
            block = block.replace('"cuda"', '"cpu"')
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_example_prints_what_it_says():
    (command, *printed) = next(b for b in blocks("console") if b.startswith("$ ")).splitlines()
    torchrun, *arguments = shlex.split(command.removeprefix("$ "))
    assert torchrun == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed


def test_its_commands_are_the_ones_that_ci_runs():
    install, tests = blocks("console")[0].splitlines()
    ci = (ROOT / ".ci/run").read_text()
    assert install.split(" && ")[1] == "python -m padded_sp demo"
    assert install.split(" && ")[0].replace("pip install", "pip install --quiet") in ci
    assert tests in ci


def test_its_table_names_every_layer():
    table = README.partition("## What each layer communicates")[2].partition("## Sharp bits")[0]
    silent = {"AlignPolicy", "PaddedSeqMeta", "seq_meta", "carry_meta", "sharded_state_dict"}
    assert {n for n in padded_sp.__all__ if f"`{n}`" not in table} == silent
