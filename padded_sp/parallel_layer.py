"""``ParallelLayer``: what every layer with parameters knows of its tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from padded_sp import boundaries, collectives
from padded_sp.meta import PaddedSeqMeta
from padded_sp.shared_group import SharesGroup

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

InitMethod = Callable[[Tensor], Any]

# Transformer Engine's default for weights.
normal_init: InitMethod = functools.partial(nn.init.normal_, mean=0.0, std=0.023)


class ParameterSpec(NamedTuple):
    """A parameter of the whole model, of which each rank holds a part or all."""

    shape: tuple[int, ...]  # of the whole parameter
    partition_dim: int | None  # divided over the ranks along it; None: the same on each rank
    init_method: InitMethod


class ParallelLayer(SharesGroup):
    """A layer whose parameters are divided over, or shared by, the R ranks of ``tp_group``.

    ``copy.deepcopy`` shares the group; pickle and ``torch.save`` leave it behind, and what is
    loaded takes one by :meth:`set_tensor_parallel_group`.

    Initialisation draws each parameter whole, from a seed that the layer takes from PyTorch's CPU
    generator, and keeps this rank's part: the same seed gives the same model at every R. While it
    draws, one whole parameter (R times this rank's part) is in memory.

    Args:
        tp_group: the ranks that share the layer. None: one rank, or a group that
            :meth:`set_tensor_parallel_group` brings later.
        tp_size: R, for a layer built before its group; with ``tp_group`` it follows that.
        sequence_parallel: activations between layers are divided by rows. The gradients of
            replicated parameters are then partial, and marked ``param.sequence_parallel``.
        params_dtype: None: torch's default dtype.
        device: None: torch's default device; "meta" postpones to ``to_empty`` and
            ``reset_parameters``.
        inplace: allow to overwrite pad rows (never others) of inputs and incoming gradients.

    Raises: ValueError: ``tp_size`` or a size of a parameter is no positive integer, or ``tp_size``
        is not the size of ``tp_group``.
    """

    tp_size: int

    def __init__(
        self,
        *,
        tp_group: ProcessGroup | None,
        tp_size: int,
        sequence_parallel: bool,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        inplace: bool = True,
    ) -> None:
        super().__init__()
        tp_size = boundaries.check_size(tp_size, "tp_size")
        self.tp_group, self.tp_size, self.tp_rank, self._group_name = None, tp_size, 0, ""
        if tp_group is not None and tp_size == 1:
            self.tp_size = collectives.group_size(tp_group)
        self.sequence_parallel = sequence_parallel
        self.inplace = inplace
        self._factory = {"dtype": params_dtype, "device": device}
        self._specs: dict[str, ParameterSpec] = {}
        self._drawn_as: dict[str, tuple[torch.dtype, torch.device]] = {}
        self._seed = 0
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)

    # ---- the group ------------------------------------------------------------------------------

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Gives the layer its group; every rank of the group calls it.

        Parameters that still are what was drawn, for no particular rank, become this rank's part;
        those that were loaded or written since are kept.

        Raises: ValueError: the group has not ``tp_size`` ranks.
        """
        size = collectives.group_size(tp_group)
        if size != self.tp_size:
            raise ValueError(
                f"the group has {size} ranks, {type(self).__name__} was built with "
                f"tp_size={self.tp_size}: build it with tp_size={size} or with tp_group= itself"
            )
        self.tp_group = tp_group
        self._group_name = collectives.group_name(tp_group)
        drawn_for, self.tp_rank = self.tp_rank, collectives.group_rank(tp_group)
        if drawn_for != self.tp_rank:
            self._exchange_parts(drawn_for)

    def require_group(self) -> None:
        """Raises ValueError if the layer still waits for its group."""
        if self.tp_size > 1 and self.tp_group is None:
            raise ValueError(
                f"{type(self).__name__} was built with tp_size={self.tp_size} and has no group: "
                "call set_tensor_parallel_group(group) before the first forward"
            )

    # ---- parameters -----------------------------------------------------------------------------

    def _add_parameter(self, name: str, spec: ParameterSpec | None) -> None:
        """Registers this rank's part, still to be drawn; None where the layer has none."""
        if spec is None:
            self._check_free(name)
            self.register_parameter(name, None)
            return
        shape = self._declare(name, spec)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._factory)))

    def _declare(self, name: str, spec: ParameterSpec) -> list[int]:
        """Notes a parameter that is still to be registered; returns the shape of this rank's part.

        Raises: ValueError: a size below 1, or one that the ranks do not divide; a name in use.
        """
        self._check_free(name)
        shape = [boundaries.check_size(n, f"{name}: each size of {spec.shape}") for n in spec.shape]
        if spec.partition_dim is not None:
            shape[spec.partition_dim] = self._share(shape[spec.partition_dim], name)
        self._specs[name] = spec
        return shape

    def _check_free(self, name: str) -> None:
        if hasattr(self, name) or name in self._specs:
            raise ValueError(f"{type(self).__name__} has a {name} already; name the part otherwise")

    def _share(self, features: int, name: str) -> int:
        if features % self.tp_size:
            raise ValueError(
                f"{name}: {features} features do not divide over {self.tp_size} ranks; choose a "
                f"multiple of {self.tp_size}"
            )
        return features // self.tp_size

    def reset_parameters(self) -> None:
        """Draws every parameter anew. Takes one number from PyTorch's CPU generator."""
        self._take_seed()
        self._draw(set(self._specs))

    def _take_seed(self) -> None:
        self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    @torch.no_grad()
    def _draw(self, names: set[str]) -> None:
        for name in names:
            parameter = self._parameters[name]
            if parameter is None or parameter.is_meta:
                continue
            self._drawn_as[name] = parameter.dtype, parameter.device
            is_whole = self._specs[name].partition_dim is None or self.tp_size == 1
            if is_whole and type(parameter) is nn.Parameter:  # not one that is quantised
                self._initialise(name, parameter)
            else:
                parameter.copy_(self._drawn_parts(name)[self.tp_rank])

    @torch.no_grad()
    def _exchange_parts(self, drawn_for: int) -> None:
        """Puts this rank's part where that of rank ``drawn_for`` still is as it was drawn.

        Told by value: version counters miss ``.data``, ``load_state_dict(assign=True)`` replaces.
        """
        for name in self._drawn_as:
            parameter = self._parameters[name]
            if self._specs[name].partition_dim is None or parameter is None or parameter.is_meta:
                continue
            parts = self._drawn_parts(name)
            if torch.equal(parameter, parts[drawn_for].to(parameter)):
                parameter.copy_(parts[self.tp_rank])

    def _drawn_parts(self, name: str) -> tuple[Tensor, ...]:
        """Every rank's part of a divided parameter, as drawn (again) by its seed.

        In the dtype and on the device of the first time: others draw other numbers.
        """
        spec, (dtype, device) = self._specs[name], self._drawn_as[name]
        whole = torch.empty(spec.shape, dtype=dtype, device=device)
        self._initialise(name, whole)
        if spec.partition_dim is None:
            return (whole,) * self.tp_size
        return whole.chunk(self.tp_size, spec.partition_dim)

    def _initialise(self, name: str, whole: Tensor) -> None:
        with _seeded(self._seed + list(self._specs).index(name), whole.device):
            self._specs[name].init_method(whole)

    def _settle_parameters(self) -> None:
        """Sets the attributes by which Megatron and Transformer Engine tell parameters apart.

        Called whenever parameters may be new objects: after ``to_empty()``, ``deepcopy``, pickle.
        """
        for name, spec in self._specs.items():
            parameter: Any = self._parameters[name]
            parameter.tensor_model_parallel = spec.partition_dim is not None
            if spec.partition_dim is not None:
                parameter.partition_dim, parameter.partition_stride = spec.partition_dim, 1
            elif self.sequence_parallel:
                parameter.sequence_parallel = True

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ParallelLayer:
        super()._apply(fn, recurse)
        self._settle_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._settle_parameters()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_group_name": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle_parameters()

    def partition_dim(self, name: str) -> int | None:
        """The dim along which parameter ``name`` is divided; None: each rank has all of it."""
        return self._specs[name].partition_dim

    def partial_parameters(self) -> set[str]:
        """The parameters whose gradient is a term of a sum over the ranks."""
        return {n for n, spec in self._specs.items()
                if self.sequence_parallel and spec.partition_dim is None}  # fmt: skip

    # ---- checkpoints ----------------------------------------------------------------------------

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """``state_dict()`` as DTensors; see :func:`padded_sp.checkpoint.sharded_state_dict`."""
        from padded_sp.checkpoint import sharded_state_dict

        return sharded_state_dict(self, prefix)

    # ---- calls ----------------------------------------------------------------------------------

    def _first_row(self, meta: PaddedSeqMeta) -> int:
        """The first of the rows that this rank holds where rows are divided."""
        return self.tp_rank * (meta.num_rows // self.tp_size) if self.sequence_parallel else 0

    def _check_input(
        self, x: Tensor, meta: PaddedSeqMeta, *, features: int, shards: int, parameter: Tensor
    ) -> None:
        """Raises what every rank can see is wrong, before any communication."""
        self.require_group()
        meta.check_rows(x, "x", shards)
        self._check_rows_divide(meta)
        if x.dim() < 2 or x.shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__} takes x [rows, *, {features}] on each of its "
                f"{self.tp_size} ranks, got {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"{type(self).__name__} takes x of a floating dtype, got {x.dtype}")
        self._check_device(x, "x", meta, parameter)
        # Autocast brings operands to one dtype, but leaves float64 alone.
        converts = is_autocast_on(x) and torch.float64 not in (x.dtype, parameter.dtype)
        if x.dtype != parameter.dtype and not converts:
            raise ValueError(
                f"x is {x.dtype}, the parameters are {parameter.dtype}: convert x, build the layer "
                f"with params_dtype={x.dtype}, or call it under torch.autocast"
            )

    def _check_rows_divide(self, meta: PaddedSeqMeta) -> None:
        boundaries.check_shards(meta.num_rows, self.tp_size if self.sequence_parallel else 1)

    def _check_device(self, x: Tensor, name: str, meta: PaddedSeqMeta, parameter: Tensor) -> None:
        if not x.device == meta.device == parameter.device:
            raise ValueError(
                f"{name} is on {x.device}, its meta on {meta.device}, the parameters of "
                f"{type(self).__name__} on {parameter.device}: move them to one device, the meta "
                "with meta.to(device)"
            )


def is_autocast_on(x: Tensor) -> bool:
    """Whether autocast is, on the device of x; there is none on "meta"."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype where it is on, as ``F.linear`` converts its operands: not float64."""
    if x.dtype == torch.float64 or not is_autocast_on(x):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the CPU's generator and ``device``'s, and puts both back as they were."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
