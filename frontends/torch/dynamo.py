"""The backend of ``torch.compile``: export each graph that Dynamo captures, plan it for devices, and run it there.

PyTorch finds `compile_graph` by the entry point ``hocket`` of the group ``torch_dynamo_backends``. A captured graph
takes one of three ways:

1. If the op table has all its ops, hocket runs the whole graph.
2. If the op table lacks some ops, PyTorch runs these, and hocket the segments between. A warning lists the ops.
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
from .importer import (
    UnsupportedOpsError,
    decompose_unsupported_ops,
    has_op_converter,
    has_pytorch_order_of_equal_entries,
    import_program,
)
from .parameter_binding import ExecutorsByParameters, is_module_tensor_bound_once
from .program_split import split_at_unsupported_ops
from .result_aliases import ResultAliases, find_result_aliases, may_share_memory

CallArguments = tuple[Any, ...]
"""Arguments of one call of a captured graph."""
MAX_SCALAR_PROGRAMS = 16
"""Largest number of programs of one graph for different Python numbers; PyTorch runs further calls."""
STORAGE_VIEW_TARGETS = ("as_strided", "as_strided_", torch.as_strided)
"""Calls with results that begin at an entry of the storage, wherever their operand begins."""
_export_lock = threading.RLock()
"""Lock around the export and planning of a graph, because `torch.export` is not thread-safe."""


def compile_graph(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured to a function that runs it on devices; the backend of `torch.compile`.

    Use it as ``torch.compile(model, backend="hocket", options={"devices": "cpu:0,cpu:1"})``.

    Args:
        module: The graph that Dynamo captured.
        example_inputs: Example arguments, unused: a call decides the shapes.
        options: ``devices`` (default ``cpu:0``), and ``split_mode``, ``tensor_split`` and ``place`` of `hocket.plan`.
        mode: The mode of `torch.compile`, unused.

    Raises:
        ModelError: There is an unknown option, or a call of the function needs gradients.
    """
    settings = {"devices": "cpu:0", **(options or {})}
    if unknown := sorted(settings.keys() - {"devices", "split_mode", "tensor_split", "place"}):
        raise ModelError(f"there is no option {unknown[0]!r}; devices, split_mode, tensor_split and place are some")
    return LazilyCompiledGraph(module, settings)


