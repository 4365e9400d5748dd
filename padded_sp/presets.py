"""How other frameworks pad, as formulas of their own: nothing here makes their layouts legal.

``python -m padded_sp plan`` shows them beside the least legal plan, and ``AlignPolicy.problem``
says why the recipe refuses one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Literal

from padded_sp.alignment import RECIPES, Plan, Recipe
from padded_sp.boundaries import check_lengths, check_size, host_lengths

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Multiples:
    """What a framework rounds up to.

    Attributes:
        each: every padded length is a multiple of it, in rows.
        total: the sum of the padded lengths goes up to a multiple of it, in rows.
        rest: where the rows go that only the total needs: "tail" lengthens the last padded
            length, "own_entry" adds zero-length entries for them (one here).
    """

    each: int
    total: int = 1
    rest: Literal["tail", "own_entry"] = "tail"


def framework_plan(
    name: str,
    seq_lens: Sequence[int] | Tensor,
    recipe: Recipe = "bf16",
    tp_size: int = 1,
    cp_size: int = 1,
) -> Plan:
    """The layout that another framework gives these sequences, legal for the recipe or not.

    Sequence parallelism is on where ``tp_size > 1``; what a framework lets its user choose has its
    default.

    Args:
        name: a key of ``PRESETS``.
        seq_lens: real lengths on the host, in tokens.
        recipe, tp_size, cp_size: as for ``AlignPolicy``.

    Raises: ValueError: an unknown name or recipe; sizes below 1; no sequence; negative lengths.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    check_size(tp_size, "tp_size")
    check_size(cp_size, "cp_size")
    real = host_lengths(seq_lens, "seq_lens")
    check_lengths(real, tuple(max(0, n) for n in real))

    multiples = PRESETS[name](recipe, tp_size, cp_size)
    padded = [n + -n % multiples.each for n in real]
    rest = -sum(padded) % multiples.total
    if rest and multiples.rest == "own_entry":
        return Plan((*real, 0), (*padded, rest))
    padded[-1] += rest
    return Plan(real, tuple(padded))


def _chunks(cp_size: int) -> int:
    """Each sequence is cut into so many, two of them for each context-parallel rank."""
    return 2 * cp_size if cp_size > 1 else 1


def _scale_rows(recipe: Recipe) -> int:
    """Rows that NeMo-RL and ms-swift give each shard a multiple of, by FP8 recipe."""
    return {"fp8_blockwise": 128, "mxfp8": 32}.get(recipe, 16)


def verl(recipe: Recipe, tp_size: int, cp_size: int) -> Multiples:
    """The last sequence is stretched until the total is a multiple of 128 chunks.

    Source: verl ``verl/models/mcore/util.py``: ``preprocess_packed_seqs`` at b178a3cd (January
        2026) and ``preprocess_thd_engine`` at 1dda039b9 (August 2026).
    """
    chunk = tp_size * _chunks(cp_size)
    return Multiples(chunk) if recipe == "bf16" else Multiples(lcm(16, chunk), 128 * chunk)


def nemo_rl(recipe: Recipe, tp_size: int, cp_size: int) -> Multiples:
    """As verl, but the total depends on the recipe.

    Source: NeMo-RL ``nemo_rl/models/megatron/data.py`` at 7ea279ab (August 2026), without its
        ``make_sequence_length_divisible_by``, HybridEP and pipeline parallelism.
    """
    chunk = tp_size * _chunks(cp_size)
    return Multiples(chunk) if recipe == "bf16" else Multiples(chunk, _scale_rows(recipe) * chunk)


def skyrl(recipe: Recipe, tp_size: int, cp_size: int) -> Multiples:
    """Only sequences are aligned, so that blockwise shards need not be multiples of 128 rows.

    Source: SkyRL ``packing_utils.py`` at a9564572 (August 2026).
    """
    chunk = tp_size * _chunks(cp_size)
    return Multiples(chunk if recipe == "bf16" else lcm(chunk, 16 * cp_size))


def slime(recipe: Recipe, tp_size: int, cp_size: int) -> Multiples:
    """Each context-parallel rank's rows go up to a multiple of 128 tp, whatever the recipe.

    Source: slime ``slime/backends/megatron_utils/data.py`` at 624b824a (August 2026), with its
        default ``pad_multiplier``.
    """
    return Multiples(_chunks(cp_size), 128 * tp_size * cp_size, "own_entry")


def ms_swift(recipe: Recipe, tp_size: int, cp_size: int) -> Multiples:
    """Dummy sequences fill each shard to the recipe's multiple.

    Source: ms-swift ``swift/megatron/utils/utils.py`` at 3602360a (August 2026), without its
        fused attention, which rounds up to 64 or more.
    """
    rows = 1 if recipe == "bf16" else _scale_rows(recipe)
    return Multiples(_chunks(cp_size), tp_size * cp_size * rows, "own_entry")


#: name -> (recipe, tp_size, cp_size) -> what that framework rounds up to.
PRESETS: dict[str, Callable[[Recipe, int, int], Multiples]] = {
    "verl": verl,
    "nemo_rl": nemo_rl,
    "skyrl": skyrl,
    "slime": slime,
    "ms_swift": ms_swift,
}
