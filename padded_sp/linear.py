"""The linears of a tensor-parallel block: ``te.Linear``'s argument names, padded packs, inert pads.

A column-parallel linear divides its output features over the ranks and gathers its input's rows; a
row-parallel one divides its input features and scatters the sum of the ranks' terms by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from padded_sp.backends import torch_linear
from padded_sp.context import resolve_meta
from padded_sp.inert import inert_input, inert_output
from padded_sp.meta import PaddedSeqMeta
from padded_sp.normalization import check_normalization, norm_specs, normalize
from padded_sp.parallel_layer import ParameterSpec
from padded_sp.parallel_linear import ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b, output features divided over the R ranks of ``tp_group``; pads are inert.

    Over R ranks, T = meta.num_rows, K = in_features, O = out_features:
        x        [T / R, *, K]    this rank's rows; [T, *, K] without ``sequence_parallel``
        weight   [O / R, K]       bias [O / R]
        y        [T, *, O / R]
        forward    y = all_gather(x) W^T + b
        backward   grad_x = reduce_scatter(grad_y W);  grad_weight = grad_y^T all_gather(x)
    Communicates T * K elements for each of y, grad_x and grad_weight. Without
    ``sequence_parallel`` only grad_x, by an all-reduce.

    Args:
        in_features, out_features: K and O of the whole layer.
        bias: whether there is one.
        tp_group, tp_size: the ranks, or their number if the group comes later through
            ``set_tensor_parallel_group(group)``. Without either: one rank, no process group.
        sequence_parallel: x is divided by rows. True by default; Transformer Engine's is False.
        params_dtype: of the parameters; None: torch's default.
        device: of the parameters; None: torch's default.
        init_method: writes the whole weight in place; None: normal, standard deviation 0.023.
        return_bias: return (y, bias) with bias not added, for the caller to fuse.
        parameters_split: names the parts of a fused weight: equal parts, or name -> features
            of the whole layer. Parameters are then ``{name}_weight`` and ``{name}_bias``, and y
            holds this rank's features of each part, one after the other.
        inplace: False: never write to pad rows of the caller's tensors, copy.
        backend: "torch", or "te": Transformer Engine's GEMMs in the recipe of the surrounding
            ``te.autocast``, BF16 outside of one. Names and state dict are then te.Linear's; under
            ``te.fp8_model_init`` the weight itself is FP8. ``device`` None is "cuda" there.
            torch.compile leaves it as it is, between two compiled parts.
        fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name: of te.Linear. With a
            tracker each rank draws its own part under it.
        verify: prove the backend on this machine before its first use; see :meth:`prepare`.

    Raises:
        ImportError: backend "te" without Transformer Engine.
        ValueError: sizes below 1; a part that R does not divide; parts that do not add up; at the
            call, before anything is communicated: no group, x or meta of other rows, features,
            dtype or device; rows (times *) or features that the FP8 recipe in force does not
            allow; an FP8 autocast around backend "torch"; a backend whose numbers are wrong here.
        RuntimeError: in backward, where a weight that it needs was written after forward.
    """

    parallel_mode = "column"

    def forward(
        self,
        x: Tensor,
        meta: PaddedSeqMeta | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [T / R, *, K] -> [T, *, O / R]; (that, bias) with ``return_bias``.

        ``is_first_microbatch``: with backend "te" in FP8, True quantises the weight anew and keeps
        that for the next micro-batches, False takes what is kept, None keeps nothing.
        """
        if self.backend == "te" and torch.compiler.is_dynamo_compiling():
            return self._te_linear.eagerly(self.forward, x, meta, is_first_microbatch)
        meta = resolve_meta(meta)
        recipe = self._check(x, meta)
        rows = {"first_row": self._first_row(meta), "inplace": self.inplace}
        if self.backend == "te":
            x = inert_input(x, meta, **rows)
            y, bias, _ = self._run_te(x, meta, recipe, is_first_microbatch)
            y = self._inert(y, meta)
        else:
            x, weight, added_bias, bias = self._operands(x)
            x = inert_input(x, meta, **rows)
            y = self._multiply(x, weight, added_bias, meta)
        return (y, bias) if self.return_bias else y

    def _check(self, x: Tensor, meta: PaddedSeqMeta) -> str:
        """Raises what every rank can see is wrong; returns the name of the recipe in force."""
        self._check_input(
            x,
            meta,
            features=self.in_features,
            shards=self._shards,
            parameter=getattr(self, self._weight_names[0]),
        )
        return self._check_recipe(x, meta)

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, meta: PaddedSeqMeta
    ) -> Tensor:
        """y by backend "torch", with inert pads."""
        y = torch_linear.column_parallel_linear(
            x, weight, bias, self._group_name, self.tp_size, self.sequence_parallel
        )
        self._watch_weight(y, x, weight)
        return self._inert(y, meta)

    def _inert(self, y: Tensor, meta: PaddedSeqMeta, *, from_zeros: bool = True) -> Tensor:
        """``from_zeros``: the pad rows of what was multiplied are zero."""
        is_zero = from_zeros and not (self.use_bias and not self.return_bias)
        return inert_output(y, meta, inplace=self.inplace, is_zero=is_zero)


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b, input features divided over the R ranks of ``tp_group``; pads are inert.

    Over R ranks, T = meta.num_rows, K = in_features, O = out_features:
        x        [T, *, K / R]    this rank's features of every row
        weight   [O, K / R]       bias [O], the same on each rank
        y        [T / R, *, O]    this rank's rows; [T, *, O] without ``sequence_parallel``
        forward    y = reduce_scatter(x W^T) + b
        backward   grad_y_full = all_gather(grad_y);  grad_x = grad_y_full W
                   grad_weight = grad_y_full^T x;  grad_bias = sum of grad_y over this rank's rows
    Communicates T * O elements each way. Without ``sequence_parallel``: an all-reduce forward,
    nothing backward. Under it the bias's gradient is partial: ``reduce_replicated_gradients``.

    Args: as :class:`ColumnParallelLinear`; ``sequence_parallel`` divides y by rows.

    Raises: ValueError: in_features that R does not divide; otherwise as there.
    """

    parallel_mode = "row"

    def forward(
        self,
        x: Tensor,
        meta: PaddedSeqMeta | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [T, *, K / R] -> [T / R, *, O]; (that, bias) with ``return_bias``."""
        if self.backend == "te" and torch.compiler.is_dynamo_compiling():
            return self._te_linear.eagerly(self.forward, x, meta, is_first_microbatch)
        meta = resolve_meta(meta)
        self._check_input(
            x,
            meta,
            features=self.in_features // self.tp_size,
            shards=1,
            parameter=getattr(self, self._weight_names[0]),
        )
        recipe = self._check_recipe(x, meta)
        if self.backend == "te":
            x = inert_input(x, meta, inplace=self.inplace)
            y, bias, _ = self._run_te(x, meta, recipe, is_first_microbatch)
        else:
            x, weight, added_bias, bias = self._operands(x)
            x = inert_input(x, meta, inplace=self.inplace)
            y = torch_linear.row_parallel_linear(
                x, weight, added_bias, self._group_name, self.tp_size, self.sequence_parallel
            )
            self._watch_weight(y, x, weight)
        y = inert_output(
            y,
            meta,
            first_row=self._first_row(meta),
            inplace=self.inplace,
            is_zero=not self.use_bias or self.return_bias,
        )
        return (y, bias) if self.return_bias else y


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """LayerNorm or RMSNorm of each row, then a column-parallel linear; pads are inert.

    Over R ranks, T = meta.num_rows, K = in_features, O = out_features:
        x                  [T / R, *, K]   this rank's rows; [T, *, K] without ``sequence_parallel``
        layer_norm_weight  [K]             layer_norm_bias [K], not with "RMSNorm"
        y                  [T, *, O / R]
        forward    y = all_gather(norm(x)) W^T + b
    The norm works on this rank's rows and communicates nothing; the gradients of its parameters
    are partial under ``sequence_parallel``: ``reduce_replicated_gradients``. The rest as
    :class:`ColumnParallelLinear`.

    Args:
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance, or to the mean square; at least 1e-24.
        zero_centered_gamma: layer_norm_weight is stored minus one.
        return_layernorm_output: return the normalised rows of this rank too, after y (and bias).

    Raises: ValueError: another ``normalization``, eps below 1e-24 or not finite; otherwise as
        :class:`ColumnParallelLinear`.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **linear: Any,
    ) -> None:
        check_normalization(normalization, eps)
        # Before nn.Module's own constructor, which leaves them: the parameters follow from them.
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        super().__init__(in_features, out_features, **linear)

    def _norm_specs(self) -> dict[str, ParameterSpec | None]:
        specs = norm_specs(self.in_features, self.normalization, self.zero_centered_gamma)
        return {f"layer_norm_{name}": specs.get(name) for name in ("weight", "bias")}

    def _norm_arguments(self) -> dict[str, Any]:
        names = ("eps", "normalization", "zero_centered_gamma", "return_layernorm_output")
        return {name: getattr(self, name) for name in names}

    def forward(
        self,
        x: Tensor,
        meta: PaddedSeqMeta | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """x [T / R, *, K] -> y [T, *, O / R], or (y, bias, normalised x) as asked for."""
        if self.backend == "te" and torch.compiler.is_dynamo_compiling():
            return self._te_linear.eagerly(self.forward, x, meta, is_first_microbatch)
        meta = resolve_meta(meta)
        recipe = self._check(x, meta)
        rows = {"first_row": self._first_row(meta), "inplace": self.inplace}
        x = inert_input(x, meta, **rows)
        if self.backend == "te":
            y, bias, normed = self._run_te(x, meta, recipe, is_first_microbatch)
            y = self._inert(y, meta, from_zeros=self.layer_norm_bias is None)
            if normed is not None:
                normed = inert_output(normed, meta, **rows)
        else:
            normed = normalize(
                x,
                self.layer_norm_weight,
                self.layer_norm_bias,
                normalization=self.normalization,
                eps=self.eps,
                zero_centered_gamma=self.zero_centered_gamma,
            )
            normed = inert_output(normed, meta, **rows, is_zero=self.layer_norm_bias is None)
            operand, weight, added_bias, bias = self._operands(normed)
            y = self._multiply(operand, weight, added_bias, meta)
        returned: tuple[Tensor | None, ...] = (y,)
        if self.return_bias:
            returned += (bias,)
        if self.return_layernorm_output:
            returned += (normed,)
        return returned if len(returned) > 1 else y
