"""A graph becomes a program: nodes in order, every value at its place in a buffer."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import MappingProxyType

from ...backends.abilities import ReportsFusion, can_group_overlap
from ...backends.base import Backend, BufferSpec, Device, Instruction, Program, Tensor
from ...backends.beside import can_be_overlapped
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.repeated_runs import PREAMBLE, DeviceRepetitions
from ...graph.spec import Spec
from ...ops import op_of
from ...ops.collectives import COLLECTIVES
from ...ops.elementwise.binary import cont
from ...ops.registry import find_inplace_operand, find_storage_kind
from .alike import skeleton
from .arena import Arena, Lifetime, place, place_by_runs
from .order import Schedule, may_overwrite, schedule, settle
from .strides import Strided, densify
from .undo import Save, saves

ARENA = 0
_OWN_BUFFER = ("weight", "state", "constant")
Gathered = dict[Hashable, Sequence[Sequence[int]]]
"""The numbers of nodes that backends run at once, by the skeleton of their graph."""


def lower(graph: Graph, backend: Backend, on: Device) -> tuple[Graph, Program]:
    """The program of `graph` on one device, and the graph it runs (with the `cont` nodes that kernels needed).

    Raises `PlanError` naming the first node the device cannot run.
    """
    check_support(graph, backend, on)
    graph, program, _ = lower_with_saves(graph, backend, on)
    return graph, program


def lower_with_saves(
    graph: Graph, backend: Backend, on: Device, runs: DeviceRepetitions | None = None, gathered: Gathered | None = None
) -> tuple[Graph, Program, tuple[Node, ...]]:
    """What `lower` gives, and the nodes that save states and put them back, which the graph does not have; the device
    can run all nodes of `graph`.  Where it has `runs`, they may be repeated.  Groups of nodes that
    the backend runs at once are kept in `gathered`, by `skeleton`.  An entry there is used if its order is right for
    this graph, too.  Otherwise the backend is asked."""
    graph, views = densify(settle(graph), backend.reads_strided)
    order = schedule(
        graph,
        views,
        lambda value: backend.stored(value.spec, find_storage_kind(value)),
        can_group_overlap([(backend, on)]),
    )
    groups: Sequence[Sequence[Node]] = ()
    if isinstance(backend, ReportsFusion):
        known, key = {} if gathered is None else gathered, skeleton(graph)
        if (groups := _groups_at(graph, known.get(key, ()))) and not order.allows(chain(*groups), views):
            groups = ()
        if not groups:
            roomy = _Lowering(graph, backend, on, views, order, is_roomy=True)
            known[key] = roomy.numbers_of(backend.list_fused_groups(roomy.program(), on))
            groups = _groups_at(graph, known[key])
    lowering = _Lowering(graph, backend, on, views, order, runs, groups)
    added = tuple(node for some in lowering.saves.values() for save in some for node in (save.keep, save.back))
    return graph, lowering.program(), added


def check_support(graph: Graph, backend: Backend, on: Device) -> None:
    """Raise `PlanError` naming the first node the device cannot run."""
    for node in graph.nodes:
        if node.is_leaf or op_of(node).is_view:
            continue
        if not (support := backend.supports(node, on)).ok:
            raise PlanError(f"{node!r} cannot run on {on}: {support.reason}")


def _groups_at(graph: Graph, numbers: Sequence[Sequence[int]]) -> Sequence[Sequence[Node]]:
    """The nodes of these numbers, group by group."""
    return [[graph.nodes[number] for number in group] for group in numbers]


def _run_by_run(groups: Sequence[Sequence[Node]], run_of: Mapping[Node, int]) -> Sequence[Sequence[Node]]:
    """The groups in the order of the runs that they belong to, one that belongs to several in parts: no node reads what
    a later run makes."""
    parted: dict[int, list[Sequence[Node]]] = defaultdict(list)
    for group in groups:
        its: dict[int, list[Node]] = defaultdict(list)
        for node in group:
            its[run_of[node]].append(node)
        for run, part in its.items():
            parted[run].append(part)
    return [part for _, parts in sorted(parted.items()) for part in parts]


@dataclass(frozen=True, slots=True)
class _Slots:
    """What shares memory: `slot_of` maps each base value to the value in whose memory it lies; `until` is the last step
    that runs beside a collective."""

    slot_of: Mapping[Value, Value]
    last_read: Mapping[Value, int]
    step: Mapping[Node, int]
    until: Mapping[Node, int]


class _Lowering:
    """One graph on its way to a program; lives for one call of `lower`.

    Of nodes in `groups`, each of which the backend may run at once, none writes where another of its group reads.
    Where it `is_roomy` no memory is used twice, so that nothing but the graph says what can run together.
    """

    def __init__(
        self,
        graph: Graph,
        backend: Backend,
        on: Device,
        views: Mapping[Value, Strided],
        order: Schedule,
        runs: DeviceRepetitions | None = None,
        groups: Sequence[Sequence[Node]] = (),
        is_roomy: bool = False,
    ) -> None:
        self.graph, self.backend, self.order, self.runs = graph, backend, order, runs
        self.called, self.views = assign_names(graph), dict(views)
        self.can_overlap_collectives = can_group_overlap([(backend, on)])
        self.kept: dict[Value, Spec] = {}
        self.tensors: dict[Value, Tensor] = {}
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.saves: dict[Node | None, list[Save]] = defaultdict(list)  # by the node that they precede
        for save in saves(order, views, backend, on):
            self.saves[save.make_writer].append(save)
            self.views.update(save.views)
            state = save.state.node.name
            self.called.update({save.keep: f"{state}.save", save.back: f"{state}.undo"})
        groups = groups or [(n,) for n in order.nodes if not n.is_leaf and not op_of(n).is_view]
        run_of = {} if runs is None else runs.kind_by_node(graph)
        if groups and run_of:
            groups = _run_by_run(groups, run_of)
        self.group_of, self.is_roomy = {node: group for group in groups for node in group}, is_roomy
        self.work = [*self.group_of]
        self.run_at = list(accumulate((run_of[node] for node in self.work), max)) if runs else []
        self.slots = self._share()
        step = self.slots.step
        self.spans = {step[n]: (step[group[0]], step[group[-1]]) for n, group in self.group_of.items()}
        self.buffers, self.places, self.scratch = self._place()

    def program(self) -> Program:
        instructions: list[Instruction] = []
        undo: list[tuple[int, Instruction]] = []
        for node in (*self.work, None):
            for save in self.saves.get(node, ()):
                keep = self._instruction(save.keep)
                undo.append((len(instructions), self._undoing(save, keep)))
                instructions.append(keep)
            if node is not None:
                instructions.append(self._instruction(node))
        for state, new in self.order.copied.items():
            name = f"{self.called[state.node]}.update"
            source, target = self._tensor(new), self._tensor(state)
            instructions.append(Instruction(cont.name, (source,), (target,), cont.defaults, None, name))
        return Program(
            tuple(self.buffers),
            tuple(instructions),
            MappingProxyType({v.node.name: self._tensor(v) for v in self.graph.inputs}),
            MappingProxyType({name: self._tensor(v) for name, v in self.graph.outputs.items()}),
            tuple(undo),
        )

    def numbers_of(self, groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The numbers of the nodes that these instructions of the program compute."""
        instructions = self.program().instructions
        numbers = ([instructions[n].index for n in group if instructions[n].index >= 0] for group in groups)
        return [group for group in numbers if group]

    def _undoing(self, save: Save, keep: Instruction) -> Instruction:
        """What puts a state back where it lies, as it is kept there."""
        (state, *_), back = keep.src, self._instruction(save.back)
        assert state is not None, "what is saved is there"
        return replace(back, dst=(state,))

    def _all_saves(self) -> Iterator[Save]:
        return (save for saves in self.saves.values() for save in saves)

    def _instruction(self, node: Node) -> Instruction:
        src = tuple(None if s is None else self._tensor(s) for s in node.src)
        dst = tuple(map(self._tensor, node.results))
        index = self.index.get(node, -1)
        return Instruction(node.op, src, dst, node.attrs, self.scratch.get(node), self.called[node], index)

    # ------------------------------------------------------------------------------------------------- sharing

    def _share(self) -> _Slots:
        """Decide in-place results and how long each memory is read; what undoes the step is read when it has ended."""
        step = {n: i for i, n in enumerate(self.work)}
        last_read: dict[Value, int] = {}
        end = len(self.work)
        for node in self.work:
            for source in node.inputs:
                last_read[self.views[source].base] = end if self.is_roomy else step[node]
        if self.runs is not None:  # any run may be the last that reads it
            behind = bisect_left(self.run_at, self.run_at[-1])
            for value, last in last_read.items():
                if self.runs.is_outside_repetitions(value.node) and self.run_at[last] > PREAMBLE and last < behind:
                    last_read[value] = behind - 1
        for value in (*self.graph.outputs.values(), *self.order.copied.values()):
            last_read[self.views[value].base] = end
        slot_of: dict[Value, Value] = dict(self.order.donated)
        for save in self._all_saves():
            step[save.keep], step[save.back] = end if save.make_writer is None else step[save.make_writer], end
            slot_of[save.back.results[0]] = save.state
            for source in (*save.keep.inputs, *save.back.inputs):
                last_read[self.views[source].base] = end
        for node in self.work:
            for index, _ in op_of(node).inplace_pairs(node.attrs):
                result = node.results[index]
                victim = None if result in slot_of else self._victim(result, slot_of, last_read, step)
                if victim is not None:
                    slot_of[result] = victim
                    last_read[victim] = max(last_read[victim], last_read.get(result, step[node]))
        until = self._until(step) if self.can_overlap_collectives else {}
        for node, last in until.items():
            base = self.views[node.inputs[0]].base
            slot = slot_of.get(base, base)
            last_read[slot] = max(last_read.get(slot, last), last)
        return _Slots(slot_of, last_read, step, until)

    def _until(self, step: Mapping[Node, int]) -> dict[Node, int]:
        """For each collective beside which others run the last step of these: up to one that needs its result, or
        meets others.  So long nothing is written where it reads."""
        until: dict[Node, int] = {}
        for at, met in enumerate(self.work):
            if not can_be_overlapped(met.op):
                continue
            last = at
            for node in self.work[at + 1 :]:
                if node.op in COLLECTIVES or any(self.views[s].base.node is met for s in node.inputs):
                    break
                last = step[node]
            if last > at:
                until[met] = last
        return until

    def _victim(
        self, result: Value, slot_of: Mapping[Value, Value], last_read: Mapping[Value, int], step: Mapping[Node, int]
    ) -> Value | None:
        """The memory slot that `result` may take over from its in-place operand, if that dies here."""
        node, source = result.node, find_inplace_operand(result)
        if source is None:
            return None
        base = self.views[source].base
        slot = slot_of.get(base, base)
        dies_here = last_read[base] == last_read.get(slot) == step[node]
        same_size = self._nbytes(base) == self._nbytes(result)
        if (slot.node.is_leaf and slot.node.op != "input") or not dies_here or not same_size:
            return None
        others = [v for v in node.inputs if slot_of.get(self.views[v].base, self.views[v].base) == slot]
        if any(self.views[v].base != base for v in others) or not may_overwrite(result, base, self.views):
            return None
        if any(self.views[v].base == base for other in self.group_of[node] if other is not node for v in other.inputs):
            return None
        return slot

    # ------------------------------------------------------------------------------------------------- placing

    def _stored(self, value: Value) -> Spec:
        if (spec := self.kept.get(value)) is None:
            spec = self.kept[value] = self.backend.stored(value.spec, find_storage_kind(value))
        return spec

    def _nbytes(self, value: Value) -> int:
        return self._stored(value).nbytes

    def _place(self) -> tuple[list[BufferSpec], dict[Value, tuple[int, int]], dict[Node, Tensor]]:
        """Buffers, (buffer, byte offset) of every base value that owns memory, and the scratch of nodes."""
        owners: dict[Value, Lifetime] = {}
        for value in self.graph.inputs:
            last = self.slots.last_read.get(value, 0)
            owners[value] = self._lifetime(self._nbytes(value), -1, last)
        for node in (*self.work, *(save.keep for save in self._all_saves())):
            now = self.slots.step[node]
            for value in node.results:
                if value not in self.slots.slot_of:
                    owners[value] = self._lifetime(self._nbytes(value), now, self.slots.last_read.get(value, now))
        others = [node for save in self._all_saves() for node in (save.keep, save.back)]
        needs = {n: nbytes for n in (*self.work, *others) if (nbytes := self.backend.scratch(n))}
        step, until = self.slots.step, self.slots.until
        temporary = [self._lifetime(nbytes, step[n], until.get(n, step[n])) for n, nbytes in needs.items()]
        arena = self._arena([*owners.values(), *temporary])
        buffers = [BufferSpec("arena", "", arena.nbytes)]
        places = {v: (ARENA, offset) for v, offset in zip(owners, arena.offsets, strict=False)}
        scratch = {
            n: Tensor(ARENA, offset, (nbytes,), (1,), DType.I8)
            for (n, nbytes), offset in zip(needs.items(), arena.offsets[len(owners) :], strict=True)
        }
        for node in self.graph.nodes:
            if node.op in _OWN_BUFFER:
                spec, stored = node.specs[0], self._stored(node.results[0])
                places[node.results[0]] = (len(buffers), 0)
                buffers.append(BufferSpec(node.op, node.name, stored.nbytes, spec, stored))
        return buffers, places, scratch

    def _arena(self, lifetimes: Sequence[Lifetime]) -> Arena:
        return place_by_runs(lifetimes, self.run_at) if self.run_at else place(lifetimes)

    def _lifetime(self, nbytes: int, first: int, last: int) -> Lifetime:
        """From the first step of the group to which `first` belongs to the last one of that of `last`."""
        return Lifetime(nbytes, self.spans.get(first, (first, first))[0], self.spans.get(last, (last, last))[1])

    def _tensor(self, value: Value) -> Tensor:
        if (tensor := self.tensors.get(value)) is None:
            tensor = self.tensors[value] = self._located(value)
        return tensor

    def _located(self, value: Value) -> Tensor:
        view = self.views[value]
        dtype = self._stored(view.base).dtype
        buffer, start = self.places[self.slots.slot_of.get(view.base, view.base)]
        offset = start + view.offset * dtype.block_bytes // dtype.block
        return Tensor(buffer, offset, view.shape, view.strides, dtype)
