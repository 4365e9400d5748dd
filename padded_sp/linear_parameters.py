"""``LinearParameters``: the parameters of a linear, and the module that may hold them.

Backend "torch" computes with the layer's own parameters; "te" has a module of Transformer Engine
that holds the same parameters, by the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from padded_sp import backends
from padded_sp.boundaries import check_size
from padded_sp.collectives import group_rank
from padded_sp.fused_parameters import (
    ParametersSplit,
    lay_side_by_side,
    split_features,
)
from padded_sp.parallel_layer import (
    InitMethod,
    ParallelLayer,
    ParameterSpec,
    normal_init,
)

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

_EXTRA_STATE = "_extra_state"  # Transformer Engine's key for scales and amax histories


class LinearParameters(ParallelLayer):
    """The parameters of a linear, whole or in named parts: how they are built, drawn and saved."""

    parallel_mode: str  # "column" or "row"

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
        backend: str = "torch",
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        verify: bool = True,
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
        self.backend, self.verify = backend, verify
        backends.load(backends.LINEAR, backend)
        self._proved: set[Any] = set()
        self._weight_names: list[str] = []
        self._bias_names: list[str] = []
        self._drawn_by_te: set[str] = set()
        self._draws_under_tracker = False
        specs: dict[str, ParameterSpec | None] = {}
        by_columns = self.parallel_mode == "column"
        for part, features in split_features(parameters_split, out_features).items():
            self._weight_names.append(f"{part}weight")
            specs[self._weight_names[-1]] = ParameterSpec(
                (features, in_features), 0 if by_columns else 1, init_method or normal_init
            )
            if bias:
                self._bias_names.append(f"{part}bias")
                specs[self._bias_names[-1]] = ParameterSpec(
                    (features,), 0 if by_columns else None, nn.init.zeros_
                )
        norm = self._norm_specs()
        if name := next((n for n in norm if n in specs), None):
            raise ValueError(f"{type(self).__name__} has a {name} already; name the part otherwise")
        specs |= norm
        self.te: Any = None
        of_te = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
        }
        self._take_seed()
        if backend == "te":
            self._hold_te(specs, init_method or normal_init, parameters_split, of_te)
        else:
            _refuse_te_arguments(of_te)
            for name, spec in specs.items():
                self._add_parameter(name, spec)
        self._settle_parameters()
        self._draw(set(self._specs) - self._drawn_by_te)

    @property
    def _te_linear(self) -> Any:
        """The module of backend "te": looked up, since a layer is pickled and modules are not."""
        return backends.load(backends.LINEAR, "te")

    def _norm_specs(self) -> dict[str, ParameterSpec | None]:
        """The parameters of a norm in front of the linear; by default there is none."""
        return {}

    def _norm_arguments(self) -> dict[str, Any] | None:
        """What te.LayerNormLinear takes beyond te.Linear's arguments."""
        return None

    # ---- parameters -----------------------------------------------------------------------------

    def _hold_te(
        self,
        specs: dict[str, ParameterSpec | None],
        init_method: InitMethod,
        parameters_split: ParametersSplit | None,
        options: dict[str, Any],
    ) -> None:
        """Builds the module of Transformer Engine and shares its parameters."""
        shapes = {n: tuple(self._declare(n, spec)) for n, spec in specs.items() if spec is not None}
        init = self._te_linear.leave_undrawn  # this layer draws, as with backend "torch"
        if options["get_rng_state_tracker"] is not None:
            # Megatron's way: each rank draws its own part under the tracker.
            init, self._drawn_by_te = init_method, set(self._weight_names)
            self._draws_under_tracker = True
        elif self._te_linear.builds_fp8_weights():
            # Quantised at once, so drawn before: Transformer Engine may keep the unquantised value.
            init, self._drawn_by_te = self._draw_weight, set(self._weight_names)
        device = torch.device(self._factory["device"] or "cuda")
        if device.type == "meta" and parameters_split is not None:
            raise ValueError(
                "Transformer Engine cannot split parameters on the meta device: build the layer on "
                "its device, or without parameters_split"
            )
        dtype = self._factory["dtype"] or torch.get_default_dtype()
        self.te = self._te_linear.make(
            layer_norm=self._norm_arguments(),
            in_features=self.in_features,
            out_features=self.out_features,
            bias=self.use_bias,
            return_bias=self.return_bias and self.use_bias,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
            tp_size=self.tp_size,
            parallel_mode=self.parallel_mode,
            params_dtype=dtype,
            parameters_split=parameters_split,
            device="meta" if device.type == "meta" else device,
            init_method=init,
            **options,
        )
        # One dict: whoever replaces a parameter (a load, FSDP, te itself) does so for both.
        self.__dict__["_parameters"] = self.te._parameters
        held = {n: tuple(p.shape) for n, p in self.te._parameters.items() if p is not None}
        assert held == shapes, f"Transformer Engine made {held}, not {shapes}"
        for name, spec in specs.items():
            if spec is None:
                setattr(self, name, None)

    @torch.no_grad()
    def _draw_weight(self, weight: Tensor) -> None:
        """Writes this rank's part; the only weight, since FP8 ones are never split."""
        (name,) = self._weight_names
        self._drawn_as[name] = weight.dtype, weight.device
        weight.copy_(self._drawn_parts(name)[self.tp_rank])

    def reset_parameters(self) -> None:
        """Draws every parameter anew. Takes one number from PyTorch's CPU generator.

        With ``get_rng_state_tracker`` Transformer Engine draws this rank's part under it instead.
        """
        self._take_seed()
        names = set(self._specs)
        on_meta = any(p.is_meta for p in self.parameters())
        if self.te is not None and (self._draws_under_tracker or on_meta):
            self.te.reset_parameters()
            names -= self._drawn_by_te
            self._settle_parameters()
        self._draw(names)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        te = getattr(self, "te", None)  # not there yet while the base class is being built
        if te is not None and self._drawn_by_te and group_rank(tp_group) != self.tp_rank:
            raise ValueError(
                "the weights were drawn for rank 0 and cannot be exchanged for another rank's: "
                "FP8 weights, and a get_rng_state_tracker, need tp_group= at construction"
            )
        super().set_tensor_parallel_group(tp_group)
        if te is not None:
            te.set_tensor_parallel_group(tp_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        if self.te is not None:
            twin.te.set_tensor_parallel_group(self.tp_group)
        return twin

    def _settle_parameters(self) -> None:
        super()._settle_parameters()
        for names in (self._weight_names, self._bias_names):
            lay_side_by_side([self.get_parameter(name) for name in names])

    # ---- checkpoints ----------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.te is not None:
            destination[prefix + _EXTRA_STATE] = self.te.get_extra_state()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Without it a checkpoint of backend "torch" loads too, and backend "torch" needs none.
        extra_state = state_dict.pop(prefix + _EXTRA_STATE, None)
        if self.te is not None:  # first: it holds the scales to quantise FP8 weights by
            self.te.set_extra_state(extra_state)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, tp_size={self.tp_size}, "
            f"sequence_parallel={self.sequence_parallel}, backend={self.backend!r}"
        )


def _refuse_te_arguments(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{name} is an argument of backend 'te': pass backend='te' with it")
