"""Conversion of programs and layouts to plain data and back; reading checks the type of each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...backends.base import BufferSpec, Instruction, Program, Tensor
from ...graph.dtypes import DTYPE_BY_NAME
from ...graph.errors import format_count
from ...graph.graph import Graph
from ...graph.spec import Spec, make_spec
from ...ops import REGISTRY
from ..ir.layout import PARTIAL, REPLICATE, Layout, Local, Shard


def layout_to_data(layout: Layout) -> object:
    """Return a layout as plain data for JSON, which `layout_from_data` reads."""
    match layout:
        case Shard(axis, runs):
            return {"axis": axis, "runs": runs}
        case Local(devices):
            return {"devices": devices}
        case _:
            return str(layout)


def program_to_data(program: Program) -> dict[str, Any]:
    """Return a program as plain data for JSON, which `program_from_data` reads.

    The attributes of an instruction are not stored, because its graph node has them.
    """
    return {
        "buffers": [
            [b.kind, b.name, b.nbytes, _spec_to_data(b.declared_spec), _spec_to_data(b.stored_spec)]
            for b in program.buffers
        ],
        "instructions": list(map(_instruction_to_data, program.instructions)),
        "undo": [[at, _instruction_to_data(back)] for at, back in program.undo],
        "inputs": {name: _tensor_to_data(t) for name, t in program.inputs.items()},
        "results": {name: _tensor_to_data(t) for name, t in program.outputs.items()},
    }


def _instruction_to_data(i: Instruction) -> object:
    return [
        i.index,
        i.op,
        i.node,
        list(map(_tensor_to_data, i.src)),
        list(map(_tensor_to_data, i.dst)),
        _tensor_to_data(i.scratch),
    ]


def _spec_to_data(spec: Spec | None) -> object:
    return None if spec is None else [list(spec.shape), spec.dtype.text]


def _tensor_to_data(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return [tensor.buffer, tensor.offset, list(tensor.shape), list(tensor.strides), tensor.dtype.text]


def program_from_data(entry: Mapping[str, Any], graph: Graph) -> Program:
    """Build a program from plain data (see `program_to_data`) and from the graph that it runs.

    The graph supplies the attributes of the instructions.
    """

    def tensors(items: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return MappingProxyType({name: _tensor_from_data(value) for name, value in items.items()})

    return Program(
        tuple(
            BufferSpec(
                require_text(kind),
                require_text(name),
                require_nonnegative_integer(nbytes),
                _spec_from_data(declared),
                _spec_from_data(stored),
            )
            for kind, name, nbytes, declared, stored in entry["buffers"]
        ),
        tuple(_instruction_from_data_and_node(graph, *parts) for parts in entry["instructions"]),
        tensors(entry["inputs"]),
        tensors(entry["results"]),
        tuple(
            (require_nonnegative_integer(at), _instruction_from_data_and_node(graph, *parts))
            for at, parts in entry["undo"]
        ),
    )


def _instruction_from_data_and_node(
    graph: Graph, index: Any, op: Any, name: Any, src: Any, dst: Any, scratch: Any
) -> Instruction:
    """Build an instruction from plain data and from its graph node, which supplies the attributes.

    An instruction without a node (`index` is -1) has the default attributes of its op.
    """
    operands, results = tuple(map(_optional_tensor_from_data, src)), tuple(map(_tensor_from_data, dst))
    if type(index) is not int or not -1 <= index < len(graph.nodes):
        raise ValueError(f"step {name!r:.60} computes node {index!r:.60} of {len(graph.nodes)}")
    attrs = REGISTRY[require_text(op)].defaults if index == -1 else graph.nodes[index].attrs
    return Instruction(op, operands, results, attrs, _optional_tensor_from_data(scratch), require_text(name), index)


def _optional_tensor_from_data(value: Any) -> Tensor | None:
    return None if value is None else _tensor_from_data(value)


def _tensor_from_data(value: Any) -> Tensor:
    buffer, offset, shape, strides, dtype = value
    if len(shape) != len(strides):
        raise ValueError(
            f"a tensor has {format_count(len(shape), 'axis', 'axes')} but {format_count(len(strides), 'stride')}"
        )
    return Tensor(
        require_nonnegative_integer(buffer),
        require_nonnegative_integer(offset),
        _counts_from_data(shape),
        _counts_from_data(strides),
        DTYPE_BY_NAME[dtype],
    )


def _spec_from_data(value: Any) -> Spec | None:
    return None if value is None else make_spec(_counts_from_data(value[0]), require_text(value[1]))


def layout_from_data(value: Any) -> Layout:
    """Build a layout from the plain data of `layout_to_data`; raise `ValueError` for any other data."""
    match value:
        case "R":
            return REPLICATE
        case "P":
            return PARTIAL
        case {"axis": axis, "runs": runs}:
            return Shard(
                require_nonnegative_integer(axis),
                tuple(tuple((_range_from_data(run)) for run in device) for device in runs),
            )
        case {"devices": devices}:
            return Local(_counts_from_data(devices))
        case _:
            raise ValueError(f"{value!r:.60} is no layout")


def _range_from_data(value: Any) -> tuple[int, int]:
    offset, length = value
    return require_nonnegative_integer(offset), require_nonnegative_integer(length)


def _counts_from_data(values: Any) -> tuple[int, ...]:
    return tuple(map(require_nonnegative_integer, values))


def require_nonnegative_integer(value: Any) -> int:
    """Return `value` if it is an integer of at least 0; raise `ValueError` otherwise."""
    if type(value) is not int or value < 0:  # False equals 0 in Python
        raise ValueError(f"{value!r:.60} is no count")
    return value


def require_text(value: Any) -> str:
    """Return `value` if it is a text; raise `TypeError` otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def require_nonnegative_number(value: Any) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a finite number of at least 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.60} is no finite number from zero on")
    return float(value)
