"""The real megatron-core, imported over Transformer Engine or, without a GPU, over its double."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

_T = TypeVar("_T")


def import_megatron(name: str) -> ModuleType:
    """``megatron.core.<name>``, without the warnings of what it does without."""
    return without_warnings(lambda: import_module(f"megatron.core.{name}"))


def without_warnings(call: Callable[[], _T]) -> _T:
    """What Megatron warns about when it is imported or built: Apex, deprecated options of its
    own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@contextmanager
def model_parallel(group: dist.ProcessGroup) -> Iterator[None]:
    """Megatron's process groups, tensor-parallel over all ranks; without a GPU, on the CPU."""
    parallel_state = import_megatron("parallel_state")
    random = import_megatron("tensor_parallel.random")
    if not parallel_state.model_parallel_is_initialized():  # once a process: groups are many
        without_warnings(lambda: parallel_state.initialize_model_parallel(group.size()))
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            random.model_parallel_cuda_manual_seed(1)
        else:
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            tracker = random.CudaRNGStatesTracker
            patch.setattr(tracker, "fork", lambda self, name=None: nullcontext())
        yield


def config_of(group: dist.ProcessGroup, **options: Any) -> Any:
    """A TransformerConfig in BF16, its rows divided over the group's ranks."""
    cls = import_megatron("transformer.transformer_config").TransformerConfig
    given = {
        "num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "tensor_model_parallel_size": group.size(),
        "sequence_parallel": group.size() > 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    } | options
    return without_warnings(lambda: cls(**given))
