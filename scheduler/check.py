"""The verifier of programs.  It shares no code with the planner: it follows what each byte of memory holds.

Every instruction's writes replace what was in those bytes; every read must find, whole, the value that the graph says
the node reads.  Early reuse, a wrong alias, a reader after the writer of its state, a lost output are all the same
complaint: at this step these bytes hold something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..backends.base import Instruction, Program, Tensor
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.node import Node, Value
from ..graph.text import names
from ..ops import op_of


def check(graph: Graph, program: Program) -> None:
    """Raise `PlanError` with the first fault of `program` as a way to run `graph`."""
    for why in faults(graph, program):
        raise PlanError(f"program for {program.device}: {why}")


def faults(graph: Graph, program: Program) -> Iterator[str]:
    """Everything wrong with `program`, as text."""
    called = names(graph)
    nodes = {called[n]: n for n in graph.nodes}
    memory = _Memory(program)
    for number, buffer in enumerate(program.buffers):
        if buffer.kind != "arena":
            leaf = nodes.get(buffer.name)
            if leaf is None or leaf.op != buffer.kind:
                yield f"buffer {number} is {buffer.kind} %{buffer.name}, which the graph does not have"
            else:
                memory.write((number, 0, buffer.nbytes), Value(leaf))
    for name, tensor in program.inputs.items():
        yield from memory.inside(tensor, f"input %{name}")
        memory.write(_extent(tensor), Value(nodes[name]))
    ran: set[Node] = set()
    for step, instruction in enumerate(program.instructions):
        yield from _step(step, instruction, nodes, memory, graph)
        if instruction.node in nodes:
            ran.add(nodes[instruction.node])
    for node in graph.nodes:
        if not node.is_leaf and not op_of(node).is_view and node not in ran:
            yield f"%{called[node]} never runs"
    for name, value in graph.outputs.items():
        if name not in program.outputs:
            yield f"output {name!r} is missing"
        else:
            yield from memory.expect(program.outputs[name], _base(value), f"at the end, output {name!r}")
    buffers = {b.name: i for i, b in enumerate(program.buffers) if b.kind == "state"}
    for state, new in graph.updates.items():
        number = buffers[state.node.name]
        held = memory.holds((number, 0, program.buffers[number].nbytes))
        if state.spec.size and held not in (_base(new), (state, new)):
            yield f"at the end, state %{state.node.name} holds {_show(held)} and not its new value {new!r}"


def _step(step: int, instruction: Instruction, nodes: dict[str, Node], memory: _Memory, graph: Graph) -> Iterator[str]:
    where = f"step {step} (%{instruction.node})"
    update = {f"{s.node.name}.update": (s, v) for s, v in graph.updates.items()}.get(instruction.node)
    node = nodes.get(instruction.node)
    if node is None and update is None:
        yield f"{where}: the graph has no such node"
        return
    sources = node.src if node is not None else (update[1],) if update else ()
    for position, (source, tensor) in enumerate(zip(sources, instruction.src, strict=True)):
        if source is not None and tensor is not None:
            if tensor.shape != source.shape:
                yield f"{where}: operand {position} is {list(tensor.shape)}, but {source!r}"
            yield from memory.expect(tensor, _base(source), f"{where}: operand {position}")
    taken = [] if instruction.scratch is None else [_extent(instruction.scratch)]
    taken += [_extent(t) for t in instruction.dst]
    yield from _overlaps(where, instruction, node, taken)
    for extent in taken:
        memory.write(extent, None)
    values = node.results if node is not None else (update,)
    for value, tensor in zip(values, instruction.dst, strict=True):
        yield from memory.inside(tensor, f"{where}: result")
        memory.write(_extent(tensor), value)


def _overlaps(
    where: str, instruction: Instruction, node: Node | None, taken: list[tuple[int, int, int]]
) -> Iterator[str]:
    """No two results (or scratch) share bytes, and a result shares bytes with an operand only as declared."""
    for i, one in enumerate(taken):
        for two in taken[:i]:
            if _meet(one, two):
                yield f"{where}: a result or the scratch overlaps another"
    if node is None:
        return
    declared = op_of(node)
    scratch = instruction.scratch is not None
    for index, extent in enumerate(taken):
        result = index - scratch
        allowed = [name for r, name in declared.inplace if r == result]
        for name, tensor in zip(declared.operand_names, instruction.src, strict=False):
            if tensor is None or not _meet(extent, _extent(tensor)):
                continue
            exact = (
                _extent(tensor) == extent and tensor.strides == instruction.dst[result].strides
                if result >= 0
                else False
            )
            twin = any(
                n in allowed and t == tensor for n, t in zip(declared.operand_names, instruction.src, strict=False)
            )
            if not exact or not (name in allowed or twin):
                yield f"{where}: overwrites its operand {name} while reading it"


class _Memory:
    """What each range of each buffer holds: lists of (start, end, value), disjoint and in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranges: dict[int, list[tuple[int, int, object]]] = {i: [] for i in range(len(program.buffers))}

    def write(self, extent: tuple[int, int, int], value: object) -> None:
        buffer, start, end = extent
        if start == end:
            return
        kept: list[tuple[int, int, object]] = []
        for a, b, held in self.ranges[buffer]:
            if b <= start or a >= end:
                kept.append((a, b, held))
            else:  # what is left of a value that lost some bytes is no value
                kept += [(a, start, None)] if a < start else []
                kept += [(end, b, None)] if b > end else []
        self.ranges[buffer] = sorted([*kept, (start, end, value)], key=lambda r: r[:2])

    def holds(self, extent: tuple[int, int, int]) -> object:
        buffer, start, end = extent
        return next((held for a, b, held in self.ranges[buffer] if a <= start and end <= b), None)

    def inside(self, tensor: Tensor, what: str) -> Iterator[str]:
        _, start, end = _extent(tensor)
        if not 0 <= start <= end <= self.program.buffers[tensor.buffer].nbytes:
            yield f"{what}: {tensor} lies outside its buffer of {self.program.buffers[tensor.buffer].nbytes} bytes"

    def expect(self, tensor: Tensor, value: Value, what: str) -> Iterator[str]:
        yield from self.inside(tensor, what)
        extent = _extent(tensor)
        if extent[1] == extent[2]:
            return
        held = self.holds(extent)
        if held != value:
            yield f"{what}: reads {value!r} from {tensor}, which holds {_show(held)}"


def _show(held: object) -> str:
    return "something else" if held is None else repr(held)


def _base(value: Value) -> Value:
    """The value whose memory a chain of views shows."""
    while not value.node.is_leaf and op_of(value.node).is_view:
        value = value.node.inputs[0]
    return value


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """(buffer, first byte, end) of everything a tensor's strides can reach."""
    if 0 in tensor.shape:
        return tensor.buffer, tensor.offset, tensor.offset
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    blocks = last // tensor.dtype.block + 1
    return tensor.buffer, tensor.offset, tensor.offset + blocks * tensor.dtype.block_bytes


def _meet(one: tuple[int, int, int], two: tuple[int, int, int]) -> bool:
    return one[0] == two[0] and max(one[1], two[1]) < min(one[2], two[2])
