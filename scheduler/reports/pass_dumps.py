"""Dumps of the planner passes as text: factors, layouts, device graphs, memory, programs and fused kernels of a plan.

The dumps show only the decisions of planning itself.
"""

from __future__ import annotations

import itertools
import re
import string
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...backends.base import Instruction, Program, Tensor
from ...backends.capabilities import GeneratesFusedKernels, ProgramFusion
from ...graph.attrs import format_attribute, quote_node_name
from ...graph.errors import format_count
from ...graph.graph import Graph, assign_names, format_graph
from ...graph.node import Node, Value
from ...ops import REGISTRY
from ..ir.execution_plan import Plan
from ..ir.formatting import format_bytes, format_table
from ..ir.layout import Layout, Shard
from ..lowering.lower import ARENA_BUFFER
from ..sharding.axes import Factor
from ..sharding.factors import Factors

LIFETIME_COLUMNS = 64
"""Columns in which the lifetime of a value is drawn; in a longer program several steps share a column."""
MAX_LISTED_NAMES = 3
"""Maximum names in a table cell; the rest is counted."""


def format_node_reference(name: str) -> str:
    """Return a node name as in graph text, ``%name``, with quotes if needed; numbers of unnamed nodes have none."""
    return f"%{name if name.isdecimal() else quote_node_name(name)}"


def join_first_names(found: Sequence[str]) -> str:
    """Return the first `MAX_LISTED_NAMES` names as text, followed by the number of the others."""
    more = f" and {len(found) - MAX_LISTED_NAMES} more" if len(found) > MAX_LISTED_NAMES else ""
    return ", ".join(found[:MAX_LISTED_NAMES]) + more


# ---------------------------------------------------------------------------------------------------------- factors


def format_factor_tables(factors: Factors) -> str:
    """Return two tables for debugging: the factors of a graph, and the axes of every value as products of factors.

    A factor is an index range that several axes share, such as attention heads. Each has a letter, the leaves with
    this factor, and the nodes that keep it from being sharded. Axes are written as in einops, outer first; ``|``
    stands between segments, and ``!`` follows a factor that cannot be sharded.
    """
    node_names = assign_names(factors.graph)
    symbols = _assign_factor_symbols(factors)
    contracted, coupled, having = (defaultdict[Factor, list[str]](list) for _ in range(3))
    for node in factors.graph.nodes:
        if node.is_leaf:
            for factor in factors.factors_of(node.results[0]):
                having[factor].append(format_node_reference(node_names[node]))
        else:
            uses = factors.find_factor_roles(node)
            for factor in uses.contracted_factors:
                contracted[factor].append(format_node_reference(node_names[node]))
            for factor in uses.coupled_factors:
                coupled[factor].append(format_node_reference(node_names[node]))
    rows: list[tuple[str, ...]] = [("factor", "size", "leaves", "summed over by", "whole for")]
    for factor, symbol in symbols.items():
        cells = (join_first_names(found[factor]) or "-" for found in (having, contracted, coupled))
        rows.append((symbol, str(factor.size), *cells))
    values = [
        (
            _format_value(v, node_names),
            str(v.spec),
            "  ".join(_format_axis(axis, symbols) for axis in factors.axes_of(v)),
        )
        for node in factors.graph.nodes
        for v in node.results
    ]
    return "\n".join([*format_table(rows, "lrlll"), "", *format_table(values, "lll")])


def _assign_factor_symbols(factors: Factors) -> dict[Factor, str]:
    """Give each factor a symbol of one or more letters, in the order of the values.

    Factors of only one index get no symbol.
    """
    free = ("".join(word) for n in itertools.count(1) for word in itertools.product(string.ascii_lowercase, repeat=n))
    symbols: dict[Factor, str] = {}
    for node in factors.graph.nodes:
        for value in node.results:
            for factor in (f for axis in factors.axes_of(value) for segment in axis for f in segment):
                if factor.size != 1 and factor not in symbols:
                    symbols[factor] = next(free) + ("!" if factor.blocked else "")
    return symbols


def _format_axis(axis: Sequence[Sequence[Factor]], symbols: Mapping[Factor, str]) -> str:
    products = [" ".join(symbols[f] for f in segment if f.size != 1) or "1" for segment in axis]
    return products[0] if len(products) == 1 and " " not in products[0] else f"({' | '.join(products)})"


def _format_value(value: Value, node_names: Mapping[Node, str]) -> str:
    return format_node_reference(node_names[value.node]) + (f"#{value.index}" if len(value.node.specs) > 1 else "")


# ----------------------------------------------------------------------------------------------------------- shards


