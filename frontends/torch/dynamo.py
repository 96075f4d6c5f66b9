"""The backend of ``torch.compile``: export each graph that Dynamo captures, plan it for devices, and run it there.

PyTorch finds `compile_graph` by the entry point ``hocket`` of the group ``torch_dynamo_backends``. A captured graph
takes one of three ways:

1. If all its ops have a row in the op table, hocket runs the whole graph.
2. If some ops have none, PyTorch runs these, and hocket runs the segments between them. A warning lists the ops.
3. If hocket cannot import the graph for another reason, PyTorch runs it. A warning states the reason.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from ...graph import HocketError
from ...scheduler import plan
from ..errors import ModelError
from .exported import MissingRowsError, decomposed, has_order_of_pytorch, is_in_table, program_of
from .operands import Bindings, is_operand
from .parts import parts_of

Arguments = tuple[Any, ...]
"""The arguments of one call of a captured graph."""
MOST_NUMBERS = 16
"""The largest number of programs of one graph for changing Python numbers; PyTorch runs further calls."""
_loading = threading.RLock()
"""A lock that is held while a graph is exported and planned, because `torch.export` is not thread-safe."""


def compiled(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Return a function that runs a captured graph, as `torch.compile` asks of a backend.

    Use it as ``torch.compile(model, backend="hocket", options={"devices": "cpu:0,cpu:1"})``.

    Args:
        module: The graph that Dynamo captured.
        example_inputs: Example arguments, unused: a call decides the shapes.
        options: ``devices`` (default ``cpu:0``), and ``split_mode``, ``tensor_split`` and ``place`` of `hocket.plan`.
        mode: The mode of `torch.compile`, unused.

    Raises:
        ModelError: There is an unknown option, or a call of the function needs gradients.
    """
    given = {"devices": "cpu:0", **(options or {})}
    if unknown := sorted(given.keys() - {"devices", "split_mode", "tensor_split", "place"}):
        raise ModelError(f"there is no option {unknown[0]!r}; devices, split_mode, tensor_split and place are some")
    return Compiled(module, given)


