"""What each recipe, tp and cp demands of rows and of features, as data; the least padding for it.

Linears need nothing per sequence, only totals; context parallelism alone needs each sequence to
split into ``2 * cp_size`` chunks. So the least legal layout pads sequences to that, and the total
to one multiple more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from numbers import Integral
from typing import TYPE_CHECKING, Literal, get_args

from padded_sp.boundaries import check_lengths, check_size, host_lengths

if TYPE_CHECKING:
    from torch import Tensor

    from padded_sp.meta import PaddedSeqMeta

Recipe = Literal["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8"]
Placement = Literal["tail", "own_entry", "each_sequence"]
_SIZES = (
    "tp_size",
    "cp_size",
    "sequence_multiple",
    "total_multiple",
    "num_sequences",
    "inner_rows",
)


@dataclass(frozen=True)
class RecipeRule:
    """What Transformer Engine's linears demand of their operands, on Hopper and later.

    Attributes:
        rows_per_rank: each rank's rows must be a multiple of this.
        rows: all rows (T) must be a multiple of this.
        features: each rank's input and output features must be a multiple of this.
        reason: what breaks where the rows are none, for error messages.
    """

    rows_per_rank: int
    rows: int
    features: int
    reason: str


_ANY = RecipeRule(1, 1, 1, "the reduce-scatter needs T % tp_size == 0")
_FP8_GEMM = RecipeRule(8, 16, 16, "FP8 GEMMs need 8 rows per rank, their wgrad T % 16 == 0")
_BLOCKS = RecipeRule(128, 16, 128, "blocks of 128 rows must not straddle ranks to travel as FP8")
_MX_BLOCKS = RecipeRule(32, 32, 32, "MXFP8 scales blocks of 32 rows")

#: recipe -> (its rule, its rule where FP8 travels between ranks).
RECIPES: dict[str, tuple[RecipeRule, RecipeRule]] = {
    "bf16": (_ANY, _ANY),
    "fp8_delayed": (_FP8_GEMM, _FP8_GEMM),
    "fp8_current": (_FP8_GEMM, _FP8_GEMM),
    "fp8_blockwise": (_FP8_GEMM, _BLOCKS),
    "mxfp8": (_MX_BLOCKS, _MX_BLOCKS),
}


def check_features(recipe: str, in_features: int, out_features: int) -> None:
    """Raises ValueError where a recipe's GEMMs do not take a weight [out_features, in_features].

    Args: in_features, out_features: of this rank's share of the weight.
    """
    multiple = RECIPES[recipe][0].features  # on the wire too, blocks need more: they may not travel
    if in_features % multiple or out_features % multiple:
        raise ValueError(
            f"{recipe} GEMMs need multiples of {multiple} features, got {in_features} in and "
            f"{out_features} out on this rank. Choose features, or a tp_size, that leave each rank "
            "such multiples, or call the layer outside of the FP8 autocast"
        )


def travels_as_fp8(recipe: str, num_rows: int, features: int, tp_size: int) -> bool:
    """Whether a gather to ``num_rows`` rows of ``features`` sends FP8; if not, it sends BF16.

    Rows as GEMMs see them: of x [rows, *, K] the product of all dims but the last. With ``tp_size``
    1, where nothing is sent: whether the recipe's GEMMs take such an operand.
    """
    rule = RECIPES[recipe][tp_size > 1]
    aligned = num_rows % (tp_size * rule.rows_per_rank) == 0 and features % rule.features == 0
    return aligned and recipe != "bf16"


@dataclass(frozen=True)
class Plan:
    """Real and padded lengths of a layout; a policy may have appended zero-length entries.

    Attributes:
        seq_lens: real lengths, in tokens.
        padded_lens: padded lengths, in rows.
        note: names a cheaper plan where the recipe has one; else empty.
    """

    seq_lens: tuple[int, ...]
    padded_lens: tuple[int, ...]
    note: str = field(default="", compare=False)

    @property
    def num_tokens(self) -> int:
        """The real rows."""
        return sum(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """All rows, pads included."""
        return sum(self.padded_lens)

    def waste(self) -> float:
        """The share of the rows that are pads, from 0 to 1."""
        return 1 - self.num_tokens / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True)
class AlignPolicy:
    """The alignment that a recipe and a parallel layout need, and where its padding goes.

    Args:
        recipe: the FP8 recipe of the linears, or "bf16".
        tp_size: ranks that share the rows (tensor and sequence parallelism).
        cp_size: ranks that share each sequence (context parallelism).
        fp8_wire: with "fp8_blockwise" and ``tp_size > 1``, let gathers travel as FP8, which needs
            128 rows per rank. False: they travel as BF16 and 8 rows do.
        sequence_multiple: a further multiple of every padded length, in rows.
        total_multiple: a further multiple of the total, in rows.
        bucket: totals go up to a multiple of it (an int), or to the least listed size that holds
            them (a sequence of ints): fewer distinct shapes. A listed size that the other rules do
            not allow goes up to the next total that they do.
        num_sequences: zero-length entries fill the arrays up to this many sequences.
        placement: where the rows go that only the total needs: "tail" lengthens the last padded
            length, "own_entry" adds a zero-length entry for them, "each_sequence" aligns every
            padded length to the total's multiple.
        inner_rows: rows that GEMMs see for each row of the pack: the product of the dims between,
            for x [rows, *, K].

    Raises: ValueError: an unknown recipe or placement; sizes or multiples below 1.
    Source: TransformerEngine ``transformer_engine/pytorch/utils.py`` (assert_dim_for_fp8_exec),
        ``transformer_engine/pytorch/distributed.py`` (gather_along_first_dim).
    """

    recipe: Recipe = "bf16"
    tp_size: int = 1
    cp_size: int = 1
    fp8_wire: bool = True
    sequence_multiple: int = 1
    total_multiple: int = 1
    bucket: int | Sequence[int] | None = None
    num_sequences: int | None = None
    placement: Placement = "tail"
    inner_rows: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str) or self.recipe not in RECIPES:
            raise ValueError(f"unknown recipe {self.recipe!r}; known: {', '.join(RECIPES)}")
        if self.placement not in get_args(Placement):
            raise ValueError(
                f"unknown placement {self.placement!r}; known: {', '.join(get_args(Placement))}"
            )
        # Stored as Python integers: hashable, and NumPy's would overflow.
        for name in _SIZES:
            size = getattr(self, name)
            if name != "num_sequences" or size is not None:
                object.__setattr__(self, name, check_size(size, name))
        if isinstance(self.bucket, int | Integral):
            object.__setattr__(self, "bucket", check_size(self.bucket, "bucket"))
        elif self.bucket is not None:
            sizes = [check_size(n, "bucket") for n in host_lengths(self.bucket, "bucket")]
            if not sizes:
                raise ValueError("bucket is an empty list of sizes; pass None for no buckets")
            object.__setattr__(self, "bucket", tuple(sorted(sizes)))

    @property
    def rule(self) -> RecipeRule:
        """The recipe's rule with this tp size and wire."""
        plain, on_the_wire = RECIPES[self.recipe]
        return on_the_wire if self.fp8_wire and self.tp_size > 1 else plain

    @property
    def sequence_alignment(self) -> int:
        """The multiple of every padded length, in rows."""
        return lcm(self._chunks, self.sequence_multiple)

    @functools.cached_property
    def total_alignment(self) -> int:
        """The multiple of the total, in rows. Context parallelism splits the rows first.

        It contains the sequences' own multiple: their lengths add up to nothing else.
        """
        per_rank, rows = (
            n // gcd(n, self.inner_rows) for n in (self.rule.rows_per_rank, self.rule.rows)
        )
        rows = lcm(per_rank * self.tp_size, rows)
        return lcm(self.sequence_alignment, self.cp_size * rows, self.total_multiple)

    @property
    def _chunks(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def plan(self, seq_lens: Sequence[int] | Tensor) -> Plan:
        """The layout with the fewest pad rows that this policy allows.

        Args: seq_lens: real lengths on the host, in tokens; 0 is legal.
        Raises: ValueError: no sequence; negative lengths; more sequences than ``num_sequences``;
            more rows than the largest bucket.
        """
        real = host_lengths(seq_lens, "seq_lens")
        check_lengths(real, tuple(max(0, n) for n in real))
        each = self.sequence_alignment
        if self.placement == "each_sequence":
            each = lcm(each, self.total_alignment)
        padded = [_round_up(n, each) for n in real]
        rest = self._total(sum(padded)) - sum(padded)
        entries = [*real]
        if rest and self.placement == "own_entry":
            entries.append(0)
            padded.append(rest)
        else:
            padded[-1] += rest
        missing = 0 if self.num_sequences is None else self.num_sequences - len(entries)
        if missing < 0:
            raise ValueError(
                f"{len(entries)} entries exceed num_sequences={self.num_sequences}; raise it, or "
                "put fewer sequences into the pack"
            )
        note = self._cheaper_wire(real, sum(padded))
        return Plan((*entries, *[0] * missing), (*padded, *[0] * missing), note)

    def _total(self, rows: int) -> int:
        """The least legal total that holds ``rows``."""
        aligned = _round_up(rows, self.total_alignment)
        if self.bucket is None:
            return aligned
        if isinstance(self.bucket, int):
            return _round_up(aligned, lcm(self.bucket, self.total_alignment))
        for size in self.bucket:
            size = _round_up(size, self.total_alignment)
            if size >= aligned:
                return size
        raise ValueError(
            f"{aligned} rows exceed the largest bucket, {self.bucket[-1]}; add a larger bucket, or "
            "put fewer sequences into the pack"
        )

    def _cheaper_wire(self, seq_lens: tuple[int, ...], rows: int) -> str:
        """Names the total that gathers in BF16 would need, where it is less than ``rows``."""
        if self.rule is not _BLOCKS or self.bucket is not None:
            return ""
        cheaper = replace(self, fp8_wire=False, num_sequences=None).plan(seq_lens).num_rows
        if cheaper == rows:
            return ""
        return f"{cheaper} rows would do with fp8_wire=False, which gathers in BF16"

    def waste(self, seq_lens: Sequence[int] | Tensor) -> float:
        """The share of the planned rows that are pads, from 0 to 1."""
        return self.plan(seq_lens).waste()

    def check(self, meta: PaddedSeqMeta) -> None:
        """Raises ValueError where the rules do not hold for a layout that exists already.

        Reads host integers only. The message names the rule, the rows, the recipe and the least
        legal plan. Buckets and ``num_sequences`` shape plans and are not demanded of a layout.
        """
        if not (problem := self.problem(meta)):
            return
        ways_out = ""
        if not meta.is_capacity:
            plan = replace(self, bucket=None, num_sequences=None).plan(meta.seq_lens)
            note = f" ({plan.note})" if plan.note else ""
            ways_out = f"The least legal total is {plan.num_rows} rows{note}; "
        if self.fp8_wire and not replace(self, fp8_wire=False).problem(meta):
            ways_out += "fp8_wire=False takes this layout as it is and gathers in BF16; "
        raise ValueError(
            f"{problem}. {ways_out}PaddedSeqMeta.from_seq_lens(seq_lens, policy) plans it"
        )

    def problem(self, meta: PaddedSeqMeta) -> str:
        """The first rule that does not hold for a layout, with the rows and the recipe; else ""."""
        problem = next(self._problems(meta), "")
        return problem and f"{self.recipe} at tp {self.tp_size}, cp {self.cp_size}: {problem}"

    def _problems(self, meta: PaddedSeqMeta) -> Iterator[str]:
        """Each rule that does not hold, with its reason."""
        rows, tp_size, cp_size, rule = meta.num_rows, self.tp_size, self.cp_size, self.rule
        each = self.sequence_alignment
        # Without a multiple no sequence is looked at: layers check at every call.
        for i, length in enumerate(() if each == 1 or meta.is_capacity else meta.padded_lens):
            if length % each:
                yield (
                    f"sequence {i} has {length} padded rows, no multiple of {each}: cp {cp_size} "
                    f"cuts it into {self._chunks}, sequence_multiple is {self.sequence_multiple}"
                )
        if rows % (cp_size * tp_size):
            yield f"{rows} rows do not divide over tp {tp_size} x cp {cp_size} into equal shards"
        gathered, shard = rows // cp_size, rows // (cp_size * tp_size)
        each = f" x {self.inner_rows} in each" if self.inner_rows > 1 else ""
        if shard * self.inner_rows % rule.rows_per_rank:
            yield (
                f"{shard} rows per rank (of {rows}){each} are no multiple of {rule.rows_per_rank}: "
                f"{rule.reason}"
            )
        if gathered * self.inner_rows % rule.rows:
            yield f"{gathered} rows{each} are no multiple of {rule.rows}: {rule.reason}"
        if rows % self.total_multiple:
            yield f"{rows} rows are no multiple of total_multiple {self.total_multiple}"


def _round_up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
