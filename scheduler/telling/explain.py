"""The plan report: cost, memory, and for each timeline entry its devices, its time and its reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...backends.abilities import Meets
from ...graph.attrs import quote_node_name
from ...graph.graph import assign_names
from ...graph.layer_folding import find_repetitions
from ...graph.node import Node, Value
from ...ops import REGISTRY
from ...ops.collectives import find_collective_number
from ..layout import Local, Shard
from ..lowering.lane import Lane
from ..machines.hardware import leaf_of
from ..plan import Plan
from ..stages import WORK, Stage, met_bytes
from ..succession import followed, gain, stages_text
from ..units import columns, nbytes_text, places, time_text
from .critical import critical_path
from .evenness import evenness
from .hints import Hint, hints
from .listing import program_text, ref


def explain(plan: Plan, *, steps: bool = False) -> str:
    """Return the report of a plan: summary, reasons, memory, weight balance and timeline.

    With `steps`, the instructions of each device follow.
    """
    lines = [summary(plan), *(f"  {reason}" for reason in reason_lines(plan))]
    lines += ["", *memory_table(plan), ""]
    if uneven := evenness(plan):
        lines += [*uneven.lines(), ""]
    lines += stage_table(plan)
    if steps:
        for lane in plan.lanes:
            lines += ["", f"{lane.device}: {program_text(lane.program)}"]
    return "\n".join(lines)


def summary(plan: Plan) -> str:
    """Return nodes, steps, collectives by kind, arithmetic and time in one line."""
    views = sum(not n.is_leaf and REGISTRY[n.op].is_view for n in plan.graph.nodes)
    longest = max(len(lane.program.instructions) for lane in plan.lanes)
    counts: dict[str, int] = {}
    for stage in plan.stages:
        if stage.op != WORK:
            name = "copy" if stage.op == "send" else stage.op
            counts[name] = counts.get(name, 0) + 1
    meetings = ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "no collectives"
    where = places([str(lane.device) for lane in plan.lanes])
    simulated = " (simulated)" if plan.lanes[0].backend.name == "simulated" else ""
    idle = f"{places(plan.spare)} left free; " if plan.spare else ""
    if len(plan.lanes) > 1 and len(plan.stages) == 1 and not _parted(plan):
        idle += f"each of {len(plan.lanes)} devices does all; "
    return (
        f"{idle}{len(plan.graph.nodes)} nodes, {views} of them views; {longest} steps on {where}{simulated}; "
        f"{meetings}; {plan.flops() / 1e6:.1f} MFLOP; {time_text(plan.cost.total)} a run estimated, "
        f"{time_text(plan.cost.collectives)} of it in collectives; speeds: {plan.hardware.source}"
    )


def _parted(plan: Plan) -> bool:
    """Return whether devices have different parts of a weight, a state or an output."""
    return any(isinstance(layout, Shard | Local) for layout in (*plan.leaves.values(), *plan.outputs.values()))


def reason_lines(plan: Plan) -> list[str]:
    """Return the lines about the search, which are the plan's reasons, and about its results."""
    return [
        *plan.reasons,
        *made_lines(plan),
        *placement_lines(plan),
        *meeting_lines(plan),
        *path_lines(plan),
        *beside_lines(plan),
        *following_lines(plan),
        *stand_in_lines(plan),
    ]


def made_lines(plan: Plan) -> list[str]:
    """Return a line with the time of the plan.

    It differs from the search's times, because the programs contain copies that the search does not see.
    """
    if not plan.cuts:
        return []
    return [f"with all that the programs copy: {time_text(plan.cost.total)}, {plan.cost.meetings} collectives"]


def placement_lines(plan: Plan) -> list[str]:
    """Return a line for each reason why nodes run on one device alone."""
    lines = []
    for placed in plan.placed:
        first, *others = (f"%{name if name.isdecimal() else quote_node_name(name)}" for name in placed.nodes)
        shown = first if not others else f"{first}, {others[0]}" if len(others) == 1 else f"{first} to {others[-1]}"
        count = f"{len(placed.nodes)} node{'s' if others else ''}"
        lines.append(f"{plan.lanes[placed.device].device} alone runs {count} ({shown}): {placed.because}")
    return lines


