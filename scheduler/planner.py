"""From a graph and a group of devices to a plan: the modes of splitting, each a way to answer one request.

Every way goes the same road: where nodes run or which factors are cut (`sharding`), the graphs of the devices
(`sharding.emit`, `sharding.layers`), their programs (`lowering`), and the proof (`verifier`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends.base import THREADS, group_of
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.node import Value
from ..graph.validation import (
    CALLABLE,
    MAX_MESSAGE_CHARACTERS,
    NONE,
    TEXT,
    format_value,
    instance_of,
    list_of,
    number_between,
    pair_of,
    validate_arguments,
)
from ..ops import verify
from ..ops.collectives import COLLECTIVES
from .choosing.planning import Chooser, Mode, Planning
from .choosing.uses import Use
from .choosing.ways import best_way
from .lowering.lane import DEVICES, Devices
from .machines.hardware import CPU, Hardware
from .plan import SPLIT_NAMES, Host, Plan
from .sharding.pins import Place
from .spelling import spelled_out
from .uncollected import uncollected
from .verifier.plan import verify_plan

MOST = 2.0**63
"""Of a share."""


OPTIONS = {
    "graph": instance_of(Graph),
    "split_mode": TEXT,
    "tensor_split": list_of(number_between(-MOST, MOST), "a sequence of finite numbers"),
    "place": list_of(pair_of(TEXT, TEXT), "a sequence of pairs (regular expression, device)"),
    "like": instance_of(Plan) | NONE,
}


@validate_arguments(PlanError, devices=TEXT | list_of(TEXT, "a sequence of texts"), threads=THREADS, **OPTIONS)
def plan(
    graph: Graph,
    devices: str | Sequence[str] = "cpu:0",
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: Place = (),
    like: Plan | None = None,
    threads: int | None = None,
) -> Plan:
    """Verify `graph` and plan it for devices by name (``"cpu:0,cpu:1"`` or a list).

    `split_mode` is ``none`` (the first device alone), ``layer`` (consecutive nodes on each device), ``tensor`` (cut
    wherever kernels get shorter), ``layer,tensor`` (consecutive nodes on each machine, or on each team of devices, cut
    among its devices) or ``auto`` (whichever of these takes least time, on however many of the devices, where memory
    and devices have a price).  `tensor_split` gives the devices' shares in any unit.  `place` are pairs
    (regular expression, device): nodes whose name it matches, or that read a weight or state it matches, run on that
    device alone; the first that matches counts.  `like` is a plan over the same weights and states whose layout is
    kept.  Each device computes with so many `threads`; without a number devices share the processors.  Raises
    `GraphError`, `PlanError` or `BackendError`.
    """
    group = group_of(devices.split(",") if isinstance(devices, str) else devices, threads)
    return plan_for(graph, group, split_mode=split_mode, tensor_split=tensor_split, place=place, like=like)


@validate_arguments(
    PlanError,
    group=DEVICES,
    hardware=instance_of(Hardware),
    choose=CALLABLE | NONE,
    host=instance_of(Host) | NONE,
    use=instance_of(Use) | NONE,
    **OPTIONS,
)
@uncollected()
def plan_for(
    graph: Graph,
    group: Devices,
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: Place = (),
    like: Plan | None = None,
    hardware: Hardware = CPU,
    choose: Chooser | None = None,
    host: Host | None = None,
    use: Use | None = None,
) -> Plan:
    """`plan` for backends and devices that are already at hand; `choose` takes the place of the search.

    Where there is a `use`, the mode ``auto`` takes what is fastest for that, not for one run of `graph`.

    Where the group's memory is short (and the mode is not ``tensor``), `host` takes what does not fit as one more
    device.  In the modes ``none`` and ``auto`` devices that have nothing to do are left out of the plan.
    """
    if split_mode not in SPLIT_MODES:
        raise PlanError(f"split mode is {format_value(split_mode)}; need one of {'; '.join(SPLIT_MODES)}")
    if len({str(device) for _, device in group}) < len(group) or not group:
        raise PlanError(
            f"devices {', '.join(str(d) for _, d in group) or 'none'}: name each once, and at least one; "
            "parts of one device are named as cuda:0.0,cuda:0.1"
        )
    verify(graph)
    graph = spelled_out(graph, group)
    if strange := [n for n in graph.nodes if n.op in COLLECTIVES]:
        raise PlanError(f"{strange[0]!r}: collectives are put in by the planner; leave them out of the graph")
    if like is not None:
        group = _group_like(like, graph, group)
    shares = _proportions(tensor_split, len(group))
    planning = Planning(graph, tuple(group), shares if tensor_split else (), hardware, place, like, use)
    made = planning.made(SPLIT_MODES[split_mode], like, choose, host)
    try:
        verify_plan(made)
    except PlanError as why:
        if all(lane.short is None for lane in made.lanes):
            raise
        planning.doubt = (f"every run of layers is planned by itself, since of {why}",)
        made = planning.made(SPLIT_MODES[split_mode], like, choose, host)
        verify_plan(made)
    return made


WAYS = (Planning.alone, Planning.layers, Planning.shards, Planning.staged, best_way)
SPLIT_MODES: Mapping[str, Mode] = dict(zip(SPLIT_NAMES, WAYS, strict=True))
"""The modes by name, each a way to answer a planning for several devices."""


def _group_like(like: Plan, graph: Graph, group: Devices) -> Devices:
    """The devices of `group` that take part as in `like`.  Raises `PlanError` if `like` is no plan over them and over
    the weights and states of `graph`."""
    names, taken = [str(device) for _, device in group], [str(lane.device) for lane in like.lanes]
    if len(names) != len(taken):
        group = [pair for pair, name in zip(group, names, strict=True) if name not in like.spare]
        if [str(device) for _, device in group] != taken:
            raise PlanError(
                f"like: it is a plan for {len(taken)} devices, and {len(names)} are given; "
                f"give {', '.join(taken):.{2 * MAX_MESSAGE_CHARACTERS}}"
            )
    stored = {v.node.name: v for v in (*like.graph.weights, *like.graph.states)}
    for value in (*graph.weights, *graph.states):
        earlier = stored.get(value.node.name, value)
        if not _accepts_same_layout(earlier, value):
            raise PlanError(
                f"like: {value.label:.{MAX_MESSAGE_CHARACTERS}} is a {value.node.op} {value.spec}, and in the earlier "
                f"plan a {earlier.node.op} {earlier.spec}; rename it, or plan without like"
            )
    return group


def _accepts_same_layout(earlier: Value, value: Value) -> bool:
    """Return whether two weights are of one shape and type, or two states of one type: a state may have other sizes."""
    if (earlier.node.op, earlier.spec.dtype) != (value.node.op, value.spec.dtype):
        return False
    if value.node.op == "state":
        return len(earlier.spec.shape) == len(value.spec.shape)
    return earlier.spec == value.spec


def _proportions(tensor_split: Sequence[float], devices: int) -> Sequence[float]:
    if not tensor_split:
        return [1.0] * devices
    if len(tensor_split) > devices or any(s < 0 for s in tensor_split) or not sum(tensor_split):
        shown = ",".join(f"{s:g}" for s in tensor_split)
        raise PlanError(f"tensor split {shown}: need at most {devices} shares, none negative, one above zero")
    return [*tensor_split, *[0.0] * (devices - len(tensor_split))]
