"""RMSNorm and LayerNorm with inert pads.

A norm works row by row, but the gradient of its weight sums over rows: one NaN in a pad row would
poison it, and a zero row's gradient comes back multiplied by 1 / sqrt(eps).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from padded_sp.boundaries import check_size
from padded_sp.context import resolve_meta
from padded_sp.inert import inert_input, inert_output
from padded_sp.meta import PaddedSeqMeta
from padded_sp.parallel_layer import ParallelLayer, ParameterSpec, is_autocast_on

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

# Below, 1 / sqrt(eps) cubed, which backward computes in float32, becomes infinite.
_LEAST_EPS = 1e-24


class _Norm(ParallelLayer):
    normalization: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = True,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        inplace: bool = True,
    ) -> None:
        check_normalization(self.normalization, eps)
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
            inplace=inplace,
        )
        self.normalized_shape = check_size(normalized_shape, "normalized_shape")
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        specs = norm_specs(self.normalized_shape, self.normalization, zero_centered_gamma)
        for name in ("weight", "bias"):
            self._add_parameter(name, specs.get(name))
        self._settle_parameters()
        self._draw(set(specs))

    def forward(self, x: Tensor, meta: PaddedSeqMeta | None = None) -> Tensor:
        """x [T / R, *, H] -> the same shape; [T, *, H] without ``sequence_parallel``."""
        meta = resolve_meta(meta)
        self._check_input(
            x,
            meta,
            features=self.normalized_shape,
            shards=self.tp_size if self.sequence_parallel else 1,
            parameter=self.weight,
        )
        rows = {"first_row": self._first_row(meta), "inplace": self.inplace}
        y = normalize(
            inert_input(x, meta, **rows),
            self.weight,
            self.bias,
            normalization=self.normalization,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return inert_output(y, meta, **rows, is_zero=self.bias is None)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, tp_size={self.tp_size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row; pads are inert.

    Over R ranks, T = meta.num_rows, H = normalized_shape:
        x, y     [T / R, *, H]   this rank's rows; [T, *, H] without ``sequence_parallel``
        weight   [H], the same on each rank
    Communicates nothing. Under ``sequence_parallel`` the gradient of weight is that of this rank's
    rows: ``reduce_replicated_gradients`` sums it. Under autocast it computes in the wider dtype
    of x and weight, and returns that.

    Args:
        normalized_shape: H.
        eps: added to the mean square; at least 1e-24, so that zero rows stay finite.
        tp_group, tp_size: the ranks, which say where this rank's rows lie.
        sequence_parallel: x is divided by rows. True by default; Transformer Engine's is None.
        params_dtype, device: of the parameters; None: torch's defaults.
        zero_centered_gamma: weight is stored minus one.
        inplace: False: never write to pad rows of the caller's tensors, copy.

    Raises: ValueError: normalized_shape below 1, eps below 1e-24 or not finite; at the call: no
        group, x or meta of other rows, features, dtype or device.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    normalization = "RMSNorm"


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row; pads are inert.

    Shapes, arguments, gradients and errors as :class:`RMSNorm`, and a bias [H] beside the weight;
    pad rows of y are zero, not bias.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """

    normalization = "LayerNorm"


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    normalization: str,
    eps: float,
    zero_centered_gamma: bool,
) -> Tensor:
    """x [..., H] normalised over H. Pad rows are the caller's business."""
    if is_autocast_on(x):
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    gamma = weight + 1 if zero_centered_gamma else weight
    if normalization == "RMSNorm":
        return F.rms_norm(x, gamma.shape, gamma, eps)
    return F.layer_norm(x, gamma.shape, gamma, bias, eps)


def norm_specs(
    features: int, normalization: str, zero_centered_gamma: bool
) -> dict[str, ParameterSpec]:
    """The parameters of a norm over ``features``: a weight and, for LayerNorm, a bias."""
    init_weight = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
    specs = {"weight": ParameterSpec((features,), None, init_weight)}
    if normalization == "LayerNorm":
        specs["bias"] = ParameterSpec((features,), None, nn.init.zeros_)
    return specs


def check_normalization(normalization: str, eps: float) -> None:
    """Raises ValueError unless pad rows, which are zero, come out of such a norm and back."""
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f'normalization must be "LayerNorm" or "RMSNorm", got {normalization!r}')
    if not isinstance(eps, (int, float)) or not _LEAST_EPS <= eps < math.inf:
        raise ValueError(
            f"eps must be finite and at least {_LEAST_EPS}, got {eps!r}: the zeros of pad rows are "
            "multiplied by 1 / sqrt(eps), and must stay zeros"
        )
