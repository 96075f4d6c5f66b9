"""One device's part of a plan: the graph that it runs, lowered to a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...backends.base import Backend, Device, Program
from ...graph.arguments import Kind, a, list_of, pair_of
from ...graph.graph import Graph
from ...graph.node import Node
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

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


def first_alike(lanes: Sequence[Lane]) -> list[int]:
    """For each lane the number of the first one that runs the same program: its own, if none does."""
    first: dict[int, int] = {}
    return [first.setdefault(id(lane.program), number) for number, lane in enumerate(lanes)]


def lanes_of(graphs: Sequence[Graph], group: Devices) -> tuple[Lane, ...]:
    """The lane of each device from its graph; equal graphs on devices of one kind have one program.

    A device that cannot run how another saves its states has a program of its own.
    """
    known: dict[tuple[object, ...], tuple[Lane, tuple[Node, ...]]] = {}
    lanes = []
    digests = {g: g.digest() for g in set(graphs)} if len(group) > 1 else {}
    for graph, (backend, device) in zip(graphs, group, strict=True):
        key = (type(backend), backend.name, device.kind, digests.get(graph))
        twin, added = known.get(key, (None, ()))
        if twin is not None and all(backend.supports(node, device).ok for node in added):
            check_support(graph, backend, device)
            lanes.append(Lane(device, backend, twin.graph, twin.program))
        else:
            lowered, program, added = lower_with_saves(graph, backend, device)
            lanes.append(Lane(device, backend, lowered, program))
            known.setdefault(key, (lanes[-1], added))
    return tuple(lanes)
