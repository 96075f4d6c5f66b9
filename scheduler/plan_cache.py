"""The plan cache: a folder of verified plans, which a later process reads in a tenth of the time that planning takes.

The key of an entry is a hash of everything on which a plan depends: graph, devices, options, and the source files of
the planner and the verifier. A damaged entry, or an entry of another key, is planned again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.capabilities import SupportsPlanCache
from ..graph.errors import PlanError
from ..graph.graph import Graph
from ..graph.storage.disk_cache import make_cache_path, read_cached, write_cached
from ..graph.validation import NONE, ArgumentKind, instance_of, validate_arguments
from ..ops.registry import BUILTIN_OPS
from .costs.calibration_file import choose_calibrated_or_built_in_hardware
from .costs.hardware import Hardware
from .ir.execution_plan import PLAN_ARGUMENT_KINDS, HostOffload, Plan
from .lowering.device_plan import DEVICES_KIND, Devices, find_first_devices_with_same_program
from .planning.decompose import decompose_unsupported_ops
from .serialisation.plan_data import build_digest_names_outputs_key, plan_to_data, unverified_plan_from_data

if TYPE_CHECKING:
    from .planning.workload import Workload

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
"""The folder of the package `hocket`."""
PLAN_SOURCE_FOLDERS = (
    "graph",
    "ops",
    "ops/*",
    "backends",
    "backends/fusion",
    "backends/host",
    "backends/cpu",
    "backends/cpu/compilation",
    "backends/cpu/execution",
    "backends/cpu/steps",
    "backends/numpy",
    "scheduler",
    "scheduler/*",
    "scheduler/*/*",
)
"""Folders of the package with the source code on which plans depend."""


def _is_workload(value: object) -> bool:
    """Return whether a value is a `Workload`; its module is imported here, because most plans come from the cache."""
    from .planning.workload import Workload

    return isinstance(value, Workload)


@validate_arguments(
    PlanError,
    group=DEVICES_KIND,
    hardware=instance_of(Hardware) | NONE,
    host=instance_of(HostOffload) | NONE,
    use=NONE | ArgumentKind("a Workload", _is_workload),
    **PLAN_ARGUMENT_KINDS,
)
def plan_with_cache(
    graph: Graph,
    group: Devices,
    *,
    split_mode: str = "auto",
    tensor_split: Sequence[float] = (),
    place: Sequence[tuple[str, str]] = (),
    like: Plan | None = None,
    hardware: Hardware | None = None,
    host: HostOffload | None = None,
    use: Workload | None = None,
) -> Plan:
    """Return the plan that `plan_for_group` makes, from the cache if an earlier process stored it there.

    Args:
        graph: The graph to plan.
        group: The backend and the device of each member of the device group.
        split_mode: A name of `SPLIT_MODE_NAMES`.
        tensor_split: The shares of the devices, in any unit.
        place: Placement rules, pairs (regular expression, device).
        like: An earlier plan over the same weights and states; the new plan keeps their layouts.
        hardware: Speeds of devices and links; by default the calibrated speeds of the group.
        host: The device that takes the weights and states that exceed the memory of the group.
        use: The workload for which split mode ``auto`` optimises.
    """
    hardware = choose_calibrated_or_built_in_hardware(graph, group) if hardware is None else hardware
    graph = decompose_unsupported_ops(graph, group)
    asked = [*group, *([] if host is None else [(host.backend, host.device)])]
    options = (
        split_mode,
        tuple(tensor_split),
        tuple(place),
        hardware,
        None if host is None else host.hardware,
    )
    file = None
    if _uses_only_own_backends_and_ops(graph, asked):
        file = _compute_cache_path(
            graph,
            asked,
            (
                *options,
                None if like is None else _build_earlier_plan_key(like),
                None if use is None else _build_workload_key(use),
            ),
        )
    if file is not None and (data := read_cached(file)) is not None:
        with suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):
            plan = unverified_plan_from_data(json.loads(data), lambda entry: asked[entry["device"]], graph)
            return _name_programs_for_binding_cache(plan, file)
    from .planning.planner import plan_for_group

    plan = plan_for_group(
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
    numbers = {str(device): number for number, (_, device) in enumerate(asked)}
    document = plan_to_data(plan, lambda one: {"device": numbers[str(one.device)]}, plan.graph)
    write_cached(file, json.dumps(document, allow_nan=False, separators=(",", ":")).encode())
    return _name_programs_for_binding_cache(plan, file)


def _name_programs_for_binding_cache(plan: Plan, file: Path) -> Plan:
    """Return the plan with programs named after its cache file; backends cache bindings under these names."""
    first_equal = find_first_devices_with_same_program(plan.device_plans)
    programs = {first: replace(plan.device_plans[first].program) for first in first_equal}
    for first, program in programs.items():
        object.__setattr__(program, "cache_name", f"{file.name}.{first}")
    device_plans = (
        replace(device_plan, program=programs[first])
        for device_plan, first in zip(plan.device_plans, first_equal, strict=True)
    )
    return replace(plan, device_plans=tuple(device_plans))


def _uses_only_own_backends_and_ops(graph: Graph, group: Devices) -> bool:
    """Return whether a plan may be cached: all of its backends and ops must be part of hocket.

    The source code of other packages may change unnoticed, and the cached plan would be outdated.
    """
    return all(isinstance(b, SupportsPlanCache) and _is_builtin_backend(type(b)) for b, _ in group) and all(
        node.is_leaf or node.op in BUILTIN_OPS for node in graph.nodes
    )


def _is_builtin_backend(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__.partition('.')[0]}.backends.")


def _build_earlier_plan_key(earlier_plan: Plan) -> object:
    """Return the part of a cache key that identifies an earlier plan with layouts that the new plan must keep."""
    return (
        [*earlier_plan.leaves.items()],
        sorted(earlier_plan.sharded_factors),
        earlier_plan.shares,
        [v.node.name for v in earlier_plan.graph.states],
    )


def _build_workload_key(workload: Workload) -> object:
    """Return the part of a cache key that identifies a workload: its text and its graphs.

    The text alone is not enough, because workloads of equal text may have different graphs.
    """
    return (
        str(workload),
        workload.chunk_sizes,
        workload.lone_hardware,
        [
            graph.digest()
            for graph in (workload.build_graph(workload.sequence_count, 1), workload.graph_for_stage_balance)
        ],
    )


def _compute_cache_path(graph: Graph, asked: Devices, options: object) -> Path:
    devices = [
        (type(b).__qualname__, b.describe_settings() if isinstance(b, SupportsPlanCache) else "", d) for b, d in asked
    ]
    return make_cache_path(
        "plans", build_digest_names_outputs_key(graph), devices, options, _list_planner_source_file_versions()
    )


@cache
def _list_planner_source_file_versions() -> tuple[tuple[str, int, int], ...]:
    """Return path, byte size and modification time of each source file that plans depend on.

    If one of them differs, a cached plan is outdated. Python uses the same data to find out whether a compiled file is
    current. The list takes 20 ms, and a process runs the code that it has loaded, so each process makes it once.
    """
    files = sorted(file for folder in PLAN_SOURCE_FOLDERS for file in PACKAGE_FOLDER.glob(f"{folder}/*.py"))
    return tuple((str(file), (of := file.stat()).st_size, of.st_mtime_ns) for file in files)
