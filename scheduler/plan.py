"""A plan: for each device the graph and the program it runs, how leaves and outputs lie on them, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..backends.base import Backend, Device, Program, find
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..ops import REGISTRY, verify
from ..ops.collective import COLLECTIVES
from .assign import assign
from .check import check
from .choose import Choice, cuts_of, factors_at
from .choose import choose as search
from .cost import CPU, Estimate, Hardware
from .factors import Factor, Factors
from .layout import Layout, Shares
from .lower import lower
from .place import layer_split, place, placed_like
from .shard import Sharded, shard

SPLIT_MODES = ("none", "layer", "tensor", "auto")
Chooser = Callable[[Graph, Factors], frozenset[Factor]]
Cuts = frozenset[tuple[str, int, int, int]]
"""The factors that are cut, each by a leaf that has it: (leaf, axis, segment, place)."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One device's part of a plan: `graph` is what it runs, with local shapes and the `cont` nodes kernels needed."""

    device: Device
    backend: Backend
    graph: Graph
    program: Program

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}


@dataclass(frozen=True, eq=False)
class Plan:
    """What `graph` becomes on a group of devices.  Nothing is allocated yet, so a plan costs no device.

    `leaves` and `outputs` say how each input, weight, state and output lies on the devices; `reasons` is what the
    search considered.
    """

    graph: Graph
    lanes: tuple[Lane, ...]
    leaves: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    cuts: Cuts
    cost: Estimate
    reasons: tuple[str, ...]

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over devices."""
        return {kind: sum(lane.memory()[kind] for lane in self.lanes) for kind in self.lanes[0].memory()}

    def flops(self) -> int:
        """Floating-point operations of one run on one device, however it is cut."""
        return sum(REGISTRY[n.op].flops(n) for n in self.graph.nodes if not n.is_leaf)

    def collectives(self) -> int:
        """How often the devices meet in one run."""
        return sum(i.op in COLLECTIVES for i in self.lanes[0].program.instructions)

    def explain(self) -> str:
        """The summary, what the search considered, and for each device one line a step."""
        lines = [str(self), *(f"  {reason}" for reason in self.reasons)]
        for lane in self.lanes:
            lines += _steps(lane)
        return "\n".join(lines)

    def __str__(self) -> str:
        views = sum(not n.is_leaf and REGISTRY[n.op].is_view for n in self.graph.nodes)
        steps = max(len(lane.program.instructions) for lane in self.lanes)
        lines = [
            f"{len(self.graph.nodes)} nodes, {views} of them views; {steps} steps on "
            f"{', '.join(str(lane.device) for lane in self.lanes)}; {self.collectives()} collectives; "
            f"{self.flops() / 1e6:.1f} MFLOP"
        ]
        for lane in self.lanes:
            memory = "  ".join(f"{kind} {nbytes_text(n)}" for kind, n in lane.memory().items())
            lines.append(f"{lane.device}  {memory}")
        return "\n".join(lines)


def _steps(lane: Lane) -> list[str]:
    def where(buffer: int) -> str:
        spec = lane.program.buffers[buffer]
        return spec.name or spec.kind

    lines = []
    for step, i in enumerate(lane.program.instructions):
        reads = ", ".join("_" if t is None else f"{where(t.buffer)}+{t.offset}" for t in i.src)
        writes = ", ".join(f"{where(t.buffer)}+{t.offset} {t.spec}" for t in i.dst)
        lines.append(f"{step:5}  {lane.device}  {i.op:16} %{i.node}: {reads} -> {writes}")
    return lines


def plan(
    graph: Graph,
    devices: str | Sequence[str] = "cpu:0",
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    like: Plan | None = None,
) -> Plan:
    """Verify `graph` and plan it for devices by name (``"cpu:0,cpu:1"`` or a list).

    `split_mode` is ``none`` (the first device alone), ``layer`` (consecutive nodes on each device), ``tensor`` (cut
    wherever kernels get shorter) or ``auto`` (cut where the predicted time falls).  `tensor_split` gives the devices'
    shares in any unit.  `like` is a plan over the same weights and states whose layout is kept.  Raises `GraphError`,
    `PlanError` or `BackendError`.
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    return plan_for(graph, [find(n) for n in names], split_mode=split_mode, tensor_split=tensor_split, like=like)


