"""The demo: its text, its arms, its verdict, and the whole of it as a user starts it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import runpy
import subprocess
import sys

import pytest
import torch

import padded_sp.__main__
from padded_sp import AlignPolicy
from padded_sp.demo import report, speed, text
from padded_sp.demo import run as demo_run
from padded_sp.demo.arms import (
    Handling,
    all_arms,
    labels_of_unpadded_rows,
    labels_with_pads,
    labels_without_end,
    mixed_spans,
    own_labels,
    padded_spans,
    real_spans,
)
from padded_sp.demo.batch import Batch
from padded_sp.demo.launch import RankFailure, launch
from padded_sp.demo.losses import PaddedModel, PlainModel, model_of
from padded_sp.demo.model import Llama, LlamaConfig
from padded_sp.demo.train import Run, Step, train

main = padded_sp.__main__.main
CPU = torch.device("cpu")
CONFIG = LlamaConfig(text.VOCAB_SIZE, hidden_size=32, num_layers=1, head_dim=8, ffn_size=48)
PADDED = AlignPolicy("fp8_current", tp_size=2, placement="each_sequence")
ARMS = {arm.name: arm for arm in all_arms(PADDED)}
PACK = [[text.BEGIN, *data, text.END] for data in (b"def f(x):", b"return", b"1 + x * x", b"")]


# ---- the whole of it ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """A demo of a few steps, started as a user does: its output, and where its files are."""
    folder = tmp_path_factory.mktemp("demo")
    options = "--steps 4 --warm-up 6 --tokens 600 --output new/demo.png --json demo.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "padded_sp", "demo", *options.split()],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_demo_prints_a_line_for_each_arm(small_demo):
    output, _ = small_demo
    table = output[output.index("first → last") : output.index("Plot:")]
    for name in ARMS:
        assert (
            len([line for line in table.splitlines() if line.strip().startswith(f"{name} ")]) == 2
        )
    assert "padded_sp on 2 ranks took the steps of the unpadded run" in output
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output  # nothing was cut off


def test_demo_times_the_two_arms_that_are_compared(small_demo):
    output, folder = small_demo
    arms = json.loads((folder / "demo.json").read_text())["arms"]
    rates = {arm["name"]: arm["tokens_per_second"] for arm in arms}
    timed = {name: rate for name, rate in rates.items() if rate is not None}
    assert list(timed) == ["unpadded", "padded_sp"]
    for name, rate in timed.items():
        (line,) = [
            line for line in output.splitlines() if line.startswith(f"{name} ") and "→" in line
        ]
        assert line.split()[-1] == f"{rate:,.0f}"
    assert "each timed alone and without NaN" in output


def test_demo_tells_of_its_progress(small_demo):
    output, _ = small_demo
    for name in ("warm-up: step 6/6", *(f"{name}: step 4/4" for name in ARMS)):
        assert name in output


def test_demo_draws_a_plot(small_demo):
    assert (small_demo[1] / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_writes_figures_that_show_each_route(small_demo):
    arms = {a["name"]: a for a in json.loads((small_demo[1] / "demo.json").read_text())["arms"]}
    assert list(arms) == list(ARMS)
    first = {name: arm["steps"][0] for name, arm in arms.items()}
    for right, ours in zip(arms["unpadded"]["steps"], arms["padded_sp"]["steps"], strict=True):
        assert ours["loss"] == pytest.approx(right["loss"], rel=report.TOLERANCE)
        assert ours["gradient_norm"] == pytest.approx(right["gradient_norm"], rel=report.TOLERANCE)
    assert first["pads hold NaN"]["gradient_norm"] is None  # NaN
    assert arms["pads hold NaN"]["steps"][1]["loss"] is None
    norm = first["unpadded"]["gradient_norm"]
    assert first["pad loss kept"]["gradient_norm"] > 1.02 * norm
    assert first["zero pads, loss kept"]["gradient_norm"] > 2 * norm
    assert first["labels shifted"]["gradient_norm"] > 1.02 * norm
    share = arms["padded_sp"]["padding_share"]
    assert first["mean over all rows"]["gradient_norm"] < (1 - share / 2) * norm
    assert first["boundaries mixed up"]["loss"] != pytest.approx(
        first["unpadded"]["loss"], rel=1e-3
    )
    assert arms["unpadded"]["padding_share"] == 0 < arms["padded_sp"]["padding_share"]


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ("--steps 0", "--steps must be an integer of at least 1"),
        ("--warm-up -1", "--warm-up must be an integer of at least 0"),
        ("--seed -1", "--seed must be an integer of at least 0"),
        ("--tokens 10", f"--tokens must be an integer of at least {text.MAX_TOKENS}"),
        ("--learning-rate -1", "--learning-rate must be a finite number above 0, got -1.0"),
        ("--learning-rate nan", "--learning-rate must be a finite number above 0, got nan"),
        ("--text no/such/file", "no such file"),
        ("--text .", "--text . is a directory; name the files in it"),
        ("--output far/away/demo.png", "there is no folder far, and the demo creates one folder"),
        ("--output demo.pdf", "--output demo.pdf: name a file that ends in .png"),
        ("--output .", "--output .: name a file that ends in .png"),
        ("--json far/away/demo.json", "--json far/away/demo.json: there is no folder far"),
    ],
)
def test_demo_refuses(options, way_out, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *options.split()]) == 2
    error = capsys.readouterr().err
    assert way_out in error
    assert error.count("\n") == 1  # one line
    assert not list(tmp_path.iterdir())


def _small_demo_after(monkeypatch, launched, folder, *options: str) -> int:
    """The demo's exit status, with ``launched`` in the place of its ranks."""
    monkeypatch.setattr(demo_run, "launch", launched)
    options = ("--warm-up", "0", "--tokens", "400", "--output", f"{folder}/demo.png", *options)
    return main(["demo", *options])


