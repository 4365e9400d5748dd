"""A check in the middle of someone else's step, which must not notice it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """PyTorch as if nothing surrounded the call, and afterwards as it was.

    Inside: gradients are on, autocast and inference mode are off, ``device`` is the current one.
    The caller's hooks on saved tensors see nothing: those of an activation checkpoint count them,
    and would recompute the caller's forward. Random states of the CPU and of ``device`` come back.
    Reading the device is allowed, also where ``torch.cuda.set_sync_debug_mode`` forbids it.
    Communicates nothing.
    """
    on_cuda = device.type == "cuda"
    with ExitStack() as inside:
        inside.enter_context(
            torch.random.fork_rng(devices=[device] if on_cuda else [], device_type="cuda")
        )
        inside.enter_context(torch.inference_mode(False))
        inside.enter_context(torch.enable_grad())
        for kind in {"cpu", device.type}:
            inside.enter_context(torch.autocast(kind, enabled=False))
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        if on_cuda:
            inside.enter_context(torch.cuda.device(device))
            inside.enter_context(_host_reads_allowed())
        yield


def current_device() -> torch.device:
    """The GPU in use, by its index; the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def _host_reads_allowed() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    if not before:  # the setter warns, also of going back to the default
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _itself(x: T) -> T:
    return x