class LazilyCompiledGraph:
    """A graph that Dynamo captured, as a function of tensors that is compiled at its first call.

    The first call with each combination of shapes and numbers exports and plans the graph.

    Dynamo passes some Python numbers as tensors; each value of such a number needs a program of its own. Dynamo also
    calls one graph for several modules of a class, so the parameters are arguments of each call. Results share memory
    with arguments and with each other as in eager PyTorch, unless `is_segment` says that only PyTorch reads them.
    """

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any], *, is_segment: bool = False) -> None:
        self.module, self.options = module, dict(options)
        self.may_share_results = not is_segment and may_share_memory(module)
        self.reads_storage_offsets = any(node.target in STORAGE_VIEW_TARGETS for node in module.graph.nodes)
        self.scalar_arguments = _find_tensor_arguments_read_as_scalars(module)
        self.runners: dict[CallArguments, Callable[[CallArguments], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            raise ModelError("hocket computes no gradients; call the compiled model within torch.no_grad()")
        numbers = {i: args[i].item() for i in self.scalar_arguments if isinstance(args[i], torch.Tensor)}
        shapes = (
            (a.shape, a.dtype, is_module_tensor_bound_once(a)) if isinstance(a, torch.Tensor) else a for a in args
        )
        key = (*shapes, *map(repr, numbers.values()))
        if self.may_share_results:
            key += tuple(a.stride() for a in args if isinstance(a, torch.Tensor))
        if self.may_share_results and self.reads_storage_offsets:
            key += tuple(a.storage_offset() for a in args if isinstance(a, torch.Tensor))
        if key not in self.runners:
            with _export_lock:
                if key not in self.runners:
                    self.runners[key] = self._build_graph_runner(args, numbers)
        return self.runners[key](_replace_scalar_arguments_by_none(args, numbers) if numbers else args)

    def _build_graph_runner(self, args: CallArguments, numbers: Mapping[int, Any]) -> Callable[[CallArguments], Any]:
        """Build the function that runs calls with the shapes of `args`.

        Hocket runs the graph as far as it supports the ops. The function runs the whole graph by hocket, or segments of
        it, or it leaves the graph to PyTorch. `numbers` has the values of the scalar arguments by index.
        """
        module = _replace_scalar_arguments_by_constants(self.module, numbers) if numbers else self.module
        args = _replace_scalar_arguments_by_none(args, numbers)
        try:
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
                raise ModelError("it is called with tensors on the meta device, which have no numbers")
            if numbers and len(self.runners) >= MAX_SCALAR_PROGRAMS:
                raise ModelError(
                    f"it is called with more than {MAX_SCALAR_PROGRAMS} numbers; give a number that varies as a tensor"
                )
            aliases = find_result_aliases(module, args) if self.may_share_results else None
            return _with_results_sharing_memory(WholeGraph(module, args, self.options), aliases)
        except UnsupportedOpsError as why:
            warnings.warn(f"PyTorch runs itself what hocket has no row for: {why.op_counts_text}", stacklevel=2)
            return _with_results_sharing_memory(SegmentedGraph(module, args, self.options), aliases)
        except ModelError as why:
            warnings.warn(f"PyTorch runs this graph itself: {why}", stacklevel=2)
            return lambda call_args: module(*call_args)


def _with_results_sharing_memory(
    runner: Callable[[CallArguments], Any], aliases: ResultAliases | None
) -> Callable[[CallArguments], Any]:
    """Return a runner; its results share memory with its arguments and each other as `aliases` says."""
    return (lambda args: aliases.share_memory(args, runner(args))) if aliases else runner


def _replace_scalar_arguments_by_none(args: CallArguments, numbers: Mapping[int, Any]) -> CallArguments:
    """Return the arguments of a call with None in place of Python numbers, which are constants in the graph."""
    return tuple(None if i in numbers else arg for i, arg in enumerate(args))


def _list_placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _find_tensor_arguments_read_as_scalars(module: torch.fx.GraphModule) -> list[int]:
    """Return the indices of the arguments that Dynamo passes as tensors, but the graph reads only as Python numbers."""
    nodes = enumerate(_list_placeholders(module.graph))
    return [i for i, node in nodes if node.users and all(map(_is_item_call, node.users))]


def _is_item_call(node: torch.fx.Node) -> bool:
    """Whether a node calls ``item()``, which reads its operand as a Python number."""
    return node.op == "call_method" and node.target == "item"


def _replace_scalar_arguments_by_constants(
    module: torch.fx.GraphModule, numbers: Mapping[int, Any]
) -> torch.fx.GraphModule:
    """Return a copy of a graph with constants in place of its scalar arguments; `numbers` has the values by index."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    placeholders = _list_placeholders(graph)
    read = {item: number for i, number in numbers.items() for item in placeholders[i].users}

    def replace_read(node: torch.fx.Node) -> Any:
        return read.get(node, node)

    for node in graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_arg((node.args, node.kwargs), replace_read)
    for item in read:
        graph.erase_node(item)
    return torch.fx.GraphModule(module, graph)


class WholeGraph:
    """Runs a captured graph as a whole in hocket; it is planned once, for all sets of parameters in its calls."""

    def __init__(self, module: torch.fx.GraphModule, args: CallArguments, options: Mapping[str, Any]) -> None:
        settings = dict(options)
        devices = settings.pop("devices")
        self.module = module
        operands = [i for i, arg in enumerate(args) if is_module_tensor_bound_once(arg)]
        self.program = import_program(_export_and_decompose_graph(module, args), operands, _is_supported_exactly)
        self.bindings = ExecutorsByParameters(self.program, plan(self.program.graph, devices, **settings), module)

    def __call__(self, args: CallArguments) -> Any:
        if self.program.mutated_arguments and _has_shared_memory(
            args, [number for number, _ in self.program.mutated_arguments]
        ):
            warnings.warn("PyTorch runs this graph itself: it changes an argument that shares memory", stacklevel=3)
            return self.module(*args)
        return tree_unflatten(
            self.bindings.bind_runner_and_refresh_copies(args).run_flat_arguments(args), self.program.out_spec
        )


def _has_shared_memory(args: CallArguments, written: Sequence[int]) -> bool:
    """Whether an argument that the graph writes, one of the indices `written`, shares memory with another argument."""
    places = Counter(arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor) and arg.numel())
    return any(places[args[number].untyped_storage().data_ptr()] > 1 for number in written)


class _GraphSegment(torch.nn.Module):
    """A segment of a split graph as a module, which hocket compiles at its first call."""

    def __init__(self, module: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.compiled_graph = LazilyCompiledGraph(module, options, is_segment=True)

    def forward(self, *args: Any) -> Any:
        return self.compiled_graph(*args)


class SegmentedGraph:
    """Runs a captured graph in segments, split at unsupported ops: PyTorch runs these ops, and hocket the rest."""

    def __init__(self, module: torch.fx.GraphModule, args: CallArguments, options: Mapping[str, Any]) -> None:
        self.segmented_module, ours = split_at_unsupported_ops(
            _export_and_decompose_graph(module, args), _is_supported_exactly
        )
        for name in ours:
            setattr(self.segmented_module, name, _GraphSegment(getattr(self.segmented_module, name), options))

    def __call__(self, args: CallArguments) -> Any:
        return self.segmented_module(*args)


def _is_supported_exactly(node: torch.fx.Node) -> bool:
    """Whether hocket computes a node exactly as PyTorch does, including the order of equal entries in a sort."""
    return has_op_converter(node) and has_pytorch_order_of_equal_entries(node)


def _export_and_decompose_graph(module: torch.fx.GraphModule, args: CallArguments) -> Any:
    """Export a captured graph, and decompose its ops into ops of the op table where PyTorch can.

    Raises:
        ModelError: PyTorch cannot export the graph.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Copies, because a view of another argument would be exported as a part of that argument
        apart = tuple(torch.empty_like(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        try:
            return decompose_unsupported_ops(torch.export.export(module.eval(), apart, strict=False))
        except HocketError:
            raise
        except Exception as why:  # export runs the model, which may raise anything
            first = str(why).strip().partition("\n")[0]
            raise ModelError(f"it cannot be exported: {first}") from None