def test_demo_exits_non_zero_where_padded_sp_disagrees(monkeypatch, tmp_path, capsys):
    runs = [_run(name, [1.0] * 3) for name in ARMS]
    runs[1] = _run("padded_sp", [1.0, 1.001, 1.0])

    def launched(*args, **kwargs):
        return [runs[:3], runs[3:]]

    assert _small_demo_after(monkeypatch, launched, tmp_path) == 1
    assert "step 2: loss 1.001 against 1" in capsys.readouterr().out


def test_demo_tells_a_lost_rank_from_a_disagreement(monkeypatch, tmp_path, capsys):
    def launched(*args, **kwargs):
        return launch(_raise_on_rank_one, 2)

    assert _small_demo_after(monkeypatch, launched, tmp_path) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: rank 1 of 2 raised:\n")
    assert error.rstrip().endswith("ValueError: boom")
    assert error.count("Traceback") == 1  # the rank's


def test_demo_tells_a_failure_of_its_own_from_a_disagreement(monkeypatch, tmp_path, capsys):
    def launched(*args, **kwargs):
        raise ZeroDivisionError

    assert _small_demo_after(monkeypatch, launched, tmp_path) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_demo_of_one_step(monkeypatch, tmp_path, capsys):
    runs = [_run(name, [1.0]) for name in ARMS]
    status = _small_demo_after(monkeypatch, lambda *a, **k: [runs], tmp_path, "--steps", "1")
    assert status == 0
    shown = capsys.readouterr().out
    assert "1 steps" not in shown
    assert "→" not in shown
    for panel in report.plotted(runs).axes:
        assert all(line.get_marker() == "o" for line in panel.lines)


# ---- the verdict --------------------------------------------------------------------------------


def _run(name: str, losses: list[float], norms: list[float] | None = None) -> Run:
    steps = [Step(*pair) for pair in zip(losses, norms or [2.0] * len(losses), strict=True)]
    return Run(ARMS[name], steps, [90] * len(steps), [100] * len(steps))


def test_equal_runs_agree():
    unpadded, ours = _run("unpadded", [3.0, 2.0]), _run("padded_sp", [3.0, 2.0 * (1 + 9e-5)])
    assert report.disagreements(unpadded, ours) == []
    assert report.verdict(unpadded, ours)[1] == 0
    assert report.largest_difference(unpadded, ours) == pytest.approx(9e-5)


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        (_run("padded_sp", [3.0, 2.0 * (1 + 2e-4)]), "step 2: loss 2.0004 against 2"),
        (_run("padded_sp", [3.0, 2.0], [2.0, 1.9]), "step 2: gradient norm 1.9 against 2"),
        (_run("padded_sp", [3.0, math.nan]), "step 2: loss nan against 2"),
        (_run("padded_sp", [3.0]), "1 step against 2"),
    ],
    ids=["loss", "gradient norm", "nan", "fewer steps"],
)
def test_other_runs_disagree(ours, line):
    unpadded = _run("unpadded", [3.0, 2.0])
    assert report.disagreements(unpadded, ours) == [line]
    message, status = report.verdict(unpadded, ours)
    assert status == 1
    assert line in message


# ---- the arms -----------------------------------------------------------------------------------


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Llama(CONFIG, None, CPU).state_dict()


def _one_step(model, policy) -> Step:
    (step,) = train(model, [Batch.of(PACK, policy, CPU)], learning_rate=1e-3)
    return step


