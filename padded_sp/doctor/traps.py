"""What is known to go wrong, where this machine or its environment is set up for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from padded_sp.backends.cudnn import SOUND_PADS_ON_HOPPER, is_hopper
from padded_sp.backends.isolation import current_device
from padded_sp.doctor.machine import (
    Version,
    dotted,
    is_transformer_engine_installed,
    loaded_cudnn,
    shipped_cudnn,
    transformer_engine,
)

_LOAD_PYTORCHS_CUDNN = (
    'CUDNN_HOME=$(python -c "import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])"); export '
    "CUDNN_HOME LD_LIBRARY_PATH=$CUDNN_HOME/lib:$LD_LIBRARY_PATH, before Python starts"
)


class Trap(NamedTuple):
    what: str
    cure: str


def applying() -> list[Trap]:
    """Those that apply here. Loads Transformer Engine."""
    te = transformer_engine()
    found = list(_of_padded_sp())
    if not isinstance(te, str):
        found += [*_of_cudnn(te.cudnn_version()), *_of_transformer_engine(te)]
    elif is_transformer_engine_installed():
        cure = (
            "build its PyTorch extension for this PyTorch: python -m pip install --no-deps "
            "--no-build-isolation --no-cache-dir --force-reinstall transformer_engine_torch"
        )
        if "cudnn" in te.lower():  # libraries of two versions, found in two places
            cure = f"one cuDNN for all: {_LOAD_PYTORCHS_CUDNN}"
        found.append(Trap(f"Transformer Engine is {te}", cure))
    return found


def _of_padded_sp() -> Iterator[Trap]:
    if os.environ.get("PADDED_SP_VERIFY") == "0":
        yield Trap(
            "PADDED_SP_VERIFY=0: layers trust their backends unchecked",
            "unset it; python -m padded_sp doctor --verify runs the checks by hand",
        )


def _of_cudnn(version: Version) -> Iterator[Trap]:
    newest = max(*loaded_cudnn().values(), shipped_cudnn() or version, version)
    if version < newest:
        yield Trap(
            f"Transformer Engine took cuDNN {dotted(version)}, found before PyTorch's own "
            f"{dotted(newest)}",
            _LOAD_PYTORCHS_CUDNN,
        )
    if version < SOUND_PADS_ON_HOPPER and is_hopper(current_device()):
        yield Trap(
            f"cuDNN {dotted(version)} gives NaN gradients for short sequences with many pads on "
            "Hopper (TransformerEngine #2186), so that attention by te refuses pads",
            f"cuDNN 9.18 or newer: {_LOAD_PYTORCHS_CUDNN}",
        )
    if version[:2] == (9, 14):
        yield Trap(
            "cuDNN 9.14 computes gradients of packed attention that are 30 % off at head sizes 192 "
            "and 256",
            f"cuDNN 9.19, which is right: {_LOAD_PYTORCHS_CUDNN}",
        )


def _of_transformer_engine(te: Any) -> Iterator[Trap]:
    if os.environ.get("NVTE_FUSED_ATTN") == "0":
        left = "none is left that takes packed sequences with pads"
        if te.UNFUSED_DROPS_PADS:
            left = "the Unfused backend is left, which returns packed sequences without their pads"
        yield Trap(f"NVTE_FUSED_ATTN=0 turns cuDNN's attention off: {left}", "unset it")
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0":
        yield Trap(
            "gradients of Transformer Engine's attention differ from run to run in their last bits",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, where equal runs must be equal",
        )
    else:
        yield Trap(
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: Transformer Engine has no attention for packs "
            "whose sequences * heads * longest ** 2 reach 2 ** 30",
            "shorter packs, or unset it",
        )
    if not te.GATHERS_UNALIGNED_BLOCKS:
        yield Trap(
            f"Transformer Engine {dotted(te.VERSION)} cannot gather blockwise FP8 whose rows per "
            "rank are no multiple of 128: padded_sp gathers those in BF16",
            'AlignPolicy("fp8_blockwise", tp_size) plans rows that travel as FP8; or 2.14 or newer',
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1" and _has_one_queue_order():
        yield Trap(
            "CUDA_DEVICE_MAX_CONNECTIONS is not 1: collectives of tensor parallelism may start "
            "after the GEMMs that they should run beside",
            "CUDA_DEVICE_MAX_CONNECTIONS=1, before Python starts",
        )


def _has_one_queue_order() -> bool:
    """Up to Hopper; Blackwell has priorities instead."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] <= 9
