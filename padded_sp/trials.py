"""One function, run again and again on equal inputs, for the comparisons of ``testing.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from padded_sp.collectives import group_rank, group_size
from padded_sp.context import seq_meta
from padded_sp.meta import PaddedSeqMeta

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Params = nn.Module | Mapping[str, Tensor] | Iterable[Tensor]


class Results(NamedTuple):
    """What one run left behind, each by a name to print."""

    outputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    parameter_gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Trial:
    """A function, its inputs and their meta; ``assert_padding_inert`` explains the arguments.

    Its parameters are those it is given and those that a backward pass reaches: the latter are
    named by their number and shape as runs find them.

    Raises: ValueError: no input has the rows of ``meta``; at a run, parameters are out of reach.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Inputs,
        meta: PaddedSeqMeta,
        params: Params | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self.fn, self.inputs, self.meta, self.tp_group = fn, inputs, meta, tp_group
        module = _module_of(fn)
        self._owns_parameters = module is not None or params is not None
        self.parameters, self.buffers = _state(module, params)
        self._takes_meta = "meta" in _arguments(fn)
        if all(self.first_row(x) is None for x in _named(inputs).values()):
            raise ValueError(
                f"no input has the {meta.num_rows} rows of its meta, nor a shard of them: got "
                f"{[tuple(x.shape) for x in _named(inputs).values()]}; pass what the meta packs, "
                "and tp_group= for shards"
            )

    def run(self, pad: float = 0.0) -> Results:
        """Forward and backward with ``pad`` in every pad row, of inputs and output gradients.

        Every run starts from the same RNG state and the same buffers. It leaves those, and every
        parameter's ``.grad``, as they were.
        """
        kept_buffers = [(b, b.detach().clone()) for b in self.buffers.values()]
        devices = {x.device for x in _named(self.inputs).values() if x.is_cuda}
        try:
            with torch.random.fork_rng(list(devices)):
                return self._run(pad)
        finally:
            with torch.no_grad():
                for buffer, value in kept_buffers:
                    buffer.copy_(value)

    def _run(self, pad: float) -> Results:
        leaves = {name: self.padded(x, pad) for name, x in _named(self.inputs).items()}
        for leaf in leaves.values():
            leaf.requires_grad_(_has_gradient(leaf))
        # As inside a model, where pad rows may be overwritten: no leaves.
        activations = {name: leaf.clone() for name, leaf in leaves.items()}
        with torch.enable_grad(), seq_meta(self.meta):
            outputs = _outputs(self._call(activations))
        if not outputs:
            raise ValueError("the function returned no tensor to compare: return what it computes")
        incoming = self.output_gradients(outputs, pad)
        differentiable = [name for name, y in outputs.items() if y.requires_grad]
        self._find_parameters([outputs[name] for name in differentiable], leaves.values())
        with _gradients_set_aside(self.parameters.values()):
            if differentiable:
                torch.autograd.backward(
                    [outputs[name] for name in differentiable],
                    [incoming[name] for name in differentiable],
                )
            return Results(
                {name: y.detach() for name, y in outputs.items()},
                _gradients("input", leaves),
                _gradients("parameter", self.parameters),
                {f"buffer {name}": b.detach().clone() for name, b in self.buffers.items()},
            )

    def _find_parameters(self, outputs: list[Tensor], inputs: Iterable[Tensor]) -> None:
        """Adds the leaves that nobody named: a lambda, say, does not tell whose they are."""
        nodes = _graph(outputs)
        known = {id(x) for x in (*inputs, *self.parameters.values())}
        for node in nodes:
            if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in known:
                name = f"{len(self.parameters)} of shape {tuple(node.variable.shape)}"
                self.parameters[name] = node.variable
        recomputes = any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
        if recomputes and not self._owns_parameters:
            raise ValueError(
                "a reentrant checkpoint hides its parameters until backward: pass params=, the "
                "module or the tensors, or checkpoint with use_reentrant=False"
            )

    def require_gradients(self, results: Results) -> None:
        """Raises ValueError where there should be a backward pass and none was seen."""
        expected = self.parameters or any(map(_has_gradient, _named(self.inputs).values()))
        if expected and not results.input_gradients and not results.parameter_gradients:
            raise ValueError(
                f"no gradient came of {', '.join(results.outputs)}: nothing is known of backward. "
                "Return tensors before they are detached, rounded or used in a backward pass of "
                "the function's own; backward=False compares values alone"
            )

    def _call(self, inputs: dict[str, Tensor]) -> Any:
        keywords = {"meta": self.meta} if self._takes_meta else {}
        if isinstance(self.inputs, Mapping):
            return self.fn(**inputs, **keywords)
        return self.fn(*inputs.values(), **keywords)

    def output_gradients(self, outputs: dict[str, Tensor], pad: float) -> dict[str, Tensor]:
        """The gradients that come in: 1 for a loss, else random, the same in every run."""
        gradients = {}
        for seed, (name, y) in enumerate(outputs.items()):
            gradients[name] = torch.ones_like(y)
            if y.dim() and _has_gradient(y):
                generator = torch.Generator(y.device).manual_seed(seed)
                gradients[name] = torch.randn(
                    y.shape, generator=generator, dtype=y.dtype, device=y.device
                )
            gradients[name] = self.padded(gradients[name], pad)
        return gradients

    def padded(self, x: Tensor, pad: float) -> Tensor:
        """A clone of ``x`` with ``pad`` in its pad rows, if it has rows.

        Integers get 0 or the largest real value, which any embedding can look up.
        """
        x = x.detach().clone()
        is_pad = self.is_pad(x)
        if is_pad is None or not x.numel():
            return x
        if x.dtype != torch.bool and not _has_gradient(x):
            pad = 0 if pad == 0 or is_pad.all() else int(x[~is_pad.flatten()].max())
        return x.masked_fill_(is_pad, complex(pad, pad) if x.is_complex() else pad)

    def first_row(self, x: Tensor) -> int | None:
        """The row of the pack at which ``x`` starts; None if ``x`` is no tensor of rows."""
        rows, all_rows = x.shape[0] if x.dim() else -1, self.meta.num_rows
        if rows == all_rows:
            return 0
        if rows * group_size(self.tp_group) == all_rows:
            return rows * group_rank(self.tp_group)
        return None

    def is_pad(self, x: Tensor) -> Tensor | None:
        """bool, broadcastable to ``x``: its pad rows; None if ``x`` is no tensor of rows."""
        first = self.first_row(x)
        if first is None:
            return None
        mask = self.meta.padding_mask[first : first + x.shape[0]].to(x.device)
        return mask.view(-1, *[1] * (x.dim() - 1))


