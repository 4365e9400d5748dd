"""``wrap_gpt_model``: inert pads where no layer spec of Megatron's reaches."""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar

from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from padded_sp.backends import te_linear
from padded_sp.context import resolve_meta
from padded_sp.inert import inert_input, inert_output, may_overwrite
from padded_sp.integrations.megatron import layers, moe
from padded_sp.integrations.megatron.attention import DotProductAttention
from padded_sp.integrations.megatron.held_rows import held_rows
from padded_sp.integrations.megatron.layer_spec import SEES_PADS
from padded_sp.integrations.megatron.layers import InertLinear, InertNorm

_Model = TypeVar("_Model")

_CHANGES = layers.CHANGES | moe.CHANGES
_INERT = (InertLinear, InertNorm, DotProductAttention)


def wrap_gpt_model(model: _Model) -> _Model:
    """Makes pads inert in a GPTModel where no layer spec reaches, and returns it.

    What Megatron builds by its own class is changed into ours: the last norm of a block,
    projections of multi-latent attention, and a mixture of experts, which routes real rows alone:
    pads take no capacity and count in no loss, statistic or bias of experts.
    Pad rows, and those of the gradients, are zero in the output of the embedding and the decoder,
    and in what goes into the output layer and comes out of it. The loss of a pad token is exactly
    0, whatever its label is, and its gradient too; which tokens a mean divides by stays the
    caller's. Parameters and checkpoints are as before.

    Call the model inside ``with seq_meta(meta):`` and pass it ``to_packed_seq_params(meta)``.

    Args:
        model: a GPTModel built with ``padded_sp_layer_spec(spec)``, as it is or inside Megatron's
            wrappers (``.module``), or a list of them. Wrapping twice does nothing.

    Raises: ValueError: no GPTModel; layers of Transformer Engine in it that let pads in, by name; a
        loss that is fused with the output layer, which never shows its logits.
    Source: megatron-core 0.16.1 and 0.19.2, megatron/core/models/gpt/gpt_model.py.
    """
    for gpt in _gpt_models(model):
        if not hasattr(gpt, _WRAPPED):
            for layer in gpt.modules():
                _change(layer)
            _check(gpt)
            _wrap(gpt)
            setattr(gpt, _WRAPPED, True)
    return model


_WRAPPED = "_padded_sp_wrapped"
_BLOCKS = ("decoder", "mtp")


def _gpt_models(model: Any) -> Iterator[GPTModel]:
    for given in model if isinstance(model, (list, tuple)) else [model]:
        inner = given
        while not isinstance(inner, GPTModel):
            if not isinstance(inner := getattr(inner, "module", None), nn.Module):
                raise ValueError(
                    f"wrap_gpt_model takes Megatron's GPTModel, got {type(given).__name__}"
                )
        yield inner


def _change(layer: nn.Module) -> None:
    """Into ours, what Megatron builds by its own class whatever a spec says."""
    if ours := _CHANGES.get(type(layer)):
        layer.__class__ = ours
        if isinstance(layer, InertLinear):
            layer.is_expert = layer.is_expert or layers.is_built_for_expert(layer)
        elif not isinstance(layer, InertNorm):
            layer.check_built()  # pyright: ignore


def _check(gpt: GPTModel) -> None:
    blocks = [b for b in (getattr(gpt, name, None) for name in _BLOCKS) if b is not None]
    inside = [(name, layer) for block in blocks for name, layer in block.named_modules()]
    plain = [
        f"{name} ({type(layer).__name__})"
        for name, layer in inside
        if isinstance(layer, SEES_PADS) and not isinstance(layer, _INERT)
    ]
    if plain or not any(isinstance(layer, _INERT) for _, layer in inside):
        what = (
            f"{', '.join(plain[:3])} would let pads in" if plain else "none of its layers is ours"
        )
        raise ValueError(f"{what}: build the model with padded_sp_layer_spec(spec)")
    if getattr(gpt.config, "cross_entropy_fusion_impl", "native") == "linear":
        raise ValueError(
            "cross_entropy_fusion_impl='linear' computes the loss inside of the output layer, from "
            "pads too: set 'native' or 'te'"
        )


def _wrap(gpt: GPTModel) -> None:
    tp_group = gpt.pg_collection.tp
    zeroed = functools.partial(
        _zeroed, tp_group=tp_group, sequence_parallel=gpt.config.sequence_parallel
    )
    for name in ("embedding", "decoder"):
        if (module := getattr(gpt, name, None)) is not None:
            what = f"the output of the {name}"
            module.register_forward_hook(lambda _, args, out, what=what: zeroed(out, what))
    if (output_layer := getattr(gpt, "output_layer", None)) is not None:
        output_layer.register_forward_pre_hook(
            lambda _, args: (zeroed(args[0], "the input of the output layer"), *args[1:])
        )
        output_layer.register_forward_hook(
            lambda _, args, out: (zeroed(out[0], "logits", divided=False), *out[1:])
        )
    loss = gpt.compute_language_model_loss

    @functools.wraps(loss)
    def inert_loss(labels: Tensor, logits: Tensor) -> Tensor:
        meta = resolve_meta(None)
        if labels.shape[-1] != meta.num_rows:
            raise ValueError(
                f"labels must be [1, {meta.num_rows}], as many as its meta has rows, got "
                f"{list(labels.shape)}: pad(labels, meta) packs real ones"
            )
        # A label out of the vocabulary would be read out of bounds by some kernels.
        labels = labels.masked_fill(meta.padding_mask, 0)
        return loss(labels, logits).masked_fill(meta.padding_mask, 0)

    gpt.compute_language_model_loss = inert_loss
    for layer in gpt.modules():
        if isinstance(layer, InertNorm):
            layer.tp_group = tp_group


def _zeroed(x: Tensor, name: str, *, divided: bool | None = None, **held: Any) -> Tensor:
    """x with pad rows zero, and those of its gradient; no view, for Megatron's loss goes on in
    place."""
    meta = resolve_meta(None)
    row, _ = held_rows(x, meta, name, divided=divided, **held)
    if may_overwrite(x):
        return inert_output(te_linear.own(x), meta, first_row=row)
    return inert_input(x, meta, first_row=row, zero_gradient=True)
