"""What this machine has: versions, the libraries really loaded, GPUs, and what runs on them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import ModuleType

import torch
from torch.cuda import nccl

from padded_sp import alignment, backends
from padded_sp.backends.cudnn import Version, version_of
from padded_sp.backends.torch_attention import uses_flash

_NOT_INSTALLED = "not installed"
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


def facts() -> dict[str, str]:
    """Name -> what there is of it, in the order to be read. Loads Transformer Engine."""
    rows = {
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
        "cuDNN of PyTorch": cudnn_of_pytorch(),
        "Triton": _version("triton"),
        "Transformer Engine": _transformer_engine(),
    }
    if not isinstance(te := transformer_engine(), str):
        rows["cuDNN of Transformer Engine"] = _cudnn_files(te.cudnn_version())
    if not torch.cuda.is_available():
        return rows | {"devices": f"CPU, {torch.get_num_threads()} threads"}
    return rows | {
        "NCCL": dotted(nccl.version()),
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", first=True),
        "devices": "\n".join(_gpus()),
        "links": _links(),
    }


def recipes() -> dict[str, str]:
    """Recipe -> empty, or why the linears of backend "te" cannot compute in it here."""
    te = transformer_engine()
    if isinstance(te, str):
        return dict.fromkeys(alignment.RECIPES, te)
    return {name: te.unavailable(name) for name in alignment.RECIPES}


def attention() -> dict[str, str]:
    """Backend of attention -> what it runs on here, or why it does not; and what "auto" tries."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = {}
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.empty(1, 1, 64, dtype=dtype, device=device)
        path = "FlashAttention, whole pack" if uses_flash(q, q) else "one sequence after another"
        paths[str(dtype).removeprefix("torch.")] = path
    te = transformer_engine()
    if not isinstance(te, str):
        te = f"cuDNN {dotted(te.cudnn_version())}, packed; bfloat16 and float16"
    on_gpu = "bfloat16 and float16" if torch.cuda.is_available() else "needs a GPU"
    errors = {n: backends.import_error(path) for n, path in backends.ATTENTION.items()}
    without = {n: str(error).partition("\n")[0] for n, error in errors.items() if error}
    tried = (n for n in backends.AUTO if errors[n] is None)
    return {
        "auto": ", then ".join(tried),
        "mixed": without.get("mixed", f"short sequences by triton, long ones by flash4; {on_gpu}"),
        "triton": without.get("triton", f"our kernels, for packs of short sequences; {on_gpu}"),
        "flash4": without.get("flash4", on_gpu),
        "te": te,
        "torch": "; ".join(f"{k} on {device}: {v}" for k, v in paths.items()),
    }


def linears() -> dict[str, str]:
    """Backend of linears -> the recipes that it computes in here, or why it does not run."""
    te = transformer_engine()
    usable = te if isinstance(te, str) else ", ".join(n for n, why in recipes().items() if not why)
    return {"torch": "bf16, and every other dtype of PyTorch", "te": usable}


@functools.cache
def transformer_engine() -> ModuleType | str:
    """``padded_sp.backends.te``, or why it cannot be imported. Its loader raises all sorts."""
    try:
        return import_module("padded_sp.backends.te")
    except Exception as error:
        if not is_transformer_engine_installed():
            return _NOT_INSTALLED
        return f"installed, but cannot be imported: {error}".partition("\n")[0]


def is_transformer_engine_installed() -> bool:
    return find_spec("transformer_engine") is not None


def cudnn_of_pytorch() -> str:
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:  # older than the one that PyTorch was built with
        return str(error).partition("\n")[0]
    return "none" if number is None else dotted(version_of(number))


def loaded_cudnn() -> dict[str, Version]:
    """File -> version of each libcudnn in this process: it may hold two, from two places."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    versions = {}
    for path in dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libcudnn." in line):
        with contextlib.suppress(OSError, AttributeError):  # deleted meanwhile, or another library
            get_version = ctypes.CDLL(path).cudnnGetVersion  # already loaded: its own symbol
            get_version.restype = ctypes.c_size_t
            versions[path] = version_of(get_version())
    return versions


def shipped_cudnn() -> Version | None:
    """The one that was installed with PyTorch; None where it is no Python package."""
    major = (torch.version.cuda or "").partition(".")[0]
    version = _version(f"nvidia-cudnn-cu{major}")
    if version == _NOT_INSTALLED:
        return None
    numbers = [*map(int, re.findall(r"\d+", version)), 0, 0]
    return numbers[0], numbers[1], numbers[2]


def dotted(version: tuple[int | str, ...]) -> str:
    return ".".join(map(str, version))


def _cudnn_files(version: Version) -> str:
    files = [path for path, loaded in loaded_cudnn().items() if loaded == version]
    return f"{dotted(version)}, {' or '.join(files) or 'from a file that is not known'}"


def _transformer_engine() -> str:
    te = transformer_engine()
    return te if isinstance(te, str) else dotted(te.VERSION)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def _gpus() -> list[str]:
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"cuda:{i} {p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}"
        for i, p in enumerate(properties)
    ]


def _links() -> str:
    """Between pairs of GPUs: whether they read each other's memory, and by what."""
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    if not pairs:
        return "one GPU"
    peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    access = f"{peers} of {len(pairs)} pairs read each other's memory"
    # Where devices are chosen by this variable, nvidia-smi counts others than PyTorch.
    kinds = {} if "CUDA_VISIBLE_DEVICES" in os.environ else links_of(_nvidia_smi("topo", "-m"))
    counts = Counter(kinds[pair] for pair in pairs if pair in kinds)
    shown = ", ".join(f"{kind} ({n})" for kind, n in counts.items()) or "links unknown"
    return f"{access}; {shown}"


def links_of(topology: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> "NV18", "PHB", ... from what ``nvidia-smi topo -m`` prints."""
    rows = [_CONTROL_SEQUENCE.sub("", line).split() for line in topology.splitlines()]
    kinds = {}
    columns: list[str] = []
    for row in rows:
        if not columns and "GPU0" in row:
            columns = row
        elif row and row[0] in columns:
            for column, kind in zip(columns, row[1:], strict=False):
                if row[0].startswith("GPU") and column.startswith("GPU") and column != row[0]:
                    kinds[int(row[0][3:]), int(column[3:])] = kind
    return kinds


def _nvidia_smi(*arguments: str, first: bool = False) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() if first else done.stdout
