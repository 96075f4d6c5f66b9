"""Plans kept on disk: what was planned and proven once is read back by the next process, in a tenth of the time.

An entry is named by everything that a plan follows from: the graph, the devices, the options, and the source of whoever
makes and proves plans.  What is damaged, or was kept for something else, is planned anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..backends.abilities import Settled
from ..backends.cache import cache_folder, keep, recalled
from ..graph.export import from_json, to_json
from ..graph.graph import Graph
from ..ops.registry import BUILTIN_OPS
from .lowering.lane import Devices, Lane, first_alike
from .machines.calibrated import hardware_of
from .machines.hardware import Hardware
from .plan import Host, Placed, Plan
from .spelling import spelled_out
from .telling.as_data import layout_data, program_data, read_layout, read_program

if TYPE_CHECKING:
    from .choosing.uses import Use

PACKAGE = Path(__file__).resolve().parent.parent
MAKERS = ("graph", "ops", "ops/*", "backends", "backends/cpu", "backends/numpy", "scheduler", "scheduler/*")
"""Folders of the package whose source decides what a plan is."""


def kept_plan(
    graph: Graph,
    group: Devices,
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: Sequence[tuple[str, str]] = (),
    like: Plan | None = None,
    hardware: Hardware | None = None,
    host: Host | None = None,
    use: Use | None = None,
) -> Plan:
    """What `plan_for` gives, read from disk where an earlier process has kept it; for what was measured of the devices
    unless `hardware` is given."""
    hardware = hardware_of(graph, group) if hardware is None else hardware
    graph = spelled_out(graph, group)
    asked = [*group, *([] if host is None else [(host.backend, host.device)])]
    options = (
        split_mode,
        tuple(tensor_split),
        tuple(place),
        hardware,
        None if host is None else host.hardware,
    )
    file = None
    if _may_be_kept(graph, asked):
        file = _file(
            graph,
            asked,
            (*options, None if like is None else _lying(like), None if use is None else _wanted(use)),
        )
    if file is not None and (data := recalled(file)) is not None:
        with suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):
            return _named(_read(data, graph, asked), file)
    from .planner import plan_for

    plan = plan_for(
        graph,
        group,
        split_mode=split_mode,
        tensor_split=tensor_split,
        place=place,
        like=like,
        hardware=hardware,
        host=host,
        use=use,
    )
    if file is None:
        return plan
    keep(file, _written(plan, asked))
    return _named(plan, file)


def _named(plan: Plan, file: Path) -> Plan:
    """The plan with programs that can be told by their names, so that what backends make of them is kept as well."""
    alike = first_alike(plan.lanes)
    programs = {first: replace(plan.lanes[first].program) for first in alike}
    for first, program in programs.items():
        object.__setattr__(program, "kept", f"{file.stem}.{first}")
    lanes = (replace(lane, program=programs[first]) for lane, first in zip(plan.lanes, alike, strict=True))
    return replace(plan, lanes=tuple(lanes))


def _may_be_kept(graph: Graph, asked: Devices) -> bool:
    """Whether a plan follows from our own source, the devices and the options alone."""
    return all(isinstance(b, Settled) and _is_ours(type(b)) for b, _ in asked) and all(
        node.is_leaf or node.op in BUILTIN_OPS for node in graph.nodes
    )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__.partition('.')[0]}.backends.")


def _lying(like: Plan) -> object:
    """What of a plan those like it follow."""
    return [*like.leaves.items()], sorted(like.cuts), like.shares, [v.node.name for v in like.graph.states]


def _wanted(use: Use) -> object:
    """What a layout is judged by: two uses in the same words may read other graphs."""
    return str(use), use.sizes, [graph.digest() for graph in (use.graph_of(use.sequences, 1), use.evened)]


def _file(graph: Graph, asked: Devices, options: object) -> Path:
    from hashlib import sha256  # loads OpenSSL

    devices = [(type(b).__qualname__, b.settings() if isinstance(b, Settled) else "", d) for b, d in asked]
    parts = (_known(graph), devices, options, _sources())
    return cache_folder() / "plans" / f"{sha256(repr(parts).encode()).hexdigest()[:40]}.json"


def _sources() -> list[tuple[str, int, int]]:
    """The source of whoever makes plans: names, sizes and times, by which Python itself knows what it has compiled."""
    files = sorted(file for folder in MAKERS for file in PACKAGE.glob(f"{folder}/*.py"))
    return [(str(file), (of := file.stat()).st_size, of.st_mtime_ns) for file in files]


# ----------------------------------------------------------------------------------------------------------- as data


def _written(plan: Plan, asked: Devices) -> bytes:
    """A plan as JSON; a device's graph is left out where it is the user's."""
    own, numbers = _known(plan.graph), {str(device): number for number, (_, device) in enumerate(asked)}
    alike = first_alike(plan.lanes)
    document = {
        "lanes": [
            {
                "device": numbers[str(lane.device)],
                "like": first,
                "graph": None if first < number or _known(lane.graph) == own else to_json(lane.graph),
                "program": None if first < number else program_data(lane.program),
            }
            for number, (lane, first) in enumerate(zip(plan.lanes, alike, strict=True))
        ],
        "leaves": {name: layout_data(layout) for name, layout in plan.leaves.items()},
        "outputs": {name: layout_data(layout) for name, layout in plan.outputs.items()},
        "cuts": sorted(map(list, plan.cuts)),
        "reasons": list(plan.reasons),
        "placed": [asdict(placed) for placed in plan.placed],
        "hardware": asdict(plan.hardware),
        "host": None if plan.host is None else asdict(plan.host),
        "shares": list(plan.shares),
        "spare": list(plan.spare),
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _read(data: bytes, graph: Graph, asked: Devices) -> Plan:
    document = json.loads(data)
    lanes: list[Lane] = []
    for entry in document["lanes"]:
        backend, device = asked[entry["device"]]
        if entry["like"] < len(lanes):
            twin = lanes[entry["like"]]
            lanes.append(Lane(device, backend, twin.graph, twin.program))
        else:
            own = graph if entry["graph"] is None else from_json(entry["graph"])
            lanes.append(Lane(device, backend, own, read_program(entry["program"], own)))
    return Plan(
        graph,
        tuple(lanes),
        MappingProxyType({name: read_layout(layout) for name, layout in document["leaves"].items()}),
        MappingProxyType({name: read_layout(layout) for name, layout in document["outputs"].items()}),
        frozenset((name, axis, segment, place) for name, axis, segment, place in document["cuts"]),
        tuple(document["reasons"]),
        Hardware(**document["hardware"]),
        tuple(Placed(p["device"], p["because"], tuple(p["nodes"])) for p in document["placed"]),
        None if document["host"] is None else Hardware(**document["host"]),
        tuple(document["shares"]),
        tuple(document["spare"]),
    )


def _known(graph: Graph) -> tuple[object, ...]:
    """What one graph has to share with another to stand in its place: also names, and the order of outputs."""
    return graph.digest(), tuple(node.name for node in graph.nodes), tuple(graph.outputs)
