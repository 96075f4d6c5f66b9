"""The verifier of programs.  It shares no code with the planner: it follows what each byte of memory holds.

Every instruction's writes replace what was in those bytes; every read must find, whole, the value that the graph says
the node reads.  Early reuse, a wrong alias, a reader after the writer of its state, a lost output are all the same
complaint: at this step these bytes hold something else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..backends.base import Instruction, Program, Tensor, contiguous_strides
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
    called, views, memory = names(graph), _Views(), _Memory(program)
    nodes = {called[n]: n for n in graph.nodes}
    yield from _leaves(graph, program, memory)
    ran: set[Node] = set()
    updates = {f"{s.node.name}.update": (s, v) for s, v in graph.updates.items()}
    for step, instruction in enumerate(program.instructions):
        yield from _step(step, instruction, nodes, updates, memory, views)
        if instruction.node in nodes:
            ran.add(nodes[instruction.node])
    for node in graph.nodes:
        if not node.is_leaf and not op_of(node).is_view and node not in ran:
            yield f"%{called[node]} never runs"
    for name, value in graph.outputs.items():
        if name not in program.outputs:
            yield f"output {name!r} is missing"
        else:
            yield from memory.expect(program.outputs[name], views.of(value), f"at the end, output {name!r}")
    buffers = {b.name: i for i, b in enumerate(program.buffers) if b.kind == "state"}
    for state, new in graph.updates.items():
        if state.node.name not in buffers:
            yield f"state %{state.node.name} has no buffer"
            continue
        number = buffers[state.node.name]
        _, held = memory.holds((number, 0, program.buffers[number].nbytes))
        if state.spec.size and held not in (views.of(new).base, (state, new)):
            yield f"at the end, state %{state.node.name} holds {_show(held)} and not its new value {new!r}"


def _leaves(graph: Graph, program: Program, memory: _Memory) -> Iterator[str]:
    """Put what is there before the first step into memory."""
    nodes = {(n.op, n.name): n for n in graph.nodes if n.is_leaf}
    for number, buffer in enumerate(program.buffers):
        if buffer.kind != "arena":
            leaf = nodes.get((buffer.kind, buffer.name))
            if leaf is None:
                yield f"buffer {number} is {buffer.kind} %{buffer.name}, which the graph does not have"
            else:
                memory.write((number, 0, buffer.nbytes), Value(leaf))
    for value in graph.inputs:
        name = value.node.name
        if name not in program.inputs:
            yield f"input %{name} has no place"
            continue
        tensor = program.inputs[name]
        complaints = list(memory.inside(tensor, f"input %{name}"))
        if tensor.shape != value.shape or tensor.strides != contiguous_strides(value.shape):
            complaints.append(f"input %{name} is {value.spec}, and its place is {tensor}")
        _, held = memory.holds(_extent(tensor)) if not complaints else (0, None)
        if held is not None and value.spec.size:
            complaints.append(f"input %{name} lies where {_show(held)} lies")
        yield from complaints
        if not complaints:
            memory.write(_extent(tensor), value)


def _step(
    step: int,
    instruction: Instruction,
    nodes: dict[str, Node],
    updates: dict[str, tuple[Value, Value]],
    memory: _Memory,
    views: _Views,
) -> Iterator[str]:
    where = f"step {step} (%{instruction.node})"
    node, update = nodes.get(instruction.node), updates.get(instruction.node)
    if node is None and update is None:
        yield f"{where}: the graph has no such node"
        return
    if node is not None and (instruction.op, instruction.attrs) != (node.op, node.attrs):
        yield f"{where}: {instruction.op} with {dict(instruction.attrs)} is not {node!r}"
    sources = node.src if node is not None else (update[1],) if update else ()
    results = node.results if node is not None else (update[0],) if update else ()
    if len(sources) != len(instruction.src) or len(results) != len(instruction.dst):
        yield f"{where}: {len(instruction.src)} operands and {len(instruction.dst)} results"
        return
    for position, (source, tensor) in enumerate(zip(sources, instruction.src, strict=True)):
        if (source is None) != (tensor is None):
            yield f"{where}: operand {position} is {'missing' if tensor is None else 'too many'}"
        elif source is not None and tensor is not None:
            yield from memory.expect(tensor, views.of(source), f"{where}: operand {position}")
    taken = [] if instruction.scratch is None else [instruction.scratch]
    taken += instruction.dst
    complaints = [why for tensor in taken for why in memory.inside(tensor, f"{where}: result")]
    for value, tensor in zip(results, instruction.dst, strict=True):
        if tensor.shape != value.shape or (value.spec.size and not _is_dense(tensor)):
            complaints.append(f"{where}: {value!r} is written to {tensor}")
    yield from complaints
    if complaints:
        return
    yield from _overlaps(where, instruction, node, [_extent(t) for t in taken])
    for tensor in taken:
        memory.write(_extent(tensor), None)
    held: tuple[object, ...] = results if node is not None else (update,)
    for made, tensor in zip(held, instruction.dst, strict=True):
        memory.write(_extent(tensor), made)


def _same_entries(one: Tensor, two: Tensor) -> bool:
    """Whether entry i of one lies where entry i of the other does."""
    triples = zip(one.shape, one.strides, two.strides, strict=False)
    return one.shape == two.shape and all(n == 1 or s == t for n, s, t in triples)


def _is_dense(tensor: Tensor) -> bool:
    dense = contiguous_strides(tensor.shape)
    return all(n == 1 or s == d for n, s, d in zip(tensor.shape, tensor.strides, dense, strict=True))


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
        allowed = [name for r, name in declared.inplace_in(node.attrs) if r == result]
        for name, tensor in zip(declared.operand_names, instruction.src, strict=False):
            if tensor is None or not _meet(extent, _extent(tensor)):
                continue
            exact = result >= 0 and _extent(tensor) == extent and _same_entries(tensor, instruction.dst[result])
            twin = any(
                n in allowed and t == tensor for n, t in zip(declared.operand_names, instruction.src, strict=False)
            )
            if not exact or not (name in allowed or twin):
                yield f"{where}: overwrites its operand {name} while reading it"


class _Memory:
    """What each range of each buffer holds: per buffer disjoint ranges in order, as starts and (end, value)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.starts: list[list[int]] = [[] for _ in program.buffers]
        self.ranges: list[list[tuple[int, object]]] = [[] for _ in program.buffers]

    def write(self, extent: tuple[int, int, int], value: object) -> None:
        buffer, start, end = extent
        if start >= end:
            return
        starts, ranges = self.starts[buffer], self.ranges[buffer]
        first = bisect_right(starts, start)
        if first and ranges[first - 1][0] > start:
            first -= 1
        last = bisect_left(starts, end, first)
        new: list[tuple[int, tuple[int, object]]] = [(start, (end, value))]
        if first < last:  # what is left of a value that lost some bytes is no value
            if starts[first] < start:
                new.insert(0, (starts[first], (start, None)))
            if ranges[last - 1][0] > end:
                new.append((end, (ranges[last - 1][0], None)))
        starts[first:last] = [at for at, _ in new]
        ranges[first:last] = [held for _, held in new]

    def holds(self, extent: tuple[int, int, int]) -> tuple[int, object]:
        """Where the range that has all of `extent` begins, and its value; None where no single range has it."""
        buffer, start, end = extent
        at = bisect_right(self.starts[buffer], start) - 1
        if at < 0 or self.ranges[buffer][at][0] < end:
            return start, None
        return self.starts[buffer][at], self.ranges[buffer][at][1]

    def inside(self, tensor: Tensor, what: str) -> Iterator[str]:
        if not 0 <= tensor.buffer < len(self.program.buffers):
            yield f"{what}: {tensor} lies in no buffer"
            return
        _, start, end = _extent(tensor)
        if not 0 <= start <= end <= self.program.buffers[tensor.buffer].nbytes:
            yield f"{what}: {tensor} lies outside its buffer of {self.program.buffers[tensor.buffer].nbytes} bytes"

    def expect(self, tensor: Tensor, seen: _Seen, what: str) -> Iterator[str]:
        """Complaints unless `tensor` is what the graph says: this view of that value, which lies there now."""
        yield from self.inside(tensor, what)
        extent = _extent(tensor)
        if tensor.shape != seen.shape:
            yield f"{what} is {list(tensor.shape)}, and its value is {list(seen.shape)}"
        if extent[1] == extent[2] or not 0 <= tensor.buffer < len(self.program.buffers):
            return
        start, held = self.holds(extent)
        if held != seen.base:
            yield f"{what}: reads {seen.base!r} from {tensor}, which holds {_show(held)}"
        elif not seen.lies_as(tensor, start):
            yield f"{what}: reads other entries of {seen.base!r} than its view has: {tensor}"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A value as a view of the value whose memory it shows; offset and strides in elements."""

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def lies_as(self, tensor: Tensor, start: int) -> bool:
        """Whether `tensor` is this view of a base that begins at byte `start`."""
        dtype = tensor.dtype
        at = start + self.offset * dtype.block_bytes // dtype.block
        pairs = zip(self.shape, self.strides, tensor.strides, strict=True)
        return tensor.offset == at and all(n == 1 or mine == theirs for n, mine, theirs in pairs)


class _Views:
    """What each value of a graph shows, by the functions with which its views are declared."""

    def __init__(self) -> None:
        self.known: dict[Value, _Seen] = {}

    def of(self, value: Value) -> _Seen:
        chain = [value]
        while chain[-1] not in self.known and not chain[-1].node.is_leaf and op_of(chain[-1].node).is_view:
            chain.append(chain[-1].node.inputs[0])
        base = chain.pop()
        if base not in self.known:
            self.known[base] = _Seen(base, 0, base.shape, contiguous_strides(base.shape))
        for seen in reversed(chain):
            self.known[seen] = _through(seen.node, self.known[seen.node.inputs[0]])
        return self.known[value]


def _through(node: Node, source: _Seen) -> _Seen:
    """A view node over what its source shows, found on an array of single bytes that is never read."""
    as_view = op_of(node).as_view
    assert as_view is not None
    bytes_of = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), source.shape, source.strides)
    view = as_view(bytes_of, **node.attrs)
    shift = view.__array_interface__["data"][0] - bytes_of.__array_interface__["data"][0] if view.size else 0
    return _Seen(source.base, source.offset + shift, view.shape, view.strides)


def _show(held: object) -> str:
    return "something else" if held is None else repr(held)


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """(buffer, first byte, end) of everything a tensor's strides can reach."""
    if 0 in tensor.shape:
        return tensor.buffer, tensor.offset, tensor.offset
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    blocks = last // tensor.dtype.block + 1
    return tensor.buffer, tensor.offset, tensor.offset + blocks * tensor.dtype.block_bytes


def _meet(one: tuple[int, int, int], two: tuple[int, int, int]) -> bool:
    return one[0] == two[0] and max(one[1], two[1]) < min(one[2], two[2])
