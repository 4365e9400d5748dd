"""The one timing loop of all benchmarks, and what is written beside their figures."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent


def time_alternating(
    candidates: dict[str, Callable[[], Any]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    iterations: int,
    warm_up: int,
    head_start: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of each iteration of each candidate, of the slowest rank.

    The candidates take turns, each first in every other round, so that what else the machine does
    falls on all of them. All ranks start an iteration together; on CUDA, device events time it.
    ``head_start`` gives the device other work just before: the host then runs ahead, as it does in
    the middle of a training step, and what is timed is the device's work alone.
    """
    local: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(warm_up + iterations):
        order = list(candidates) if i % 2 == 0 else list(reversed(candidates))
        for name in order:
            dist.barrier(group)
            elapsed = _on_cuda if device.type == "cuda" else _on_cpu
            milliseconds = elapsed(candidates[name], head_start)
            if i >= warm_up:
                local[name].append(milliseconds)
    slowest = torch.tensor(list(local.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(local, slowest.tolist(), strict=True))


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentiles."""
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return {
        "median_ms": statistics.median(milliseconds),
        "p20_ms": fifths[0],
        "p80_ms": fifths[3],
    }


def ratio_of_pairs(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Of each iteration's two times, which lie side by side: median and the 20th and 80th
    percentiles. What slows the machine down for longer than an iteration cancels out."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    fifths = statistics.quantiles(ratios, n=5, method="inclusive")
    return {"median": statistics.median(ratios), "p20": fifths[0], "p80": fifths[3]}


def provenance() -> dict[str, Any]:
    """What the figures depend on: code, versions, machine, command line."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "argv": sys.argv[1:],
        "commit": _git("rev-parse", "HEAD"),
        "tree": _tree_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "gpus": gpus,
        "driver": _driver() if gpus else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def _on_cpu(work: Callable[[], Any], head_start: Callable[[], Any]) -> float:
    head_start()
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def _on_cuda(work: Callable[[], Any], head_start: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    head_start()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _git(*arguments: str) -> str | None:
    return _said("git", *arguments)


def _driver() -> str | None:
    said = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.partition("\n")[0] if said else None


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no such program here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _tree_hash() -> str:
    """One hash of every Python file of the package and its tests; needs no git."""
    files = sorted(
        (str(path.relative_to(ROOT)), path)
        for folder in ("padded_sp", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