@pytest.mark.parametrize("policy", [AlignPolicy(), PADDED], ids=["unpadded", "padded"])
def test_plain_model_is_the_same_model(policy):
    """What the other arms show is their handling of pads, not another model."""
    weights = _weights()
    ours = _one_step(PaddedModel(CONFIG, weights, CPU), policy)
    plain = _one_step(PlainModel(CONFIG, weights, CPU, Handling()), policy)
    assert plain.loss == pytest.approx(ours.loss, rel=1e-5)
    assert plain.gradient_norm == pytest.approx(ours.gradient_norm, rel=1e-5)


def test_poisoned_pads_change_no_bit():
    batches = [Batch.of(PACK, PADDED, CPU)] * 3
    models = [PaddedModel(CONFIG, _weights(), CPU, poisoned=p) for p in (False, True)]
    clean, poisoned = (
        [(s.loss, s.gradient_norm) for s in train(model, batches, learning_rate=1e-2)]
        for model in models
    )
    assert poisoned == clean
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_poison_is_there():
    model = PaddedModel(CONFIG, _weights(), CPU, poisoned=True)
    batch = Batch.of(PACK, PADDED, CPU)
    model(batch)  # the hooks poison by the batch of the last call
    logits = model.llama(batch.ids, batch.meta)
    assert torch.equal(logits.isnan().all(dim=1), batch.meta.padding_mask)


@pytest.mark.parametrize("name", list(ARMS)[2:])
def test_other_handling_trains_otherwise(name):
    weights = _weights()
    for part in ("query", "key"):
        weights[f"blocks.0.qkv.{part}_weight"] *= 20  # so that positions matter
    right = _one_step(model_of(ARMS["unpadded"], CONFIG, weights, CPU, None), AlignPolicy())
    wrong = _one_step(model_of(ARMS[name], CONFIG, weights, CPU, None), PADDED)
    assert wrong.gradient_norm != pytest.approx(right.gradient_norm, rel=1e-3)


def test_training_leaves_the_given_weights_alone():
    weights = _weights()
    for arm in ARMS.values():
        train(
            model_of(arm, CONFIG, weights, CPU, None),
            [Batch.of(PACK, PADDED, CPU)],
            learning_rate=1.0,
        )
    assert all(
        torch.equal(w, v) for w, v in zip(weights.values(), _weights().values(), strict=True)
    )


def test_spans():
    meta = Batch.of(PACK, PADDED, CPU).meta
    assert meta.seq_lens == (11, 8, 11, 2)
    assert padded_spans(meta) == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert real_spans(meta) == [(0, 11), (16, 8), (32, 11), (48, 2)]
    assert mixed_spans(meta) == [(0, 11), (11, 8), (19, 11), (30, 2)]


def test_labels():
    """Three rows of a real sequence and one pad, twice, as others label them."""
    begin, a, end = text.BEGIN, ord("a"), text.END
    batch = Batch.of([[begin, a, end]] * 2, AlignPolicy(sequence_multiple=4), CPU)
    none, pad = -100, text.PAD
    assert own_labels(batch).tolist() == [a, end, none, none] * 2
    assert labels_with_pads(batch).tolist() == [a, end, pad, pad] * 2
    assert labels_without_end(batch).tolist() == [a, none, none, none] * 2
    shifted = [a, end, none, a, end, none, none, none]
    assert labels_of_unpadded_rows(batch).tolist() == shifted


# ---- how fast -----------------------------------------------------------------------------------


class _OneRank:
    index, group, device = 0, None, CPU
    waited = 0

    def wait_for_all(self) -> None:
        self.waited += 1


def test_speed_is_of_clean_steps(monkeypatch):
    """A clock that gains a second a step makes the rate the pack's tokens; no poison in the way."""
    seconds = itertools.count()
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(PaddedModel, "_poison", None)  # not callable
    rank = _OneRank()
    arm = dataclasses.replace(ARMS["padded_sp"], num_ranks=1)
    rate = speed.tokens_per_second(arm, CONFIG, _weights(), [PACK], rank)
    assert rate == sum(map(len, PACK))
    assert rank.waited == 2  # before and after


def test_ranks_that_an_arm_does_not_need_wait():
    rank = _OneRank()
    rank.index = 1
    assert speed.tokens_per_second(ARMS["unpadded"], CONFIG, {}, [PACK], rank) is None
    assert rank.waited == 2


# ---- its ranks ----------------------------------------------------------------------------------


def _tell_and_return(rank, word):
    rank.tell(f"{word} from {rank.index}")
    return rank.index


def _raise_on_rank_one(rank):
    if rank.index == 1:
        raise ValueError("boom")


def _end_on_rank_one(rank):
    if rank.index == 1:
        os._exit(7)


