"""Functions that Megatron-Core imports by name, and calls where ``moe_router_fusion`` is on."""

from typing import Any


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the double of Transformer Engine has no fused router")


fused_compute_score_for_moe_aux_loss = _not_here
fused_moe_aux_loss = _not_here
fused_topk_with_score_function = _not_here
