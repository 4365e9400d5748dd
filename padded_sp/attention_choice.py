"""Which of the backends that a ``DotProductAttention`` allows takes a call.

The first, in the order of preference, that has no reason against the call and is proved on this
machine. All ranks choose alike: reasons go by shapes and metas, which the ranks share, and a
verdict is that of the whole group. So its ranks need the same backends installed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from padded_sp import backends, compare, verify
from padded_sp.masks import mask_name
from padded_sp.meta import PaddedSeqMeta
from padded_sp.verdict import demand, judge, same_on_ranks

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_log = logging.getLogger("padded_sp")
_logged: set[str] = set()  # what this process has said


class Backend(NamedTuple):
    """What ``padded_sp.backends`` asks of a module: not itself, which no layer could copy."""

    name: str
    compute: Callable[..., Tensor]
    reason_against: Callable[..., str]
    needs_proof: bool
    keeps_pads_inert: bool
    is_slow_for: Callable[..., bool]


class Kind(NamedTuple):
    """Of calls of one layer: what a proof tells of one kind it does not tell of another."""

    dtype: torch.dtype
    pads: bool
    other_keys: bool
    deterministic: bool


class AttentionChoice:
    """The backends that one layer allows, and what was found of them on this machine.

    Args:
        backend: a key of ``backends.ATTENTION``; several of them, by preference; or "auto".
        layer: what ``verify.verify_attention`` asks of a layer, the heads being those of one rank.

    Raises:
        ValueError: no such backend, or none at all.
        ImportError: one that is named cannot be imported, with the line that installs it.
    """

    def __init__(self, backend: str | Sequence[str], **layer: Any) -> None:
        self._allowed = tuple(_loaded(name) for name in _names(backend))
        self._only = self._allowed[0] if len(self._allowed) == 1 else None
        self._asked, self._list = backend, ", ".join(self.names)
        self._is_auto = backend == "auto"
        plain = [one for one in self._allowed if not one.needs_proof]
        self._traced = plain[-1] if plain else None
        self._layer = layer
        # (backend, kind) -> what its proof found wrong; empty where it passed.
        self._proved: dict[tuple[str, Kind], str] = {}

    def __copy__(self) -> AttentionChoice:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionChoice:
        twin = copy.copy(self)
        twin._proved = dict(self._proved)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Not what was proved, which may be read on another machine."""
        return vars(self) | {"_proved": {}}

    @property
    def breaks_graphs(self) -> bool:
        """Whether compiled code leaves its graph to choose: all of several need a proof."""
        return self._only is None and self._traced is None

    @property
    def names(self) -> tuple[str, ...]:
        """By preference."""
        return tuple(backend.name for backend in self._allowed)

    def backend_for(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: PaddedSeqMeta,
        kv_meta: PaddedSeqMeta,
        dropout: float,
        tp_group: ProcessGroup | None,
        verified: bool,
    ) -> Backend:
        """What computes this call. One that needs a proof and has none is proved first.

        One that stands alone says by itself what it does not take. ``torch.compile`` can trace no
        choice: of several it gets one that needs no proof; see ``breaks_graphs``.

        Raises: ValueError: wrong numbers of the only one; none is left, with the reason against
            each; a proof under graph capture; ranks that allow different backends.
        """
        only, compiling = self._only, torch.compiler.is_compiling()
        if only is not None and not only.needs_proof:
            return only
        if only is None and compiling and self._traced is not None:
            return self._traced
        pads = meta.has_padding or kv_meta.has_padding
        deterministic = torch.are_deterministic_algorithms_enabled()
        kind = Kind(q.dtype, pads, kv_meta is not meta, deterministic)
        if only is not None:
            if (only.name, kind) not in self._proved:
                self._prove(only, kind, q.device, tp_group, verified)
            return only

        same_on_ranks(f"backends of attention that {self._asked!r} allows", self._list, tp_group)
        against, window = {}, self._layer["window"]
        for backend in self._by_preference(q, v, meta):
            reason = backend.reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout)
            if not reason:
                reason = self._proved.get((backend.name, kind))
                if reason is None and backend.needs_proof:
                    reason = self._prove(backend, kind, q.device, tp_group, verified)
            if not reason:
                if _log.isEnabledFor(logging.DEBUG):
                    self._log_choice(backend, kind, against)
                return backend
            against[backend.name] = reason
        raise _none_is_left(against)

    def _by_preference(self, q: Tensor, v: Tensor, meta: PaddedSeqMeta) -> list[Backend]:
        """For this pack: under "auto" those that are slow for it come last."""
        if not self._is_auto:
            return list(self._allowed)
        return sorted(self._allowed, key=lambda backend: backend.is_slow_for(q, v, meta))

    def forget(self) -> None:
        """That something was proved: by ranks that no longer are those of the layer."""
        self._proved.clear()

    def prepare(
        self,
        kind: Kind,
        device: torch.device | str | None,
        tp_group: ProcessGroup | None,
        verified: bool,
    ) -> None:
        """Proves each allowed backend that takes such tensors, so that no call has to.

        Raises: ValueError: wrong numbers of the only one, or of all; under graph capture; ranks
            that allow different backends.
        """
        device = compare.device_of(device)
        if self._only is None:
            what = f"backends of attention that {self._asked!r} allows"
            same_on_ranks(what, self._list, tp_group)
        against = {}
        for backend in self._allowed:
            reason = self._reason_at_all(backend, kind, device)
            reason = reason or self._prove(backend, kind, device, tp_group, verified)
            if reason:
                against[backend.name] = reason
        if len(against) == len(self._allowed):
            raise _none_is_left(against)

    def _reason_at_all(self, backend: Backend, kind: Kind, device: torch.device) -> str:
        """Against the least call of this layer; of one that stands alone its proof will tell."""
        if self._only is not None:
            return ""
        layer = self._layer
        meta = PaddedSeqMeta.from_seq_lens([1 if kind.pads else 2], padded_lens=[2])
        keys = PaddedSeqMeta.from_seq_lens([2], padded_lens=[2]) if kind.other_keys else meta
        q, k, v = (
            torch.empty(2, layer[heads], layer[size], dtype=kind.dtype, device=device)
            for heads, size in (
                ("num_heads", "head_dim"),
                ("num_kv_heads", "head_dim"),
                ("num_kv_heads", "v_head_dim"),
            )
        )
        return backend.reason_against(q, k, v, meta, keys, window=layer["window"], dropout=0.0)

    def _prove(
        self,
        backend: Backend,
        kind: Kind,
        device: torch.device,
        tp_group: ProcessGroup | None,
        verified: bool,
    ) -> str:
        """What is wrong with it, which is kept; empty where nothing is. The only one raises."""
        problem = ""
        if verified and verify.is_enabled(tp_group):
            asked = verify.verify_attention, backend.name, tp_group
            combination = self._layer | {
                "dtype": kind.dtype,
                "pads": kind.pads,
                "other_keys": kind.other_keys,
                "device": device,
            }
            if self._only is not None:
                demand(*asked, **combination)
            elif not (verdict := judge(*asked, **combination)).passed:
                problem = verdict.problem
                _log_once(logging.WARNING, f"backend {backend.name!r} is passed over: it {problem}")
        self._proved[backend.name, kind] = problem
        return problem

    def _log_choice(self, chosen: Backend, kind: Kind, against: dict[str, str]) -> None:
        layer = self._layer
        heads = f"{layer['num_heads']} heads of {layer['head_dim']}/{layer['v_head_dim']}, "
        heads += f"{layer['num_kv_heads']} KV heads, {mask_name(*layer['window'])}"
        rows = f"{compare.name_of(kind.dtype)}, {'pads' if kind.pads else 'no pads'}"
        why = "".join(f"; not {name!r}: {reason}" for name, reason in against.items())
        _log_once(logging.DEBUG, f"attention, {heads}, {rows}: backend {chosen.name!r}", why)