def format_layouts(leaves: Mapping[str, Layout], outputs: Mapping[str, Layout]) -> str:
    """Return a table of the layouts of leaves and outputs.

    ``S0 0+32 | 32+32`` means sharded on axis 0, with the offset and the length of each device's index range.
    """
    rows = [("leaf", format_node_reference(name), _format_layout(layout)) for name, layout in leaves.items()]
    rows += [("output", name, _format_layout(layout)) for name, layout in outputs.items()]
    return "\n".join(format_table(rows, "lll"))


def _format_layout(layout: Layout) -> str:
    if not isinstance(layout, Shard):
        return str(layout)
    runs = (" ".join(f"{offset}+{n}" for offset, n in own) or "nothing" for own in layout.index_ranges)
    return f"S{layout.axis} {' | '.join(runs)}"


_QUOTED_NUMBER = re.compile(r'%"(\d+)"')
"""A device node with the number of an unnamed user node as its name, which is shown without quotes."""


def format_device_graphs(graphs: Sequence[Graph]) -> str:
    """Return the graph text of each device; for a graph equal to an earlier one only a reference to its device."""
    first: dict[str, int] = {}
    sections = []
    for device, graph in enumerate(graphs):
        text = _QUOTED_NUMBER.sub(r"%\1", format_graph(graph))
        same = first.setdefault(text, device)
        sections.append(f"device {device}" + (f":\n{text}" if same == device else f" as device {same}\n"))
    return "\n".join(sections).removesuffix("\n")


# ----------------------------------------------------------------------------------------------------------- memory


@dataclass(slots=True, eq=False)
class ArenaLifetime:
    """Where a value lies in the arena (the memory for intermediate values), and during which steps.

    - `offset`, `nbytes`: the first byte, and the number of bytes.
    - `first_step`, `last_step`: the step that writes the value (-1 for inputs), and the last step that reads it.
    - `name`, `note`: the name of the value, and a remark for people.
    """

    offset: int
    nbytes: int
    first_step: int
    last_step: int
    name: str
    note: str = ""
    writing_step: int = -1
    """The step with this value as its first result; -1 for inputs, scratch and further results."""
    overwriting_step: int = sys.maxsize
    """The step that overwrites the value."""

    @property
    def end_byte(self) -> int:
        """The byte after the last byte of the value in the arena."""
        return self.offset + self.nbytes

    @property
    def first_step_when_free(self) -> int:
        """The step from which the bytes are free: after the last read, or when another value overwrites them."""
        return min(self.last_step + 1, self.overwriting_step)


