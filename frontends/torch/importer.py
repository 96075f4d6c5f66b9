"""Conversion of an exported PyTorch program to a graph.

1. Leaves follow from the signature of the program: inputs, weights, states and constants.
2. A call with only constant operands is constant-folded by PyTorch.
3. The op table converts every other call.
4. Outputs and mutated buffers become outputs and state updates of the graph.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ...graph import DType, Graph, GraphError, Value, input, state, weight
from ...graph.validation import validate_arguments
from ..errors import ModelError
from ..tensors.call_signature import MAX_CONSTANT_BYTES, ProgramArgument, ProgramResult, resolve_dtype_name
from ..tensors.tensor import Tensor, cast, constant_tensor, limit_shape_to_max_rank, merge_equal_nodes
from .array_views import view_tensor_as_array
from .op_table import CAST_OPERAND_OPS, OP_TABLE
from .program import Program

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node

IGNORED_KEYWORDS = (
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "dtype",
    "non_blocking",
    "requires_grad",
    "generator",
)
"""Keywords of calls that do not change numbers, or that the dtype of the result already states."""
ASSERTION_OPS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
"""Names of ATen ops that compute nothing: assertions and constraints."""
MEMORY_READING_OPS = ("as_strided", "as_strided_copy", "as_strided_scatter")
"""Names of ATen ops that read the strides and the storage of an operand, which a result of hocket does not keep."""

MAX_INSERTION_SORT_ENTRIES = 16
"""Entries up to which PyTorch's CPU sort keeps the order of equal entries (insertion sort in libstdc++ `std::sort`)."""


class UnsupportedOpsError(ModelError):
    """A program calls ops that the op table lacks.

    `op_counts_text` lists the ops, each with its number of calls.
    """

    def __init__(self, listed: str) -> None:
        self.op_counts_text = listed
        super().__init__(
            f"the program calls ops that hocket has no row for: {listed}; add rows to frontends/torch/op_table.py, "
            "or let torch.compile run them in PyTorch"
        )


@validate_arguments(ModelError)
def from_torch(exported: ExportedProgram) -> Program:
    """Convert a program of ``torch.export.export(model.eval(), args)`` to a graph with its weights, ready to call.

    Parameters and buffers become weights under their own names, without a copy. Buffers that the program changes become
    states. Shapes are static, as in the example arguments.

    Raises:
        ModelError: The op table lacks ops of the program; the message lists all of them with their call counts. Or the
            program has a type or a shape that hocket does not support.
    """
    kind = type(exported)
    if (kind.__name__, kind.__module__.split(".")[0]) != ("ExportedProgram", "torch"):
        raise ModelError(f"from_torch takes a program that torch.export.export made, not {kind.__name__}")
    return import_program(decompose_unsupported_ops(exported))


def import_program(
    exported: ExportedProgram, bound_arguments: Collection[int] = (), can_convert: Callable[[Node], bool] | None = None
) -> Program:
    """Convert a decomposed program to a graph with its weights.

    Args:
        exported: A program of ops in the op table.
        bound_arguments: Indices of the arguments that become weights, which each call binds. An argument that the
            program changes becomes an input instead.
        can_convert: Returns whether hocket can compute a node. The default accepts each op in the op table.

    Raises:
        ModelError: The program has another node, or a type or a shape that hocket does not support.
    """
    import torch

    with torch.no_grad():
        return _ProgramImporter(exported, frozenset(bound_arguments), can_convert or has_op_converter).build_program()


def decompose_unsupported_ops(exported: ExportedProgram) -> ExportedProgram:
    """Decompose the ops that the op table lacks into ops that it has, as far as PyTorch can."""
    import torch
    from torch.export import default_decompositions

    decompositions = default_decompositions()
    for op in [op for op in decompositions if _get_aten_op_name(op) in OP_TABLE]:
        decompositions.pop(op)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch warns about its own names
        return exported.run_decompositions(decompositions)


