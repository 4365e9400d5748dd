"""``Verdict``: what a numeric check found, and how the ranks of a group come to share one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from padded_sp.agreement import by_value, ranks_phrase
from padded_sp.collectives import exchange_on_host, group_size

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


_TINY = 1e-300  # for a limit of 0


@dataclass(frozen=True)
class Verdict:
    """The figures of one check beside what they may be.

    Attributes:
        subject: what was checked, in words; the same on every rank.
        passed: every figure is within its limit.
        figures: relative errors against float64 by name ("output", "grad_q", ...), and "pads", the
            largest absolute value in a pad row. inf for NaN. Empty where the check could not run.
        limits: the largest that each figure may be.
        reason: why the check could not run, or on which ranks it failed; else empty.
    """

    subject: str
    passed: bool
    figures: dict[str, float]
    limits: dict[str, float]
    reason: str = ""

    @property
    def too_large(self) -> dict[str, float]:
        """The figures above their limits."""
        limits = self.limits
        return {name: x for name, x in self.figures.items() if x > limits.get(name, x)}

    @property
    def worst(self) -> str:
        """The figure nearest to its limit, or furthest above; empty without figures."""
        shares = {n: x / (self.limits.get(n) or _TINY) for n, x in self.figures.items()}
        return max(shares, key=lambda name: shares[name], default="")

    @property
    def is_refusal(self) -> bool:
        """Whether the backend does not claim to compute this, which it says by a ValueError."""
        return not self.figures and self.reason.startswith("ValueError: ")

    @property
    def problem(self) -> str:
        """What is to be said of a backend that failed."""
        what = "is wrong on this machine" if self.too_large else "does not run here"
        return f"{what}: {self}"

    def __str__(self) -> str:
        wrong = self.too_large
        parts = [f"{name} {x:.2g} (at most {self.limits[name]:.2g})" for name, x in wrong.items()]
        parts += [f"{name} {x:.2g}" for name, x in self.figures.items() if name not in wrong]
        return f"{self.subject}: {'; '.join(filter(None, [', '.join(parts), self.reason]))}"


# What this process found, by key; and what the ranks of a group agreed on, which a process that
# found its own verdict earlier must still do.
_found: dict[Hashable, Verdict] = {}
_agreed: WeakKeyDictionary[ProcessGroup, dict[Hashable, Verdict]] = WeakKeyDictionary()


def agreed(check: Callable[[], Verdict], key: Hashable, tp_group: ProcessGroup | None) -> Verdict:
    """The worst of the ranks' verdicts, the same one on every rank of ``tp_group``.

    ``check`` runs once per process and key; the ranks compare once per key and group. Every rank
    calls it, in the same order. If one rank fails, it fails on all, and says where.

    Communicates a few hundred bytes per rank through the group's store, on the host alone; nothing
    for None, for one rank, or for what was compared before.

    Raises:
        ValueError: under CUDA graph capture; ranks that check different things.
        RuntimeError: a rank did not make this call within the group's timeout; names it.
        Exception: whatever ``check`` raises. The other ranks get a failing verdict with it.
    """
    refuse_capture()
    known = _found if tp_group is None else _agreed.setdefault(tp_group, {})
    if key in known:
        return known[key]
    raised = None
    if key not in _found:
        try:
            _found[key] = check()
        except Exception as error:
            raised = error
    mine = _found.get(key) or Verdict("", False, {}, {}, f"{type(raised).__name__}: {raised}")
    if tp_group is not None and group_size(tp_group) > 1:
        texts = exchange_on_host("verify", json.dumps(asdict(mine)), tp_group)
        mine = _worst([Verdict(**json.loads(text)) for text in texts])
    if raised is not None:
        raise raised
    known[key] = mine
    return mine


def is_enabled(tp_group: ProcessGroup | None = None) -> bool:
    """Whether layers check their backends: not with ``PADDED_SP_VERIFY=0`` in the environment.

    Raises: ValueError: the ranks of ``tp_group`` differ in that: some would wait for the others.
    """
    enabled = os.environ.get("PADDED_SP_VERIFY", "1") != "0"
    same_on_ranks("PADDED_SP_VERIFY", "1" if enabled else "0", tp_group)
    return enabled


# What the ranks of a group were found to have in common.
_common: WeakKeyDictionary[ProcessGroup, set[str]] = WeakKeyDictionary()


def same_on_ranks(what: str, mine: str, tp_group: ProcessGroup | None) -> None:
    """Raises ValueError on every rank unless ``mine`` is the same on all of ``tp_group``.

    For what ranks go by when they decide whether to wait for each other. Compared once per group
    and ``what``, over the host; every rank calls it, in the same order.
    """
    if tp_group is None or group_size(tp_group) == 1:
        return
    known = _common.setdefault(tp_group, set())
    if what in known:
        return
    values = exchange_on_host("verify", mine, tp_group)
    if len(set(values)) > 1:
        raise ValueError(
            f"the ranks differ in {what}: {by_value(values)}. Give every rank of a group the same "
            "environment"
        )
    known.add(what)


def judge(
    check: Callable[..., Verdict],
    backend: str,
    tp_group: ProcessGroup | None,
    **combination: Any,
) -> Verdict:
    """``check(backend, **combination)``, :func:`agreed` by the ranks. Raises: as that does."""
    # Backends have other kernels for deterministic algorithms.
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (check.__name__, backend, deterministic, *map(str, combination.values()))
    return agreed(lambda: check(backend, **combination), key, tp_group)


def demand(
    check: Callable[..., Verdict],
    backend: str,
    tp_group: ProcessGroup | None,
    **combination: Any,
) -> None:
    """The same verdict, for a layer to go on by.

    Raises: ValueError: the verdict fails, with its figures; otherwise as :func:`agreed`.
    """
    verdict = judge(check, backend, tp_group, **combination)
    if not verdict.passed:
        raise ValueError(
            f"backend {backend!r} {verdict.problem}. Use another backend or recipe; "
            '"python -m padded_sp doctor --verify" shows all; verify=False or PADDED_SP_VERIFY=0 '
            "turns the check off"
        )


def refuse_capture() -> None:
    """Raises ValueError while a CUDA graph is captured: a check reads the device."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a layer cannot check its backend's numbers while a CUDA graph is captured: call its "
            "prepare() before the capture, or PADDED_SP_VERIFY=0 turns the check off"
        )


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """One for all ranks, made from theirs in rank order."""
    subjects = sorted({verdict.subject for verdict in verdicts} - {""})
    if len(subjects) > 1:
        raise ValueError(
            f"the ranks check different layers: {'; '.join(subjects)}. Every rank of a group "
            "builds and calls the same layers in the same order"
        )
    figures: dict[str, float] = {}
    limits: dict[str, float] = {}
    for verdict in verdicts:
        limits |= verdict.limits
        for name, x in verdict.figures.items():
            figures[name] = max(x, figures.get(name, x))
    failed = [rank for rank, verdict in enumerate(verdicts) if not verdict.passed]
    if not failed:
        return Verdict(subjects[0], True, figures, limits)
    reason = f"on {ranks_phrase(failed)} of {len(verdicts)}"
    if why := next((verdicts[rank].reason for rank in failed if verdicts[rank].reason), ""):
        reason += f": {why}"
    return Verdict("".join(subjects), False, figures, limits, reason)
