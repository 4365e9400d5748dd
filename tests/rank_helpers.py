"""What bodies that run on every rank need beside the package itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where this rank's tensors live: its own GPU for NCCL, otherwise the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def comm_counts(comms: CommDebugMode) -> dict[str, int]:
    """The collectives that ran, by name: {"all_gather_into_tensor": 1, ...}."""
    counts: dict[Any, int] = comms.get_comm_counts()
    return {str(op).rpartition(".")[2]: count for op, count in counts.items() if count}
