"""Starts the demo's ranks, and is its only file that knows of torch.distributed."""

from __future__ import annotations

import datetime
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroup

# Short enough for a user to wait for, long enough for a busy machine.
_TIMEOUT = datetime.timedelta(seconds=120)


class RankFailure(RuntimeError):
    """A rank raised, or ended without a word; the message holds what it left behind."""


@dataclass(frozen=True)
class Rank:
    """What a body knows of the process that it runs in.

    Attributes:
        index: this rank's number in ``group``.
        group: all ranks.
        device: where this rank computes.
        tell: sends any small picklable object to the process that launched the ranks.
    """

    index: int
    group: ProcessGroup
    device: torch.device
    tell: Callable[[Any], None]

    def wait_for_all(self) -> None:
        """Returns once every rank has called it."""
        # Named, or NCCL guesses the device and warns.
        device_ids = [self.index] if self.device.type == "cuda" else None
        dist.barrier(self.group, device_ids=device_ids)


def backend_for(num_ranks: int) -> str:
    """NCCL where every rank can have a GPU of its own, else gloo on CPU."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    return "nccl" if has_gpus and dist.is_nccl_available() else "gloo"


def available_backends() -> list[str]:
    """The backends that this build of PyTorch has."""
    if not dist.is_available():
        return []
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, present in has.items() if present]


def launch(
    body: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    on_news: Callable[[Any], None] = lambda news: None,
) -> list[Any]:
    """Runs ``body(rank, *args)`` in ``num_ranks`` new processes; returns what each returned.

    Args:
        body: a module-level function, ``args`` picklable.
        on_news: called here with each object that a rank tells.

    Raises: RankFailure: a rank raised, or ended without a word.
    """
    context = mp.get_context("spawn")
    mailbox = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        processes = [
            context.Process(
                target=_run_rank,
                args=(index, num_ranks, rendezvous, mailbox, body, args),
                daemon=True,
            )
            for index in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, mailbox, on_news)
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()


def _run_rank(
    index: int, num_ranks: int, rendezvous: str, mailbox: Any, body: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # one core per rank; the ranks share the machine
    backend = backend_for(num_ranks)
    device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=index,
            world_size=num_ranks,
            timeout=_TIMEOUT,
        )
        group = dist.group.WORLD
        assert group is not None
        rank = Rank(index, group, device, lambda news: mailbox.put((index, "news", news)))
        rank.wait_for_all()  # a rank that ends early must not hang up on one that still connects
        value = body(rank, *args)
        dist.destroy_process_group()
        mailbox.put((index, "value", value))
    except Exception:
        mailbox.put((index, "error", traceback.format_exc()))


def _collect(processes: list[Any], mailbox: Any, on_news: Callable[[Any], None]) -> list[Any]:
    """Reads the mailbox until every rank has returned."""
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            index, kind, content = mailbox.get(timeout=1)
        except queue.Empty:
            ended = [p for i, p in enumerate(processes) if i not in values and not p.is_alive()]
            if ended and mailbox.empty():
                codes = ", ".join(str(p.exitcode) for p in ended)
                raise RankFailure(f"a rank ended without a word, exit code {codes}") from None
            continue
        if kind == "news":
            on_news(content)
        elif kind == "value":
            values[index] = content
        else:
            _kill(processes)
            raise RankFailure(f"rank {index} of {len(processes)} raised:\n{content}")
    return [values[index] for index in range(len(processes))]


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
