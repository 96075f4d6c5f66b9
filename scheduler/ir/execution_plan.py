"""The record of a plan: the graph and program of each device, the layouts of leaves and outputs, and the reasons.

The module imports neither the planner, the verifier, the runtime nor the reports. `digest`, `explain` and `str` import
the report modules when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from ...backends.base import BACKEND_KIND, Backend, Device
from ...graph.errors import PlanError, format_count
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import RenamedAttribute
from ...graph.validation import (
    BOOL,
    NONE,
    TEXT,
    ArgumentKind,
    instance_of,
    integer_between,
    list_of,
    mapping_of,
    number_between,
    pair_of,
    tuple_of,
    validate_arguments,
    validate_constructor,
)
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES
from ..costs.hardware import DEFAULT_HARDWARE, Estimate, Hardware
from ..costs.timeline import (
    InstructionCosts,
    TimelineEntry,
    build_timeline,
    compute_instruction_costs,
    estimate_run_time,
    is_timeline_sequential,
)
from ..lowering.device_plan import DevicePlan as DevicePlan
from ..records.field_types import describe_field_fault
from ..records.illegal_records import blame_illegal_record
from .formatting import format_bytes
from .layout import Layout

if TYPE_CHECKING:
    from ...view import Page

ShardedFactors = frozenset[tuple[str, int, int, int]]
"""The sharded factors, each described by a leaf that has it: (leaf, axis, segment, position in the segment)."""
LAYOUTS_KIND = mapping_of(TEXT, instance_of(*get_args(Layout)), "a mapping from names to layouts")
"""The argument kind of `Plan.leaves` and `Plan.outputs`."""
PLAN_KIND = ArgumentKind(
    "a Plan",
    lambda v: isinstance(v, Plan) and not v._field_fault,
    lambda v: v._field_fault if isinstance(v, Plan) else "",
)
"""The argument kind of a plan; the types of all of its records are right."""
MAX_SHARE = 2.0**63
"""The largest accepted share of `tensor_split`."""
PLAN_ARGUMENT_KINDS = {
    "graph": instance_of(Graph),
    "split_mode": TEXT,
    "tensor_split": list_of(number_between(-MAX_SHARE, MAX_SHARE), "a sequence of finite numbers"),
    "place": list_of(pair_of(TEXT, TEXT), "a sequence of pairs (regular expression, device)"),
    "like": PLAN_KIND | NONE,
}
"""The kinds of the arguments that all functions share that plan a graph."""


SPLIT_MODE_NAMES = ("none", "layer", "tensor", "layer,tensor", "auto")
"""The split modes: how several devices may share a graph. `planner.SPLIT_MODES` has a function for each."""


@dataclass(frozen=True, slots=True)
class PinnedNodes:
    """Nodes of the user's graph that only one device computes, all for the same reason.

    - `device`: the number of the device.
    - `because`: the reason, as text for people.
    - `nodes`: the names of the nodes.
    """

    device: int
    because: str
    nodes: tuple[str, ...]


@validate_constructor(
    PlanError, backend=BACKEND_KIND, device=instance_of(Device), hardware=instance_of(Hardware) | NONE
)
@dataclass(frozen=True, slots=True)
class HostOffload:
    """A request to put the weights and states that exceed device memory on the host, as one more device of the plan.

    - `backend`, `device`: the backend and the device of the host.
    - `hardware`: the speeds of the host; None if they equal the speeds of the other devices.
    """

    backend: Backend
    device: Device
    hardware: Hardware | None = None


@validate_constructor(
    PlanError,
    graph=instance_of(Graph),
    device_plans=tuple_of(instance_of(DevicePlan), "a tuple of device plans"),
    leaves=LAYOUTS_KIND,
    outputs=LAYOUTS_KIND,
    sharded_factors=instance_of(frozenset),
    reasons=tuple_of(TEXT, "a tuple of texts"),
    hardware=instance_of(Hardware),
    pinned_nodes=tuple_of(instance_of(PinnedNodes), "a tuple of pinned nodes"),
    host=instance_of(Hardware) | NONE,
    shares=tuple_of(instance_of(int, float), "a tuple of numbers"),
    unused_devices=tuple_of(TEXT, "a tuple of texts"),
)
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A plan: the decision how `graph` runs on a device group. A plan allocates no device memory.

    - `device_plans`: the graph and the program of each device.
    - `leaves`, `outputs`: the layout (distribution over the devices) of each input, weight, state and output.
    - `sharded_factors`: the factors (index ranges that several axes share) that are sharded.
    - `reasons`: the alternatives that the factor search considered, as text.
    - `hardware`: the speeds of devices and links.
    - `host`: the speeds of the last device, if they differ.
    - `pinned_nodes`: the nodes that one device alone computes, with the reasons.
    - `shares`: the proportions of the tensor split; empty without one. A later plan that is made like this one has them
      too.
    - `unused_devices`: the names of devices of the group that the plan does not use.
    """

    graph: Graph
    device_plans: tuple[DevicePlan, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    sharded_factors: ShardedFactors
    reasons: tuple[str, ...]
    hardware: Hardware = DEFAULT_HARDWARE
    pinned_nodes: tuple[PinnedNodes, ...] = ()
    host: Hardware | None = None
    shares: tuple[float, ...] = ()
    unused_devices: tuple[str, ...] = ()

    collectives = RenamedAttribute("count_collectives")
    memory = RenamedAttribute("count_memory_bytes_by_kind")
    lanes = RenamedAttribute("device_plans")
    cuts = RenamedAttribute("sharded_factors")
    placed = RenamedAttribute("pinned_nodes")
    spare = RenamedAttribute("unused_devices")
    prices = RenamedAttribute("instruction_costs")
    stages = RenamedAttribute("timeline")
    together = RenamedAttribute("pipelined_timeline")

    @cached_property
    def _has_right_device_plans(self) -> bool:
        return not any(map(describe_field_fault, self.device_plans))

    @property
    def _field_fault(self) -> str:
        """A description of the first value of a wrong type in the plan or its records; empty if all are right.

        Right device plans are checked once. The layouts are checked each time, because they may be in a `dict`.
        """
        known = self.device_plans if isinstance(self.device_plans, tuple) and self._has_right_device_plans else ()
        return describe_field_fault(self, known)

    @property
    def group(self) -> list[tuple[Backend, Device]]:
        """The device group of the plan: the backend and the device of each device plan.

        Every further plan over the same weights and states must use this group.
        """
        return [(device_plan.backend, device_plan.device) for device_plan in self.device_plans]

    @property
    def speeds(self) -> tuple[Hardware, ...]:
        """The hardware model of each device, while all devices work at the same time."""
        return (*(self.hardware for _ in self.device_plans[1:]), self.host or self.hardware)

    @cached_property
    @blame_illegal_record
    def instruction_costs(self) -> tuple[InstructionCosts, ...]:
        """The predicted cost of each instruction in one run, for each device.

        If the devices work one after another, each has the higher speeds of a device that works alone.
        """
        alone = [speeds.solo_hardware for speeds in self.speeds]
        if (
            len(self.device_plans) == 1
            or alone == [*self.speeds]
            or not is_timeline_sequential(self.pipelined_timeline, len(self.device_plans))
        ):
            return self._concurrent_instruction_costs
        return self._compute_instruction_costs(alone)

    @cached_property
    def _concurrent_instruction_costs(self) -> tuple[InstructionCosts, ...]:
        """The predicted cost of each instruction on each device while all devices work at the same time."""
        return self._compute_instruction_costs(self.speeds)

    def _compute_instruction_costs(self, speeds: Sequence[Hardware]) -> tuple[InstructionCosts, ...]:
        """Predict the cost of each instruction on each device, given the speeds of each device."""
        whole = {v.node.name: v.spec.nbytes for v in (*self.graph.weights, *self.graph.states)}
        return tuple(compute_instruction_costs(self.device_plans, speeds, whole))

    @cached_property
    @blame_illegal_record
    def pipelined_timeline(self) -> tuple[TimelineEntry, ...]:
        """The predicted timeline of one run while other runs are in the pipeline, so that all devices work."""
        return tuple(build_timeline(self.device_plans, self._concurrent_instruction_costs))

    @cached_property
    @blame_illegal_record
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """The timeline of one run: compute spans and collectives in order, with their predicted seconds."""
        if self.instruction_costs is self._concurrent_instruction_costs:
            return self.pipelined_timeline
        return tuple(build_timeline(self.device_plans, self.instruction_costs))

    @cached_property
    @blame_illegal_record
    def cost(self) -> Estimate:
        """The predicted seconds of one run, split into compute and collectives."""
        return estimate_run_time(self.timeline, len(self.device_plans))

    @blame_illegal_record
    def count_memory_bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes by kind of memory (weight, state, constant, arena), summed over all devices."""
        return {
            kind: sum(device_plan.count_memory_bytes_by_kind()[kind] for device_plan in self.device_plans)
            for kind in self.device_plans[0].count_memory_bytes_by_kind()
        }

    @blame_illegal_record
    def flops(self) -> int:
        """Return the FLOPs (floating-point operations) of one run of the user's graph, before sharding."""
        return sum(REGISTRY[n.op].count_flops(n) for n in self.graph.nodes if not n.is_leaf)

    @blame_illegal_record
    def count_collectives(self) -> int:
        """Return the number of collectives and messages that the first device takes part in during one run."""
        return sum(i.op in COLLECTIVES for i in self.device_plans[0].program.instructions)

    @blame_illegal_record
    @validate_arguments(PlanError, self=PLAN_KIND)
    def digest(self) -> str:
        """Return the SHA-256 digest of the device plans and layouts, which equal plans share.

        Ranks (processes) compare their digests, to be sure that they made the same plan.
        """
        from ..serialisation.plan_json import compute_digest_of_executed_plan_parts

        return compute_digest_of_executed_plan_parts(self)

    @blame_illegal_record
    @validate_arguments(PlanError, self=PLAN_KIND, steps=BOOL)
    def explain(self, *, steps: bool = False) -> str:
        """Return a report that explains the plan: cost, considered alternatives, memory and timeline.

        Args:
            steps: Whether the report also has each instruction.
        """
        from ..reports.explain import explain_plan

        return explain_plan(self, steps=steps)

    @blame_illegal_record
    @validate_arguments(
        PlanError, self=PLAN_KIND, before=PLAN_KIND | NONE, tokens=integer_between(1) | NONE, title=TEXT
    )
    def view(self, *, before: Plan | None = None, tokens: int | None = None, title: str = "plan") -> Page:
        """Return an HTML page that shows the plan with its graph, memory and timeline.

        Args:
            before: An earlier plan; the page then also shows the differences.
            tokens: The number of tokens that one run computes, because the graph does not say it.
            title: The title of the page.
        """
        from ...view import view_plan

        return view_plan(self, before=before, tokens=tokens, title=title)

    @blame_illegal_record
    def _repr_html_(self) -> str:
        """Return the HTML page of the plan, which notebooks display."""
        return self.view()._repr_html_()

    @blame_illegal_record
    def __repr__(self) -> str:
        devices = ", ".join(str(device_plan.device) for device_plan in self.device_plans)
        needed = format_bytes(sum(self.count_memory_bytes_by_kind().values()))
        return f"Plan({format_count(len(self.graph.nodes), 'node')} on {devices}, {needed})"

    @blame_illegal_record
    def __str__(self) -> str:
        from ..reports.explain import format_memory_table, format_summary

        return "\n".join([format_summary(self), *format_memory_table(self)])