def format_memory_map(program: Program) -> str:
    """Return a map of the arena, with the offset and the lifetime of each value.

    A table of the other buffers follows.
    """
    steps = len(program.instructions)
    scale = -(-max(steps, 1) // LIFETIME_COLUMNS)
    rows = [("offset", "bytes", f"steps 0 to {steps - 1}" + (f", {scale} a column" if scale > 1 else ""), "value")]
    for life in sorted(find_arena_lifetimes(program), key=lambda v: (v.offset, v.first_step)):
        first, last = max(life.first_step, 0) // scale, min(life.last_step, steps - 1) // scale
        bar = "." * first + "#" * (last - first + 1)
        rows.append((str(life.offset), str(life.nbytes), bar.ljust(-(-steps // scale), "."), life.name + life.note))
    arena = program.buffers[ARENA_BUFFER].nbytes
    return "\n".join([f"arena of {arena} bytes", *format_table(rows, "rrll"), "", *_format_buffer_use_table(program)])


def _offset_of(life: ArenaLifetime) -> int:
    return life.offset


def find_arena_lifetimes(program: Program) -> list[ArenaLifetime]:
    """Return the byte range and the lifetime of each value in the arena, found from the instructions of a program."""
    lives = [ArenaLifetime(t.offset, t.spec.nbytes, -1, -1, f"input {name}") for name, t in program.inputs.items()]
    there = sorted(lives, key=_offset_of)  # by offset, without overlaps

    def at(tensor: Tensor) -> ArenaLifetime | None:
        before = bisect_right(there, tensor.offset, key=_offset_of) - 1
        holds = tensor.buffer == ARENA_BUFFER and before >= 0 and tensor.offset < there[before].end_byte
        return there[before] if holds else None

    for step, i in enumerate(program.instructions):
        read = [life for t in i.src if t is not None and (life := at(t)) is not None]
        for life in read:
            life.last_step = step
        for tensor in (t for t in (*i.dst, i.scratch) if t is not None and t.buffer == ARENA_BUFFER and t.spec.nbytes):
            name = (
                format_node_reference(i.node)
                if tensor is not i.scratch
                else f"scratch of {format_node_reference(i.node)}"
            )
            over = [f" over {life.name}" for life in read if life.offset == tensor.offset]
            new = ArenaLifetime(tensor.offset, tensor.spec.nbytes, step, step, name, "".join(over[:1]))
            new.writing_step = step if tensor is i.dst[0] else -1
            first = bisect_left(there, new.offset, key=_offset_of)
            first -= first > 0 and there[first - 1].end_byte > new.offset
            last = bisect_left(there, new.end_byte, key=_offset_of)
            for life in there[first:last]:
                life.overwriting_step = step
            there[first:last] = [new]
            lives.append(new)
    for name, tensor in program.outputs.items():
        if (life := at(tensor)) is not None:
            life.last_step, life.note = len(program.instructions), f"{life.note}, output {name}"
    for _, back in program.undo:
        for lifetime in (life for t in back.src if t is not None and (life := at(t)) is not None):
            lifetime.last_step = len(program.instructions)
    return lives


def compute_memory_and_last_use_by_step(program: Program) -> tuple[list[int], list[int]]:
    """Return the arena bytes in use at each step, and for each step the last step that needs its first result.

    The last step is -1 if this result is in a weight, state or constant.
    """
    steps = len(program.instructions)
    last, change = [-1] * steps, [0] * (steps + 1)
    for life in find_arena_lifetimes(program):
        end = min(life.first_step_when_free, steps)
        change[max(life.first_step, 0)] += life.nbytes
        change[end] -= life.nbytes
        if life.writing_step >= 0:
            last[life.writing_step] = end - 1
    return list(itertools.accumulate(change[:-1])), last


def _format_buffer_use_table(program: Program) -> list[str]:
    """Return a table of weights, states and constants: bytes, stored specs, and the steps that read and write them."""
    reads, writes = (defaultdict[int, list[str]](list) for _ in range(2))
    for step, i in enumerate(program.instructions):
        for tensor in (t for t in i.src if t is not None):
            reads[tensor.buffer].append(str(step))
        for tensor in i.dst:
            writes[tensor.buffer].append(str(step))
    rows: list[tuple[str, ...]] = [("buffer", "", "bytes", "kept as", "read in", "written in")]
    for number, b in enumerate(program.buffers):
        if number != ARENA_BUFFER:
            steps = (join_first_names(list(dict.fromkeys(found[number]))) or "-" for found in (reads, writes))
            rows.append((b.kind, format_node_reference(b.name), str(b.nbytes), str(b.stored_spec), *steps))
    return format_table(rows, "llrlll")


# ---------------------------------------------------------------------------------------------------------- program


def format_program(program: Program) -> str:
    """Return a table of all instructions: op, node, memory of the results, and memory of the operands."""
    places = [b.name and format_node_reference(b.name) for b in program.buffers]
    rows = [("step", "op", "writes", "reads", "with")]
    for step, i in enumerate(program.instructions):
        writes = ", ".join(_format_tensor_spec_and_location(t, places) for t in i.dst)
        reads = ", ".join("_" if t is None else _format_tensor_spec_and_location(t, places) for t in i.src)
        rows.append(
            (str(step), i.op, f"{format_node_reference(i.node)} = {writes}", reads, _format_non_default_attributes(i))
        )
    ends = [("input", program.inputs), ("output", program.outputs)]
    rows += [
        ("", end, f"{name} = {_format_tensor_spec_and_location(t, places)}", "", "")
        for end, found in ends
        for name, t in found.items()
    ]
    return "\n".join([format_count(len(program.instructions), "step"), *format_table(rows, "rllll")])


def _format_tensor_spec_and_location(tensor: Tensor, places: Sequence[str]) -> str:
    """Return the spec and the location of a tensor as text: ``f32[1,64]@256`` is at byte 256 of the arena.

    A tensor in a buffer of its own has the name of the buffer: ``f32[128,64]@%token_embd.weight``.
    """
    where = f"{places[tensor.buffer]}{f'+{tensor.offset}' if tensor.offset or not places[tensor.buffer] else ''}"
    _, _, strides = str(tensor).partition(" strides ")
    return f"{tensor.spec}@{where.lstrip('+')}" + (f" by {strides}" if strides else "")


def _format_non_default_attributes(i: Instruction) -> str:
    """Return the attributes of an instruction that differ from the defaults of the op, as text."""
    defaults = REGISTRY[i.op].defaults
    return ", ".join(f"{k}={format_attribute(v)}" for k, v in i.attrs.items() if k not in defaults or defaults[k] != v)


# ---------------------------------------------------------------------------------------------------------- a plan


def _format_distinct_programs(plan: Plan, text: Callable[[Program], str]) -> str:
    """Format the program of each device by the function `text`, and join the texts; equal texts are shown once."""
    devices: dict[str, list[str]] = {}
    for device_plan in plan.device_plans:
        devices.setdefault(text(device_plan.program), []).append(str(device_plan.device))
    return _format_texts_with_device_names(devices)


def _format_texts_with_device_names(devices: Mapping[str, Sequence[str]]) -> str:
    """Join texts, each after the names of the devices that share it."""
    return "\n\n".join(f"{' '.join(names)}: {text}" for text, names in devices.items())


def format_fusion(program: Program, fusion: ProgramFusion) -> str:
    """Return a table of the generated kernels that compute several instructions, and a line with their sums.

    ``saved`` is the memory traffic that separate kernels would have in addition. A second table has the kernels that
    run further ops on each block of columns of their result. A last line counts the groups that run as one step.
    """
    rows = [("steps", "ops", "over", "results", "saved")]
    kernels = [kernel for kernel in fusion.expressions if len(kernel.instruction_numbers) > 1]
    for kernel in kernels:
        steps = [program.instructions[n] for n in kernel.instruction_numbers]
        places = {(t.buffer, t.offset): format_node_reference(i.node) for i in steps for t in i.dst}
        results = join_first_names([places[t.buffer, t.offset] for _, t in kernel.results])
        saved = format_bytes(kernel.saved_bytes)
        numbers = join_first_names([str(n) for n in kernel.instruction_numbers])
        rows.append((numbers, " ".join(i.op for i in steps), str(list(kernel.shape)), results, saved))
    together = sum(len(kernel.instruction_numbers) for kernel in kernels)
    saved = format_bytes(sum(kernel.saved_bytes for kernel in kernels))
    head = (
        f"{format_count(len(kernels), 'fused kernel')} for {together} of "
        f"{format_count(len(program.instructions), 'step')}, {saved} not moved"
    )
    table = format_table(rows, "llllr") if kernels else []
    hooked = _format_hooked_kernels(program, fusion) if fusion.hooked else []
    matmuls = sum(len(joined) - 1 for joined in fusion.joined)
    joined = ["", f"{len(fusion.joined)} norms run right before {matmuls} kernels that read them"] if matmuls else []
    return "\n".join([head, *table, *hooked, *joined])


def _format_hooked_kernels(program: Program, fusion: ProgramFusion) -> list[str]:
    """Return a line and a table of the kernels that call further ops on each block of columns of their result."""
    rows = [("steps", "body", "ops on each panel", "over", "columns")]
    for hooked in fusion.hooked:
        (*_, body), *hooks = ([program.instructions[n] for n in stage] for stage in hooked.stages)
        numbers = join_first_names([str(n) for stage in hooked.stages for n in stage])
        ops = "; ".join(" ".join(i.op for i in hook) for hook in hooks)
        columns = "any" if hooked.panel_columns == 1 else f"multiples of {hooked.panel_columns}"
        rows.append((numbers, f"{body.op} {body.node}", ops, str(list(body.dst[0].shape)), columns))
    count = sum(len(stage) for hooked in fusion.hooked for stage in hooked.stages[1:])
    return [
        "",
        f"{format_count(len(fusion.hooked), 'kernel')} with hooks for {format_count(count, 'step')}",
        *format_table(rows, "lllll"),
    ]


def _format_fused_kernels(plan: Plan) -> str:
    """Return the fused kernels of each device; equal texts are shown once."""
    devices: dict[str, list[str]] = {}
    for device_plan in plan.device_plans:
        text = "its backend generates no fused kernels"
        if isinstance(device_plan.backend, GeneratesFusedKernels):
            text = format_fusion(device_plan.program, device_plan.backend.describe_fusion(device_plan.program))
        devices.setdefault(text, []).append(str(device_plan.device))
    return _format_texts_with_device_names(devices)


PASS_DUMPS: Mapping[str, Callable[[Plan], str]] = MappingProxyType(
    {
        "graph": lambda plan: format_graph(plan.graph),
        "factors": lambda plan: format_factor_tables(Factors(plan.graph)),
        "layouts": lambda plan: format_layouts(plan.leaves, plan.outputs),
        "shards": lambda plan: format_device_graphs([device_plan.graph for device_plan in plan.device_plans]),
        "memory": lambda plan: _format_distinct_programs(plan, format_memory_map),
        "steps": lambda plan: _format_distinct_programs(plan, format_program),
        "fused": _format_fused_kernels,
    }
)
"""The dump of each planner pass for `hocket plan --show`, in the order of the passes."""
