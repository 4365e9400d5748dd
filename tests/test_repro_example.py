"""The example of the reported case: its verdict, how it shows crashes, and a run on CPU ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_helpers import device_of

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import repro_case
import repro_conditions
from repro_conditions import CONDITIONS, STEPS, Outcome, examine, judge
from repro_fp8_padding_bug import exit_status, merged, table
from repro_plain_te import LINES, outcome

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "repro_fp8_padding_bug.py"
HOLDS = dict.fromkeys(CONDITIONS, "")


# --- Where it cannot run --------------------------------------------------------------------------


def start(*preparation: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, after some lines of Python."""
    lines = "\n".join(["import runpy, sys", f"sys.path.insert(0, {str(EXAMPLES)!r})", *preparation])
    run = f"{lines}\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, env=environment
    )


def test_says_that_transformer_engine_is_missing():
    done = start("sys.modules['transformer_engine'] = None")
    assert done.returncode == 2
    assert "pip install 'padded_sp[te]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_says_that_a_gpu_is_missing():
    done = start(PYTHONPATH=str(Path(__file__).parent / "fake_te"))
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr


# --- The verdict ----------------------------------------------------------------------------------


def test_all_conditions_hold():
    ours = [Outcome("bf16", found=HOLDS, notes=["near"]), Outcome("mxfp8", refused="too old")]
    assert exit_status(ours) == (0, "all four conditions hold in bf16")
    shown = table({"a line": "raises"}, ours)
    assert "NO" not in shown
    assert shown.count("yes") == 4
    assert "refused: too old" in shown
    assert "a line" in shown
    assert "raises" in shown


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_that_does_not_hold_fails(condition):
    ours = [Outcome("bf16", found=HOLDS), Outcome("fp8_current", found=HOLDS | {condition: "far"})]
    status, why = exit_status(ours)
    assert status == 1
    assert why == f"fp8_current: {condition}: NO: far"
    assert table({}, ours).count("NO") == 1


def test_a_condition_that_was_not_reached_fails():
    ours = [Outcome("bf16", found={"no crash": "ValueError: rows"})]
    status, why = exit_status(ours)
    assert status == 1
    assert why.count("not reached") == 3
    assert table({}, ours).count("NO") == 4


def test_nothing_that_ran_fails():
    assert exit_status([Outcome("mxfp8", refused="too old")]) == (1, "no recipe ran")
    assert exit_status([])[0] == 1


def test_every_rank_counts():
    good, bad = Outcome("bf16", found=HOLDS), Outcome("bf16", found=HOLDS | {"pads masked": "NaN"})
    assert merged([[good], [good]])[0].found == HOLDS
    assert merged([[good], [bad]])[0].reason("pads masked") == "rank 1: NaN"
    ended = Outcome("bf16", found={"no crash": "ValueError"})
    assert merged([[ended], [good]])[0].reason("padded shape") == "rank 0: not reached"


# --- What travels ---------------------------------------------------------------------------------


GATHER, SCATTER = {(272, 1536), (544, 1536)}, {(544, 1536), (272, 1536)}
STEP = [GATHER, SCATTER, GATHER, GATHER, SCATTER]


def test_communication_by_the_padded_boundaries():
    assert judge(STEPS * [*STEP, {(1,), (2,)}], 544, 2)[0] == ""
    assert "(250, 1536)" in judge(STEPS * [*STEP, {(250, 1536), (500, 1536)}], 544, 2)[0]
    assert "(272, 1536)" in judge(STEPS * [*STEP, {(272, 1536)}], 544, 2)[0]
    assert "only" in judge(STEPS * STEP[:2], 544, 2)[0]  # forward alone
    assert judge([], 544, 1) == ("", "one rank: nothing is sent")
    assert "sent" in judge([GATHER], 544, 1)[0]


# --- Lines of plain Transformer Engine ------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes: SIGSEGV"),
        ("import time; time.sleep(60)", "hangs: no end within 1 s"),
        ("raise SystemExit('a reason')", "ends with status 1: a reason"),
        ("pass", "ends with status 0: without a word"),
        ("import sys; print('log'); print('outcome:', sys.argv[1])", "a line"),
    ],
)
def test_shows_how_a_line_ends(tmp_path, body, shown):
    script = tmp_path / "line.py"
    script.write_text(body)
    assert outcome("a line", 1 if "sleep" in body else 60, str(script)) == shown


def test_a_line_shows_what_it_raises():
    command = [sys.executable, EXAMPLES / "repro_plain_te.py", next(iter(LINES))]
    without = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "fake_te")}
    done = subprocess.run(command, capture_output=True, text=True, env=without, check=True)
    assert done.stdout.startswith("outcome: raises AttributeError")


# --- On ranks -------------------------------------------------------------------------------------


def conditions_hold_and_can_fail(group):
    """With a few of the 32 heads, for the time that the double takes."""
    device = device_of(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        for module in (repro_case, repro_conditions):
            patch.setattr(module, "HEADS", 4)
            patch.setattr(module, "HIDDEN", 4 * repro_case.HEAD_DIM)
        held = examine("fp8_current", group, device)
        patch.setattr("padded_sp.linear.inert_input", lambda x, meta, **rows: x)
        leaky = examine("bf16", group, device)
    return held, leaky


@pytest.mark.max_ranks(2)
def test_conditions_on_ranks(ranks):
    for held, leaky in ranks.run(conditions_hold_and_can_fail):
        assert held.found == HOLDS
        assert "NaN in pads moves" in leaky.reason("pads masked")
        assert "gradient of qkv.query_weight" in leaky.reason("pads masked")
