"""The doctor: what is here, what is known to go wrong here, and numbers that are not believed."""

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tyro")

from padded_sp import DotProductAttention, backends
from padded_sp.__main__ import main
from padded_sp.backends import cudnn, torch_attention
from padded_sp.doctor import checks, machine, traps

FAKE_TE = SimpleNamespace(
    VERSION=(2, 20, 2),
    GATHERS_UNALIGNED_BLOCKS=True,
    UNFUSED_DROPS_PADS=False,
    cudnn_version=lambda: (9, 19, 0),
    unavailable=lambda name: "needs Blackwell" if name == "mxfp8" else "",
)


@pytest.fixture(autouse=True)
def _a_known_environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PADDED_SP_VERIFY", "NVTE_FUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def with_te(monkeypatch):
    """Transformer Engine as the doctor sees it, but for what the test says."""

    def put(te=FAKE_TE, **changes):
        if changes:
            te = SimpleNamespace(**vars(te) | changes)
        for module in (machine, traps):
            monkeypatch.setattr(module, "transformer_engine", lambda: te)

    return put


@pytest.fixture
def few_checks(monkeypatch):
    monkeypatch.setattr(checks, "_HEADS", (checks.Heads(32, 32), checks.Heads(48, 16, 2)))
    monkeypatch.setattr(checks, "_WINDOWS", ((-1, -1), (-1, 0)))
    monkeypatch.setattr(backends, "AUTO", ("torch",))
    for table in (backends.ATTENTION, backends.LINEAR):
        for name in set(table) - {"torch"}:
            monkeypatch.delitem(table, name)


@pytest.fixture
def broken(monkeypatch):
    """A backend of attention whose kernels are 30 % off at head size 32."""

    def dot_product_attention(q, k, v, *metas, **options):
        factor = 1.3 if q.shape[-1] == 32 else 1.0
        return factor * torch_attention.dot_product_attention(q, k, v, *metas, **options)

    module = SimpleNamespace(dot_product_attention=dot_product_attention)
    monkeypatch.setitem(sys.modules, "broken_backend", module)
    monkeypatch.setitem(backends.ATTENTION, "broken", "broken_backend")


# --- What is here --------------------------------------------------------------------------------


def test_the_table(capsys, with_te):
    with_te("not installed")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        platform.python_version(),
        torch.__version__,
        importlib.metadata.version("triton"),
        "gloo",
        "attention by torch",
        "linears by torch",
    ):
        assert expected in shown, expected
    assert "fp8_current    not installed" in shown
    assert torch.cuda.is_available() or "CPU, " in shown


def test_with_transformer_engine(capsys, with_te):
    with_te()
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "2.20.2" in shown
    assert "9.19.0" in shown
    assert "mxfp8          needs Blackwell" in shown
    assert "bf16, fp8_delayed, fp8_current, fp8_blockwise" in shown


@pytest.mark.parametrize("missing", ["", "te"])
def test_what_auto_tries_is_what_a_layer_allows(monkeypatch, capsys, missing):
    really = backends.import_error

    def import_error(path):
        if missing and path == backends.ATTENTION[missing]:
            return ImportError()
        return really(path)

    monkeypatch.setattr(backends, "import_error", import_error)
    assert main(["doctor"]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if "attention by auto" in x)
    names = DotProductAttention(2, 8, backend="auto")._choice.names
    assert row.split(maxsplit=3)[3].split() == ", then ".join(names).split()
    assert missing not in names


def test_cudnn_of_two_versions_in_one_process(monkeypatch):
    """Transformer Engine finds a system's cuDNN where PyTorch has loaded parts of its own."""
    what = "/usr/lib/libcudnn_heuristic.so.9: undefined symbol: _ZN5cudnn"
    monkeypatch.setattr(traps, "transformer_engine", lambda: f"cannot be imported: {what}")
    monkeypatch.setattr(traps, "is_transformer_engine_installed", lambda: True)
    (trap,) = [t for t in traps.applying() if "Transformer Engine" in t.what]
    assert "undefined symbol" in trap.what
    assert "CUDNN_HOME" in trap.cure


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModuleNotFoundError("No module named 'transformer_engine'"), 0),
        (ModuleNotFoundError("No module named 'cutlass'"), 1),  # which it needs itself
        (ImportError("libcudnn_heuristic.so.9: undefined symbol: _ZN5cudnn"), 1),
    ],
    ids=["missing", "incomplete", "broken"],
)
def test_a_backend_that_is_installed_and_breaks_is_a_failure(monkeypatch, error, status):
    monkeypatch.setattr(backends, "_is_there", lambda package: bool(status))

    def load(table, name):
        if name == "torch":
            return importlib.import_module(table[name])
        raise ImportError(f"backend {name!r} needs more: {error}") from error

    monkeypatch.setattr(checks.backends, "load", load)
    monkeypatch.setattr(checks, "_attention", lambda name: iter(()))
    monkeypatch.setattr(checks, "_linears", lambda name: iter(()))
    found = list(checks.verdicts())
    assert found
    assert not any(verdict.passed for verdict in found)
    assert all(verdict.is_refusal for verdict in found) is not bool(status)
    assert all(str(error) in verdict.reason for verdict in found)


