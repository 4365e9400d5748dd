"""Proofs, on a user's own module, that padding changes nothing and that packing changes nothing.

assert_padding_inert(model, x, meta)         # pads may hold anything, in either direction
assert_packing_equivalent(model, x, meta)    # each sequence comes out as if it were alone
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from padded_sp.meta import PaddedSeqMeta
from padded_sp.trials import Inputs, Params, Results, SequenceTrial, Trial

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_OF_ROWS = ("outputs", "input_gradients")


def assert_padding_inert(
    fn: Callable[..., Any],
    inputs: Inputs,
    meta: PaddedSeqMeta,
    *,
    params: Params | None = None,
    tp_group: ProcessGroup | None = None,
    poisons: Sequence[float] = (float("nan"), 1e4),
    backward: bool = True,
) -> None:
    """Asserts that what pad rows hold reaches nothing, forward and backward.

    Runs ``fn`` twice with zero pad rows, in its inputs and in the gradients of its outputs, then
    once with each poison there. The real rows of outputs and of input gradients, all parameter
    gradients and buffers must have the same values in all runs, to the last bit, and the pad rows
    of inexact outputs and of input gradients must be exactly zero. ``fn`` may overwrite pad rows of
    what it is given. A meta without pad rows has nothing to leak.

    Args:
        fn: called inside ``with seq_meta(meta)`` as ``fn(*inputs)``, or ``fn(**inputs)`` for a
            mapping; with ``meta=meta`` too if it has an argument of that name. Returns a tensor,
            or tuples, lists and dicts of them; numbers are compared too, None and text are not.
        inputs: [T, ...] or [T / R, ...], T = ``meta.num_rows``, R ranks in ``tp_group``. Floating
            and complex ones get a gradient. In integer ones the poison is the largest real value,
            which any embedding can look up. Tensors of other sizes are passed as they are. Outputs
            likewise: those of other sizes are compared whole.
        meta: of the rows.
        params: a module, or tensors, by whose names to report. None: ``fn``, if it is a module or
            a method of one. Gradients of all other leaves that backward reaches are compared too.
        tp_group: the ranks that hold the shards of rows. Each of them makes the same call.
        poisons: what to put into pad rows; at least one is not 0.
        backward: False: ``fn`` has no gradients, such as a metric; its values alone are compared.

    Each run gets fresh clones and the same RNG state. The global RNG state, ``.grad`` and the
    module's buffers are afterwards what they were.

    Raises:
        AssertionError: names the first tensor, row and sequence that differ, with both values; or
            says that two equal runs differ, so that nothing can be proved.
        ValueError: what would prove nothing: no input has the rows of ``meta``; ``fn`` returns no
            tensor, or an object that is none of the above; no gradient came of floating inputs or
            parameters; no poison; a reentrant checkpoint hides its parameters and ``params`` does
            not name them.
    """
    if not any(poison != 0 for poison in poisons):
        raise ValueError(
            f"poisons={poisons!r} puts nothing but 0 into pad rows, which proves nothing: leave it "
            "out, or pass values that must not leak"
        )
    trial = Trial(fn, inputs, meta, params, tp_group)
    # All runs come before any comparison: every rank has to take part in the same collectives.
    clean, again = trial.run(), trial.run()
    poisoned = [(poison, trial.run(poison)) for poison in poisons]

    if difference := _difference(trial, (clean, "in one run"), (again, "in the next"), _equal):
        raise AssertionError(
            f"not deterministic: two runs on equal inputs and RNG states differ; {difference}. "
            "Set torch.use_deterministic_algorithms(True), and keep no state between calls"
        )
    for poison, results in [(0.0, clean), *poisoned]:
        run = (results, f"with {poison:g} in pad rows")
        difference = _difference(trial, (clean, "with 0 in pad rows"), run, _equal)
        if difference := difference or _nonzero_pad(trial, *run):
            raise AssertionError(f"padding is not inert: {difference}")
    if backward:
        trial.require_gradients(clean)


def assert_packing_equivalent(
    fn: Callable[..., Any],
    inputs: Inputs,
    meta: PaddedSeqMeta,
    *,
    params: Params | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    backward: bool = True,
) -> None:
    """Asserts that a packed batch is computed as its sequences are, each by itself.

    Runs ``fn`` once on the pack, with zero pad rows, and once on the real rows of each sequence,
    with a meta of their own. Outputs and input gradients must agree, and the parameter gradients
    with the sum of those of the sequences.

    Args:
        fn, inputs, meta, params, backward: as for :func:`assert_padding_inert`, but for one rank:
            tensors of rows are whole, [T, ...]. Dropout must be off.
        rtol, atol: None: the square root of the dtype's epsilon, 3e-4 in float32.

    Raises:
        AssertionError: names the first tensor, row and sequence that differ, with both values.
        ValueError: no input has T rows, or an output has not: a mean over the pack, for example,
            is not the same of one sequence. Otherwise as there.
    """
    whole = Trial(fn, inputs, meta, params)
    packed = whole.run()
    for name, y in packed.outputs.items():
        if whole.first_row(y) is None:
            raise ValueError(
                f"{name} is {tuple(y.shape)}, without the {meta.num_rows} rows of its meta: return "
                "a value for each row, not yet reduced over the pack"
            )
    alone = _sum_of_sequences(whole, packed)

    def close(a: Tensor, b: Tensor) -> Tensor:
        if not a.is_floating_point():
            return a == b
        default = torch.finfo(a.dtype).eps ** 0.5
        return torch.isclose(
            b,
            a,
            rtol=default if rtol is None else rtol,
            atol=default if atol is None else atol,
            equal_nan=True,
        )

    if difference := _difference(whole, (alone, "alone"), (packed, "packed"), close):
        raise AssertionError(f"packing changes the result: {difference}")
    if backward:
        whole.require_gradients(packed)


def _sum_of_sequences(whole: Trial, packed: Results) -> Results:
    """What the sequences give by themselves: their rows in place, parameter gradients added."""
    alone = Results(*({name: torch.zeros_like(x) for name, x in kind.items()} for kind in packed))
    alone.buffers.update(packed.buffers)  # they may well depend on the number of calls
    incoming = whole.output_gradients(packed.outputs, 0.0)
    starts = itertools.accumulate(whole.meta.padded_lens, initial=0)
    for start, length in zip(starts, whole.meta.seq_lens, strict=False):
        if length == 0:
            continue
        rows = slice(start, start + length)
        sequence = SequenceTrial(whole, rows, incoming).run()
        for kind in _OF_ROWS:
            for name, x in getattr(sequence, kind).items():
                total = getattr(alone, kind)[name]
                if whole.first_row(total) is None:  # the gradient of a table, say
                    total += x
                else:
                    total[rows] = x
        for name, gradient in sequence.parameter_gradients.items():
            total = alone.parameter_gradients.setdefault(name, torch.zeros_like(gradient))
            total += gradient
    return alone


def _difference(
    trial: Trial,
    expected: tuple[Results, str],
    actual: tuple[Results, str],
    same: Callable[[Tensor, Tensor], Tensor],
) -> str | None:
    """Where two runs first differ, pad rows apart, in words; None if nowhere."""
    (results, when), (others, otherwise) = expected, actual
    for kind in Results._fields:
        tensors, other_tensors = getattr(results, kind), getattr(others, kind)
        for name in tensors | other_tensors:
            if name not in tensors or name not in other_tensors:
                return f"{name} exists only {when if name in tensors else otherwise}"
            a, b = _real(tensors[name]), _real(other_tensors[name])
            if a.shape != b.shape:
                return f"{name} is {tuple(a.shape)} {when}, {tuple(b.shape)} {otherwise}"
            differs = ~same(a, b)
            is_pad = trial.is_pad(a) if kind in _OF_ROWS else None
            if is_pad is not None:
                differs = differs & ~is_pad
            if differs.any():
                at = tuple(differs.nonzero()[0].tolist())
                place = _row(trial, a, at) if is_pad is not None else ""
                return f"{name}{place} at {at} is {a[at]:.7g} {when}, {b[at]:.7g} {otherwise}"
    return None


def _nonzero_pad(trial: Trial, results: Results, when: str) -> str | None:
    """The first pad row that is not exactly zero, in words; None if all are."""
    for name, x in (results.outputs | results.input_gradients).items():
        x = _real(x)
        is_pad = trial.is_pad(x) if x.is_floating_point() else None
        if is_pad is None:
            continue
        nonzero = (x != 0) & is_pad
        if nonzero.any():
            at = tuple(nonzero.nonzero()[0].tolist())
            return f"{name}{_row(trial, x, at)} at {at} is {x[at]:.7g} {when}, and must be 0"
    return None


def _row(trial: Trial, x: Tensor, at: tuple[int, ...]) -> str:
    row = (trial.first_row(x) or 0) + at[0]
    sequence, position = trial.meta.sequence_ids[row], trial.meta.position_ids[row]
    kind = "pad" if trial.meta.padding_mask[row] else "token"
    return f", row {row} ({kind}, position {position} of sequence {sequence}),"


def _real(x: Tensor) -> Tensor:
    """x, or real and imaginary parts along a last dim of 2."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))
