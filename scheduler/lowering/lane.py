"""One device's part of a plan: the graph that it runs, lowered to a program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

from ...backends.abilities import STAND_IN, KernelCall, ListsKernels, can_group_overlap
from ...backends.base import Backend, Device, Program
from ...backends.beside import find_overlapped_instructions
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node
from ...graph.repeated_runs import DeviceRepetitions, ShortenedGraph, split_numbered_name
from ...graph.validation import ArgumentKind, instance_of, list_of, pair_of
from ...ops.collectives import COLLECTIVES, POINT_TO_POINT_OPS, find_collective_number
from .alike import identity, named, numbered, pattern
from .lower import Gathered, lower_with_saves
from .unfold import called_again, unfolded

Devices = Sequence[tuple[Backend, Device]]
DEVICES = list_of(
    pair_of(ArgumentKind("a backend", lambda b: hasattr(b, "compile")), instance_of(Device)),
    "a sequence of pairs of a backend and a Device",
)
"""The devices of a plan, each with the backend that runs it."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One device's part of a plan: `graph` is what it runs, with local shapes and the `cont` nodes kernels needed.

    Instructions of `program` say by number which node of `graph` they compute.  Both are made when somebody asks for
    them where the lane is that of a `short` one, whose runs it repeats.
    """

    device: Device
    backend: Backend
    graph: Graph
    program: Program
    short: Short | None = field(default=None, init=False, compare=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name not in ("graph", "program") or self.short is None:
            raise AttributeError(name)
        for own, made in zip(("graph", "program"), self.short.unfolded, strict=True):
            object.__setattr__(self, own, made)
        return vars(self)[name]

    @cached_property
    def calls(self) -> Sequence[KernelCall] | None:
        """The kernels that the program will call and where they are written, as far as that is known before there is
        memory for it; None where the backend cannot say."""
        backend, device, short = self.backend, self.device, self.short
        if not isinstance(backend, ListsKernels):
            return None
        if short is not None:
            known = called_again(short.graph, short.program, short.of, backend.list_kernels(short.program, device))
            if known is not None:
                return known
        return backend.list_kernels(self.program, device)

    @cached_property
    def meanwhile(self) -> Mapping[int, Sequence[int]]:
        """For each collective beside which the device can compute, by position, the instructions that run beside it."""
        if not can_group_overlap([(self.backend, self.device)]):
            return {}
        together = {
            number: called.instruction_numbers for called in self.calls or () for number in called.instruction_numbers
        }
        order = range(len(self.program.instructions))
        return find_overlapped_instructions(
            self.program, dict.fromkeys(together.get(number, (number,)) for number in order)
        )

    def launches(self) -> Sequence[float]:
        """How many launches each instruction takes: those of a chain are shared by its instructions; one each where the
        backend cannot say what is called."""
        if self.calls is None:
            return [1.0] * len(self.program.instructions)
        launches = [0.0] * len(self.program.instructions)
        for called in self.calls:
            for number in called.instruction_numbers:
                launches[number] += 1 / len(called.instruction_numbers)
        return launches

    def stand_ins(self) -> frozenset[int]:
        """Return the positions of the instructions that NumPy computes for lack of a compiled kernel."""
        return frozenset(
            n for called in self.calls or () if called.kernel == STAND_IN for n in called.instruction_numbers
        )

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


@dataclass(frozen=True, eq=False)
class Short:
    """Graph and program of a short graph on a device, and the long graph that it stands for."""

    graph: Graph
    program: Program
    of: ShortenedGraph

    @cached_property
    def unfolded(self) -> tuple[Graph, Program]:
        """What the device runs of the long graph."""
        return unfolded(self.graph, self.program, self.of)


def repeating(device: Device, backend: Backend, short: Short) -> Lane:
    """A lane whose graph and program are those that `short` stands for."""
    lane: Lane = object.__new__(Lane)
    for name, value in {"device": device, "backend": backend, "short": short}.items():
        object.__setattr__(lane, name, value)
    return lane


def lanes_from(lanes: Sequence[Lane], of: ShortenedGraph) -> tuple[Lane, ...]:
    """The lanes of a long graph from those of the short one that stands for it."""
    shorts: dict[tuple[int, int], Short] = {}
    for lane in lanes:
        shorts.setdefault((id(lane.graph), id(lane.program)), Short(lane.graph, lane.program, of))
    return tuple(repeating(lane.device, lane.backend, shorts[id(lane.graph), id(lane.program)]) for lane in lanes)


def first_alike(lanes: Sequence[Lane]) -> list[int]:
    """For each lane the number of the first one that runs the same program: its own, if none does."""
    first: dict[int, int] = {}
    return [first.setdefault(id(lane.program), number) for number, lane in enumerate(lanes)]


def teams_of(programs: Sequence[Program]) -> tuple[tuple[int, ...], ...]:
    """For each device those whom it meets in collectives, itself among them: they are in one team.

    Whoever has a meeting of the same number comes to it.  The verifier sees to it that all meetings of a device are of
    one team; letters go from any device to any other.  Where nobody meets, all are one team, whose letters go the
    shortest way.
    """
    numbers: list[int | None] = []
    known: dict[int, int | None] = {}
    for program in programs:
        if id(program) not in known:
            together = (i for i in program.instructions if i.op in COLLECTIVES and i.op not in POINT_TO_POINT_OPS)
            known[id(program)] = next((find_collective_number(i.op, i.attrs) for i in together), None)
        numbers.append(known[id(program)])
    if not any(number is not None for number in numbers):
        return (tuple(range(len(numbers))),) * len(numbers)
    members: dict[int | None, list[int]] = {}
    for device, number in enumerate(numbers):
        members.setdefault(number, []).append(device)
    return tuple((d,) if number is None else tuple(members[number]) for d, number in enumerate(numbers))


def lanes_of(graphs: Sequence[Graph], group: Devices, of: ShortenedGraph | None = None) -> tuple[Lane, ...]:
    """The lane of each device from its graph; equal graphs on devices of one kind have one program, and of graphs that
    are alike one is lowered; devices can run all of it.  Where they are `of` a short graph, its runs may be repeated.

    A device that cannot run how another saves its states has a program of its own.
    """
    numbers: dict[Hashable, int] = {}  # in the place of patterns: each lookup of one hashes all nodes of a graph
    patterns: dict[Graph, int] = {}
    for graph in set(graphs):
        its = pattern(graph), None if of is None else tuple(of.kind_by_node(graph).values())
        patterns[graph] = numbers.setdefault(its, len(numbers))
    alone = {known for known, times in Counter(patterns.values()).items() if times == 1}
    identities = {graph: identity(graph) for graph in patterns}
    lowered: dict[Hashable, tuple[Graph, Program, tuple[Node, ...]]] = {}
    known: dict[Hashable, tuple[Graph, Program]] = {}
    gathered: dict[Hashable, Gathered] = defaultdict(dict)
    lanes = []
    for graph, (backend, device) in zip(graphs, group, strict=True):
        kind: Hashable = (type(backend), backend.name, device.kind, patterns[graph])
        made = lowered.get(kind)
        own = made is None or not all(backend.supports(node, device).ok for node in made[2])
        is_alone = patterns[graph] in alone  # no other graph would take what comes of numbers in place of names
        if made is None or own:
            of_its_kind = gathered[type(backend), backend.name, device.kind]
            own_names = graph if is_alone else numbered(graph)
            made = lower_with_saves(own_names, backend, device, _runs(graph, is_alone, of), of_its_kind)
            lowered.setdefault(kind, made)
        key = (kind, identities[graph])
        twin = known.get(key)
        if twin is None or own:
            twin = made[:2] if is_alone else named(made[0], made[1], graph)
            known.setdefault(key, twin)
        lanes.append(Lane(device, backend, *twin))
    return tuple(lanes)


def _runs(graph: Graph, is_alone: bool, of: ShortenedGraph | None) -> DeviceRepetitions | None:
    """The runs of what is made of `graph`, whose nodes are called by their places in it unless it is alone."""
    if of is None or is_alone:
        return None if of is None else DeviceRepetitions(of)

    def called(node: Node) -> str:
        number, ending = split_numbered_name(node.name)
        return graph.nodes[number].name + ending

    return DeviceRepetitions(of, called)
