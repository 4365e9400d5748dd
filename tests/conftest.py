"""The ``ranks`` fixture, one body run on every rank of a process group, and ``--record``.

Plain ``pytest`` starts CPU ranks on gloo, once per world size, and keeps them between tests.
``torchrun --standalone --nproc-per-node N -m pytest tests/distributed`` makes each pytest process
one rank, on NCCL where there are GPUs; with fewer GPUs than ranks they share them, on gloo, which
proves what is computed and nothing of NCCL. The tests are the same: a module-level function
``body(group, **kwargs)``, run by ``ranks.run(body, **kwargs)``, which returns every rank's value.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import platform
import queue
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZES = (1, 2, 3, 4)
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
ON_GPUS = UNDER_TORCHRUN and torch.cuda.is_available()
RANK = int(os.environ.get("RANK", "0"))
# NCCL refuses two ranks on one GPU.
SHARE_GPUS = ON_GPUS and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
if ON_GPUS:  # Transformer Engine warns without it, and warnings are errors
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Transformer Engine's stand-in, for machines that the real one does not run on.
FAKE_TE = str(Path(__file__).parent / "fake_te")
if importlib.util.find_spec("transformer_engine") is None:
    sys.path.append(FAKE_TE)

# NCCL builds its communicators inside the first collective, which takes tens of seconds.
COLLECTIVE_TIMEOUT = timedelta(seconds=120 if ON_GPUS else 30)
# Longer than a collective, so that a rank stuck in one reports before it is given up on.
OUTCOME_TIMEOUT = 2 * COLLECTIVE_TIMEOUT
# Once one rank has failed, the others raise soon or are stuck in a collective with it.
GRACE = timedelta(seconds=20)
# A new process imports torch first, on a busy machine with few cores.
STARTUP_TIMEOUT = timedelta(seconds=120)

# What one rank made of a body: its traceback, or the value that it returned.
Outcome = tuple[str | None, Any]


# --- Ranks ---------------------------------------------------------------------------------------


class SpawnedRanks:
    """CPU ranks in child processes, started at the first body and anew after a failed one."""

    backend = "gloo"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []

    def run(self, body: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Runs `body(group, **kwargs)` on every rank; returns the values in rank order, or fails
        the test with every rank's traceback."""
        if not self._processes:
            self._start()
        job = pickle.dumps((body, kwargs))
        for jobs in self._jobs:
            jobs.put(job)
        outcomes = self._collect(OUTCOME_TIMEOUT)
        # A collective that one rank left early cannot be trusted again.
        if len(outcomes) < self.world_size or any(error for error, _ in outcomes.values()):
            self._kill()
        return _values_or_fail(outcomes, self.world_size)

    def close(self) -> None:
        for jobs in self._jobs if self._processes else ():
            jobs.put(None)
        for process in self._processes:
            process.join(timeout=10)
        self._kill()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        # Kept here: the store must outlive every rank that still talks to it.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._jobs = [context.SimpleQueue() for _ in range(self.world_size)]
        self._answers = context.Queue()
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, self.world_size, self._store.port, self._jobs[rank], self._answers),
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for process in self._processes:
            process.start()
        _values_or_fail(self._collect(STARTUP_TIMEOUT), self.world_size)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def _collect(self, timeout: timedelta) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                rank, outcome = self._answers.get(timeout=0.5)
                outcomes[rank] = _unpacked(outcome)
                continue
            for rank, process in enumerate(self._processes):
                if rank not in outcomes and not process.is_alive():
                    outcomes[rank] = f"the process died with exit code {process.exitcode}", None
                    deadline = min(deadline, time.monotonic() + GRACE.total_seconds())
        return outcomes


class TorchrunRanks:
    """This process is one rank. Outcomes are shared through a store, not through the group: a rank
    that fails while the others wait in a collective must still be heard."""

    def __init__(self) -> None:
        device = None
        if ON_GPUS:
            index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        self.backend = "nccl" if ON_GPUS and not SHARE_GPUS else "gloo"
        bound = device if self.backend == "nccl" else None
        dist.init_process_group(self.backend, timeout=COLLECTIVE_TIMEOUT, device_id=bound)
        if SHARE_GPUS:
            dist._coalescing_manager = _coalesce_nothing
            self._on_host = _functional_collectives_on_the_host()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._bodies_run = 0
        self._store = dist.PrefixStore("outcomes", dist.group.WORLD.get_group_store())

    def run(self, body: Callable[..., Any], **kwargs: Any) -> list[Any]:
        self._bodies_run += 1
        mine = _outcome_of(lambda: _call(body, kwargs))
        self._store.set(f"{self._bodies_run}/{self.rank}", _packed(mine))
        outcomes = {self.rank: mine}
        timeout = GRACE if mine[0] else OUTCOME_TIMEOUT
        for rank in set(range(self.world_size)) - {self.rank}:
            key = f"{self._bodies_run}/{rank}"
            with contextlib.suppress(dist.DistError):
                self._store.wait([key], timeout)
                outcomes[rank] = _unpacked(self._store.get(key))
            if rank not in outcomes or outcomes[rank][0]:
                timeout = GRACE
        return _values_or_fail(outcomes, self.world_size)

    def close(self) -> None:
        dist.destroy_process_group()


@contextlib.contextmanager
def _coalesce_nothing(**_: Any) -> Iterator[Any]:
    """For gloo, which cannot: Transformer Engine's gathers inside it are each waited for anyway."""
    yield SimpleNamespace(wait=lambda: None)


