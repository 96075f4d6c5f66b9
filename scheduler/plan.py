"""The record of a plan: for each device its lane, how leaves and outputs lie on the devices, and why.

It imports nobody who makes, proves, runs or tells a plan; `digest`, `explain` and `str` ask the tellers when called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from ..backends.base import Backend, Device
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.lazy_dataclass import dataclass
from ..graph.validation import (
    BOOL,
    NONE,
    TEXT,
    ArgumentKind,
    instance_of,
    integer_between,
    mapping_of,
    tuple_of,
    validate_arguments,
    validate_constructor,
)
from ..ops import REGISTRY
from ..ops.collectives import COLLECTIVES
from .layout import Layout
from .lowering.lane import Lane as Lane
from .machines.hardware import CPU, Estimate, Hardware
from .stages import Prices, Stage, estimate, prices_of, stages, take_turns
from .units import nbytes_text

if TYPE_CHECKING:
    from ..view import Page

Cuts = frozenset[tuple[str, int, int, int]]
"""The factors that are cut, each by a leaf that has it: (leaf, axis, segment, place)."""
LAYOUTS = mapping_of(TEXT, instance_of(*get_args(Layout)), "a mapping from names to layouts")
PLAN = ArgumentKind("a Plan", lambda v: isinstance(v, Plan))


SPLIT_NAMES = ("none", "layer", "tensor", "layer,tensor", "auto")
"""How several devices may share a graph: ways that `planner` has."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes of the user's graph, by name, that device number `device` computes for one reason."""

    device: int
    because: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """The device that takes what does not fit on the others, and its speeds if they differ from theirs."""

    backend: Backend
    device: Device
    hardware: Hardware | None = None


@validate_constructor(
    PlanError,
    graph=instance_of(Graph),
    lanes=tuple_of(instance_of(Lane), "a tuple of lanes"),
    leaves=LAYOUTS,
    outputs=LAYOUTS,
    cuts=instance_of(frozenset),
    reasons=tuple_of(TEXT, "a tuple of texts"),
    hardware=instance_of(Hardware),
    placed=tuple_of(instance_of(Placed), "a tuple of placed nodes"),
    host=instance_of(Hardware) | NONE,
    shares=tuple_of(instance_of(int, float), "a tuple of numbers"),
    spare=tuple_of(TEXT, "a tuple of texts"),
)
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What `graph` becomes on a group of devices.  Nothing is allocated yet, so a plan costs no device.

    `leaves` and `outputs` say how each input, weight, state and output lies on the devices; `reasons` is what the
    search considered; `placed` are the nodes that one device alone computes, and why; `cost` is predicted from the
    programs, for devices and links like `hardware`, the last one like `host` if that is given; `shares` are those of
    the tensor split, if one was asked for, which plans like this one follow; `spare` names devices that were given and
    are left free.
    """

    graph: Graph
    lanes: tuple[Lane, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    cuts: Cuts
    reasons: tuple[str, ...]
    hardware: Hardware = CPU
    placed: tuple[Placed, ...] = ()
    host: Hardware | None = None
    shares: tuple[float, ...] = ()
    spare: tuple[str, ...] = ()

    @property
    def group(self) -> list[tuple[Backend, Device]]:
        """The devices that take part, for plans over the same weights and states."""
        return [(lane.backend, lane.device) for lane in self.lanes]

    @property
    def speeds(self) -> tuple[Hardware, ...]:
        """What each device is like where all of them work."""
        return (*(self.hardware for _ in self.lanes[1:]), self.host or self.hardware)

    @cached_property
    def prices(self) -> tuple[Prices, ...]:
        """For each device what its instructions are predicted to cost in one run."""
        alone = [speeds.alone for speeds in self.speeds]
        if len(self.lanes) == 1 or alone == [*self.speeds] or not take_turns(self.together, len(self.lanes)):
            return self._priced(self.speeds)
        return self._priced(alone)

    def _priced(self, speeds: Sequence[Hardware]) -> tuple[Prices, ...]:
        whole = {v.node.name: v.spec.nbytes for v in (*self.graph.weights, *self.graph.states)}
        return tuple(prices_of(self.lanes, speeds, whole))

    @cached_property
    def together(self) -> tuple[Stage, ...]:
        """The stages as they are where all devices work at once, in runs that follow each other."""
        return tuple(stages(self.lanes, self._priced(self.speeds)))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Work between meetings of the devices, and the meetings, with their times in one run."""
        return tuple(stages(self.lanes, self.prices))

    @cached_property
    def cost(self) -> Estimate:
        """The predicted time of one run."""
        return estimate(self.stages, len(self.lanes))

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over devices."""
        return {kind: sum(lane.memory()[kind] for lane in self.lanes) for kind in self.lanes[0].memory()}

    def flops(self) -> int:
        """Floating-point operations of one run on one device, however it is cut."""
        return sum(REGISTRY[n.op].count_flops(n) for n in self.graph.nodes if not n.is_leaf)

    def collectives(self) -> int:
        """How often the devices meet in one run."""
        return sum(i.op in COLLECTIVES for i in self.lanes[0].program.instructions)

    def digest(self) -> str:
        """SHA-256 of what runs where; equal in every process that plans the same, so that ranks can compare it."""
        from .telling.as_json import digest

        return digest(self)

    @validate_arguments(PlanError, steps=BOOL)
    def explain(self, *, steps: bool = False) -> str:
        """What it costs, what was considered, memory, and each stage with its reason; `steps`: each instruction."""
        from .telling.explain import explain

        return explain(self, steps=steps)

    @validate_arguments(PlanError, before=PLAN | NONE, tokens=integer_between(1) | NONE, title=TEXT)
    def view(self, *, before: Plan | None = None, tokens: int | None = None, title: str = "plan") -> Page:
        """A page that shows the plan, its graph, memory and time; with `before` beside another plan.  `tokens` says how
        many a run computes, since no graph tells that."""
        from ..view import view_plan

        return view_plan(self, before=before, tokens=tokens, title=title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.view()._repr_html_()

    def __repr__(self) -> str:
        devices = ", ".join(str(lane.device) for lane in self.lanes)
        return f"Plan({len(self.graph.nodes)} nodes on {devices}, {nbytes_text(sum(self.memory().values()))})"

    def __str__(self) -> str:
        from .telling.explain import memory_table, summary

        return "\n".join([summary(self), *memory_table(self)])
