"""How other frameworks pad: their own numbers, and which of their layouts are illegal."""

from __future__ import annotations

import math
import random

import pytest

from padded_sp import AlignPolicy, PaddedSeqMeta
from padded_sp.__main__ import main
from padded_sp.alignment import Plan
from padded_sp.presets import PRESETS, framework_plan

SEED = [5, 38]


def illegal(plan: Plan, policy: AlignPolicy) -> bool:
    meta = PaddedSeqMeta.from_seq_lens(plan.seq_lens, padded_lens=plan.padded_lens)
    return policy.problem(meta) != ""


@pytest.mark.parametrize(
    ("name", "recipe", "tp_size", "cp_size", "padded_lens"),
    [
        # Multiples of tp * 2 cp, and of 16 with FP8; then 128 tp * 2 cp in all.
        ("verl", "bf16", 2, 1, [6, 38]),
        ("verl", "bf16", 2, 2, [8, 40]),
        ("verl", "fp8_blockwise", 2, 1, [16, 240]),
        ("verl", "fp8_delayed", 2, 1, [16, 240]),
        ("verl", "mxfp8", 3, 1, [48, 336]),  # lcm(16, 3)
        ("verl", "fp8_current", 2, 2, [16, 1008]),
        # Multiples of tp * 2 cp; then 128, 32 or 16 times that.
        ("nemo_rl", "bf16", 2, 2, [8, 40]),
        ("nemo_rl", "fp8_blockwise", 2, 1, [6, 250]),
        ("nemo_rl", "mxfp8", 2, 1, [6, 58]),
        ("nemo_rl", "fp8_delayed", 2, 1, [6, 58]),
        ("nemo_rl", "fp8_current", 2, 2, [8, 120]),
        # Multiples of tp * 2 cp, and of 16 cp with FP8; nothing in all.
        ("skyrl", "bf16", 2, 1, [6, 38]),
        ("skyrl", "bf16", 2, 2, [8, 40]),
        ("skyrl", "fp8_blockwise", 2, 1, [16, 48]),
        ("skyrl", "fp8_delayed", 2, 2, [32, 64]),
        # Multiples of 2 cp; then 128 tp for each cp rank, whatever the recipe.
        ("slime", "bf16", 2, 1, [5, 38, 213]),
        ("slime", "fp8_blockwise", 2, 2, [8, 40, 464]),
        # Multiples of 2 cp; then tp * cp times 128, 32, 16 or 1.
        ("ms_swift", "bf16", 2, 1, [5, 38, 1]),
        ("ms_swift", "bf16", 2, 2, [8, 40]),
        ("ms_swift", "mxfp8", 2, 1, [5, 38, 21]),
        ("ms_swift", "fp8_blockwise", 2, 2, [8, 40, 464]),
        ("ms_swift", "fp8_delayed", 4, 1, [5, 38, 21]),
    ],
)
def test_each_pads_by_its_own_formula(name, recipe, tp_size, cp_size, padded_lens):
    plan = framework_plan(name, SEED, recipe, tp_size, cp_size)
    assert list(plan.padded_lens) == padded_lens
    assert list(plan.seq_lens) == SEED + [0] * (len(padded_lens) - len(SEED))


def packs(num_packs: int, budget: int) -> list[list[int]]:
    """Log-normal lengths with a median of 400 tokens, in order, as many as fit."""
    draw = random.Random(0)
    done: list[list[int]] = []
    pack: list[int] = []
    while len(done) < num_packs:
        length = int(draw.lognormvariate(math.log(400), 0.85))
        if sum(pack) + length > budget:
            done.append(pack)
            pack = []
        pack.append(length)
    return done


@pytest.mark.parametrize(
    ("tp_size", "cp_size", "budget", "extra"),
    [
        (8, 4, 32768, {"verl": 25, "nemo_rl": 25, "skyrl": 5.5, "slime": 5.5, "ms_swift": 5.5}),
        (4, 2, 16384, {"verl": 7.5, "nemo_rl": 7.5, "skyrl": 2.7, "slime": 2.7, "ms_swift": 2.7}),
    ],
)
def test_they_disagree_by_five_times(tp_size, cp_size, budget, extra):
    """Extra rows in percent of the tokens, blockwise."""
    layouts = packs(400, budget)
    tokens = sum(map(sum, layouts))
    for name, percent in extra.items():
        rows = sum(
            framework_plan(name, pack, "fp8_blockwise", tp_size, cp_size).num_rows
            for pack in layouts
        )
        assert 100 * (rows / tokens - 1) == pytest.approx(percent, abs=0.7), name


@pytest.mark.parametrize(
    ("name", "seq_lens", "recipe", "tp_size", "fp8_wire", "refused"),
    [
        ("skyrl", SEED, "fp8_blockwise", 2, True, True),  # 32 rows a rank
        ("skyrl", SEED, "fp8_blockwise", 2, False, False),
        ("skyrl", [5], "fp8_delayed", 4, True, True),  # 4 rows a rank
        ("skyrl", [5], "mxfp8", 1, True, True),  # 16 rows
        ("nemo_rl", SEED, "fp8_blockwise", 2, True, False),
        ("verl", SEED, "fp8_blockwise", 2, True, False),
        ("slime", SEED, "fp8_blockwise", 2, True, False),
        ("ms_swift", SEED, "mxfp8", 2, True, False),
    ],
)
def test_an_illegal_layout_stays_illegal(name, seq_lens, recipe, tp_size, fp8_wire, refused):
    plan = framework_plan(name, seq_lens, recipe, tp_size)
    assert illegal(plan, AlignPolicy(recipe, tp_size, fp8_wire=fp8_wire)) is refused


def test_the_command_line_says_why_a_layout_is_illegal(capsys):
    options = "--recipe fp8_blockwise --tp-size 2"
    assert main(["plan", "5", "38", *options.split()]) == 0
    shown = capsys.readouterr().out
    legal = {
        words[0]: words[4]
        for words in map(str.split, shown.splitlines())
        if words and words[0] in ("padded_sp", *PRESETS)
    }
    assert legal == dict.fromkeys(("padded_sp", *PRESETS), "yes") | {"skyrl": "no"}
    (line,) = [line for line in shown.splitlines() if "illegal" in line]
    assert line == (
        "skyrl: illegal for fp8_blockwise at tp 2, cp 1: 32 rows per rank (of 64) are no multiple "
        "of 128: blocks of 128 rows must not straddle ranks to travel as FP8; legal where gathers "
        "travel as BF16"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trl", SEED), "unknown preset 'trl'; known: verl, nemo_rl"),
        (("verl", SEED, "int4"), "unknown recipe 'int4'; known: bf16"),
        (("verl", SEED, "bf16", 0), "tp_size must be an integer of at least 1, got 0"),
        (("verl", SEED, "bf16", 1, 0), "cp_size must be an integer of at least 1, got 0"),
        (("verl", []), "no sequence"),
        (("verl", [5, -1]), "sequence 1 has a negative length"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        framework_plan(*arguments)
