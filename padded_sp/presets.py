"""How other frameworks pad, as policies, to compare their waste with the least legal plan's."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

from padded_sp.alignment import AlignPolicy, Recipe


def preset(name: str, recipe: Recipe = "bf16", tp_size: int = 1, cp_size: int = 1) -> AlignPolicy:
    """The policy that pads as another framework does.

    Args: name: "verl", "nemo_rl", "skyrl", "slime" or "ms_swift".
    Raises: ValueError: an unknown name.
    Source: verl ``verl/models/mcore/util.py``; NeMo-RL ``nemo_rl/models/megatron/data.py``; SkyRL
        ``packing_utils.py``; slime ``slime/backends/megatron_utils/data.py``; ms-swift
        ``swift/megatron/utils/utils.py``.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name](recipe, tp_size, cp_size)


def _fp8_multiple(recipe: Recipe) -> int:
    """The multiple that the frameworks use for each recipe, in rows."""
    return {"bf16": 1, "fp8_blockwise": 128, "mxfp8": 32}.get(recipe, 16)


def _zigzag(cp_size: int) -> int:
    return 2 * cp_size if cp_size > 1 else 1


def _verl(recipe: Recipe, tp_size: int, cp_size: int) -> AlignPolicy:
    share = tp_size * _zigzag(cp_size)
    each, total = (share, share) if recipe == "bf16" else (lcm(16, share), share * 128)
    return AlignPolicy(recipe, tp_size, cp_size, sequence_multiple=each, total_multiple=total)


def _nemo_rl(recipe: Recipe, tp_size: int, cp_size: int) -> AlignPolicy:
    each = _zigzag(cp_size) * tp_size
    total = each * _fp8_multiple(recipe)
    return AlignPolicy(recipe, tp_size, cp_size, sequence_multiple=each, total_multiple=total)


def _skyrl(recipe: Recipe, tp_size: int, cp_size: int) -> AlignPolicy:
    each = tp_size * _zigzag(cp_size)
    each = each if recipe == "bf16" else lcm(each, 16 * cp_size)
    return AlignPolicy(recipe, tp_size, cp_size, sequence_multiple=each, total_multiple=each)


def _slime(recipe: Recipe, tp_size: int, cp_size: int) -> AlignPolicy:
    return AlignPolicy(
        recipe, tp_size, cp_size, total_multiple=tp_size * cp_size * 128, placement="own_entry"
    )


def _ms_swift(recipe: Recipe, tp_size: int, cp_size: int) -> AlignPolicy:
    total = tp_size * cp_size * _fp8_multiple(recipe)
    return AlignPolicy(recipe, tp_size, cp_size, total_multiple=total, placement="own_entry")


#: name -> (recipe, tp_size, cp_size) -> the policy with that framework's multiples.
PRESETS: dict[str, Callable[[Recipe, int, int], AlignPolicy]] = {
    "verl": _verl,
    "nemo_rl": _nemo_rl,
    "skyrl": _skyrl,
    "slime": _slime,
    "ms_swift": _ms_swift,
}
