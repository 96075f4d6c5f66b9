"""One device's part of a plan: the graph that it runs, lowered to a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property

from ...backends.abilities import Called, Foretells, grade_of
from ...backends.base import Backend, Device, Program
from ...graph.arguments import Kind, a, list_of, pair_of
from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.records import dataclass
from ...ops.collective import COLLECTIVES, LETTERS, sequence_of
from .alike import identity, named, numbered, pattern
from .lower import check_support, lower_with_saves

Devices = Sequence[tuple[Backend, Device]]
DEVICES = list_of(
    pair_of(Kind("a backend", lambda b: hasattr(b, "compile")), a(Device)),
    "a sequence of pairs of a backend and a Device",
)
"""The devices of a plan, each with the backend that runs it."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One device's part of a plan: `graph` is what it runs, with local shapes and the `cont` nodes kernels needed.

    Instructions of `program` say by number which node of `graph` they compute.
    """

    device: Device
    backend: Backend
    graph: Graph
    program: Program

    @cached_property
    def calls(self) -> Sequence[Called] | None:
        """The kernels that the program will call and where they are written, as far as that is known before there is
        memory for it; None where the backend cannot say."""
        backend = self.backend
        return backend.foretold(self.program, self.device) if isinstance(backend, Foretells) else None

    def launches(self) -> Sequence[float]:
        """How many launches each instruction takes: those of a chain are shared by its instructions; one each where the
        backend cannot say what is called."""
        if self.calls is None:
            return [1.0] * len(self.program.instructions)
        launches = [0.0] * len(self.program.instructions)
        for called in self.calls:
            for number in called.numbers:
                launches[number] += 1 / len(called.numbers)
        return launches

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


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
            together = (i for i in program.instructions if i.op in COLLECTIVES and i.op not in LETTERS)
            known[id(program)] = next((sequence_of(i.op, i.attrs) for i in together), None)
        numbers.append(known[id(program)])
    if not any(number is not None for number in numbers):
        return (tuple(range(len(numbers))),) * len(numbers)
    members: dict[int | None, list[int]] = {}
    for device, number in enumerate(numbers):
        members.setdefault(number, []).append(device)
    return tuple((d,) if number is None else tuple(members[number]) for d, number in enumerate(numbers))


def lanes_of(graphs: Sequence[Graph], group: Devices) -> tuple[Lane, ...]:
    """The lane of each device from its graph; equal graphs on devices of one kind have one program, and of graphs that
    are alike one is lowered.

    A device that cannot run how another saves its states has a program of its own.
    """
    patterns = {graph: pattern(graph) for graph in set(graphs)}
    alone = {known for known, times in Counter(patterns.values()).items() if times == 1}
    identities = {graph: identity(graph) for graph in patterns}
    lowered: dict[Hashable, tuple[Graph, Program, tuple[Node, ...]]] = {}
    known: dict[Hashable, tuple[Graph, Program]] = {}
    checked = set[Hashable]()
    lanes = []
    for graph, (backend, device) in zip(graphs, group, strict=True):
        if (grade := (graph, grade_of(backend, device))) not in checked:
            check_support(graph, backend, device)
            checked.add(grade)
        kind: Hashable = (type(backend), backend.name, device.kind, patterns[graph])
        made = lowered.get(kind)
        own = made is None or not all(backend.supports(node, device).ok for node in made[2])
        is_alone = patterns[graph] in alone  # no other graph would take what comes of numbers in place of names
        if made is None or own:
            made = lower_with_saves(graph if is_alone else numbered(graph), backend, device)
            lowered.setdefault(kind, made)
        key = (kind, identities[graph])
        twin = known.get(key)
        if twin is None or own:
            twin = made[:2] if is_alone else named(made[0], made[1], graph)
            known.setdefault(key, twin)
        lanes.append(Lane(device, backend, *twin))
    return tuple(lanes)
