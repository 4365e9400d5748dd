"""The linears of a tensor-parallel block: ``te.Linear``'s argument names, padded packs, inert pads.

A column-parallel linear divides its output features over the ranks and gathers its input's rows; a
row-parallel one divides its input features and scatters the sum of the ranks' terms by rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from padded_sp.backends import torch_linear
from padded_sp.boundaries import check_size
from padded_sp.context import resolve_meta
from padded_sp.fused_parameters import (
    ParametersSplit,
    joined,
    lay_side_by_side,
    split_features,
    watch_parts,
)
from padded_sp.inert import inert_input, inert_output
from padded_sp.meta import PaddedSeqMeta
from padded_sp.normalization import check_normalization, norm_specs, normalize
from padded_sp.parallel_layer import (
    InitMethod,
    ParallelLayer,
    ParameterSpec,
    normal_init,
    to_autocast_dtype,
)

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


class _ParallelLinear(ParallelLayer):
    """The parameters of a linear, whole or in named parts."""

    _partition_dim: int  # of the weight [O, K]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        parameters_split: ParametersSplit | None = None,
        inplace: bool = True,
    ) -> None:
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
            inplace=inplace,
        )
        self.in_features = in_features = check_size(in_features, "in_features")
        self.out_features = out_features = check_size(out_features, "out_features")
        self.use_bias, self.return_bias = bias, return_bias
        self._weight_names: list[str] = []
        self._bias_names: list[str] = []
        by_columns = self._partition_dim == 0
        for part, features in split_features(parameters_split, out_features).items():
            weight = ParameterSpec(
                (features, in_features), self._partition_dim, init_method or normal_init
            )
            self._weight_names.append(f"{part}weight")
            self._add_parameter(self._weight_names[-1], weight)
            if bias:
                self._bias_names.append(f"{part}bias")
                spec = ParameterSpec((features,), 0 if by_columns else None, nn.init.zeros_)
                self._add_parameter(self._bias_names[-1], spec)
        self._settle_parameters()
        self.reset_parameters()

    def _settle_parameters(self) -> None:
        super()._settle_parameters()
        for names in (self._weight_names, self._bias_names):
            lay_side_by_side([self.get_parameter(name) for name in names])

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

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, tp_size={self.tp_size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ParallelLinear):
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

    Raises:
        ValueError: sizes below 1; a part that R does not divide; parts that do not add up; at the
            call, before anything is communicated: no group, x or meta of other rows, features,
            dtype or device.
        RuntimeError: in backward, where a weight that it needs was written after forward.
    """

    _partition_dim = 0

    def forward(
        self, x: Tensor, meta: PaddedSeqMeta | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [T / R, *, K] -> [T, *, O / R]; (that, bias) with ``return_bias``."""
        meta = resolve_meta(meta)
        self._check(x, meta)
        first_row = self._first_row(meta)
        x, weight, bias, returned_bias = self._operands(x)
        x = inert_input(x, meta, first_row=first_row, inplace=self.inplace)
        y = self._multiply(x, weight, bias, meta)
        return (y, returned_bias) if self.return_bias else y

    def _check(self, x: Tensor, meta: PaddedSeqMeta) -> None:
        self._check_input(
            x,
            meta,
            features=self.in_features,
            shards=self.tp_size if self.sequence_parallel else 1,
            parameter=getattr(self, self._weight_names[0]),
        )

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, meta: PaddedSeqMeta
    ) -> Tensor:
        y = torch_linear.column_parallel_linear(
            x, weight, bias, self._group_name, self.tp_size, self.sequence_parallel
        )
        self._watch_weight(y, x, weight)
        return inert_output(y, meta, inplace=self.inplace, is_zero=bias is None)


class RowParallelLinear(_ParallelLinear):
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

    _partition_dim = 1

    def forward(
        self, x: Tensor, meta: PaddedSeqMeta | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [T, *, K / R] -> [T / R, *, O]; (that, bias) with ``return_bias``."""
        meta = resolve_meta(meta)
        self._check_input(
            x,
            meta,
            features=self.in_features // self.tp_size,
            shards=1,
            parameter=getattr(self, self._weight_names[0]),
        )
        x, weight, bias, returned_bias = self._operands(x)
        x = inert_input(x, meta, inplace=self.inplace)
        y = torch_linear.row_parallel_linear(
            x, weight, bias, self._group_name, self.tp_size, self.sequence_parallel
        )
        self._watch_weight(y, x, weight)
        y = inert_output(
            y,
            meta,
            first_row=self._first_row(meta),
            inplace=self.inplace,
            is_zero=bias is None,
        )
        return (y, returned_bias) if self.return_bias else y


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
        super().__init__(in_features, out_features, **linear)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        specs = norm_specs(in_features, normalization, zero_centered_gamma)
        for name in ("weight", "bias"):
            self._add_parameter(f"layer_norm_{name}", specs.get(name))
        self._settle_parameters()
        self._draw({f"layer_norm_{name}" for name in specs})

    def forward(self, x: Tensor, meta: PaddedSeqMeta | None = None) -> Any:
        """x [T / R, *, K] -> y [T, *, O / R], or (y, bias, normalised x) as asked for."""
        meta = resolve_meta(meta)
        self._check(x, meta)
        rows = {"first_row": self._first_row(meta), "inplace": self.inplace}
        normed = normalize(
            inert_input(x, meta, **rows),
            self.layer_norm_weight,
            self.layer_norm_bias,
            normalization=self.normalization,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        normed = inert_output(normed, meta, **rows, is_zero=self.layer_norm_bias is None)
        operand, weight, bias, returned_bias = self._operands(normed)
        y = self._multiply(operand, weight, bias, meta)
        returned: tuple[Tensor | None, ...] = (y,)
        if self.return_bias:
            returned += (returned_bias,)
        if self.return_layernorm_output:
            returned += (normed,)
        return returned if len(returned) > 1 else y