def meeting_lines(plan: Plan) -> list[str]:
    """Return how the devices of each backend exchange data, if the backend has several transports."""
    kinds: dict[type, list[Lane]] = {}
    for lane in plan.lanes:
        kinds.setdefault(type(lane.backend), []).append(lane)
    lines = []
    for lanes in kinds.values():
        devices, backend = [lane.device for lane in lanes], lanes[0].backend
        if isinstance(backend, Meets) and len(devices) > 1:
            how = (
                backend.meeting(devices)
                if len(kinds) == 1
                else "through memory of the host, as devices of several kinds do"
            )
            lines.append(f"{places(list(map(str, devices)))} meet {how}")
    return lines


def path_lines(plan: Plan) -> list[str]:
    """Return the shares of devices and collectives on the critical path, for several devices."""
    if len(plan.lanes) == 1 or not plan.cost.total:
        return []
    seconds: dict[str, float] = defaultdict(float)
    for link in critical_path(plan.stages, len(plan.lanes)):
        name = "collectives" if link.device is None else f"work of {plan.lanes[link.device].device}"
        seconds[name] += link.stage.seconds
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)
    shares = (f"{seconds[name] / plan.cost.total:.0%} {name}" for name in ranked)
    return [f"the time of a run is {', '.join(shares)}"]


def beside_lines(plan: Plan) -> list[str]:
    """Return the time saved by computation during collectives."""
    if not (hidden := plan.cost.hidden):
        return []
    lanes = {id(lane.program): lane for lane in plan.lanes}.values()
    steps = [lane.program.instructions[at] for lane in lanes for at in lane.meanwhile]
    met = {find_collective_number(i.op, i.attrs) for i in steps}
    return [f"devices compute beside {len(met)} of {plan.cost.meetings} collectives, which saves {time_text(hidden)}"]


def following_lines(plan: Plan) -> list[str]:
    """Return the speedup of pipelined runs."""
    times, through = gain(plan), stages_text(followed(plan), len(plan.lanes))
    if times < 1.01:
        return []
    return [f"runs that follow each other through {through} are {times:.2f} times as fast as one by one"]


def stand_in_lines(plan: Plan) -> list[str]:
    """Return a line for each kind of device with ops that have no compiled kernel, so that NumPy computes them."""
    nodes: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for lane in plan.lanes:
        for position in lane.stand_ins():
            instruction = lane.program.instructions[position]
            nodes[lane.device.kind][instruction.op].add(instruction.index)
    lines = []
    for kind, by_op in nodes.items():
        counts = ", ".join(f"{op} ({len(numbers)})" for op, numbers in sorted(by_op.items()))
        lines.append(f"{kind} has no compiled kernel for these nodes, which NumPy computes: {counts}")
    return lines


def memory_table(plan: Plan) -> list[str]:
    """Return the bytes on each device by kind, and the free memory.

    The saved bytes for the undo of a failed run are a part of the compute memory.
    """
    rows: list[tuple[str, ...]] = [("device", "weights", "states", "constants", "compute", "to undo", "free after")]
    for lane in plan.lanes:
        held = lane.memory()
        free = "-"
        if lane.device.memory is not None:
            own = (lane.device.kind, lane.device.index)
            parts = [other for other in plan.lanes if (other.device.kind, other.device.index) == own]
            left = lane.device.memory - sum(sum(part.memory().values()) for part in parts)
            free = nbytes_text(left) if left >= 0 else f"{nbytes_text(-left)} short"
        kinds = ("weight", "state", "constant", "arena")
        sizes = (*(held[k] for k in kinds), lane.program.saved_bytes)
        rows.append((str(lane.device), *(nbytes_text(n) if n else "-" for n in sizes), free))
    return columns(rows, "lrrrrrr")


