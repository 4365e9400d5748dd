"""docs/padding.md: each script shows what it says, in ten lines; every route has both halves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from megatron_helpers import import_megatron

PAGE = (Path(__file__).parent.parent / "docs/padding.md").read_text()
INTRODUCTION, *ROUTES = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def scripts(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def title(route: str) -> str:
    return route.partition("\n")[0]


@pytest.mark.parametrize("route", ROUTES, ids=title)
def test_scripts_run(route):
    import_megatron("transformer.moe.moe_utils")
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for script in (*scripts(INTRODUCTION), *scripts(route)):
        exec(compile(script, "docs/padding.md", "exec"), namespace)


@pytest.mark.parametrize("route", ROUTES, ids=title)
def test_both_halves_are_short_and_check_something(route):
    plain, ours, *others = scripts(route)
    assert not others
    for script in (plain, ours):
        assert len([line for line in script.splitlines() if line]) <= 10
        assert "assert" in script


def test_the_table_names_every_route():
    linked = re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", INTRODUCTION, re.MULTILINE)
    names = [title(route).lower() for route in ROUTES]
    assert [name for name, _ in linked] == [
        n.replace("nan", "NaN").replace("fp8", "FP8") for n in names
    ]
    assert [anchor for _, anchor in linked] == [name.replace(" ", "-") for name in names]