def _names(backend: str | Sequence[str]) -> tuple[str, ...]:
    if backend != "auto":
        names = (backend,) if isinstance(backend, str) else tuple(backend)
        if not names:
            raise ValueError("backend names no backend of attention; give one, several, or 'auto'")
        return names
    here = []
    for name in backends.AUTO:
        error = backends.import_error(backends.ATTENTION[name])
        if error is None:
            here.append(name)
        elif backends.is_installed(name):  # so that its absence would surprise
            _log_once(logging.WARNING, f"backend 'auto' leaves out {name!r}: {error}")
    return tuple(here)


def _loaded(name: str) -> Backend:
    module: Any = backends.load(backends.ATTENTION, name)
    return Backend(
        name,
        module.dot_product_attention,
        module.reason_against,
        module.NEEDS_PROOF,
        getattr(module, "KEEPS_PADS_INERT", False),
        getattr(module, "is_slow_for", _is_never_slow),
    )


def _is_never_slow(*call: Any) -> bool:
    return False


def _none_is_left(against: dict[str, str]) -> ValueError:
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in against.items())
    return ValueError(f"none of the allowed backends of attention takes this call:{reasons}")


def _log_once(level: int, what: str, why: str = "") -> None:
    """Once per process and ``what``."""
    if what not in _logged:
        _logged.add(what)
        _log.log(level, "%s%s", what, why)
