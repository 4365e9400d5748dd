"""Megatron's ``PackedSeqParams`` and ``PaddedSeqMeta``, one made from the other.

Real boundaries are in ``cu_seqlens_q`` and padded ones in ``cu_seqlens_q_padded``, as Megatron's
attention and RoPE read them. Which other fields there are depends on Megatron's version.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from torch import Tensor

from padded_sp.boundaries import check_size
from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_ARRAYS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")

# What follows from boundaries, so that another object's is of no use: the first is made by
# `__post_init__`, the second by newer versions on their first use of context parallelism.
_DERIVED = ("seq_idx", "cp_scatter_cache")


@overload
def from_packed_seq_params(
    params: PackedSeqParams,
    tp_size: int = 1,
    return_kv: Literal[False] = False,
    *,
    cp_size: int | None = None,
    num_rows: int | None = None,
) -> PaddedSeqMeta: ...
@overload
def from_packed_seq_params(
    params: PackedSeqParams,
    tp_size: int = 1,
    *,
    return_kv: Literal[True],
    cp_size: int | None = None,
    num_rows: int | None = None,
) -> tuple[PaddedSeqMeta, PaddedSeqMeta]: ...
def from_packed_seq_params(
    params: PackedSeqParams,
    tp_size: int = 1,
    return_kv: bool = False,
    *,
    cp_size: int | None = None,
    num_rows: int | None = None,
) -> PaddedSeqMeta | tuple[PaddedSeqMeta, PaddedSeqMeta]:
    """The meta of a packed batch of Megatron's, with its arrays where ``params`` has them.

    Arrays on a device are read, which waits for it: call this before the step. The meta is kept
    for as long as ``params`` lives, so that every later call with the same arrays, unwritten since,
    returns it without reading anything.

    Args:
        params: ``qkv_format`` is "thd"; ``cu_seqlens_*`` int32 [B + 1], real boundaries;
            ``cu_seqlens_*_padded`` int32 [B + 1], boundaries of the layout, None where nothing is
            padded. Keys and values without boundaries have those of the queries. Where all four
            arrays hold padded boundaries, as several frameworks fill them, the real ones are lost:
            build the meta with ``PaddedSeqMeta.from_seq_lens`` then.
        tp_size: ranks that share the rows under sequence parallelism.
        return_kv: return (meta, kv_meta) for ``DotProductAttention``; one object twice where the
            boundaries of keys and values are those of the queries.
        cp_size: ranks that share each sequence; default ``params.local_cp_size``, else 1.
        num_rows: T, rows of the packed tensors before any split. Default ``params.total_tokens``
            without context parallelism (with it, its meaning differs by caller), else the last
            padded boundary. Rows behind that are pads.

    Raises:
        ValueError: ``qkv_format`` is not "thd"; no boundaries; boundaries that
            ``PaddedSeqMeta.from_cu_seqlens`` refuses, or fewer rows than they have; other numbers
            of sequences of keys; a ``max_seqlen_*`` on the host below a real length;
            ``pad_between_seqs=False`` though pads lie before real rows; keys with other
            boundaries, unless ``return_kv``.
    Source: megatron-core 0.19.2, megatron/core/packed_seq_params.py.
    """
    _check_format(params)
    if cp_size is None:
        dynamic: int | None = getattr(params, "local_cp_size", None)
        cp_size = dynamic or 1
    if num_rows is None and cp_size == 1:
        num_rows = getattr(params, "total_tokens", None)
    key = tp_size, cp_size, num_rows
    kept = _kept_metas(params)
    if key not in kept:
        kept[key] = _metas_of(params, tp_size, cp_size, num_rows)
    meta, kv_meta = kept[key]
    if return_kv:
        return meta, kv_meta
    if kv_meta is not meta:
        raise ValueError(
            f"keys have other boundaries than queries ({_difference(meta, kv_meta)}), which one "
            "meta cannot carry: ask for both, return_kv=True, and pass them to "
            "DotProductAttention as meta and kv_meta"
        )
    return meta


def to_packed_seq_params(
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta | None = None,
    like: PackedSeqParams | None = None,
) -> PackedSeqParams:
    """Megatron's parameters of a packed batch, with the arrays of ``meta`` (not copies).

    Without pads the padded arrays are None, which lets Transformer Engine take its fast path. Else
    ``pad_between_seqs`` is True where this version of Megatron has it: older ones leave it to
    Transformer Engine to find out, which then compares the arrays on the device and before 2.18
    misses pads behind the last sequence.

    Args:
        meta: of the queries; of keys and values too, unless ``kv_meta``.
        kv_meta: of keys and values, where they are other tokens.
        like: its class is built, and its fields are kept that no meta knows, such as ``cp_group``.

    ``max_seqlen_*`` are the longest padded lengths (integers), ``total_tokens`` is T; from it
    Megatron derives ``seq_idx`` on the device of the arrays, which waits for it.

    Raises:
        ImportError: megatron-core is not installed, and there is no ``like``.
        ValueError: ``meta`` or ``kv_meta`` is no PaddedSeqMeta; they differ in ``num_sequences``;
            a class without padded boundaries, of a megatron-core that is too old.
    """
    kv_meta = meta if kv_meta is None else kv_meta
    for name, given in (("meta", meta), ("kv_meta", kv_meta)):
        if not isinstance(given, PaddedSeqMeta):
            raise ValueError(f"{name} must be a PaddedSeqMeta, got {type(given).__name__}")
    if meta.num_sequences != kv_meta.num_sequences:
        raise ValueError(
            f"{meta.num_sequences} sequences of queries and {kv_meta.num_sequences} of keys: each "
            "sequence needs both, of length 0 where it has none"
        )
    cls = _class() if like is None else type(like)
    names = _fields(cls)
    if absent := [name for name in _ARRAYS if name not in names]:
        raise ValueError(
            f"{cls.__qualname__} has no {', '.join(absent)}: it is not the PackedSeqParams of "
            "megatron-core 0.16.1 or newer"
        )
    has_padding = meta.has_padding or kv_meta.has_padding
    known: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": meta.cu_seqlens,
        "cu_seqlens_kv": kv_meta.cu_seqlens,
        "cu_seqlens_q_padded": meta.cu_seqlens_padded if has_padding else None,
        "cu_seqlens_kv_padded": kv_meta.cu_seqlens_padded if has_padding else None,
        "max_seqlen_q": meta.max_seq_len,
        "max_seqlen_kv": kv_meta.max_seq_len,
        "total_tokens": meta.num_rows,
        "pad_between_seqs": has_padding,
    }
    kept = {n: getattr(like, n) for n in names if n not in _DERIVED} if like is not None else {}
    return cls(**kept | {name: value for name, value in known.items() if name in names})


# ---- from ---------------------------------------------------------------------------------------


def _check_format(params: Any) -> None:
    if any(not hasattr(params, name) for name in ("qkv_format", *_ARRAYS)):
        raise ValueError(
            f"params must be Megatron's PackedSeqParams, got {type(params).__name__}; metas of "
            "other batches are made by PaddedSeqMeta.from_seq_lens and from_cu_seqlens"
        )
    if params.qkv_format != "thd":
        raise ValueError(
            f"qkv_format={params.qkv_format!r} is no packed batch, which has qkv_format='thd'"
        )
    if params.cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is None; set it to the real boundaries, int32 [B + 1]")
    if params.cu_seqlens_kv is None and params.cu_seqlens_kv_padded is not None:
        raise ValueError(
            "cu_seqlens_kv_padded without cu_seqlens_kv: give the keys' real boundaries too, or "
            "neither where they are those of the queries"
        )


def _metas_of(
    params: Any, tp_size: int, cp_size: int, num_rows: int | None
) -> tuple[PaddedSeqMeta, PaddedSeqMeta]:
    sizes: dict[str, Any] = {"tp_size": tp_size, "cp_size": cp_size}
    meta = _meta_of(params, "q", num_rows=num_rows, **sizes)
    has_same_arrays = params.cu_seqlens_kv is None or (
        params.cu_seqlens_kv is params.cu_seqlens_q
        and params.cu_seqlens_kv_padded is params.cu_seqlens_q_padded
    )
    if has_same_arrays:
        return meta, meta
    kv_meta = _meta_of(params, "kv", **sizes)
    sequences = len(params.cu_seqlens_q) - 1
    if kv_meta.num_sequences != sequences:
        raise ValueError(
            f"{sequences} sequences of queries (cu_seqlens_q) and {kv_meta.num_sequences} of keys "
            "(cu_seqlens_kv): each sequence needs both, of length 0 where it has none"
        )
    if _lengths(kv_meta) == _lengths(meta)[:sequences]:
        return meta, meta
    if meta.num_sequences > sequences:
        # Rows behind the queries' last boundary are an entry, which has no keys.
        real, padded = ((*lengths, 0) for lengths in (kv_meta.seq_lens, kv_meta.padded_lens))
        kv_meta = PaddedSeqMeta.from_seq_lens(
            real, padded_lens=padded, device=kv_meta.device, **sizes
        )
    return meta, kv_meta


def _meta_of(params: Any, side: str, **kwargs: Any) -> PaddedSeqMeta:
    names = f"cu_seqlens_{side}", f"cu_seqlens_{side}_padded"
    try:
        meta = PaddedSeqMeta.from_cu_seqlens(*(getattr(params, name) for name in names), **kwargs)
    except ValueError as error:
        # It speaks of cu_seqlens and cu_seqlens_padded.
        raise ValueError(f"PackedSeqParams, {' and '.join(names)}: {error}") from error
    _check_against(params, side, meta)
    return meta


def _check_against(params: Any, side: str, meta: PaddedSeqMeta) -> None:
    """What else ``params`` says of the boundaries; nothing is read from a device."""
    bound, longest = getattr(params, f"max_seqlen_{side}"), max(meta.seq_lens)
    if isinstance(bound, Tensor):
        bound = int(bound) if bound.device.type == "cpu" and bound.numel() == 1 else None
    if bound is not None and check_size(bound, f"max_seqlen_{side}", least=0) < longest:
        raise ValueError(
            f"max_seqlen_{side}={bound} is below the longest sequence of cu_seqlens_{side}, "
            f"{longest} tokens: attention would leave out the rest"
        )
    if getattr(params, "pad_between_seqs", None) is False:
        pads = 0
        for i, (real, padded) in enumerate(_lengths(meta)):
            if real and pads:
                raise ValueError(
                    f"pad_between_seqs=False, but {pads} pad rows lie before sequence {i} "
                    f"(cu_seqlens_{side} and cu_seqlens_{side}_padded): set it to True or None"
                )
            pads += padded - real


def _lengths(meta: PaddedSeqMeta) -> list[tuple[int, int]]:
    """B pairs, real and padded."""
    return list(zip(meta.seq_lens, meta.padded_lens, strict=True))


def _difference(meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta) -> str:
    for i, (own, keys) in enumerate(zip(_lengths(meta), _lengths(kv_meta), strict=True)):
        if own != keys:
            return f"sequence {i} has {keys[0]} tokens in {keys[1]} rows, not {own[0]} in {own[1]}"
    raise AssertionError("the same lengths make the same meta")


# ---- metas kept per object ----------------------------------------------------------------------


class _Kept(NamedTuple):
    owner: weakref.ref[Any]
    arrays: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    others: tuple[Any, ...]
    metas: dict[Any, tuple[PaddedSeqMeta, PaddedSeqMeta]]


# By id: a dataclass that compares its fields cannot be hashed.
_kept: dict[int, _Kept] = {}


def _kept_metas(params: Any) -> dict[Any, tuple[PaddedSeqMeta, PaddedSeqMeta]]:
    """The metas made from ``params`` as it is now, to be added to; forgotten along with it."""
    arrays = tuple(getattr(params, name) for name in _ARRAYS)
    if any(not _tells_writes(array) for array in arrays):
        return {}
    versions = tuple(0 if array is None else array._version for array in arrays)
    others = params.max_seqlen_q, params.max_seqlen_kv, getattr(params, "pad_between_seqs", None)
    key = id(params)
    found = _kept.get(key)
    if (
        found is not None
        and found.owner() is params
        and all(a is b for a, b in zip(found.arrays, arrays, strict=True))
        and all(a is b for a, b in zip(found.others, others, strict=True))
        and found.versions == versions
    ):
        return found.metas
    try:
        owner = weakref.ref(params, lambda ref: _forget(key, ref))
    except TypeError:  # a class with slots
        return {}
    _kept[key] = _Kept(owner, arrays, versions, others, {})
    return _kept[key].metas


def _forget(key: int, owner: weakref.ref[Any]) -> None:
    # The next object may have the same id by the time that this is called.
    if key in _kept and _kept[key].owner is owner:
        del _kept[key]


def _tells_writes(array: Any) -> bool:
    """Whether an array is None or counts how often it was written to."""
    return array is None or (isinstance(array, Tensor) and not array.is_inference())


# ---- to -----------------------------------------------------------------------------------------


def _class() -> Any:
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError as error:
        raise ImportError(
            "to_packed_seq_params builds megatron-core's class: python -m pip install "
            "'megatron-core>=0.16.1', or pass like="
        ) from error
    return PackedSeqParams


def _fields(cls: type) -> list[str]:
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"like must be a PackedSeqParams, got {cls.__name__}")
    return [field.name for field in dataclasses.fields(cls) if field.init]