def has_op_converter(node: Node) -> bool:
    """Return whether hocket can convert a node. Either the op table has its op, or the node computes nothing."""
    return node.op == "call_function" and (
        _get_aten_op_name(node.target) in OP_TABLE or _is_assertion_or_tuple_item(node)
    )


def has_pytorch_order_of_equal_entries(node: Node) -> bool:
    """Return whether hocket sorts equal entries in the same order as PyTorch, or no result depends on their order.

    Without ``stable=True``, PyTorch may change the order of equal entries if it sorts 17 or more. The result is True
    for a node that does not sort.
    """
    name = _get_aten_op_name(node.target)
    if name not in ("sort", "argsort") or node.kwargs.get("stable"):
        return True
    places = node.meta["val"] if name == "argsort" else node.meta["val"][1]
    axis = int(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1))  # type: ignore[arg-type]
    if not places.dim() or places.shape[axis] <= MAX_INSERTION_SORT_ENTRIES:
        return True
    return name == "sort" and not any(user.args[1] == 1 and user.users for user in node.users)


def _get_aten_op_name(target: object) -> str:
    """Return the name of an ATen op without its overload, or an empty string for any other target."""
    packet = getattr(target, "_overloadpacket", None)
    return str(getattr(packet, "__name__", "")) if packet is not None else ""


