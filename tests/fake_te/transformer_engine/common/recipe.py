"""Recipes: what they are called, what they hold, and the predicates that tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple


class _Maxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The 8 bits of a number, forward and backward."""

    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)


class Recipe:
    """Base of all recipes."""

    backward_override = None

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


def _ignoring_others(recipe: type) -> type:
    """The constructor takes any arguments by name, as those of pydantic's dataclasses do."""
    constructor, known = recipe.__init__, {field.name for field in fields(recipe)}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **{n: x for n, x in kwargs.items() if n in known})

    recipe.__init__ = __init__
    return recipe


@_ignoring_others
@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        assert dims.count(2) <= 1, "2D by 2D block gemm not supported."
        for wants_fp8_attention in (self.fp8_dpa, self.fp8_mha):
            assert not wants_fp8_attention, "FP8 attention is not supported for Float8BlockScaling."


@dataclass
class MXFP8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class CustomRecipe(Recipe):
    qfactory: Callable[..., Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
