"""The real megatron-core, imported over Transformer Engine or, without a GPU, over its double."""

from __future__ import annotations

import sys
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
def model_parallel(group: dist.ProcessGroup, *, expert_parallel: bool = False) -> Iterator[None]:
    """Megatron's process groups, tensor-parallel over all ranks; without a GPU, on the CPU.

    ``expert_parallel``: experts are divided over the ranks, not the rows of their weights.
    """
    parallel_state = import_megatron("parallel_state")
    size = group.size()
    sizes = (size, size, 1) if expert_parallel else (size, 1, size)
    if _initialized != [sizes]:  # seldom: process groups are many
        parallel_state.destroy_model_parallel()
        without_warnings(
            lambda: parallel_state.initialize_model_parallel(
                sizes[0],
                expert_model_parallel_size=sizes[1],
                expert_tensor_parallel_size=sizes[2],
            )
        )
        _initialized[:] = [sizes]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # PyTorch 2.13 has newer names for collectives that Megatron calls.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fp8_autocast is deprecated")
        if not torch.cuda.is_available():
            _run_on_cpu(patch)
        seed_everything()
        yield


def seed_everything() -> None:
    """The same parameters for every model that is built after it."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        import_megatron("tensor_parallel.random").model_parallel_cuda_manual_seed(1)


_initialized: list[tuple[int, int, int]] = []


class _Stream:
    """A stream or event of a device that there is not."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _run_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """What Megatron asks of CUDA whatever device it runs on."""
    tracker = import_megatron("tensor_parallel.random").CudaRNGStatesTracker
    patch.setattr(tracker, "fork", lambda self, name=None: nullcontext())
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "current_stream", _Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    dispatcher = import_megatron("transformer.moe.token_dispatcher")
    patch.setattr(dispatcher, "maybe_move_tensor_to_cpu", _as_on_the_host)


def _as_on_the_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return x.numpy() if as_numpy and torch.is_tensor(x) else x


def put_checkpoints_back(patch: pytest.MonkeyPatch) -> None:
    """What ``carry_meta_through_recompute`` replaces is replaced for as long as ``patch`` is."""
    random = import_megatron("tensor_parallel.random")
    for owner, name in (
        (random.CheckpointFunction, "forward"),
        (random.CheckpointWithoutOutput, "checkpoint"),
        (sys.modules["transformer_engine.pytorch.distributed"], "checkpoint"),
    ):
        patch.setattr(owner, name, vars(owner)[name])
    if not torch.cuda.is_available():
        patch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: None)
        patch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)


def config_of(group: dist.ProcessGroup, name: str = "TransformerConfig", **options: Any) -> Any:
    """A configuration of that class, in BF16, its rows divided over the group's ranks."""
    cls = getattr(import_megatron("transformer.transformer_config"), name)
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
