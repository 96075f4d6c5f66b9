"""The data of a plan for a page: timeline rows, the cost of each instruction, and memory over steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, groupby
from typing import Any

from ..graph.dtypes import DType
from ..graph.node import Node
from ..graph.spec import Spec
from ..ops.collectives import find_collective_sequence_number
from ..scheduler.costs.timeline import COMPUTE, InstructionCost, TimelineEntry
from ..scheduler.ir.execution_plan import Plan
from ..scheduler.lowering.device_plan import DevicePlan, find_first_devices_with_same_program
from ..scheduler.reports.explain import TimelineReasons, format_decision_lines, format_summary
from ..scheduler.reports.measured_steps import MeasuredPlan
from ..scheduler.reports.pass_dumps import compute_memory_and_last_use_by_step
from ..scheduler.reports.placement_hints import suggest_weights_for_single_device
from ..scheduler.reports.value_layouts import format_value_layouts
from .graph_data import GraphData, format_spec_and_bytes
from .intern_table import InternTable


class PlanData:
    """The data of a plan for a page. The data of the plan's graph is not included."""

    def __init__(self, plan: Plan, graph: GraphData, times: MeasuredPlan | None = None) -> None:
        self.plan, self.graph, self.times = plan, graph, times
        self.node = {name: node for node, name in graph.names.items()}
        numbers: dict[int, int] = {}
        self.program = [
            numbers.setdefault(first, len(numbers)) for first in find_first_devices_with_same_program(plan.device_plans)
        ]
        self.first = [self.program.index(p) for p in range(len(numbers))]
        self.reasons = TimelineReasons(plan)
        self.texts = InternTable[str]("")
        self.costs = InternTable[InstructionCost]()
        self.specs = InternTable[tuple[tuple[int, ...], DType]]()
        self.kernels = InternTable[tuple[str, str, str]]()
        self.calls = InternTable[tuple[tuple[int, ...], int]](((), 0))

    def build_page_data(self) -> dict[str, Any]:
        """Build the page data of the plan, as plain data for JSON."""
        plan = self.plan
        programs = [self._build_instruction_columns(p) for p in range(len(self.first))]
        rows = [self._build_timeline_row(*row) for row in self._iterate_timeline_rows([p["block"] for p in programs])]
        layouts = format_value_layouts(plan)
        advice = suggest_weights_for_single_device(plan, layouts)
        measured = None if self.times is None else self._build_measured_kernel_and_time_columns(self.times)
        return {
            "summary": format_summary(plan),
            "cost": {
                "total": plan.cost.total,
                "collectives": plan.cost.collectives,
                "meetings": plan.cost.collective_count,
            },
            "decisions": format_decision_lines(plan),
            "hinted": {self.graph.number[self.node[name]]: str(hint) for name, hint in advice.items()},
            "devices": [self._build_device_data(d) for d in range(len(plan.device_plans))],
            "programs": programs,
            "rows": rows,
            "layouts": list(map(self.texts, layouts.values())),
            "measured": measured,
            "texts": self.texts.items,
            "specs": [format_spec_and_bytes(Spec(*parts)) for parts in self.specs.items],
            "kernels": self.kernels.items,
            "calls": self.calls.items,
            "costs": [
                [c.flops, c.nbytes, c.bytes_sent, _round_seconds(c.seconds), _round_seconds(c.unsharded_seconds)]
                for c in self.costs.items
            ],
        }

    def _build_device_data(self, d: int) -> dict[str, Any]:
        device_plan = self.plan.device_plans[d]
        return {
            "name": str(device_plan.device),
            "backend": device_plan.backend.name,
            "about": device_plan.device.description,
            "memory": device_plan.device.memory,
            "program": self.program[d],
            "held": {**device_plan.count_memory_bytes_by_kind(), "undo": device_plan.program.undo_bytes},
            "speeds": asdict(self.plan.speeds[d]),
        }

    def _build_measured_kernel_and_time_columns(self, times: MeasuredPlan) -> dict[str, Any]:
        """Build the columns of measured times from a trace: the kernel and the seconds of each instruction, by device.

        The column `together` has the number of instructions that the same kernel computes, if they are fused.
        """
        columns = [
            {
                "kernel": [-1 if s is None else self.texts(s.kernel) for s in steps],
                "seconds": [None if s is None else _round_seconds(s.seconds) for s in steps],
                "together": [0 if s is None else s.steps_in_kernel for s in steps],
            }
            for steps in times.steps_by_device
        ]
        return {
            "label": times.label,
            "runs": times.run_count,
            "seconds": _round_seconds(times.median_run_seconds),
            "exact": times.has_equal_shapes,
            "devices": columns,
        }

    # ------------------------------------------------------------------------------------------------ instructions

    def _build_instruction_columns(self, number: int) -> dict[str, Any]:
        """Build the columns of program `number`, with an entry for each instruction.

        The column `own` has the names of instructions that the planner added.
        """
        device_plan, device = self.plan.device_plans[self.first[number]], self.first[number]
        program = device_plan.program
        prices = self.plan.instruction_costs[device]
        ops, own, origin = InternTable[str](), {}, []
        for at, i in enumerate(program.instructions):
            node, is_own = self._find_user_node_of_instruction(number, at)
            origin.append(-1 if node is None else self.graph.number[node])
            if is_own:
                own[at] = i.node
        live, last = compute_memory_and_last_use_by_step(program)
        return {
            "ops": (columns := [ops(i.op) for i in program.instructions]) and ops.items,
            "op": columns,
            "node": origin,
            "own": own,
            "block": self._assign_instruction_blocks(origin),
            "cost": [self.costs(prices.get_cost(at)) for at in range(len(program.instructions))],
            "spec": [self.specs((i.dst[0].shape, i.dst[0].dtype)) for i in program.instructions],
            "calls": self._number_distinct_kernel_calls(device_plan),
            "last": last,
            "live": live,
            "kept": program.undo_bytes,
        }

    def _number_distinct_kernel_calls(self, device_plan: DevicePlan) -> list[int]:
        """Return for each instruction the number of the kernel call that computes it; equal calls have equal numbers.

        A call is a pair: its kernels, and how many instructions they compute. Number 0 is the empty call, for a backend
        that does not report kernels.
        """
        kernels: list[list[int]] = [[] for _ in device_plan.program.instructions]
        together = [0] * len(kernels)
        for called in device_plan.predicted_kernel_calls or ():
            number = self.kernels((called.kernel, called.source.file_and_line, called.source.text))
            for at in called.instruction_numbers:
                kernels[at] += [number] if number not in kernels[at] else []
                together[at] = len(called.instruction_numbers)
        return [self.calls((tuple(own), count)) for own, count in zip(kernels, together, strict=True)]

    def _find_user_node_of_instruction(self, number: int, at: int) -> tuple[Node | None, bool]:
        """Find the user node that an instruction computes or converts, and whether it only converts."""
        device_plan = self.plan.device_plans[self.first[number]]
        i = device_plan.program.instructions[at]
        user = self.node.get(i.node)
        local = device_plan.graph.nodes[i.index] if i.index >= 0 else None
        if local is not None and user is not None and user.op == i.op:
            return user, False
        if local is None:  # a copy of a state, named for it
            return self.node.get(i.node.rpartition(".")[0]), True
        if local.op == "receive":
            return self.node.get(i.node.rpartition(".from.")[0]), True
        while local.inputs:
            local = local.inputs[0].node
            name = local.name.rpartition(".from.")[0] if local.op == "receive" else local.name
            if name in self.node:
                return self.node[name], True
        return None, True

    def _assign_instruction_blocks(self, node_numbers: Sequence[int]) -> list[int]:
        """Return for each instruction the number of the graph block to which it belongs on the page.

        The page shows blocks one after the other. Instructions of an earlier block that follow a later block count as
        part of the later one. The exception is a sequence that contains a whole block: a device may compute an encoder
        between two blocks of a decoder.
        """
        nodes, own = self.graph.graph.nodes, list[int]()
        for node in node_numbers:
            own.append(self.graph.block.get(nodes[node], own[-1] if own else 0) if node >= 0 else own[-1] if own else 0)
        first, last = {b: at for at, b in reversed([*enumerate(own)])}, {b: at for at, b in enumerate(own)}
        reached = list(accumulate(own, max))
        for _, stretch in groupby(range(len(own)), key=lambda at: (own[at] < reached[at], reached[at])):
            start, *rest = stretch
            end = rest[-1] if rest else start
            if not any(start <= first[own[at]] and last[own[at]] <= end for at in (start, *rest)):
                own[start : end + 1] = reached[start : end + 1]
        return own

    # -------------------------------------------------------------------------------------------------------- rows

    def _iterate_timeline_rows(
        self, block: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, int, dict[int, tuple[int, int]], list[int]]]:
        """Yield the rows of the timeline: computations that run in parallel, and collectives between them.

        Each row is the tuple (op, block, instructions, devices). `instructions` maps each program to the pair (first
        instruction, count).
        """
        done = [0] * len(self.plan.device_plans)
        collectives: dict[int, dict[int, int]] = defaultdict(dict)
        for d, device_plan in enumerate(self.plan.device_plans):
            for at, i in enumerate(device_plan.program.instructions):
                if (number := find_collective_sequence_number(i.op, i.attrs)) is not None:
                    collectives[number][d] = at

        def work(until: Mapping[int, int]) -> Iterator[tuple[str, int, dict[int, tuple[int, int]], list[int]]]:
            cells: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
            for d, end in until.items():
                blocks, times = block[self.program[d]], Counter[int]()
                for b, run in groupby(range(done[d], end), key=blocks.__getitem__):
                    first, *rest = run
                    cells[b, times[b]][d] = (first, 1 + len(rest))
                    times[b] += 1
                done[d] = end
            for b, time in sorted(cells):
                there = cells[b, time]
                yield COMPUTE, b, {self.program[d]: cell for d, cell in there.items()}, list(there)

        for number in sorted(collectives):
            there = collectives[number]
            yield from work(there)
            ops = {d: self.plan.device_plans[d].program.instructions[at].op for d, at in there.items()}
            sender = next((d for d in there if ops[d] == "send"), min(there))
            devices = [sender, *(d for d in there if d != sender)]
            b = block[self.program[sender]][there[sender]]
            yield ops[sender], b, {self.program[d]: (at, 1) for d, at in there.items()}, devices
            for d, at in there.items():
                done[d] = at + 1
        yield from work(
            {d: len(device_plan.program.instructions) for d, device_plan in enumerate(self.plan.device_plans)}
        )

    def _build_timeline_row(
        self, op: str, block: int, cells: Mapping[int, tuple[int, int]], devices: list[int]
    ) -> list[Any]:
        explained_devices = (
            {self.program[d]: d for d in reversed(devices)}.items()
            if op == COMPUTE
            else [(self.program[devices[0]], devices[0])]
        )
        because = [
            self.texts(
                self.reasons.explain_devices_or_collective(
                    TimelineEntry(op, (d,) if op == COMPUTE else tuple(devices), *cells[p], 0.0, 0.0, 0.0, None, d)
                )
            )
            for p, d in explained_devices
        ]
        return [op, block, [[p, *cell] for p, cell in cells.items()], devices, list(dict.fromkeys(reversed(because)))]


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