class Compiled:
    """A captured graph, which is exported and planned for each combination of argument shapes and Python numbers.

    Dynamo hands over some Python numbers as tensors; each of their values needs a program of its own. Dynamo also calls
    one graph for several modules of a class, so parameters are arguments of a call like any others.
    """

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self.module, self.options = module, dict(options)
        self.numbers = _numbers(module)
        self.loaded: dict[Arguments, Callable[[Arguments], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            raise ModelError("hocket computes no gradients; call the compiled model within torch.no_grad()")
        numbers = {i: args[i].item() for i in self.numbers if isinstance(args[i], torch.Tensor)}
        shapes = ((a.shape, a.dtype, is_operand(a)) if isinstance(a, torch.Tensor) else a for a in args)
        key = (*shapes, *map(repr, numbers.values()))
        if key not in self.loaded:
            with _loading:
                if key not in self.loaded:
                    self.loaded[key] = self._load(args, numbers)
        return self.loaded[key](_without(args, numbers) if numbers else args)

    def _load(self, args: Arguments, numbers: Mapping[int, Any]) -> Callable[[Arguments], Any]:
        """Build a runner for arguments of these shapes: hocket, hocket in segments, or PyTorch."""
        module = _with_numbers(self.module, numbers) if numbers else self.module
        args = _without(args, numbers)
        try:
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
                raise ModelError("it is called with tensors on the meta device, which have no numbers")
            if numbers and len(self.loaded) >= MOST_NUMBERS:
                raise ModelError(
                    f"it is called with more than {MOST_NUMBERS} numbers; give a number that varies as a tensor"
                )
            return Loaded(module, args, self.options)
        except MissingRowsError as why:
            warnings.warn(f"PyTorch runs itself what hocket has no row for: {why.listed}", stacklevel=2)
            return Broken(module, args, self.options)
        except ModelError as why:
            warnings.warn(f"PyTorch runs this graph itself: {why}", stacklevel=2)
            return lambda given: module(*given)


def _without(args: Arguments, numbers: Mapping[int, Any]) -> Arguments:
    """Return the arguments with None in place of the numbers, which the graph contains as constants."""
    return tuple(None if i in numbers else arg for i, arg in enumerate(args))


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _numbers(module: torch.fx.GraphModule) -> list[int]:
    """Return the indices of the arguments that the graph reads only as Python numbers, for example a float."""
    nodes = enumerate(_placeholders(module.graph))
    return [i for i, node in nodes if node.users and all(map(_is_item, node.users))]


def _is_item(node: torch.fx.Node) -> bool:
    """Return whether a node reads its operand as a Python number."""
    return node.op == "call_method" and node.target == "item"


def _with_numbers(module: torch.fx.GraphModule, numbers: Mapping[int, Any]) -> torch.fx.GraphModule:
    """Return a copy of the graph in which constants replace the numbers that it reads from its arguments."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    placeholders = _placeholders(graph)
    read = {item: number for i, number in numbers.items() for item in placeholders[i].users}

    def known(node: torch.fx.Node) -> Any:
        return read.get(node, node)

    for node in graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known)
    for item in read:
        graph.erase_node(item)
    return torch.fx.GraphModule(module, graph)


class Loaded:
    """A captured graph on its devices: planned once, and bound to each set of parameters with which it is called."""

    def __init__(self, module: torch.fx.GraphModule, args: Arguments, options: Mapping[str, Any]) -> None:
        given = dict(options)
        devices = given.pop("devices")
        self.module = module
        operands = [i for i, arg in enumerate(args) if is_operand(arg)]
        self.program = program_of(_exported(module, args), operands, _has_row)
        self.bindings = Bindings(self.program, plan(self.program.graph, devices, **given), module)

    def __call__(self, args: Arguments) -> Any:
        if self.program.written and _overlap(args, [number for number, _ in self.program.written]):
            warnings.warn("PyTorch runs this graph itself: it changes an argument that shares memory", stacklevel=3)
            return self.module(*args)
        return tree_unflatten(self.bindings.runner(args).flat(args), self.program.out_spec)


def _overlap(args: Arguments, written: Sequence[int]) -> bool:
    """Return whether one of the arguments `written` (indices) shares its memory with another argument."""
    places = Counter(arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor) and arg.numel())
    return any(places[args[number].untyped_storage().data_ptr()] > 1 for number in written)


class _Part(torch.nn.Module):
    """A segment of a captured graph, which hocket compiles at its first call."""

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.call = Compiled(module, options)

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


class Broken:
    """A captured graph that is split at ops without a row: PyTorch runs these ops, and hocket the segments between."""

    def __init__(self, module: torch.fx.GraphModule, args: Arguments, options: Mapping[str, Any]) -> None:
        self.whole, ours = parts_of(_exported(module, args), _has_row)
        for name in ours:
            setattr(self.whole, name, _Part(getattr(self.whole, name), options))

    def __call__(self, args: Arguments) -> Any:
        return self.whole(*args)


def _has_row(node: torch.fx.Node) -> bool:
    """Return whether hocket computes a call as PyTorch does, including the order of equal entries in a sort."""
    return is_in_table(node) and has_order_of_pytorch(node)


def _exported(module: torch.fx.GraphModule, args: Arguments) -> Any:
    """Export a captured graph, and decompose its ops into ops of the op table where PyTorch can.

    Raises:
        ModelError: PyTorch cannot export the graph.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Copies, because a view of another argument would be exported as a part of that argument
        apart = tuple(torch.empty_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        try:
            return decomposed(torch.export.export(module.eval(), apart, strict=False))
        except HocketError:
            raise
        except Exception as why:  # export runs the model, which may raise anything
            first = str(why).strip().partition("\n")[0]
            raise ModelError(f"it cannot be exported: {first}") from None
