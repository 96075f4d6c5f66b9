"""The verifier of programs.  It shares no code with the planner: it follows what each byte of memory holds.

Every instruction's writes replace what was in those bytes; every read must find, whole, the value that the graph says
the node reads.  Early reuse, a wrong alias, a reader after the writer of its state, a lost output are all the same
complaint: at this step these bytes hold something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...backends.base import Instruction, Program, Tensor, contiguous_strides
from ...graph.errors import PlanError
from ...graph.graph import Graph, names
from ...graph.node import Node, Value
from ...ops import op_of
from .contents import Memory, Views, extent_of, is_dense, meet, show
from .undo import Journal


def check(graph: Graph, program: Program) -> None:
    """Raise `PlanError` with the first fault of `program` as a way to run `graph`."""
    for why in faults(graph, program):
        raise PlanError(f"program for {program.device}: {why}")


def faults(graph: Graph, program: Program) -> Iterator[str]:
    """Everything wrong with `program`, as text."""
    called, views, memory = names(graph), Views(), Memory(program)
    journal = Journal(graph, program, memory)
    nodes = {called[n]: n for n in graph.nodes}
    yield from _leaves(graph, program, memory)
    ran: set[Node] = set()
    updates = {f"{s.node.name}.update": (s, v) for s, v in graph.updates.items()}
    for step, instruction in enumerate(program.instructions):
        if step in journal.backs:
            yield from journal.save(step, instruction)
            continue
        yield from _step(step, instruction, nodes, updates, memory, views)
        yield from journal.after(step, instruction, nodes.get(instruction.node))
        if instruction.node in nodes:
            ran.add(nodes[instruction.node])
    yield from journal.end()
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
            yield f"at the end, state %{state.node.name} holds {show(held)} and not its new value {new!r}"


def _leaves(graph: Graph, program: Program, memory: Memory) -> Iterator[str]:
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
        _, held = memory.holds(extent_of(tensor)) if not complaints else (0, None)
        if held is not None and value.spec.size:
            complaints.append(f"input %{name} lies where {show(held)} lies")
        yield from complaints
        if not complaints:
            memory.write(extent_of(tensor), value)


def _step(
    step: int,
    instruction: Instruction,
    nodes: dict[str, Node],
    updates: dict[str, tuple[Value, Value]],
    memory: Memory,
    views: Views,
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
        if tensor.shape != value.shape or (value.spec.size and not is_dense(tensor)):
            complaints.append(f"{where}: {value!r} is written to {tensor}")
    yield from complaints
    if complaints:
        return
    yield from _overlaps(where, instruction, node, [extent_of(t) for t in taken])
    for tensor in taken:
        memory.write(extent_of(tensor), None)
    held: tuple[object, ...] = results if node is not None else (update,)
    for made, tensor in zip(held, instruction.dst, strict=True):
        memory.write(extent_of(tensor), made)


def _same_entries(one: Tensor, two: Tensor) -> bool:
    """Whether entry i of one lies where entry i of the other does."""
    triples = zip(one.shape, one.strides, two.strides, strict=False)
    return one.shape == two.shape and all(n == 1 or s == t for n, s, t in triples)


def _overlaps(
    where: str, instruction: Instruction, node: Node | None, taken: list[tuple[int, int, int]]
) -> Iterator[str]:
    """No two results (or scratch) share bytes, and a result shares bytes with an operand only as declared."""
    for i, one in enumerate(taken):
        for two in taken[:i]:
            if meet(one, two):
                yield f"{where}: a result or the scratch overlaps another"
    if node is None:
        return
    declared = op_of(node)
    scratch = instruction.scratch is not None
    for index, extent in enumerate(taken):
        result = index - scratch
        allowed = [name for r, name in declared.inplace_in(node.attrs) if r == result]
        for name, tensor in zip(declared.operand_names, instruction.src, strict=False):
            if tensor is None or not meet(extent, extent_of(tensor)):
                continue
            exact = result >= 0 and extent_of(tensor) == extent and _same_entries(tensor, instruction.dst[result])
            twin = any(
                n in allowed and t == tensor for n, t in zip(declared.operand_names, instruction.src, strict=False)
            )
            if not exact or not (name in allowed or twin):
                yield f"{where}: overwrites its operand {name} while reading it"