def plan_for(
    graph: Graph,
    group: Sequence[tuple[Backend, Device]],
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    like: Plan | None = None,
    hardware: Hardware = CPU,
    choose: Chooser | None = None,
) -> Plan:
    """`plan` for backends and devices that are already at hand; `choose` takes the place of the search."""
    if split_mode not in SPLIT_MODES:
        raise PlanError(f"split mode is {split_mode!r}; one of {', '.join(SPLIT_MODES)}")
    if len({str(device) for _, device in group}) < len(group) or not group:
        raise PlanError(f"devices {', '.join(str(d) for _, d in group) or 'none'}: name each once, and at least one")
    if split_mode == "none":
        group = group[:1]
    proportions = _proportions(tensor_split, len(group))
    verify(graph)
    if split_mode == "layer":
        placement = layer_split(graph, proportions) if like is None else placed_like(graph, like.leaves)
        placed = place(graph, placement, len(group))
        return Plan(graph, _lanes(placed, group), placed.leaves, placed.outputs, frozenset(), Estimate(0, 0, 0), ())
    factors = Factors(graph)
    if like is not None:
        choice = _given(graph, factors, factors_at(graph, factors, like.cuts), like.cost, "an earlier plan's layout")
    elif choose is not None:
        choice = _given(graph, factors, choose(graph, factors), Estimate(0, 0, 0), "chosen by the caller")
    else:
        choice = search(graph, factors, len(group), hardware, eager=split_mode == "tensor")
    cuts = cuts_of(graph, factors, choice.factors)
    shares = _deal(graph, factors, cuts, proportions)
    sharded = shard(graph, factors, choice.assignment, shares)
    lanes = _lanes(sharded, group)
    return Plan(graph, lanes, sharded.leaves, sharded.outputs, cuts, choice.cost, choice.considered)


def _lanes(sharded: Sharded, group: Sequence[tuple[Backend, Device]]) -> tuple[Lane, ...]:
    return tuple(_lane(local, backend, device) for local, (backend, device) in zip(sharded.graphs, group, strict=True))


def _lane(graph: Graph, backend: Backend, device: Device) -> Lane:
    lowered, program = lower(graph, backend, device)
    check(lowered, program)
    return Lane(device, backend, lowered, program)


def _proportions(tensor_split: Sequence[float], devices: int) -> Sequence[float]:
    if not tensor_split:
        return [1.0] * devices
    if len(tensor_split) > devices or any(s < 0 for s in tensor_split) or not sum(tensor_split):
        shown = ",".join(f"{s:g}" for s in tensor_split)
        raise PlanError(f"tensor split {shown}: need at most {devices} shares, none negative, one above zero")
    return [*tensor_split, *[0.0] * (devices - len(tensor_split))]


def _given(graph: Graph, factors: Factors, chosen: frozenset[Factor], cost: Estimate, why: str) -> Choice:
    return Choice(chosen, assign(graph, factors, chosen), cost, (why,))


def _deal(graph: Graph, factors: Factors, cuts: Cuts, proportions: Sequence[float]) -> Shares:
    """Shares of all factors that are cut, dealt in the order of their leaves, so that related plans agree."""
    shares = Shares(proportions)
    for cut in sorted(cuts, key=_natural):
        (factor,) = factors_at(graph, factors, frozenset([cut]))
        shares.of(factor)
    return shares


def _natural(cut: tuple[str, int, int, int]) -> tuple[object, ...]:
    """Sort key in which layer 9 comes before layer 10."""
    name = tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in cut[0].split("."))
    return (tuple((flag, str(value).zfill(12)) for flag, value in name), *cut[1:])


def nbytes_text(n: float) -> str:
    """Bytes for people: ``4.2 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