class SequenceTrial(Trial):
    """The same for one sequence: the real rows ``rows`` of ``whole``, with a meta of their own."""

    def __init__(self, whole: Trial, rows: slice, gradients: dict[str, Tensor]) -> None:
        def cut(x: Tensor) -> Tensor:
            return x if whole.first_row(x) is None else x[rows]

        inputs = whole.inputs
        if isinstance(inputs, Tensor):
            inputs = cut(inputs)
        elif isinstance(inputs, Mapping):
            inputs = {name: cut(x) for name, x in inputs.items()}
        else:
            inputs = [cut(x) for x in inputs]
        meta = PaddedSeqMeta.from_seq_lens([rows.stop - rows.start], device=whole.meta.device)
        super().__init__(whole.fn, inputs, meta, whole.parameters)
        self.parameters, self.buffers = whole.parameters, whole.buffers
        self._incoming = {name: gradient[rows] for name, gradient in gradients.items()}

    def output_gradients(self, outputs: dict[str, Tensor], pad: float) -> dict[str, Tensor]:
        """This sequence's rows of the gradients that the whole pack gets."""
        return {name: self._incoming[name].clone() for name in outputs}


def _named(inputs: Inputs | Iterable[Tensor]) -> dict[str, Tensor]:
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return {str(name): x for name, x in pairs}


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that ``fn`` is, wraps, or is a method of."""
    for function in (fn, inspect.unwrap(fn)):
        owner = getattr(function, "__self__", function)
        if isinstance(owner, nn.Module):
            return owner
    return None


def _state(*owners: Params | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters among what is given, and the buffers of its modules."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for owner in owners:
        if isinstance(owner, nn.Module):
            parameters |= owner.named_parameters()
            buffers |= owner.named_buffers()
        elif owner is not None:
            parameters |= _named(owner)
    return {name: p for name, p in parameters.items() if p.requires_grad}, buffers


def _graph(outputs: Iterable[Tensor]) -> dict[Any, None]:
    """Every autograd node behind the outputs, in an order that depends on the graph alone."""
    # Keys are kept, as references: a node's Python object lives no longer than they do.
    found: dict[Any, None] = {}
    nodes = [torch.autograd.graph.get_gradient_edge(y).node for y in outputs]
    while nodes:
        node = nodes.pop()
        if node not in found:
            found[node] = None
            nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return found


@contextmanager
def _gradients_set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, every ``.grad`` starts as None; afterwards it is what it was."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def _arguments(fn: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except ValueError:  # a builtin without a signature, such as torch.exp
        return ()


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _outputs(returned: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors and numbers in what a function returned. Raises ValueError for other objects."""
    if isinstance(returned, Tensor):
        return {name: returned}
    if isinstance(returned, (int, float)):
        dtype = torch.float64 if isinstance(returned, float) else None
        return {name: torch.tensor(returned, dtype=dtype)}
    if returned is None or isinstance(returned, str):
        return {}
    if isinstance(returned, Mapping):
        parts = returned.items()
    elif isinstance(returned, (tuple, list)):
        parts = enumerate(returned)
    else:
        raise ValueError(
            f"{name} is a {type(returned).__name__}, whose tensors would go unseen: return tensors "
            "or numbers, or tuples, lists and dicts of them"
        )
    found: dict[str, Tensor] = {}
    for key, part in parts:
        found |= _outputs(part, f"{name}[{key!r}]")
    return found


def _gradients(kind: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"gradient of {kind} {name}": leaf.grad
        for name, leaf in leaves.items()
        if leaf.grad is not None
    }
