"""Random rows with poisoned pads, and how far results are from exact ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from padded_sp.backends.isolation import current_device, isolated
from padded_sp.meta import PaddedSeqMeta
from padded_sp.verdict import Verdict

Span = tuple[int, int]  # the first row, and the row after the last

# Right kernels stay below 0.6 % in BF16, but for sums that a CPU accumulates in it (1.8 %), and by
# their bits below 0.1 % in FP16; wrong ones that were met are off by 30 % and more. FP32 may be
# computed in TF32, which has the mantissa of FP16.
LIMITS = {
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
    torch.float32: 5e-3,
    torch.float64: 1e-9,
}

# A sequence whose gradient vanishes, as that of a single row's query does, is measured by this
# share of what its rows would have on average.
_LEAST_SHARE = 0.1

Lengths = tuple[int, ...]  # one a sequence


class Compared(NamedTuple):
    """A result beside the exact one.

    Attributes:
        actual, exact: [rows, ...], of the same shape.
        meta: of the rows; None for a parameter's gradient, which has no pads.
        with_pads: where pads are looked for, if in more than ``actual``.
    """

    actual: Tensor
    exact: Tensor
    meta: PaddedSeqMeta | None = None
    with_pads: Tensor | None = None


class Rows:
    """Normal numbers, NaN in the pad rows of a meta. The caller's generators give none of them.

    Rows that meet in one product need seeds of their own: a query that equals a key sees it alone,
    and gradients become differences of nearly equal numbers.
    """

    def __init__(
        self,
        real: Lengths,
        padded: Lengths,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.meta = PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype

    def draw(self, *sizes: int) -> Tensor:
        """[T, *sizes]"""
        pads = self.meta.padding_mask.view(-1, *[1] * len(sizes))
        return self.normal(self.meta.num_rows, *sizes).masked_fill(pads, math.nan)

    def normal(self, *shape: int) -> Tensor:
        device, generator = self.meta.device, self._generator
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return x.to(self._dtype)


def results(out: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of leaves, by name."""
    grads = torch.autograd.grad(out, [*leaves.values()], grad)
    return {"output": out.detach()} | {f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}


def exact_leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float64."""
    return {name: x.detach().double().requires_grad_() for name, x in tensors.items()}


def limit_of(dtype: torch.dtype) -> float:
    """Of relative errors. Raises: ValueError: no dtype that layers compute in."""
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, LIMITS))}; got {dtype}")
    return LIMITS[dtype]


def device_of(device: torch.device | str | None) -> torch.device:
    """With its index: a generator of "cuda" would not be of "cuda:0". None: the GPU, or the CPU."""
    device = torch.device(current_device() if device is None else device)
    return current_device() if device.type == "cuda" and device.index is None else device


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judged(
    subject: str,
    checks: Sequence[Callable[[], dict[str, Compared]]],
    limits: dict[str, float],
    device: torch.device,
) -> Verdict:
    """Runs checks apart from whatever surrounds the call; the worst figure of each name counts.

    What they raise is a verdict too, but for a lack of memory, which says nothing of the numbers.
    """
    limits = limits | {"pads": 0.0}
    with _undisturbed(device):
        try:
            found = [_figures(check()) for check in checks]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            line = str(error).partition("\n")[0]
            return Verdict(subject, False, {}, limits, f"{type(error).__name__}: {line}")
    figures = {name: max(one[name] for one in found) for name in found[0]}
    passed = all(x <= limits[name] for name, x in figures.items())
    return Verdict(subject, passed, figures, limits)


def _undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """Nothing is imported here for Transformer Engine: where it is not, it has no state."""
    if "transformer_engine.pytorch" not in sys.modules:
        return isolated(device)
    return import_module("padded_sp.backends.te_state").undisturbed(device)


def _figures(compared: dict[str, Compared]) -> dict[str, float]:
    figures = {}
    pads = [0.0]
    for name, (actual, exact, meta, with_pads) in compared.items():
        spans = [(0, len(exact))] if meta is None else _real_spans(meta)
        figures[name] = _relative_error(actual.double(), exact, spans)
        if meta is not None and meta.has_padding:
            held = actual if with_pads is None else with_pads
            pads.append(_without_nan(held[meta.padding_mask].abs().amax().item()))
    return figures | {"pads": max(pads)}


def _relative_error(actual: Tensor, exact: Tensor, spans: list[Span]) -> float:
    """|actual - exact| / |exact|, the worst of the spans of rows."""
    squares = torch.stack(
        [
            torch.stack([x[start:stop].square().sum() for x in (actual - exact, exact)])
            for start, stop in spans
        ]
    ).tolist()
    mean = sum(square for _, square in squares) / sum(stop - start for start, stop in spans)
    worst = 0.0
    for (start, stop), (error, square) in zip(spans, squares, strict=True):
        square = max(square, _LEAST_SHARE**2 * mean * (stop - start))
        if error:
            worst = max(worst, _without_nan(math.sqrt(error / square)) if square else math.inf)
    return worst


def _real_spans(meta: PaddedSeqMeta) -> list[Span]:
    starts = accumulate(meta.padded_lens, initial=0)
    return [(start, start + n) for start, n in zip(starts, meta.seq_lens, strict=False)]


def _without_nan(x: float) -> float:
    return math.inf if math.isnan(x) else x
