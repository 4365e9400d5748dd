"""``ParallelLinear``: what every call of a linear does, whatever its backend and its shape.

The recipe that surrounds a call is found and its rules checked, and the backend proved, before
anything is sent; then the backend computes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from padded_sp import alignment, backends, verify
from padded_sp.fused_parameters import joined, watch_parts
from padded_sp.linear_parameters import LinearParameters
from padded_sp.meta import PaddedSeqMeta
from padded_sp.parallel_layer import to_autocast_dtype
from padded_sp.verdict import demand


class ParallelLinear(LinearParameters):
    """A linear's parameters and what computes with them."""

    def prepare(self, dtype: torch.dtype | None = None) -> None:
        """Proves on this machine that the backend computes right, outside any step.

        Compares a small linear of this kind with float64, in the recipe that surrounds the call
        (``te.autocast``; BF16 without) and in ``dtype`` (None: the parameters'), once per process.
        The first forward calls it if nobody did. Leaves random states and Transformer Engine's FP8
        state as they were. Every rank of ``tp_group`` calls it: they agree on the verdict.

        Communicates a few hundred bytes over the host of ``tp_group``. Waits for the device.

        Raises: ValueError: the numbers are wrong, with the figures; under graph capture; a recipe
            that Transformer Engine does not offer here.
        """
        dtype = self.get_parameter(self._weight_names[0]).dtype if dtype is None else dtype
        recipe = self._recipe()
        if self.verify and verify.is_enabled(self.tp_group):
            demand(
                verify.verify_linear,
                self.backend,
                self.tp_group,
                recipe=recipe,
                layer="layer_norm_column" if self._norm_arguments() else self.parallel_mode,
                dtype=dtype,
                device=self.get_parameter(self._weight_names[0]).device,
            )
        self._proved.add((recipe, dtype))

    def _recipe(self) -> str:
        """The name of the recipe that surrounds the call; "bf16" without one.

        Raises: ValueError: one that this layer's backend does not compute in.
        """
        recipe = backends.surrounding_fp8_recipe()
        if recipe is None:
            return "bf16"
        if self.backend != "te":
            raise ValueError(
                f"{type(self).__name__} computes with backend {self.backend!r}, which has no FP8, "
                "inside an FP8 autocast of Transformer Engine: build it with backend='te', or call "
                "it inside te.autocast(enabled=False)"
            )
        return self._te_linear.recipe_for(recipe, self.tp_group if self.sequence_parallel else None)

    def _check_recipe(self, x: Tensor, meta: PaddedSeqMeta) -> str:
        """What the recipe in force demands of the layout and the features; its name.

        Reads host integers only. Raises: ValueError: before anything is communicated.
        """
        recipe = self._recipe()
        check_layout(recipe, x, meta, self._shards, self._local_features)
        if self.backend == "te" and (recipe, x.dtype) not in self._proved:
            self.prepare(x.dtype)
        return recipe

    @property
    def _shards(self) -> int:
        """The ranks that divide the rows."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def _local_features(self) -> tuple[int, int]:
        """This rank's K and O."""
        if self.parallel_mode == "column":
            return self.in_features, self.out_features // self.tp_size
        return self.in_features // self.tp_size, self.out_features

    def _run_te(
        self, x: Tensor, meta: PaddedSeqMeta, recipe: str, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """y, the bias to return, the normalised x to return."""
        wide_gather = ""
        if recipe == "fp8_blockwise" and self._shards > 1:
            features = self.in_features if self.parallel_mode == "column" else self.out_features
            rows = meta.num_rows * inner_rows(x)
            wide_gather = self._te_linear.why_wide(self.parallel_mode, rows, features, self.tp_size)
        return self._te_linear.run(
            self.te,
            x,
            meta,
            self.tp_group,
            is_first_microbatch=is_first_microbatch,
            wide_gather=wide_gather,
        )

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, weight, the bias to add and the bias to return, in the dtype to compute in."""
        weight = joined([getattr(self, name) for name in self._weight_names])
        x, weight, bias = to_autocast_dtype(x), to_autocast_dtype(weight), None
        if self.use_bias:
            bias = to_autocast_dtype(joined([getattr(self, name) for name in self._bias_names]))
        return (x, weight, None, bias) if self.return_bias else (x, weight, bias, None)

    def _watch_weight(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        if x.requires_grad:  # only its gradient is computed from the weight
            watch_parts(y, weight, [getattr(self, name) for name in self._weight_names])


def check_layout(
    recipe: str, x: Tensor, meta: PaddedSeqMeta, shards: int, features: tuple[int, int]
) -> None:
    """What a recipe demands of the rows, which ``shards`` ranks divide, and of this rank's K and O.

    Reads host integers only. Raises: ValueError: the rule, the rows and the least legal plan.
    """
    if recipe == "bf16":
        return
    alignment.check_features(recipe, *features)
    policy = _policy(recipe, shards, inner_rows(x))
    if meta.num_rows % policy.total_alignment:
        policy.check(meta)


def inner_rows(x: Tensor) -> int:
    """What * is in x [rows, *, features], all in all: GEMMs see so many rows for each row."""
    return x.shape[1:-1].numel()


@functools.cache
def _policy(recipe: str, tp_size: int, inner_rows: int) -> alignment.AlignPolicy:
    """Blocks that straddle ranks are legal: they travel as BF16."""
    return alignment.AlignPolicy(recipe, tp_size, fp8_wire=False, inner_rows=inner_rows)  # pyright: ignore
