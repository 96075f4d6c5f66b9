"""The backend of ``torch.compile``: what Dynamo captures is exported, planned for devices and run there.

PyTorch finds it by the entry point ``hocket`` of the group ``torch_dynamo_backends``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...graph import HocketError
from ..errors import ModelError
from .exported import MissingRowsError, from_torch
from .parts import parts_of
from .program import Runner

Arguments = tuple[Any, ...]
MOST_NUMBERS = 16
"""Programs of one graph for numbers that differ from call to call; beyond these PyTorch runs it."""


def compiled(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What runs a captured graph: ``torch.compile(model, backend="hocket", options={"devices": "cpu:0,cpu:1"})``.

    `options` are ``devices`` and those of `hocket.plan`.  Ops without a row PyTorch runs, with a warning that lists
    them, and hocket what comes before and behind them; a graph that hocket cannot take otherwise is left to PyTorch.
    Raises `ModelError` where gradients are wanted.
    """
    given = {"devices": "cpu:0", **(options or {})}
    if unknown := sorted(given.keys() - {"devices", "split_mode", "tensor_split", "place"}):
        raise ModelError(f"there is no option {unknown[0]!r}; devices, split_mode, tensor_split and place are some")
    return Compiled(module, given)


class Compiled:
    """A captured graph; it is exported, planned and loaded for each combination of shapes that it is called with, and
    of numbers that Dynamo hands over as tensors."""

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self.module, self.options = module, dict(options)
        self.numbers = _numbers(module)
        self.loaded: dict[Arguments, Callable[[Arguments], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            raise ModelError("hocket computes no gradients; call the compiled model within torch.no_grad()")
        numbers = {i: args[i].item() for i in self.numbers if isinstance(args[i], torch.Tensor)}
        shapes = ((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        key = (*shapes, *map(repr, numbers.values()))
        if key not in self.loaded:
            self.loaded[key] = self._load(args, numbers)
        return self.loaded[key](args)

    def _load(self, args: Arguments, numbers: Mapping[int, Any]) -> Callable[[Arguments], Any]:
        """The graph on its devices, all of it or in parts, or as PyTorch runs it."""
        module = _with_numbers(self.module, numbers) if numbers else self.module
        args = tuple(None if i in numbers else a for i, a in enumerate(args))
        try:
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
            return lambda given: self.module(*given)


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _numbers(module: torch.fx.GraphModule) -> list[int]:
    """The arguments, by number, that are read as Python numbers alone: floats that have changed, say."""
    nodes = enumerate(_placeholders(module.graph))
    return [i for i, node in nodes if node.users and all(map(_is_item, node.users))]


def _is_item(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _with_numbers(module: torch.fx.GraphModule, numbers: Mapping[int, Any]) -> torch.fx.GraphModule:
    """The graph with these numbers in place of what is read from its arguments."""
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


class _Fixed(torch.nn.Module):
    """A captured graph whose parameters are its own instead of arguments; those that are None are left so."""

    def __init__(self, module: torch.fx.GraphModule, args: Arguments) -> None:
        super().__init__()
        self.module = module
        self.names: list[str | None] = []
        for node, value in zip(_placeholders(module.graph), args, strict=True):
            own = value is None or isinstance(value, torch.nn.Parameter)
            self.names.append(node.name if own else None)
            if own:
                self.register_parameter(node.name, value)

    @property
    def free(self) -> list[int]:
        """The arguments, by number, that are given at each call."""
        return [i for i, name in enumerate(self.names) if name is None]

    def forward(self, *rest: Any) -> Any:
        others = iter(rest)
        return self.module(*(next(others) if name is None else getattr(self, name) for name in self.names))


class Loaded:
    """A captured graph on its devices; parameters that were changed in place since are loaded anew."""

    def __init__(self, module: torch.fx.GraphModule, args: Arguments, options: Mapping[str, Any]) -> None:
        fixed = _Fixed(module, args).eval()
        self.free, self.parameters = fixed.free, list(fixed.parameters())
        given = dict(options)
        devices = given.pop("devices")
        self.runner = from_torch(_exported(fixed, args)).on(devices, **given)
        self.version = self._version()

    def _version(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self.parameters]

    def __call__(self, args: Arguments) -> Any:
        now = self._version()
        if now != self.version:
            self.runner = Runner(self.runner.program, self.runner.plan)
            self.version = now
        return self.runner(*(args[i] for i in self.free))


class _Part(torch.nn.Module):
    """A part of a captured graph, which hocket runs once it is called."""

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.call = Compiled(module, options)

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


class Broken:
    """A captured graph that breaks at ops without a row: PyTorch runs these, hocket what lies between."""

    def __init__(self, module: torch.fx.GraphModule, args: Arguments, options: Mapping[str, Any]) -> None:
        fixed = _Fixed(module, args).eval()
        self.free = fixed.free
        self.whole, ours = parts_of(_exported(fixed, args))
        for name in ours:
            setattr(self.whole, name, _Part(getattr(self.whole, name), options))

    def __call__(self, args: Arguments) -> Any:
        return self.whole(*(args[i] for i in self.free))


def _exported(fixed: _Fixed, args: Arguments) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(fixed, tuple(args[i] for i in fixed.free), strict=False)
        except HocketError:
            raise
        except Exception as why:  # export runs the model itself, which raises of any kind
            first = str(why).strip().partition("\n")[0]
            raise ModelError(f"it cannot be exported: {first}") from None