def test_launch_brings_news_and_values():
    news = []
    assert launch(_tell_and_return, 2, "hello", on_news=news.append) == [0, 1]
    assert sorted(news) == ["hello from 0", "hello from 1"]


def test_launch_reports_a_lost_rank():
    with pytest.raises(RankFailure, match="ended without a word, exit code 7"):
        launch(_end_on_rank_one, 2)


# ---- its text -----------------------------------------------------------------------------------

SOURCE = (
    b'''
def short(): pass

def kept(x):
    """A docstring."""
    return x + 1

class C:
    async def method(self):
        return "caf\xc3\xa9, ".join(self.words)

def long():
'''
    + b"    print('again')\n" * 40
)


def test_functions_of_a_python_file():
    kept, method = text.python_functions(SOURCE)
    assert kept == b'def kept(x):\n    """A docstring."""\n    return x + 1'
    assert method.startswith(b"async def method(self):")
    assert "café" in method.decode()


def test_source_that_does_not_parse_is_split_into_paragraphs():
    assert text.python_functions(b"def f(:\n\nprint 1") == [b"def f(:", b"print 1"]


def test_paragraphs():
    assert text.paragraphs(b"one\ntwo\r\n\r\nthree\n\n\n\n  four \n") == [
        b"one\ntwo",
        b"three",
        b"four",
    ]
    longest = text.MAX_TOKENS - 2
    assert list(map(len, text.paragraphs(b"x" * (2 * longest + 5)))) == [longest, longest, 5]
    assert text.paragraphs(b" \n\n \n") == []


def test_files_of_the_user(tmp_path):
    (tmp_path / "a.py").write_bytes(SOURCE)
    (tmp_path / "b.txt").write_bytes(b"one\n\ntwo")
    pieces = text.split_files([tmp_path / "a.py", tmp_path / "b.txt"])
    assert pieces[-2:] == [b"one", b"two"]
    assert len(pieces) == 4
    packs = text.token_packs([tmp_path / "b.txt"], num_packs=3, tokens_per_pack=400, seed=0)
    assert len(packs) == 3  # the same text over and over
    assert {tuple(s) for pack in packs for s in pack} == {
        (text.BEGIN, *b"one", text.END),
        (text.BEGIN, *b"two", text.END),
    }


def test_files_without_text(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"\n\n")
    with pytest.raises(ValueError, match=r"no text to train on in .*empty\.txt"):
        text.token_packs([tmp_path / "empty.txt"], num_packs=1, tokens_per_pack=400, seed=0)


def test_packs_of_the_standard_library():
    packs = text.token_packs(None, num_packs=5, tokens_per_pack=700, seed=3)
    assert packs == text.token_packs(None, num_packs=5, tokens_per_pack=700, seed=3)
    assert packs != text.token_packs(None, num_packs=5, tokens_per_pack=700, seed=4)
    assert len(packs) == 5
    for pack in packs:
        assert 700 - text.MAX_TOKENS < sum(map(len, pack)) <= 700
        assert all(len(sequence) <= text.MAX_TOKENS for sequence in pack)
        assert all(bytes(s[1:-1]).lstrip().startswith((b"def", b"async", b"@")) for s in pack)
    texts = [tuple(s) for pack in packs for s in pack]
    assert len(set(texts)) > 0.9 * len(texts)


# ---- the other subcommands ----------------------------------------------------------------------


def test_plan(capsys):
    lengths = ["100", "150", "120", "130"]
    assert main(["plan", *lengths, "--recipe", "fp8_blockwise", "--tp-size", "2"]) == 0
    lines = {
        words[0]: words[1:]
        for words in map(str.split, capsys.readouterr().out.splitlines())
        if words
    }
    assert lines["padded_sp"] == ["512", "256", "2.3%", "yes", "100", "150", "120", "142"]
    assert lines["verl"][0] == "768"


def test_plan_refuses(capsys):
    assert main(["plan", "100", "--tp-size", "0"]) == 2
    assert "tp_size" in capsys.readouterr().err


def test_a_slip_gets_the_options_of_its_own_subcommand(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "100", "--tp", "2"])
    assert exit_.value.code == 2
    shown = capsys.readouterr()
    shown = shown.out + shown.err
    assert "--tp-size INT" in shown
    assert "python -m padded_sp plan --help" in shown
    assert "--output" not in shown  # the demo's
    assert "in python" not in shown


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"padded_sp {padded_sp.__version__}\n"


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert "gloo" in shown


def test_missing_extra_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "rich" else find_spec(name, *a),
    )
    with pytest.raises(SystemExit, match=r"needs rich: python -m pip install 'padded_sp\[cli\]'"):
        runpy.run_path(padded_sp.__main__.__file__)