@dataclass
class _ProgramImporter:
    """Converts one exported program to a graph; it holds the tensors, constants and weights that exist so far."""

    exported_program: ExportedProgram
    bound_arguments: frozenset[int]
    can_convert: Callable[[Node], bool]
    weights: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    """The values that hocket computes, by FX node: a `Tensor`, or a tuple of tensors."""
    constants: dict[Node, Any] = field(default_factory=dict)
    """The values that PyTorch has computed during the import, by FX node."""
    states: dict[str, Value] = field(default_factory=dict)
    arguments: list[ProgramArgument] = field(default_factory=list)
    weight_by_memory: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Weights by address, shape and strides, so that tensors with shared memory become one weight."""

    def build_program(self) -> Program:
        signature = self.exported_program.graph_signature
        changes = ("BUFFER_MUTATION", "USER_INPUT_MUTATION")
        changed = {spec.target for spec in signature.output_specs if spec.kind.name in changes}
        if wrong := [
            s.kind.name for s in signature.output_specs if s.kind.name in ("LOSS_OUTPUT", "GRADIENT_TO_PARAMETER")
        ]:
            raise ModelError(
                f"this is a training graph (it has a {wrong[0]}); export model.eval() for its outputs alone"
            )
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        for node in self.exported_program.graph.nodes:
            if node.op == "placeholder":
                self._add_leaf(node, specs[node.name], changed)
        self._require_convertible_calls()
        for node in self.exported_program.graph.nodes:
            if node.op == "get_attr":
                self.constants[node] = _get_attribute_at_path(self.exported_program.graph_module, str(node.target))
            elif node.op == "call_function":
                self._convert_or_fold_call(node)
        return self._finish_program()

    # ------------------------------------------------------------------------------------------------------ leaves

    def _add_leaf(self, node: Node, spec: Any, changed: set[str | None]) -> None:
        """Add the leaf of a placeholder node: an argument, a parameter, a buffer or a constant.

        A changed buffer becomes a state. Another buffer is a constant; a large one becomes a weight at its first use.
        """
        kind = spec.kind.name
        if kind == "USER_INPUT":
            self._add_input_weight_or_constant(
                node, spec, is_weight=len(self.arguments) in self.bound_arguments and node.name not in changed
            )
        elif kind == "PARAMETER" or (kind == "BUFFER" and spec.target in changed):
            data = self.exported_program.state_dict[spec.target]
            if kind == "BUFFER":
                dtype, truth = _to_dtype_and_boolean_flag(data.dtype, node)
                value = state(spec.target, limit_shape_to_max_rank(data.shape), dtype)
                self.states[spec.target], self.weights[spec.target] = value, view_tensor_as_array(data, spec.target)
                self.values[node] = Tensor(value, tuple(data.shape), truth)
            else:
                self.values[node] = self._add_or_share_weight(spec.target, data)
        elif kind in ("BUFFER", "CONSTANT_TENSOR"):
            data = self.exported_program.state_dict.get(spec.target)
            self.constants[node] = self.exported_program.constants[spec.target] if data is None else data
        else:
            raise ModelError(f"the program takes {node.name}, a {kind.lower()}; hocket takes tensors and numbers")

    def _add_input_weight_or_constant(self, node: Node, spec: Any, *, is_weight: bool) -> None:
        """Add an argument of the program: as a graph input, as a weight, or as a constant if it is no tensor."""
        value = node.meta.get("val")
        if not _is_tensor(value):
            self.arguments.append(ProgramArgument("", getattr(spec.arg, "value", value)))
            self.constants[node] = value
            return
        assert value is not None
        dtype, truth = _to_dtype_and_boolean_flag(value.dtype, node)
        shape = _require_static_shape(node, value)
        self.arguments.append(ProgramArgument(node.name, None, shape, str(value.dtype).removeprefix("torch.")))
        leaf = weight if is_weight else input
        self.values[node] = Tensor(leaf(node.name, limit_shape_to_max_rank(shape), dtype), shape, truth)

    def _add_or_share_weight(self, name: str, data: torch.Tensor) -> Tensor:
        """Add a tensor as a weight, and return it; tensors with equal address, shape and strides share one weight."""
        key = (data.data_ptr(), *data.shape, -1, *data.stride())
        if data.numel() and key in self.weight_by_memory:
            return self.weight_by_memory[key]
        dtype, truth = _to_dtype_and_boolean_flag(data.dtype, name)
        array = view_tensor_as_array(data, name)
        shape = tuple(data.shape)
        self.weights[name] = array.reshape(limit_shape_to_max_rank(shape))
        self.weight_by_memory[key] = Tensor(weight(name, limit_shape_to_max_rank(shape), dtype), shape, truth)
        return self.weight_by_memory[key]

    # ------------------------------------------------------------------------------------------------------- nodes

    def _require_convertible_calls(self) -> None:
        """Raise an error before the conversion if hocket cannot convert a call that is not constant-folded.

        `UnsupportedOpsError` lists all such ops; PyTorch can run them instead. `ModelError` reports a symbolic shape,
        or such an op that reads the memory of a result, which hocket lays out differently.
        """
        known, missing = set(self.constants), Counter[str]()
        for node in self.exported_program.graph.nodes:
            if _is_tensor(node.meta.get("val")):
                _require_static_shape(node, node.meta["val"])
            if node.op == "get_attr":
                known.add(node)
            elif node.op == "call_function":
                if _has_no_randomness_or_subgraph(node) and all(n in known for n in node.all_input_nodes):
                    known.add(node)
                elif not self.can_convert(node):
                    is_result = node.all_input_nodes and node.all_input_nodes[0].op == "call_function"
                    if _get_aten_op_name(node.target) in MEMORY_READING_OPS and is_result:
                        raise ModelError(
                            f"%{node.name} = {_format_call_target(node.target)}: it reads the memory of a result, and "
                            "hocket lays results out in its own way"
                        )
                    missing[_format_call_target(node.target)] += 1
        if missing:
            listed = ", ".join(f"{name} ({count})" for name, count in missing.most_common())
            raise UnsupportedOpsError(listed)

    def _convert_or_fold_call(self, node: Node) -> None:
        """Convert one call to graph nodes, or constant-fold it if all of its operands are constants."""
        name = _get_aten_op_name(node.target)
        if name in ASSERTION_OPS:
            return
        if _has_no_randomness_or_subgraph(node) and all(n in self.constants for n in node.all_input_nodes):
            compute: Any = node.target
            self.constants[node] = compute(
                *_replace_nodes(node.args, self.constants), **_replace_nodes(node.kwargs, self.constants)
            )
            return
        if _format_call_target(node.target) == "getitem":
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            return
        tensors = {n: self._get_tensor_or_add_constant_weight(n) for n in node.all_input_nodes}
        kwargs = {k: v for k, v in node.kwargs.items() if k not in IGNORED_KEYWORDS}
        row: Callable[..., Any] = OP_TABLE[name]
        try:
            if name in CAST_OPERAND_OPS:
                operand = node.all_input_nodes[0]
                tensors[operand] = cast(tensors[operand], *_to_dtype_and_boolean_flag(node.meta["val"].dtype, node))
            out = row(*_replace_nodes(node.args, tensors), **_replace_nodes(kwargs, tensors))
            self.values[node] = _cast_to_pytorch_dtypes(out, node.meta["val"], node)
        except (ModelError, GraphError) as why:
            raise ModelError(f"%{node.name} = {_format_call_target(node.target)}: {why}") from None
        except Exception as why:  # a row may not know an argument of the call
            problem = f"{type(why).__name__}: {why}".partition("\n")[0]
            raise ModelError(
                f"%{node.name} = {_format_call_target(node.target)}: the row fails with {problem:.200}"
            ) from why

    def _get_tensor_or_add_constant_weight(self, node: Node) -> Any:
        """Return the tensor of an FX node; a large or bfloat16 constant is added as a weight at its first use."""
        if node in self.values:
            if self.values[node] is None:
                raise ModelError(f"%{node.name} is a result that hocket does not compute; remove it from the program")
            return self.values[node]
        if not _is_tensor(known := self.constants[node]):
            return known
        if known.numel() * known.element_size() <= MAX_CONSTANT_BYTES and str(known.dtype) != "torch.bfloat16":
            _to_dtype_and_boolean_flag(known.dtype, node, known=True)
            self.values[node] = constant_tensor(known.detach().numpy())
        else:
            name = next(
                (s.target for s in self.exported_program.graph_signature.input_specs if s.arg.name == node.name), None
            )
            data = known.float() if known.dtype in (_find_torch_dtype("float64"), _find_torch_dtype("bool")) else known
            leaf = self._add_or_share_weight(name or f"folded.{node.name}", data.contiguous())
            is_index = name is None and leaf.is_integer and bool((known >= 0).all())  # a buffer may change later
            self.values[node] = replace(leaf, is_bool=str(known.dtype) == "torch.bool", is_non_negative=is_index)
        return self.values[node]

    # ------------------------------------------------------------------------------------------------------ results

    def _finish_program(self) -> Program:
        """Build the graph from the outputs and the changed buffers, and return it as a program."""
        signature = self.exported_program.graph_signature
        (output,) = (n for n in self.exported_program.graph.nodes if n.op == "output")
        outputs: dict[str, Value] = {}
        updates: dict[Value, Value] = {}
        results: list[ProgramResult] = []
        written: dict[int, str] = {}
        named = [s.arg.name for s in signature.input_specs if s.kind.name == "USER_INPUT"]
        for spec, node in zip(signature.output_specs, output.args[0], strict=True):
            kind = spec.kind.name
            if kind == "BUFFER_MUTATION":
                assert spec.target is not None
                old = self.states[spec.target]
                new = self._get_tensor_or_add_constant_weight(node)
                updates[old] = cast(new, old.dtype).value if not new.is_bool else new.value
            elif kind in ("USER_OUTPUT", "USER_INPUT_MUTATION"):
                if not hasattr(node, "op") or (node in self.constants and not _is_tensor(self.constants[node])):
                    results.append(ProgramResult("", self.constants.get(node, node) if hasattr(node, "op") else node))
                    continue
                name = node.name
                out = self._get_tensor_or_add_constant_weight(node)
                outputs[name] = out.value
                result = ProgramResult(name, None, out.shape, str(node.meta["val"].dtype).removeprefix("torch."))
                if kind == "USER_OUTPUT":
                    results.append(result)
                else:
                    written[named.index(str(spec.target))] = name
                    results.append(result)
            else:
                raise ModelError(f"the program gives a {kind.lower()}; hocket gives tensors")
        if not outputs and not updates:
            raise ModelError("the program computes nothing that depends on its arguments")
        graph = merge_equal_nodes(Graph(outputs, updates))
        needed = {v.node.name for v in graph.weights} | {v.node.name for v in graph.states}
        count = sum(s.kind.name == "USER_INPUT_MUTATION" for s in signature.output_specs)
        return Program(
            graph,
            {name: data for name, data in self.weights.items() if name in needed},
            tuple(self.arguments),
            tuple(results[count:]),
            tuple(written.items()),
            self.exported_program.call_spec.in_spec,
            self.exported_program.call_spec.out_spec,
            tuple((i, a.name) for i, a in enumerate(self.arguments) if a.name in needed),
        )


def _get_attribute_at_path(module: Any, path: str) -> Any:
    """Return the attribute of a module at a dotted path, such as ``layers.0.weight``."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _is_tensor(x: object) -> bool:
    return hasattr(x, "element_size") and hasattr(x, "dtype")