def stage_table(plan: Plan) -> list[str]:
    """Return one row per timeline entry; repeated sequences of entries, such as layers, are shown once and counted."""
    reasons, advice = Reasons(plan), hints(plan)
    rows = [("stage", "where", "nodes", "reads", "moved", "est", "uncut", "because")]
    table: list[tuple[str, ...]] = []
    for number, stage in enumerate(plan.stages):
        said = [reasons.of(stage), *(f"hint: {hint}" for hint in reasons.hints(stage, advice))]
        table.append(_row(plan, number, stage, "; ".join(said)))
    kept: list[tuple[str, ...]] = []
    notes: dict[int, str] = {}
    for start, length, times in find_repetitions([_likeness(row) for row in table]):
        kept += table[start : start + length]
        if times > 1:
            last = start + length * times - 1
            notes[len(kept)] = f"     … these {length} stages {times - 1} times more, to stage {last}"
    lines = columns([*rows, *kept], "rlrrrrrl")
    for at in sorted(notes, reverse=True):
        lines.insert(at + 1, notes[at])
    return lines


def _row(plan: Plan, number: int, stage: Stage, because: str) -> tuple[str, ...]:
    """Return the table row of one timeline entry."""
    where = places([str(plan.lanes[d].device) for d in stage.devices])
    if stage.op == "send":
        where = " -> ".join(str(plan.lanes[d].device) for d in sorted(stage.devices, key=lambda d: d != stage.source))
    if stage.op != WORK:
        where = f"{'copy' if stage.op == 'send' else stage.op} {where}"
    reads, moved = (nbytes_text(n) if n else "-" for n in (stage.reads, stage.moved))
    uncut = "-" if stage.uncut is None else time_text(stage.uncut)
    if stage.beside:
        because = f"beside the meeting before it; {because}"
    return str(number), where, str(stage.count), reads, moved, time_text(stage.seconds), uncut, because