def test_flash_attention_2_is_not_4(monkeypatch, tmp_path):
    """Both are the package flash_attn; what is installed is told without importing it."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not backends.is_installed("flash4")
    (tmp_path / "flash_attn" / "cute").mkdir()
    assert backends.is_installed("flash4")
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # as if it were absent
    assert not backends.is_installed("mixed")


def test_each_attention_backend_says_why_it_is_not_there(monkeypatch):
    absent = {name: ImportError(f"{name} needs this\nand that") for name in ("flash4", "mixed")}
    errors = {path: absent.get(name) for name, path in backends.ATTENTION.items()}
    monkeypatch.setattr(backends, "import_error", errors.get)
    shown = machine.attention()
    assert (shown["flash4"], shown["mixed"]) == ("flash4 needs this", "mixed needs this")
    assert shown["auto"] == "triton, then te, then torch"
    assert shown["triton"].startswith("our kernels")


def test_transformer_engine_that_does_not_load(monkeypatch):
    machine.transformer_engine.cache_clear()
    monkeypatch.setattr(machine, "import_module", _raise_undefined_symbol)
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    try:
        assert machine.transformer_engine() == (
            "installed, but cannot be imported: undefined symbol: _ZN3c10"
        )
        (trap,) = [t for t in traps.applying() if "Transformer Engine" in t.what]
        assert "undefined symbol" in trap.what
        assert "--no-build-isolation" in trap.cure
        machine.transformer_engine.cache_clear()
        monkeypatch.setattr(machine, "find_spec", lambda name: None)
        assert machine.transformer_engine() == "not installed"
        assert traps.applying() == []
    finally:
        machine.transformer_engine.cache_clear()


def _raise_undefined_symbol(name):
    raise RuntimeError("undefined symbol: _ZN3c10\nand more")


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links():
    assert machine.links_of("unknown") == {}
    links = machine.links_of(TOPOLOGY)
    assert {pair: links[pair] for pair in ((0, 1), (0, 2), (1, 2))} == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 2): "PHB",
    }
    assert len(links) == 6


def test_two_libraries_of_one_name(monkeypatch, tmp_path):
    files = [tmp_path / where / "libcudnn.so.9" for where in ("system", "pip")]
    maps = [
        f"7f00-7f01 r-xp 0 08:01 1{' ' * 20}{file}\n7f01-7f02 rw-p 0 08:01 1   {file}"
        for file in files
    ]
    others = "7f00-7f01 r-xp 0 08:01 1   /usr/lib/libcudnn_graph.so.9\n7f00-7f01 rw-p 0 00:00 0"
    (tmp_path / "maps").write_text("\n".join([*maps, others]))

    class Library:
        def __init__(self, path):
            number = 91400 if "system" in path else 91900

            def get_version():
                return number

            self.cudnnGetVersion = get_version

    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "maps")
    monkeypatch.setattr(machine.ctypes, "CDLL", Library)
    expected = dict(zip(map(str, files), ((9, 14, 0), (9, 19, 0)), strict=True))
    assert machine.loaded_cudnn() == expected
    assert machine._cudnn_files((9, 14, 0)) == f"9.14.0, {files[0]}"


# --- Traps ---------------------------------------------------------------------------------------


def whats():
    return " | ".join(trap.what for trap in traps.applying())


def test_an_old_cudnn_is_named_with_its_cure(monkeypatch, with_te, capsys):
    with_te(cudnn_version=lambda: (9, 14, 0))
    monkeypatch.setattr(traps, "loaded_cudnn", lambda: {"/a": (9, 14, 0), "/b": (9, 19, 0)})
    monkeypatch.setattr(traps, "is_hopper", lambda device: True)
    for expected in ("found before PyTorch's own 9.19.0", "TransformerEngine #2186", "30 % off"):
        assert expected in whats(), expected
    assert all("CUDNN_HOME" in trap.cure for trap in traps.applying()[:3])
    main(["doctor"])
    assert "30 % off at head sizes 192 and 256" in " ".join(capsys.readouterr().out.split())

    with_te(cudnn_version=lambda: (9, 19, 0))
    assert "cuDNN" not in whats()
    monkeypatch.setattr(traps, "loaded_cudnn", dict)
    monkeypatch.setattr(traps, "shipped_cudnn", lambda: (9, 21, 0))
    assert "own 9.21.0" in whats()


def test_which_gpus_are_hopper(monkeypatch):
    """And where its rules hold: te's attention asks it of each call's device."""
    capability = {0: (9, 0), 1: (10, 0), 2: (8, 9)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability[device.index]
    )
    is_hopper = cudnn.is_hopper.__wrapped__
    assert [is_hopper(torch.device("cuda", n)) for n in capability] == [True, False, False]
    assert not is_hopper(torch.device("cpu"))


def test_the_environments_traps(monkeypatch, with_te):
    with_te()
    assert "PADDED_SP_VERIFY" not in whats()
    monkeypatch.setenv("PADDED_SP_VERIFY", "0")
    assert "unchecked" in whats()
    assert "NVTE_FUSED_ATTN" not in whats()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert "none is left" in whats()
    assert "differ from run to run" in whats()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert "2 ** 30" in whats()
    assert "differ from run to run" not in whats()
    monkeypatch.setattr(traps, "_has_one_queue_order", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in whats()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in whats()


def test_the_versions_traps(monkeypatch, with_te):
    with_te()
    assert "blockwise" not in whats()
    with_te(VERSION=(2, 12, 0), GATHERS_UNALIGNED_BLOCKS=False, UNFUSED_DROPS_PADS=True)
    assert "2.12.0 cannot gather blockwise FP8" in whats()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert "without their pads" in whats()


# --- Numbers -------------------------------------------------------------------------------------


def test_right_numbers(capsys, few_checks, tmp_path):
    file = tmp_path / "report.json"
    assert main(["doctor", "--verify", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("right") == 8 + 3
    assert "WRONG" not in shown
    report = json.loads(file.read_text())
    assert list(report) == ["machine", "runs", "recipes", "traps", "checks"]
    assert report["machine"]["PyTorch"].startswith(torch.__version__)
    assert len(report["checks"]) == 11
    subjects = [check["subject"] for check in report["checks"]]
    assert len(set(subjects)) == 11
    heads = 8 if torch.cuda.is_available() else 4
    expected = f"attention by torch, {heads} heads of 48/16, {heads // 2} KV heads, causal, "
    assert f"{expected}bfloat16, no pads" in subjects
    assert all(check["outcome"] == "right" for check in report["checks"])


def test_wrong_numbers_end_with_1(capsys, few_checks, broken, tmp_path):
    file = tmp_path / "report.json"
    assert main(["doctor", "--verify", "--json", str(file)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("WRONG") == 4  # every mask and pads at head size 32, and nothing else
    assert "0.3" in shown
    wrong = [c for c in json.loads(file.read_text())["checks"] if c["outcome"] == "WRONG"]
    assert all("attention by broken" in c["subject"] and "of 32" in c["subject"] for c in wrong)


def test_nan_is_wrong_and_is_json(monkeypatch, few_checks, broken, tmp_path):
    def nan(q, k, v, *metas, **options):
        return torch.nan * torch_attention.dot_product_attention(q, k, v, *metas, **options)

    monkeypatch.setattr(sys.modules["broken_backend"], "dot_product_attention", nan)
    file = tmp_path / "report.json"
    assert main(["doctor", "--verify", "--json", str(file)]) == 1
    assert "Infinity" not in file.read_text()
    last = [c for c in json.loads(file.read_text())["checks"] if "broken" in c["subject"]][-1]
    assert last["figures"]["output"] == "inf"


def test_what_a_backend_refuses_is_no_failure(capsys, monkeypatch, few_checks, broken):
    def refuses(*_, **__):
        raise ValueError("heads of this size are [not] for us")

    monkeypatch.setattr(sys.modules["broken_backend"], "dot_product_attention", refuses)
    monkeypatch.setitem(backends.LINEAR, "absent", "padded_sp.backends.absent")
    monkeypatch.setitem(backends._PACKAGES, "absent", ("no_such_package",))
    assert main(["doctor", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("not supported") == 8 + 1
    assert "and 7 more: heads of this size are [not] for us" in shown
    assert "linears by absent: No module named 'padded_sp.backends.absent'" in shown


def test_a_crash_is_a_failure(capsys, monkeypatch, few_checks, broken):
    def crashes(*_, **__):
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(sys.modules["broken_backend"], "dot_product_attention", crashes)
    assert main(["doctor", "--verify"]) == 1
    assert "and 7 more: RuntimeError: CUDA error: misaligned address" in capsys.readouterr().out


def test_a_file_of_another_kind_is_refused(capsys):
    assert main(["doctor", "--json", "report.txt"]) == 2
    assert "--json must name a .json file, got report.txt" in capsys.readouterr().err


def test_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "padded_sp", "doctor"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