def _find_torch_dtype(name: str) -> object:
    import torch

    return getattr(torch, name)


def _to_dtype_and_boolean_flag(dtype: object, where: object, *, known: bool = False) -> tuple[DType, bool]:
    """Return the hocket dtype of a PyTorch dtype, and whether it is boolean.

    `where` names the value in errors. For a constant (`known`), float64 becomes f32.
    """
    name = str(dtype).removeprefix("torch.")
    if known and name == "float64":
        return DType.F32, False
    return resolve_dtype_name(name, where)


def _require_static_shape(where: object, value: Any) -> tuple[int, ...]:
    """Return the shape of a value; raise `ModelError` if the shape is symbolic."""
    if not all(isinstance(n, int) for n in value.shape):
        why = "depends on numbers; mask entries instead of choosing them" if "u" in str(value.shape) else "varies"
        raise ModelError(f"%{where} has a shape that {why}; export the program without dynamic_shapes")
    return tuple(value.shape)


def _format_call_target(target: object) -> str:
    """Return the name of a call target for messages."""
    text = str(target)
    return getattr(target, "__name__", text) if text.startswith("<") else text


def _is_assertion_or_tuple_item(node: Node) -> bool:
    """Return whether a node computes nothing: it is an assertion, or it takes one result of a tuple."""
    return _format_call_target(node.target) == "getitem" or _get_aten_op_name(node.target) in ASSERTION_OPS


