"""Megatron's mixture of experts on real rows alone: pads are routed to no expert.

Pad rows are taken out in front of the router and put back, as zeros, behind the experts. So they
take no expert's capacity, and losses, statistics and the bias of experts count real tokens only.
Shared experts see the padded rows, which tensor parallelism needs; their linears keep pads inert.

Source: megatron-core 0.16.1 and 0.19.2, megatron/core/transformer/moe/moe_layer.py and router.py.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.transformer.moe import moe_layer, router
from torch import Tensor

from padded_sp.collectives import group_size
from padded_sp.context import resolve_meta
from padded_sp.integrations.megatron.held_rows import first_row, held_rows, shards_of
from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import pad_part, unpad_part


class MoELayer(moe_layer.MoELayer):
    """Megatron's ``MoELayer``, to whose experts no pads are sent.

        hidden_states  [rows, 1, H]   rows: T / R under ``sequence_parallel``, else T
        output         [rows, 1, H]   zero in pad rows, and the bias None

    Made of one that Megatron built, by its class. The meta is the surrounding one; a
    ``padding_mask`` is not needed and ignored. Communication is that of the token dispatcher, whose
    ranks then have unequal numbers of rows.

    Raises: ValueError: at the call: no meta; a capacity meta, whose real rows only the device
        counts; other rows than the meta has.
    """

    router: Any

    def check_built(self) -> None:
        """Raises ValueError for what asks for equal numbers of rows, or for those of the pack."""
        for layer in self.children():
            if isinstance(layer, TELinear):  # latent projections, of what is sent
                layer.is_expert = True  # type: ignore
        if self.config.moe_shared_expert_overlap:
            raise ValueError(
                "moe_shared_expert_overlap=True has the dispatcher run shared experts on the rows "
                "that it sends, which are no longer those of the pack: set it to False"
            )
        if self.config.moe_pad_expert_input_to_capacity and self._sharing_ranks > 1:
            raise ValueError(
                "moe_pad_expert_input_to_capacity=True sends as many rows from each rank, and "
                "ranks have unequal numbers of real ones: set it to False"
            )

    @property
    def _sharing_ranks(self) -> int:
        """The ranks that send tokens to each other."""
        return group_size(self.attn_tp_group) * group_size(self.ep_group)

    @property
    def _keeps_rows(self) -> bool:
        """Whether the dispatcher gathers one number of rows from each rank: then pads are sent
        along, to no expert."""
        return self.config.moe_token_dispatcher_type == "allgather" and self._sharing_ranks > 1

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        """probs and routing_map [real rows, experts]; of all rows where those are sent."""
        meta, row = self._held(hidden_states)
        real = unpad_part(hidden_states, meta, row)
        probs, routing_map = super().route(real, self.router.mask_of(real, meta))
        if self._keeps_rows:
            rows = hidden_states.shape[0]
            return pad_part(probs, meta, row, rows), pad_part(routing_map, meta, row, rows)
        self._real_rows = real  # for the next step, which gathers them no second time
        return probs, routing_map

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """The dispatcher gets real rows alone."""
        sent = vars(self).pop("_real_rows", hidden_states)
        return super().preprocess(sent, probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """[rows, 1, H] again, with zeros in pad rows; the shared experts' output added."""
        output = super().postprocess(output, None)
        if not self._keeps_rows:
            meta, group = resolve_meta(None), self.attn_tp_group
            shards = shards_of(group, self.config.sequence_parallel)
            rows = meta.num_rows // shards
            output = pad_part(output, meta, first_row(meta, group, shards), rows)
        return output if shared_expert_output is None else output + shared_expert_output

    def _held(self, hidden_states: Tensor) -> tuple[PaddedSeqMeta, int]:
        """The meta, and the first row that this rank holds."""
        meta = resolve_meta(None)
        if meta.is_capacity:
            raise ValueError(
                "MoELayer sends real rows alone, whose number a capacity meta has on the device: "
                "give the meta that you copy_() into it"
            )
        row, _ = held_rows(
            hidden_states,
            meta,
            "the input of MoELayer",
            self.attn_tp_group,
            sequence_parallel=self.config.sequence_parallel,
            divided=True,
        )
        return meta, row


class TopKRouter(router.TopKRouter):
    """Megatron's ``TopKRouter`` for real rows, of which ranks have unequal numbers.

    Losses are means over the real tokens of the pack: with a mask Megatron's own weighs each rank's
    mean alike, however few tokens it has, and refuses to count for the expert bias. Without pads
    everything is Megatron's, bit for bit.
    """

    def check_built(self) -> None:
        """Raises ValueError for quantile balancing, which gathers equal numbers of rows."""
        if self.routing_type == "quantile_balancing" and group_size(self.tp_cp_group) > 1:
            raise ValueError(
                "quantile_balancing gathers as many rows from each rank, and ranks have unequal "
                "numbers of real ones: use another moe_router_load_balancing_type"
            )

    def mask_of(self, real: Tensor, meta: PaddedSeqMeta) -> Tensor | None:
        """Has Megatron count tokens instead of rows: a padding mask of real rows, all False.

        None where each rank has as many rows as the others: in a pack without pads, unless other
        packs take part in a loss.
        """
        if self.routing_type == "quantile_balancing":
            return None
        if not meta.has_padding and not self.get_aux_loss_coeff("global_aux_loss"):
            return None
        return torch.zeros(real.shape[:2], dtype=torch.bool, device=real.device)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The sum over this rank's rows over the number of all; Megatron has this rank's mean."""
        coefficient = self.config.moe_z_loss_coeff
        if padding_mask is None or coefficient is None or self.calculate_per_token_loss:
            return super().apply_z_loss(logits, padding_mask)
        config = self.config
        share = len(logits) * self.tp_cp_group.size() / max(resolve_meta(None).num_tokens, 1)
        self.config = copy.copy(config)
        self.config.moe_z_loss_coeff = coefficient * share
        try:
            return super().apply_z_loss(logits, padding_mask)
        finally:
            self.config = config

    def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Each rank's term of the loss counts alike, as it does where all have as many rows."""
        if self.calculate_per_token_loss and isinstance(kwargs.get("valid_token_count"), Tensor):
            tokens = resolve_meta(None).num_tokens
            kwargs["valid_token_count"] = tokens / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron's, without the mask, which it cannot apply: all rows are real."""
        super()._apply_expert_bias(routing_map)


#: What Megatron builds by itself -> what it is changed into, by its class.
CHANGES: dict[type, type] = {moe_layer.MoELayer: MoELayer, router.TopKRouter: TopKRouter}
