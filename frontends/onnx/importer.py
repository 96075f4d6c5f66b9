"""Conversion of an ONNX model to a graph.

1. Varying shapes and fixed inputs get the values that the caller gives.
2. Functions are inlined, and shape inference finds the dtype of each value.
3. Inputs become graph inputs. Initialisers become weights if they hold floats or are large, otherwise constants.
4. Shape arithmetic with constant inputs is constant-folded by the reference evaluator of onnx.
5. The op table converts every other node.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph import DType, Graph, GraphError, Value, input, weight
from ...graph.errors import format_count
from ...graph.validation import validate_arguments
from ..errors import ModelError
from ..tensors.call_signature import MAX_CONSTANT_BYTES, ProgramArgument, ProgramResult, resolve_dtype_name
from ..tensors.tensor import Tensor, cast, constant_tensor, limit_shape_to_max_rank, merge_equal_nodes
from .files import MAX_NODES, read_model, read_tensor_array
from .op_table import CONSTANT_FOLDED_OPS, CONSTANT_INPUT_OPS, OLDER_OPSET_ROWS, OP_TABLE
from .program import Program, convert_bool_and_bf16_for_graph

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

MAX_FOLDED_ENTRIES = 1 << 12
"""Largest number of input entries of a node that is constant-folded."""


@validate_arguments(ModelError)
def from_onnx(
    source: str | os.PathLike[str] | bytes,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, npt.ArrayLike] | None = None,
) -> Program:
    """Convert the ONNX model in a file or in bytes to a graph with its weights, ready to call.

    Initialisers become weights under their own names.

    Args:
        source: The path of a file, or the bytes of a model.
        shapes: The shapes of inputs with a varying shape, by input name.
        fixed: The values of inputs on which shapes depend, by input name. These inputs become constants.

    Raises:
        ModelError: The op table lacks ops of the model; the message lists all of them with their node counts. Or the
            model is inconsistent, or has a type or a shape that hocket does not support.
    """
    model, folder = read_model(source)
    from onnx import helper
    from onnx.shape_inference import InferenceError, infer_shapes

    _fix_shapes_and_inputs(model, dict(shapes or {}), dict(fixed or {}))
    try:
        model = infer_shapes(_inline_functions(model), data_prop=True)
    except (InferenceError, ValueError, RuntimeError) as why:
        raise ModelError(f"the model does not fit together: {' '.join(str(why).split())[:300]}") from None
    kinds = {
        info.name: np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)).name
        for info in (*model.graph.value_info, *model.graph.output)
        if info.type.tensor_type.elem_type in helper.get_all_tensor_dtypes()
    }
    return _ModelImporter(model, folder, kinds).build_program()


def _fix_shapes_and_inputs(model: ModelProto, shapes: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Write the given shapes into the inputs of a model, and turn the inputs in `fixed` into initialisers."""
    from onnx import numpy_helper

    infos = {info.name: info for info in model.graph.input}
    if unknown := sorted((set(shapes) | set(fixed)) - set(infos)):
        raise ModelError(f"the model has no input {unknown[0]!r}; its inputs are {', '.join(infos) or 'none'}")
    for name, shape in shapes.items():
        if any(not isinstance(n, int) or n < 1 for n in shape):
            raise ModelError(f"shape {shape!r} of {name!r}; need whole numbers of at least 1")
        dims = infos[name].type.tensor_type.shape
        own = [d.dim_value for d in dims.dim]
        if own and (len(own) != len(shape) or any(n > 0 and n != m for n, m in zip(own, shape, strict=True))):
            raise ModelError(f"shape {list(shape)} of {name!r}; the model says {[n if n > 0 else '?' for n in own]}")
        dims.ClearField("dim")
        for n in shape:
            dims.dim.add().dim_value = n
    for name, array in fixed.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        model.graph.input.remove(infos[name])