def _likeness(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return the common part of the rows of two layers: all cells, without numbers in names."""
    return (*row[1:-1], re.sub(r"\d+", "N", row[-1]))


class Reasons:
    """The reasons for timeline entries, read from the graphs of the devices and the layouts of their leaves."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.because = _because(plan)
        self.shapes = {name: [spec.shape for spec in node.specs] for node, name in assign_names(plan.graph).items()}

    def of(self, stage: Stage) -> str:
        """Return the reason for a timeline entry."""
        nodes = self._nodes(stage)
        if stage.op == WORK:
            return self._work(nodes, stage.devices)
        return self._meeting(self.plan.lanes[stage.source], stage, nodes[0])

    def hints(self, stage: Stage, advice: Mapping[str, Hint]) -> list[Hint]:
        """Return the hints of `advice` about weights that an entry reads."""
        read = (leaf_of(s).name for n in self._nodes(stage) for s in n.inputs) if stage.op == WORK else ()
        return list(dict.fromkeys(advice[name] for name in read if name in advice))

    def _nodes(self, stage: Stage) -> list[Node]:
        """Return the nodes that an entry computes, from the graph of its first device."""
        lane = self.plan.lanes[stage.source]
        instructions = lane.program.instructions[stage.first : stage.first + stage.count]
        return [lane.graph.nodes[i.index] for i in instructions if i.index >= 0]

    def _work(self, nodes: Sequence[Node], devices: Sequence[int]) -> str:
        """Return the reason for work: the largest pinned leaf and the largest sharded leaf that the entry reads."""
        because = {name: why for name, (device, why) in self.because.items() if device in devices}
        leaves = {leaf_of(s).name: leaf_of(s) for n in nodes for s in n.inputs}
        kept = [n for n in leaves.values() if n.op in ("weight", "state") and n.name in self.plan.leaves]
        special = [n for n in kept if isinstance(self.plan.leaves[n.name], Shard | Local)]
        if not special:
            why = [because[n.name] for n in nodes if n.name in because]
            return f"placed here: {why[0]}" if why else self._whole(nodes)
        cut = [n for n in special if isinstance(self.plan.leaves[n.name], Shard)]
        local = [n for n in special if n not in cut]
        said = []
        if local:
            most, others = _largest(local)
            said.append(f"%{most.label}{others} placed here: {because.get(most.name, 'nothing else reads it')}")
        if cut:
            most, others = _largest(cut)
            said.append(f"%{most.label}{others} cut on axis {self._axis(most)}")
        return "; ".join(said)

    def _whole(self, nodes: Sequence[Node]) -> str:
        """Return the reason for work that reads no sharded weight; it may read a part of a replicated one."""
        read = [(s, leaf_of(s)) for n in nodes if not REGISTRY[n.op].is_view for s in n.inputs]
        stored = [(s, leaf) for s, leaf in read if leaf.op in ("weight", "state")]
        if part := [leaf for s, leaf in stored if s.spec.nbytes < leaf.specs[0].nbytes]:
            return f"a part of %{part[0].label}, which is whole on each device"
        if stored:
            return "its weights are whole on each device"
        for s, _ in read:
            if s.shape != self.shapes.get(s.node.name, [s.shape] * (s.index + 1))[s.index]:
                return f"{named(s)} lies in shards, with which each device goes on"
        return "what it reads is whole on each device"

    def _meeting(self, lane: Lane, stage: Stage, node: Node) -> str:
        """Return the reason for a collective or a message."""
        if stage.op == "send":
            to = self.plan.lanes[next(d for d in stage.devices if d != stage.source)].device
            return f"{named(node.inputs[0])} is made on {lane.device} and read on {to}"
        source = node.inputs[0]
        cut = self._cut_behind(source.node)
        because = "" if cut is None else f": %{cut.label} is cut on axis {self._axis(cut)}"
        if stage.op == "all_gather":
            return f"{named(source)} lies in shards and is read whole{because}"
        whose = ", of which each keeps its own rows" if stage.op == "reduce_scatter" else ""
        return f"{named(source)} is a sum over the devices{whose}{because}{self._way(lane, stage)}"

    def _way(self, lane: Lane, stage: Stage) -> str:
        """Return how a sum over several machines is computed, if it is first computed within each machine."""
        met = self.plan.hardware.collective(stage.op, met_bytes(lane.program.instructions[stage.first]), stage.devices)
        if not (met.inside and met.across):
            return ""
        over = f"{met.machines} x {len(stage.devices) // met.machines}"
        return f"; {stage.op} over {over}: {time_text(met.inside)} inside, {time_text(met.across)} across"

    def _axis(self, leaf: Node) -> int:
        """Return the axis on which a leaf is sharded."""
        layout = self.plan.leaves[leaf.name]
        assert isinstance(layout, Shard)
        return layout.axis

    def _cut_behind(self, node: Node) -> Node | None:
        """Return the nearest sharded weight or state from which a value is computed."""
        queue, seen = [node], {node}
        for here in queue:
            leaves = [s.node for s in here.inputs if s.node.is_leaf]
            for leaf in leaves:
                if isinstance(self.plan.leaves.get(leaf.name), Shard):
                    return leaf
            fresh = [s.node for s in here.inputs if s.node not in seen and not s.node.is_leaf]
            queue += fresh
            seen.update(fresh)
            if len(seen) > 1000:
                break
        return None


def _largest(leaves: Sequence[Node]) -> tuple[Node, str]:
    """Return the leaf with the most bytes, and a text with the count of the others."""
    return max(leaves, key=lambda n: n.specs[0].nbytes), f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""


def named(value: Value) -> str:
    """Return a value of a device's graph by its name in a dump of the user's graph."""
    return ref(value.node.name or value.node.op) + (f"#{value.index}" if len(value.node.specs) > 1 else "")


def _because(plan: Plan) -> dict[str, tuple[int, str]]:
    """Return the pinned device and the reason for nodes by name, and for the weights and states that they read."""
    said = {name: (placed.device, placed.because) for placed in plan.placed for name in placed.nodes}
    reasons = dict(said)
    for node, name in assign_names(plan.graph).items() if said else ():
        for leaf in map(leaf_of, node.inputs):
            if name in said:
                reasons.setdefault(leaf.name, said[name])
    return reasons