def _has_no_randomness_or_subgraph(node: Node) -> bool:
    """Return whether PyTorch may evaluate a node at import: it draws no random numbers and calls no subgraph."""
    import torch

    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


def _replace_nodes(tree: Any, value_by_node: Mapping[Node, Any]) -> Any:
    """Return the arguments of a call with each FX node replaced by its value in `value_by_node`."""
    if isinstance(tree, list | tuple):
        return [_replace_nodes(x, value_by_node) for x in tree]
    if isinstance(tree, dict):
        return {k: _replace_nodes(v, value_by_node) for k, v in tree.items()}
    return value_by_node[tree] if type(tree).__name__ == "Node" else tree


def _cast_to_pytorch_dtypes(out: Any, meta: Any, node: Node) -> Any:
    """Cast the results of a converter to the dtypes in `meta`, the results that PyTorch predicts for the node.

    Raises:
        ModelError: A result has another shape than in PyTorch, so the converter is wrong.
    """
    if isinstance(meta, list | tuple):
        return tuple(_cast_to_pytorch_dtypes(o, m, node) for o, m in zip(out, meta, strict=False))
    if out is None or meta is None:
        return None
    dtype, truth = _to_dtype_and_boolean_flag(meta.dtype, node)
    fitted: Tensor = cast(out, dtype, truth)
    shape = _require_static_shape(node, meta)
    if fitted.shape != shape:
        raise ModelError(f"gives {list(fitted.shape)} where PyTorch has {list(shape)}; the row is wrong")
    return fitted