def _functional_collectives_on_the_host() -> torch.library.Library:
    """For gloo, which crashes on CUDA tensors of the functional ones (PyTorch 2.11)."""

    def group_of(name: str) -> dist.ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(name)

    def all_gather(x: torch.Tensor, size: int, name: str) -> torch.Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(size)]
        dist.all_gather(parts, x.cpu().contiguous(), group_of(name))
        return torch.cat(parts).to(x.device)

    def all_reduce(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
        total = x.cpu().contiguous()
        dist.all_reduce(total, getattr(dist.ReduceOp, op.upper()), group_of(name))
        return total.to(x.device)

    def reduce_scatter(x: torch.Tensor, op: str, size: int, name: str) -> torch.Tensor:
        return all_reduce(x, op, name).chunk(size)[group_of(name).rank()].clone()

    def all_to_all(x: torch.Tensor, outs: list[int], ins: list[int], name: str) -> torch.Tensor:
        received = torch.empty(sum(outs), *x.shape[1:], dtype=x.dtype)
        dist.all_to_all_single(received, x.cpu().contiguous(), outs, ins, group_of(name))
        return received.to(x.device)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", all_gather, "CUDA")
    library.impl("all_reduce", all_reduce, "CUDA")
    library.impl("reduce_scatter_tensor", reduce_scatter, "CUDA")
    library.impl("all_to_all_single", all_to_all, "CUDA")
    library.impl("wait_tensor", lambda x: x, "CUDA")
    return library


def _serve(rank: int, world_size: int, port: int, jobs: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    answers.put((rank, _packed((None, "started"))))
    while (job := jobs.get()) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome = _outcome_of(lambda job=job: _call(*pickle.loads(job)))
        answers.put((rank, _packed(outcome)))
    dist.destroy_process_group()


def _call(body: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    value = body(dist.group.WORLD, **kwargs)
    if ON_GPUS:
        torch.cuda.synchronize()  # an error of this body must not surface in the next one
    return value


def _outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return None, call()
    except KeyboardInterrupt:
        raise
    except BaseException:  # pytest.fail and pytest.raises leave by one that is not an Exception
        return traceback.format_exc(), None


def _packed(outcome: Outcome) -> bytes:
    """By value: a tensor in shared memory would die with the rank that made it."""
    packed = io.BytesIO()
    try:
        torch.save(outcome, packed)
    except Exception:
        packed = io.BytesIO()
        torch.save((f"its value cannot be pickled\n{traceback.format_exc()}", None), packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> Outcome:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


def _values_or_fail(outcomes: dict[int, Outcome], world_size: int) -> list[Any]:
    reports = [f"--- rank {r}\n{error}" for r, (error, _) in sorted(outcomes.items()) if error]
    reports += [f"--- rank {r} never answered" for r in range(world_size) if r not in outcomes]
    if reports:
        pytest.fail("\n".join(reports), pytrace=False)
    return [outcomes[r][1] for r in range(world_size)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        sizes = (int(os.environ["WORLD_SIZE"]),) if UNDER_TORCHRUN else WORLD_SIZES
        limit = metafunc.definition.get_closest_marker("max_ranks")
        if limit is not None and not UNDER_TORCHRUN:
            sizes = tuple(size for size in sizes if size <= limit.args[0])
        metafunc.parametrize(
            "ranks", sizes, indirect=True, scope="session", ids=lambda n: f"world{n}"
        )


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[SpawnedRanks | TorchrunRanks]:
    launched = TorchrunRanks() if UNDER_TORCHRUN else SpawnedRanks(request.param)
    yield launched
    launched.close()


# --- Results, kept beside the hash of the code that they are of -----------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        metavar="FILE",
        type=Path,
        help="write counts, failures, versions, GPU and the hash of the code to FILE as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "max_ranks(n): on at most n CPU ranks")
    if UNDER_TORCHRUN:  # the group is broken after a failed body: stop there, on every rank
        config.option.maxfail = config.option.maxfail or 1
    record = config.getoption("record")
    if record is not None and RANK == 0:
        config.pluginmanager.register(_Recorder(record, config.rootpath), "record")


class _Recorder:
    """Counts outcomes and writes them when the session ends."""

    def __init__(self, file: Path, root: Path) -> None:
        self._file, self._root = file, root
        self._counts = Counter(passed=0, failed=0, skipped=0)
        self._failures: list[str] = []
        # At the start: what runs is what was imported, not what was edited meanwhile.
        self._tree = tree_id(root)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(f"{report.nodeid} ({report.when})")
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._counts["failed"] += 1
            self._failures.append(f"{report.nodeid} (collect)")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        recorded = {
            **self._counts,
            "failures": self._failures,
            "exit_status": int(exitstatus),
            "arguments": list(session.config.invocation_params.args),
            "backend": _backend(),
            "world_sizes": [int(os.environ["WORLD_SIZE"])] if UNDER_TORCHRUN else WORLD_SIZES,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": _versions(),
            "tree_id": self._tree,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(recorded, indent=2) + "\n")


def _backend() -> str:
    return "gloo, ranks share a GPU" if SHARE_GPUS else "nccl" if ON_GPUS else "gloo"


def tree_id(root: Path) -> str:
    """One hash, 16 hexadecimal digits, of every .py file under padded_sp/ and tests/, as printed by
    ``find padded_sp tests -name '*.py' -type f | LC_ALL=C sort | xargs sha256sum | sha256sum``."""
    files = [path for top in ("padded_sp", "tests") for path in (root / top).rglob("*.py")]
    names = sorted(str(path.relative_to(root)) for path in files if path.is_file())
    lines = [f"{hashlib.sha256((root / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _versions() -> dict[str, str | None]:
    nccl = cudnn = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if "transformer_engine_torch" in sys.modules:  # the one that it loaded
        cudnn = sys.modules["transformer_engine_torch"].get_cudnn_version()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "triton": _installed("triton"),
        "transformer_engine": _installed("transformer_engine"),
        "cudnn_of_te": cudnn,
    }


def _installed(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None
