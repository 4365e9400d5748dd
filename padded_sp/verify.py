"""Does a backend compute the right numbers on this machine? Compared with float64.

Kernels compute wrong gradients without a word, and which kernels run is up to libraries that are
found at run time. So layers trust a backend by its figures, once per process and kind of call:
their ``prepare()`` runs the check for what they compute. By hand:

    from padded_sp import verify

    print(verify.verify_attention("te", num_heads=16, head_dim=192))

Outside of any step: a check waits for the device. The environment variable ``PADDED_SP_VERIFY=0``
turns off the checks that layers make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_sp import alignment, backends, compare
from padded_sp.backends import reference
from padded_sp.backends.attend import attend
from padded_sp.boundaries import check_size
from padded_sp.inert import inert_input, inert_output
from padded_sp.masks import mask_name
from padded_sp.meta import PaddedSeqMeta
from padded_sp.verdict import Verdict, agreed, is_enabled, refuse_capture

__all__ = ["Verdict", "agreed", "is_enabled", "verify_attention", "verify_linear"]

# Real and padded lengths. A few rows in many, several tiles of any kernel, tails of all kinds.
_ATTENTION_LENGTHS = (3, 150, 700, 333, 100), (64, 160, 704, 336, 112)
# Of the keys, where they are not those of the queries: none sees no key, whatever the mask.
_KEY_LENGTHS = (40, 170, 700, 500, 101), (48, 176, 704, 512, 112)
_LINEAR_LENGTHS = (101, 3, 90), (112, 48, 96)
_IN_FEATURES, _OUT_FEATURES = 256, 384

#: What ``verify_linear`` knows.
LAYERS = ("column", "row", "layer_norm_column")
_EPS = 1e-5

# Root mean square of what rounding to 3 and to 2 bits of mantissa does to normal numbers, relative
# to theirs: up to 2 ** -(bits + 1) either way, on mantissas whose mean square is 7 / 3.
_E4M3 = 2**-4 / math.sqrt(3) / math.sqrt(7 / 3)
_E5M2 = 2 * _E4M3
# Formats of the two operands of a GEMM, forward and backward, that a recipe has by default. Their
# errors are independent, and a sum of many products has the relative error of one.
_HYBRID = math.hypot(_E4M3, _E4M3), math.hypot(_E4M3, _E5M2)
_ALL_E4M3 = math.hypot(_E4M3, _E4M3), math.hypot(_E4M3, _E4M3)
_FP8_ERRORS = {
    "fp8_delayed": _HYBRID,
    "fp8_current": _HYBRID,
    "fp8_blockwise": _ALL_E4M3,
    "mxfp8": _ALL_E4M3,
}
# Twice that, 7 % forward and at most 11 % backward, is far from right and from wrong kernels.
_FP8_MARGIN = 2

_Call = Callable[[Tensor, PaddedSeqMeta], Tensor]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # real and padded


def verify_attention(
    backend: str,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    v_head_dim: int | None = None,
    window: tuple[int, int] = (-1, 0),
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    pads: bool = True,
    other_keys: bool = False,
    device: torch.device | str | None = None,
) -> Verdict:
    """Compares a backend's attention and its gradients with float64, on packed random sequences.

    Figures: "output", "grad_q", "grad_k" and "grad_v", each of the worst sequence; "pads". Pad rows
    hold NaN outside and are zeroed as the layer does it. A backend that works on packs of several
    kinds in several ways names one of each (``PROOF_PACKS``); the worst counts. Heads are
    independent of each other: those of the first and of the last KV head are compared. Random
    states and Transformer Engine's state are left as they were. Communicates nothing.

    Args:
        backend: a key of ``padded_sp.backends.ATTENTION``.
        num_heads, num_kv_heads: of one rank.
        window: (left, right), -1 for no limit: (-1, 0) is causal, (-1, -1) sees everything.
        pads: whether sequences have pad rows.
        other_keys: whether keys have lengths of their own (``kv_meta``).
        device: None: the current GPU, or the CPU without one.

    Returns: a verdict, a failing one where the backend raises.
    Raises: ValueError: no such backend; head counts or a dtype that attention does not have; under
        CUDA graph capture.
    """
    refuse_capture()
    module = backends.load(backends.ATTENTION, backend)
    device = compare.device_of(device)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name, size in (("num_heads", num_heads), ("num_kv_heads", kv_heads)):
        check_size(size, name)
    if num_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads} is no multiple of num_kv_heads={kv_heads}")
    limit = compare.limit_of(dtype)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    options: dict[str, Any] = {"window": window, "softmax_scale": scale}

    def check(lengths: Lengths, key_lengths: Lengths | None) -> dict[str, compare.Compared]:
        rows = compare.Rows(lengths[not pads], lengths[1], device, dtype)
        keys = rows
        if key_lengths is not None:
            keys = compare.Rows(key_lengths[not pads], key_lengths[1], device, dtype, seed=1)
        # Scores of unit variance at any scale: after a softmax that is nearly one-hot, gradients
        # are differences of nearly equal numbers.
        q = rows.draw(num_heads, head_dim) * (head_dim**-0.5 / scale)
        tensors = {"q": q, "k": keys.draw(kv_heads, head_dim), "v": keys.draw(kv_heads, v_head_dim)}
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        grad = rows.draw(num_heads * v_head_dim)

        out = attend(
            module.dot_product_attention,
            getattr(module, "KEEPS_PADS_INERT", False),
            leaves["q"],
            leaves["k"],
            leaves["v"],
            rows.meta,
            keys.meta,
            dropout=0.0,
            **options,
        )
        actual = compare.results(out, leaves, grad.clone())

        def some_heads(x: Tensor, heads: int) -> Tensor:
            """[T, *] -> [T, fewer, D]: those of the first and of the last KV head."""
            by_kv_head = x.reshape(x.shape[0], kv_heads, heads // kv_heads, -1)
            return by_kv_head[:, :: max(1, kv_heads - 1)].flatten(1, 2)

        heads_of = dict(zip(actual, (num_heads, num_heads, kv_heads, kv_heads), strict=True))
        fewer = compare.exact_leaves(
            {n: some_heads(x, heads_of[f"grad_{n}"]) for n, x in leaves.items()}
        )
        metas = {"meta": rows.meta, "kv_meta": keys.meta}
        out = reference.dot_product_attention(**fewer, **metas, mask="full", **options)
        exact = compare.results(out, fewer, some_heads(grad, num_heads).flatten(1).double())
        metas_of = dict(zip(actual, (rows.meta, rows.meta, keys.meta, keys.meta), strict=True))
        return {
            name: compare.Compared(
                some_heads(x, heads_of[name]).flatten(1), exact[name].flatten(1), metas_of[name], x
            )
            for name, x in actual.items()
        }

    packs = getattr(module, "PROOF_PACKS", (_ATTENTION_LENGTHS,))
    checks = [partial(check, lengths, None) for lengths in packs]
    if other_keys:
        checks = [partial(check, _ATTENTION_LENGTHS, _KEY_LENGTHS)]
    heads = f"{num_heads} heads of {head_dim}" + f"/{v_head_dim}" * (v_head_dim != head_dim)
    heads += f", {kv_heads} KV heads" * (kv_heads != num_heads)
    subject = f"attention by {backend}, {heads}, {mask_name(*window)}, {compare.name_of(dtype)}"
    subject += ", pads" if pads else ", no pads"
    subject += ", other keys" * other_keys
    limits: dict[str, float] = dict.fromkeys(("output", "grad_q", "grad_k", "grad_v"), limit)
    return compare.judged(subject, checks, limits, device)


def verify_linear(
    backend: str,
    *,
    recipe: str = "bf16",
    layer: str = "column",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Verdict:
    """Compares a backend's linear on one rank, and its gradients, with float64.

    Figures: "output", "grad_x", "grad_weight" and "grad_bias", with a norm in front also
    "grad_layer_norm_weight" and "grad_layer_norm_bias"; "pads". Rows are those of packed sequences;
    pads and states are treated as by :func:`verify_attention`. Delayed scaling is judged at its
    third step, once scales have followed the first ones. Communicates nothing.

    Args:
        backend: a key of ``padded_sp.backends.LINEAR``.
        recipe: a key of ``padded_sp.alignment.RECIPES``.
        layer: "column", "row", or "layer_norm_column".
        dtype: of the parameters and the input.
        device: None: the current GPU, or the CPU without one.

    Returns: a verdict, a failing one where the backend raises or this GPU lacks the recipe.
    Raises: ValueError: no such backend, layer, recipe or dtype; a recipe that the backend has
        nowhere; under CUDA graph capture.
    """
    refuse_capture()
    module = backends.load(backends.LINEAR, backend)
    device = compare.device_of(device)
    if layer not in LAYERS or recipe not in alignment.RECIPES:
        raise ValueError(
            f"layer must be one of {', '.join(LAYERS)} and recipe one of "
            f"{', '.join(alignment.RECIPES)}; got {layer!r} and {recipe!r}"
        )
    holds_modules = hasattr(module, "make")
    if recipe != "bf16" and not holds_modules:
        raise ValueError(f"backend {backend!r} has no FP8: recipe must be 'bf16', got {recipe!r}")
    limit = compare.limit_of(dtype)

    def check() -> dict[str, compare.Compared]:
        rows = compare.Rows(*_LINEAR_LENGTHS, device, dtype)
        x, grad = rows.draw(_IN_FEATURES).requires_grad_(), rows.draw(_OUT_FEATURES)
        parameters = _parameters(rows, layer)
        prepared = _te_linear if holds_modules else _torch_linear
        call, leaves = prepared(module, layer, recipe, parameters)
        leaves = {"x": x} | leaves
        actual = {}
        for _ in range(3 if recipe == "fp8_delayed" else 1):
            y = inert_output(call(inert_input(x, rows.meta), rows.meta), rows.meta)
            actual = compare.results(y, leaves, grad.clone())
        exact = compare.exact_leaves({"x": x} | parameters)
        exact = compare.results(_exact_linear(layer, exact, rows.meta), exact, grad.double())
        return {
            name: compare.Compared(
                actual[name], x, rows.meta if name in ("output", "grad_x") else None
            )
            for name, x in exact.items()
        }

    forward, backward = (max(limit, _FP8_MARGIN * e) for e in _FP8_ERRORS.get(recipe, (0, 0)))
    grads = dict.fromkeys((f"grad_{name}" for name in ("x", *_PARAMETERS)), backward)
    subject = f"{layer} linear by {backend}, {recipe}, {compare.name_of(dtype)}"
    return compare.judged(subject, [check], {"output": forward} | grads, device)


# --- linears -------------------------------------------------------------------------------------

_PARAMETERS = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")


def _parameters(rows: compare.Rows, layer: str) -> dict[str, Tensor]:
    weight = rows.normal(_OUT_FEATURES, _IN_FEATURES) * _IN_FEATURES**-0.5
    parameters = [weight, 0.1 * rows.normal(_OUT_FEATURES)]
    if layer == "layer_norm_column":
        parameters += [1 + 0.1 * rows.normal(_IN_FEATURES), 0.1 * rows.normal(_IN_FEATURES)]
    return dict(zip(_PARAMETERS, parameters, strict=False))


def _torch_linear(
    module: Any, layer: str, recipe: str, parameters: dict[str, Tensor]
) -> tuple[_Call, dict[str, Tensor]]:
    """What computes y, and the parameters that it uses, as leaves."""
    leaves = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    multiply = module.row_parallel_linear if layer == "row" else module.column_parallel_linear

    def call(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        if layer == "layer_norm_column":
            norm = leaves["layer_norm_weight"], leaves["layer_norm_bias"]
            x = inert_output(F.layer_norm(x, x.shape[1:], *norm, _EPS), meta)
        return multiply(x, leaves["weight"], leaves["bias"], "", 1, False)

    return call, leaves


def _te_linear(
    module: Any, layer: str, recipe: str, parameters: dict[str, Tensor]
) -> tuple[_Call, dict[str, Tensor]]:
    """The same by a module of Transformer Engine, inside its autocast."""
    te = import_module("padded_sp.backends.te")
    if reason := te.unavailable(recipe):
        raise ValueError(reason)
    weight = parameters["weight"]
    norm = {"eps": _EPS, "normalization": "LayerNorm", "zero_centered_gamma": False}
    held = module.make(
        layer_norm=norm | {"return_layernorm_output": False} if "layer_norm" in layer else None,
        in_features=_IN_FEATURES,
        out_features=_OUT_FEATURES,
        bias=True,
        return_bias=False,
        sequence_parallel=False,
        tp_group=None,
        tp_size=1,
        parallel_mode="row" if layer == "row" else "column",
        params_dtype=weight.dtype,
        parameters_split=None,
        device=weight.device,
        init_method=None,
        fuse_wgrad_accumulation=False,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
    )
    leaves = dict(held.named_parameters())
    with torch.no_grad():
        for name, parameter in leaves.items():
            parameter.copy_(parameters[name])
    # Amax of this rank alone: the others may not be checking anything now.
    recipe_options = {"reduce_amax": False} if recipe == "fp8_delayed" else {}
    recipe_object = te.make_recipe(recipe, **recipe_options)

    def call(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        with te.autocast(recipe_object):
            return module.run(held, x, meta, None, is_first_microbatch=None)[0]

    return call, leaves


def _exact_linear(layer: str, leaves: dict[str, Tensor], meta: PaddedSeqMeta) -> Tensor:
    x, weight, bias = leaves["x"], leaves["weight"], leaves["bias"]
    if layer == "row":
        return reference.row_parallel_linear([x], [weight], bias, meta)[0]
    if layer == "column":
        return reference.column_parallel_linear([x], [weight], [bias], meta)[0]
    norm = leaves["layer_norm_weight"], leaves["layer_norm_bias"]
    return reference.layer_norm_column_parallel_linear(
        [x], *norm, [weight], [bias], meta, eps=_EPS
    )[0]
