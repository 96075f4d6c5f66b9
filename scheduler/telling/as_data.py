"""Programs and layouts as plain data, and back; reading checks the type of each part."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...backends.base import BufferSpec, Instruction, Program, Tensor
from ...graph.dtypes import DTYPE_BY_NAME
from ...graph.graph import Graph
from ...graph.spec import Spec, make_spec
from ...ops import REGISTRY
from ..layout import PARTIAL, REPLICATE, Layout, Local, Shard


def layout_data(layout: Layout) -> object:
    """Return a layout as plain data."""
    match layout:
        case Shard(axis, runs):
            return {"axis": axis, "runs": runs}
        case Local(devices):
            return {"devices": devices}
        case _:
            return str(layout)


def program_data(program: Program) -> dict[str, Any]:
    """Return a program as plain data; the attributes of an instruction are stored only with its graph node."""
    return {
        "buffers": [[b.kind, b.name, b.nbytes, _spec(b.declared), _spec(b.stored)] for b in program.buffers],
        "instructions": list(map(_instruction, program.instructions)),
        "undo": [[at, _instruction(back)] for at, back in program.undo],
        "inputs": {name: _tensor(t) for name, t in program.inputs.items()},
        "results": {name: _tensor(t) for name, t in program.outputs.items()},
    }


def _instruction(i: Instruction) -> object:
    return [i.index, i.op, i.node, list(map(_tensor, i.src)), list(map(_tensor, i.dst)), _tensor(i.scratch)]


def _spec(spec: Spec | None) -> object:
    return None if spec is None else [list(spec.shape), spec.dtype.text]


def _tensor(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return [tensor.buffer, tensor.offset, list(tensor.shape), list(tensor.strides), tensor.dtype.text]


def read_program(entry: Mapping[str, Any], graph: Graph) -> Program:
    """Build a program from plain data and its graph."""

    def tensors(items: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return MappingProxyType({name: _present(value) for name, value in items.items()})

    return Program(
        tuple(
            BufferSpec(text_of(kind), text_of(name), count(nbytes), _read_spec(declared), _read_spec(stored))
            for kind, name, nbytes, declared, stored in entry["buffers"]
        ),
        tuple(_read_instruction(graph, *parts) for parts in entry["instructions"]),
        tensors(entry["inputs"]),
        tensors(entry["results"]),
        tuple((count(at), _read_instruction(graph, *parts)) for at, parts in entry["undo"]),
    )


def _read_instruction(graph: Graph, index: Any, op: Any, name: Any, src: Any, dst: Any, scratch: Any) -> Instruction:
    """Build an instruction; its attributes come from its graph node, or from the op's defaults without a node."""
    operands, results = tuple(map(_read_tensor, src)), tuple(map(_present, dst))
    if type(index) is not int or not -1 <= index < len(graph.nodes):
        raise ValueError(f"step {name!r:.60} computes node {index!r:.60} of {len(graph.nodes)}")
    attrs = REGISTRY[text_of(op)].defaults if index == -1 else graph.nodes[index].attrs
    return Instruction(op, operands, results, attrs, _read_tensor(scratch), text_of(name), index)


def _read_tensor(value: Any) -> Tensor | None:
    return None if value is None else _present(value)


def _present(value: Any) -> Tensor:
    buffer, offset, shape, strides, dtype = value
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} axes but {len(strides)} strides")
    return Tensor(count(buffer), count(offset), _numbers(shape), _numbers(strides), DTYPE_BY_NAME[dtype])


def _read_spec(value: Any) -> Spec | None:
    return None if value is None else make_spec(_numbers(value[0]), text_of(value[1]))


def read_layout(value: Any) -> Layout:
    """Build a layout from plain data. Raises `ValueError` for other data."""
    match value:
        case "R":
            return REPLICATE
        case "P":
            return PARTIAL
        case {"axis": axis, "runs": runs}:
            return Shard(count(axis), tuple(tuple((_run(run)) for run in device) for device in runs))
        case {"devices": devices}:
            return Local(_numbers(devices))
        case _:
            raise ValueError(f"{value!r:.60} is no layout")


def _run(value: Any) -> tuple[int, int]:
    offset, length = value
    return count(offset), count(length)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(count, values))


def count(value: Any) -> int:
    """Return `value` if it is an integer from zero on. Raises `ValueError` for any other value."""
    if type(value) is not int or value < 0:  # False equals 0 in Python
        raise ValueError(f"{value!r:.60} is no count")
    return value


def text_of(value: Any) -> str:
    """Return `value` if it is a text. Raises `TypeError` for any other value."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value