def _inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of functions by the nodes of the functions.

    This applies to the functions of the model, and to ops that the op table lacks but ONNX defines by simpler ops.
    """
    from onnx.defs import SchemaError, get_schema
    from onnx.inliner import inline_local_functions, inline_selected_functions
    from onnx.shape_inference import infer_shapes

    model = inline_local_functions(model) if model.functions else model
    opsets = _get_opset_versions(model)
    for _ in range(8):
        ids = set()
        for node in model.graph.node:
            domain = _normalise_domain(node)
            if domain in opsets and (domain or node.op_type not in OP_TABLE):
                try:
                    schema: Any = get_schema(node.op_type, opsets[domain], domain)
                except SchemaError:
                    continue
                if schema.has_function or schema.has_context_dependent_function:
                    ids.add((node.domain, node.op_type))
                    own = {attribute.name for attribute in node.attribute}
                    for (
                        name,
                        schema_attribute,
                    ) in schema.attributes.items():  # a function needs the defaults as attributes
                        if name not in own and schema_attribute.default_value.type:
                            node.attribute.append(schema_attribute.default_value)
        before = len(model.graph.node)
        if not ids:
            break
        typed = infer_shapes(model)
        try:
            model = inline_selected_functions(typed, sorted(ids), inline_schema_functions=True)
        except RuntimeError:  # an assertion in onnx, which names no node
            raise ModelError(_describe_first_uninlinable_op(typed, ids)) from None
        if len(model.graph.node) > MAX_NODES:
            raise ModelError(f"the model has {len(model.graph.node)} nodes written out; hocket reads {MAX_NODES}")
        if len(model.graph.node) == before:
            break
    return model


def _describe_first_uninlinable_op(model: ModelProto, ids: set[tuple[str, str]]) -> str:
    """Return an error message for the first op in `ids` (domain, op type) that onnx cannot inline."""
    from onnx.inliner import inline_selected_functions

    for key in sorted(ids):
        try:
            inline_selected_functions(model, [key], inline_schema_functions=True)
        except RuntimeError:
            node = next(n for n in model.graph.node if (n.domain, n.op_type) == key)
            absent = f" without its input {list(node.input).index('')}" if "" in node.input else ""
            return (
                f"node {node.name or node.output[0]!r}: onnx does not write {key[1]} out in other ops{absent}; "
                "export the model with that op decomposed, or add a row to frontends/onnx/op_table.py"
            )
    return "onnx does not write its functions out together; export the model with functions decomposed"


def _normalise_domain(node: NodeProto) -> str:
    """Return the operator domain of a node; the domain of ONNX itself is the empty string."""
    return "" if node.domain == "ai.onnx" else node.domain


def _get_opset_versions(model: ModelProto) -> dict[str, int]:
    """Return the opset version of each operator domain that the model imports."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}


