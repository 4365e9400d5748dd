"""``DotProductAttention``: attention of packed sequences, head-parallel, in the padded layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from padded_sp import backends, boundaries
from padded_sp.attention_choice import AttentionChoice, Kind
from padded_sp.backends.attend import attend
from padded_sp.collectives import group_size
from padded_sp.context import resolve_meta
from padded_sp.masks import window_of
from padded_sp.meta import PaddedSeqMeta
from padded_sp.parallel_layer import is_autocast_on, to_autocast_dtype
from padded_sp.shared_group import SharesGroup

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

# Arguments of other libraries' attention, and what they ask for.
_UNSUPPORTED = {
    "softmax_type": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "a soft cap on scores",
    "logits_soft_cap": "a soft cap on scores",
    "kv_cache": "a KV cache",
    "inference_params": "a KV cache",
}


class DotProductAttention(SharesGroup):
    """softmax(scale Q K^T) V of each sequence by itself, pad rows exactly zero.

    Args:
        num_heads: query heads of all ranks together.
        head_dim: size of a query's and a key's head.
        num_kv_heads: key and value heads of all ranks together, for GQA and MQA. None: num_heads.
        v_head_dim: size of a value's head, for MLA. None: head_dim.
        mask: "full", or "causal", which is aligned bottom-right: the last query of a sequence sees
            its last key, also where a sequence has unequal numbers of queries and keys. Its full
            name, "causal_bottom_right", is taken too.
        window: (left, right): a query sees that many keys before and after its own place, -1 for
            no limit. A causal mask is right = 0, and takes no other than 0 or -1. None: no window.
        dropout: probability of dropping an attention weight, in training mode only.
        softmax_scale: None: head_dim ** -0.5.
        tp_group: the ranks that share the heads. No communication: ranks hold whole heads.
        tp_size: its size, where the group comes later or never.
        get_rng_state_tracker: returns a tracker of RNG states; dropout draws under its ``fork()``,
            so that ranks drop differently. None: the default generator.
        backend: a key of ``padded_sp.backends.ATTENTION``. "torch": FlashAttention on GPUs in half
            precision, else scaled_dot_product_attention of one sequence after another. The others
            run on GPUs in half precision. "te": Transformer Engine's, head sizes that are multiples
            of 8. "flash4": FlashAttention-4. "triton": our own kernels, for short sequences.
            "mixed": short sequences by "triton", long ones by "flash4".
            A tuple of keys allows several, by preference: each call goes to the first that takes it
            and whose numbers are right. "auto": those of ``padded_sp.backends.AUTO`` that are
            installed. Ranks that have not the same ones raise.
        inplace: may write zeros into the pad rows of q, k and v.
        verify: prove each backend but "torch" before its first use; see :meth:`prepare`.

    Raises:
        ValueError: head counts that the ranks or the KV heads do not divide; a mask, window,
            dropout or backend that does not exist; anything of sinks, soft cap or KV cache.
        ImportError: a backend that is named and not installed, with the line that installs it.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        *,
        mask: str = "causal",
        window: tuple[int, int] | None = None,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        backend: str | Sequence[str] = "torch",
        inplace: bool = True,
        verify: bool = True,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        _refuse(unsupported)
        check_size = boundaries.check_size
        self.num_heads = check_size(num_heads, "num_heads")
        self.head_dim = check_size(head_dim, "head_dim")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = check_size(kv_heads, "num_kv_heads")
        self.v_head_dim = check_size(head_dim if v_head_dim is None else v_head_dim, "v_head_dim")
        self.mask = mask
        self.window = window_of(mask, window)
        self.dropout = dropout
        self.get_rng_state_tracker = get_rng_state_tracker
        self.backend, self.verify = backend, verify
        self.inplace = inplace
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}; the third argument counts KV heads, v_head_dim= is the size "
                "of a value's head"
            )
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ValueError(f"softmax_scale must be a positive number, got {scale!r}")
        self.softmax_scale = scale
        self.tp_size = group_size(tp_group) if tp_size == 1 else tp_size
        for name, heads in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
            if self.tp_size < 1 or heads % self.tp_size:
                raise ValueError(
                    f"{name}={heads} does not divide over {self.tp_size} ranks; with fewer KV "
                    "heads than ranks, repeat them to one a rank and pass the repeated count"
                )
        self._choice = AttentionChoice(
            backend,
            num_heads=self.num_heads // self.tp_size,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads // self.tp_size,
            v_head_dim=self.v_head_dim,
            window=self.window,
            softmax_scale=self.softmax_scale,
        )
        self.set_tensor_parallel_group(tp_group)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Gives the layer the ranks that share its heads; they agree on what is proved of them.

        Raises: ValueError: the group has not ``tp_size`` ranks.
        """
        if tp_group is not None and group_size(tp_group) != self.tp_size:
            raise ValueError(
                f"the group has {group_size(tp_group)} ranks, DotProductAttention was built with "
                f"tp_size={self.tp_size}: build it with the group's size or with tp_group= itself"
            )
        self.tp_group = tp_group
        self._choice.forget()

    def prepare(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        pads: bool | None = None,
        other_keys: bool = False,
    ) -> None:
        """Proves on this machine that the backend computes this layer right, outside any step.

        Compares outputs and gradients with float64 for this layer's heads, mask and window, once
        per process: with pads and without (``pads=None``) or one of both, with keys of the same
        lengths or with a ``kv_meta`` of their own, under deterministic algorithms if they are on.
        The first forward of each such kind does it if nobody did; backend "torch" needs no proof.
        Of several allowed backends each that takes such tensors is proved, and those that are wrong
        are passed over from then on, which is logged. Leaves random states and Transformer Engine's
        state as they were. Every rank of ``tp_group`` calls it: they agree on the verdict over the
        host, in a few hundred bytes. Waits for the device.

        Raises: ValueError: the numbers of the backend, or of all, are wrong, with the figures;
            under graph capture; ranks that allow different backends.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        for with_pads in (True, False) if pads is None else (pads,):
            kind = Kind(dtype, with_pads, other_keys, deterministic)
            self._choice.prepare(kind, device, self.tp_group, self.verify)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: PaddedSeqMeta | None = None,
        kv_meta: PaddedSeqMeta | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Attends inside each sequence.

            q    [T, heads / tp, head_dim]          T    = meta.num_rows
            k    [T_kv, kv_heads / tp, head_dim]    T_kv = kv_meta.num_rows
            v    [T_kv, kv_heads / tp, v_head_dim]
            out  [T, heads / tp * v_head_dim]

        Args:
            q, k, v: of one floating dtype, which the result has too (that of autocast inside it).
            meta: boundaries of the queries; None: that of the surrounding ``seq_meta``.
            kv_meta: boundaries of keys and values, sequence by sequence those of the same queries.
                None: meta.

        Communicates nothing. Pad rows of the result and of the gradients of q, k and v are exactly
        zero, and so are those of queries that see no key.

        Raises: ValueError: q, k and v that disagree with the metas, the head counts or each other;
            no allowed backend takes them, with the reason against each.
        Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Dao 2023, arXiv:2307.08691.
        """
        _refuse(unsupported)
        meta = resolve_meta(meta)
        kv_meta = meta if kv_meta is None else kv_meta
        if is_autocast_on(q):
            q, k, v = map(to_autocast_dtype, (q, k, v))
        self._check(q, k, v, meta, kv_meta)
        _refuse_fp8_attention()
        if torch.compiler.is_compiling() and self._choice.breaks_graphs:
            from padded_sp.backends.outside_of_graphs import eagerly

            return eagerly(self._attend, q, k, v, meta, kv_meta)
        return self._attend(q, k, v, meta, kv_meta)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        backend = self._choice.backend_for(
            q, k, v, meta, kv_meta, dropout, self.tp_group, self.verify
        )

        with self._rng(dropout):
            return attend(
                backend.compute,
                backend.keeps_pads_inert,
                q,
                k,
                v,
                meta,
                kv_meta,
                inplace=self.inplace,
                window=self.window,
                dropout=dropout,
                softmax_scale=self.softmax_scale,
            )

    def _rng(self, dropout: float) -> Any:
        if dropout == 0 or self.get_rng_state_tracker is None:
            return nullcontext()
        return self.get_rng_state_tracker().fork()

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta
    ) -> None:
        if kv_meta.num_sequences != meta.num_sequences:
            raise ValueError(
                f"kv_meta has {kv_meta.num_sequences} sequences, meta has {meta.num_sequences}; "
                "give the keys of each query sequence, of length 0 where there are none"
            )
        heads, kv_heads = self.num_heads // self.tp_size, self.num_kv_heads // self.tp_size
        for name, x, x_meta, num_heads, head_dim in (
            ("q", q, meta, heads, self.head_dim),
            ("k", k, kv_meta, kv_heads, self.head_dim),
            ("v", v, kv_meta, kv_heads, self.v_head_dim),
        ):
            if x.dim() != 3 or x.shape[1:] != (num_heads, head_dim):
                raise ValueError(
                    f"{name} must be [rows, {num_heads}, {head_dim}] on each of {self.tp_size} "
                    f"ranks, got {tuple(x.shape)}; head counts are given for all ranks together"
                )
            x_meta.check_rows(x, name)
            if x.device != x_meta.device:
                raise ValueError(
                    f"{name} is on {x.device}, its meta on {x_meta.device}; move it by meta.to()"
                )
            if x.dtype != q.dtype or not x.is_floating_point():
                raise ValueError(
                    f"q, k and v must have one floating dtype, got {q.dtype} for q and {x.dtype} "
                    f"for {name}; cast them"
                )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._choice.names == ("te",):  # so that te.DotProductAttention finds its key, empty
            destination[prefix + "_extra_state"] = torch.empty(0, dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # te.DotProductAttention writes this key, without anything that attention here would need.
        state_dict.pop(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads of {self.head_dim}, {self.num_kv_heads} KV heads with values "
            f"of {self.v_head_dim}, mask={self.mask!r}, window={self.window}, "
            f"dropout={self.dropout}, tp_size={self.tp_size}, backend={self.backend!r}"
        )


def _refuse_fp8_attention() -> None:
    """Raises ValueError where a surrounding recipe asks for what no backend trains.

    Transformer Engine crashed on it up to 2.18, and computing in BF16 would be a silent fallback.
    """
    if torch.compiler.is_compiling():
        return
    recipe = backends.surrounding_fp8_recipe()
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        raise ValueError(
            f"{type(recipe).__name__} asks for FP8 attention, which no backend can train on packed "
            "sequences: set fp8_dpa=False and fp8_mha=False, which keeps FP8 GEMMs and computes "
            "attention in BF16"
        )


def _refuse(unsupported: dict[str, Any]) -> None:
    for name, value in unsupported.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"DotProductAttention got an unexpected argument {name!r}")
        if value is not None and (isinstance(value, Tensor) or value not in (0, "vanilla")):
            raise ValueError(
                f"{name}={value!r} asks for {_UNSUPPORTED[name]}, which padded_sp's attention does "
                "not support; leave it out, or use another attention for this layer"
            )