@dataclass
class _ModelImporter:
    """Converts one ONNX model to a graph; it holds the tensors, constants and weights that exist so far."""

    model: ModelProto
    folder: Path | None
    dtype_names: Mapping[str, str]
    """The NumPy dtype name of each value, by value name."""
    weights: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """The values that hocket computes, by name."""
    constants: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """The values that are known during the import, by name."""
    weight_names: set[str] = field(default_factory=set)
    """Names of constants that become weights even if they are small."""
    arguments: list[ProgramArgument] = field(default_factory=list)

    def build_program(self) -> Program:
        graph = self.model.graph
        if graph.sparse_initializer:
            raise ModelError(
                f"the model has {len(graph.sparse_initializer)} sparse initialisers; hocket has dense ones"
            )
        initialised = {tensor.name for tensor in graph.initializer}
        for info in graph.input:
            if info.name not in initialised:
                self._add_input(info)
        self._import_graph_or_taken_branch(graph)
        return self._finish_program()

    def _import_graph_or_taken_branch(self, graph: GraphProto) -> None:
        """Convert the nodes of the model graph, or of the taken branch of an ``If`` node."""
        for tensor in graph.initializer:
            data = self.constants[tensor.name] = read_tensor_array(tensor, self.folder)
            if data.size > 1 and data.dtype.kind not in "biu":
                self.weight_names.add(tensor.name)
        for node in graph.node:
            if node.op_type in CONSTANT_INPUT_OPS:
                self.weight_names -= set(node.input)
        self._require_convertible_ops(graph)
        for node in graph.node:
            self._evaluate_or_convert_node(node, _get_opset_versions(self.model).get("", 1))

    def _add_input(self, info: ValueInfoProto) -> None:
        """Add an input of the model as a graph input.

        Raises:
            ModelError: The type is not supported, or the shape varies.
        """
        from onnx import helper

        if not info.type.HasField("tensor_type"):
            raise ModelError(f"%{info.name} is a {info.type.WhichOneof('value')}; hocket takes tensors")
        kind = info.type.tensor_type
        if kind.elem_type not in helper.get_all_tensor_dtypes():
            raise ModelError(f"%{info.name} is of type number {kind.elem_type}, which ONNX does not have")
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
        if not kind.HasField("shape") or not all(isinstance(n, int) and n >= 0 for n in dims):
            listed = ", ".join(str(n) for n in dims)
            raise ModelError(
                f"%{info.name} has a shape that varies, [{listed}]; say it: shapes={{{info.name!r}: (...)}}"
            )
        name = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        dtype, truth = resolve_dtype_name(name, info.name)
        shape = tuple(int(n) for n in dims)
        self.arguments.append(ProgramArgument(info.name, None, shape, name))
        self.values[info.name] = Tensor(input(info.name, limit_shape_to_max_rank(shape), dtype), shape, truth)

    def _require_convertible_ops(self, graph: GraphProto) -> None:
        """Raise `ModelError` if the op table has no converter for some ops of a graph; the message lists them all."""
        missing = Counter(
            ".".join(filter(None, (_normalise_domain(node), node.op_type)))
            for node in graph.node
            if (_normalise_domain(node) or node.op_type not in (*OP_TABLE, "If"))
            and not self._can_evaluate_shape_node_at_import(node)
        )
        if missing:
            listed = ", ".join(f"{name} ({count})" for name, count in missing.most_common())
            raise ModelError(
                f"the model has ops that hocket has no row for: {listed}; add rows to frontends/onnx/op_table.py"
            )

    def _can_evaluate_shape_node_at_import(self, node: NodeProto) -> bool:
        """Return whether a node computes shapes from constants, so that the import can evaluate it."""
        return node.op_type in CONSTANT_FOLDED_OPS and all(not name or name in self.constants for name in node.input)

    def _evaluate_or_convert_node(self, node: NodeProto, opset: int) -> None:
        """Convert one node, or evaluate it if it is constant.

        Of an ``If``, the branch is imported. For other nodes, the converter is called.
        """
        where = f"%{next(filter(None, node.output), '?')} = {node.op_type}"
        for name in node.input:
            if name and name not in self.values and name not in self.constants:
                raise ModelError(f"{where}: reads %{name} before any node gives it, or in a cycle")
        if again := [n for n in node.output if n and (n in self.values or n in self.constants)]:
            raise ModelError(f"{where}: gives %{again[0]}, which is given already")
        if (
            self._can_evaluate_shape_node_at_import(node)
            and sum(self.constants[n].size for n in node.input if n) <= MAX_FOLDED_ENTRIES
        ):
            self._replace_node_by_evaluated_results(node, opset, where)
            return
        if node.op_type == "If":
            self._import_taken_branch(node, where)
            return
        since, older = OLDER_OPSET_ROWS.get(node.op_type, (0, None))
        row = older if older is not None and opset < since else OP_TABLE[node.op_type]
        try:
            attributes = _decode_attributes(node)
            if node.op_type == "Split":
                attributes["num_outputs"] = len(node.output)
            out = row(*(self._get_or_create_tensor(name) if name else None for name in node.input), **attributes)
            results = out if isinstance(out, tuple | list) else (out,)
            asked = [name for name in node.output if name]
            if len(node.output) > len(results):
                raise ModelError(
                    f"gives {format_count(len(node.output), 'result')}; hocket has the first {len(results)}"
                )
            for name, result in zip(node.output, results, strict=False):
                if name in asked:
                    self._store_result_in_onnx_dtype(name, result)
        except (ModelError, GraphError, TypeError, ValueError, IndexError, KeyError) as why:
            raise ModelError(f"{where}: {' '.join(str(why).split())}") from (
                None if isinstance(why, ModelError | GraphError) else why
            )

    def _import_taken_branch(self, node: NodeProto, where: str) -> None:
        """Convert the taken branch of an ``If`` node; its condition must be constant."""
        condition = self.constants.get(node.input[0]) if len(node.input) == 1 else None
        if condition is None or condition.size != 1:
            raise ModelError(
                f"{where}: which branch is taken depends on an input of the model; fix it: fixed={{name: array}}"
            )
        taken = next(
            (a.g for a in node.attribute if a.name == ("then_branch" if condition.all() else "else_branch")), None
        )
        if taken is None or len(taken.output) < len(node.output):
            raise ModelError(f"{where}: the branch that is taken is missing, or gives too few results")
        self._import_graph_or_taken_branch(taken)
        for name, branch_output in zip(node.output, taken.output, strict=False):
            if branch_output.name not in self.values and branch_output.name not in self.constants:
                raise ModelError(f"{where}: its branch gives %{branch_output.name}, which no node gives")
            if name and branch_output.name in self.values:
                self.values[name] = self.values[branch_output.name]
            if name and branch_output.name in self.constants:
                self.constants[name] = self.constants[branch_output.name]
            if branch_output.name in self.weight_names:
                self.weight_names.add(name)

    def _store_result_in_onnx_dtype(self, name: str, result: Tensor) -> None:
        """Store the result of a node under its value name, cast to the dtype of the ONNX value."""
        if name in self.dtype_names:
            result = cast(result, *resolve_dtype_name(self.dtype_names[name], name))
        if result.constant is not None:
            self.constants[name] = np.asarray(result.constant)
        self.values[name] = result

    def _replace_node_by_evaluated_results(self, node: NodeProto, opset: int, where: str) -> None:
        """Replace a node with constant inputs by its results, which the reference evaluator of onnx computes.

        Args:
            node: The node.
            opset: Opset version of its domain.
            where: Name of the node in errors.
        """
        from onnx import TensorProto, helper
        from onnx.reference import ReferenceEvaluator

        inputs, outputs = (
            [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in dict.fromkeys(names) if n]
            for names in (node.input, node.output)
        )
        alone = helper.make_model(
            helper.make_graph([node], "node", inputs, outputs), opset_imports=[helper.make_opsetid("", opset)]
        )
        feeds = {n: self.constants[n] for n in node.input if n}
        try:
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(alone).run(None, feeds)
        except Exception as why:  # the evaluator runs NumPy code, which may raise anything
            raise ModelError(f"{where}: {' '.join(str(why).split())[:300]}") from None
        for name, result in zip(filter(None, node.output), results, strict=True):
            self.constants[name] = np.asarray(result)

    def _get_or_create_tensor(self, name: str) -> Tensor:
        """Return the tensor of an ONNX value by its name; a constant gets its graph node at the first use.

        A large or bfloat16 constant, and an initialiser of floats, becomes a weight. Other constants become graph
        constants.
        """
        if name not in self.values:
            known = self.constants[name]
            wide = known.dtype == np.float64
            dtype, truth = (DType.F32, False) if wide else resolve_dtype_name(known.dtype.name, name)
            if name not in self.weight_names and known.nbytes <= MAX_CONSTANT_BYTES and dtype is not DType.BF16:
                self.values[name] = constant_tensor(known)
            else:
                self.weights[name] = convert_bool_and_bf16_for_graph(
                    known.astype(np.float32) if wide else known
                ).reshape(limit_shape_to_max_rank(known.shape))
                self.values[name] = Tensor(
                    weight(name, limit_shape_to_max_rank(known.shape), dtype), known.shape, truth
                )
        return self.values[name]

    def _finish_program(self) -> Program:
        """Build the graph from the model outputs, and return the program with its arguments and results."""
        outputs: dict[str, Value] = {}
        results: list[ProgramResult] = []
        for info in self.model.graph.output:
            if info.name not in self.values and info.name not in self.constants:
                raise ModelError(f"%{info.name} is an output that no node gives")
            out = self._get_or_create_tensor(info.name)
            kind = self.dtype_names.get(info.name) or ("bool" if out.is_bool else out.dtype.storage.name)
            outputs[info.name] = out.value
            results.append(ProgramResult(info.name, None, out.shape, kind))
        if not outputs:
            raise ModelError("the model has no outputs")
        graph = merge_equal_nodes(Graph(outputs, {}))
        needed = {value.node.name for value in graph.weights}
        weights = {name: data for name, data in self.weights.items() if name in needed}
        return Program(graph, weights, tuple(self.arguments), tuple(results))


def _decode_attributes(node: NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name, as numbers, text, lists of these, or arrays.

    Raises:
        ModelError: An attribute is a graph, a reference or of an unsupported type.
    """
    from onnx import AttributeProto, helper

    read: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) or attribute.ref_attr_name:
            raise ModelError(f"attribute {attribute.name!r} is a graph or a reference")
        value = helper.get_attribute_value(attribute)
        if attribute.type == AttributeProto.TENSOR:
            value = read_tensor_array(value, None)
        elif attribute.type == AttributeProto.STRING:
            value = value.decode("utf-8", "replace")
        elif attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS):
            value = list(value)
        elif attribute.type not in (AttributeProto.INT, AttributeProto.FLOAT):
            raise ModelError(f"attribute {attribute.name!r} is of a kind that hocket does not read")
        if node.op_type not in ("Cast", "CastLike") or attribute.name not in ("to", "saturate", "round_mode"):
            read[attribute.name] = value
    return read
