"""Plans as JSON: written, read back with verification, and reduced to a digest that ranks compare.

A plan that is read back is verified like a new plan, because the file may be damaged or tampered with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...backends.base import Backend, Device, find_device
from ...backends.device_name import DeviceName
from ...graph.errors import BackendError, GraphError, PlanError
from ...graph.graph import assign_names
from ...graph.node import Node
from ...graph.spec import Spec
from ...graph.validation import TEXT, validate_arguments
from ...ops import verify
from ..costs.device_catalogue import DATA_SHEETS, DataSheet
from ..costs.simulated_devices import SIMULATED_BACKEND_NAME, SimulatedBackend, build_simulated_backend
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.layout import Layout, Local, Shard, compute_local_shape
from ..lowering.device_plan import DevicePlan
from ..verifier.plan_verifier import verify_plan
from .plan_data import PLAN_FORMAT, executable_parts_to_data, plan_to_data, unverified_plan_from_data
from .program_data import require_nonnegative_integer, require_nonnegative_number, require_text


@validate_arguments(PlanError, plan=PLAN_KIND)
def plan_to_json(plan: Plan) -> str:
    """Return a plan as the text of one JSON object, which `plan_from_json` reads."""
    document = plan_to_data(plan, _device_to_data)
    document["cost"] = asdict(plan.cost)
    kinds = {
        device_plan.device.kind: device_plan.backend.data_sheet
        for device_plan in plan.device_plans
        if isinstance(device_plan.backend, SimulatedBackend)
    }
    if unknown := {kind: asdict(machine) for kind, machine in kinds.items() if DATA_SHEETS.get(kind) != machine}:
        document["machines"] = unknown
    document["memory"] = [
        {
            "device": str(device_plan.device),
            **device_plan.count_memory_bytes_by_kind(),
            "capacity": device_plan.device.memory,
        }
        for device_plan in plan.device_plans
    ]
    return json.dumps(document, allow_nan=False)


def compute_digest_of_executed_plan_parts(plan: Plan) -> str:
    """Return the SHA-256 of all parts of a plan that devices execute, as JSON.

    Reasons, predictions and memory sizes do not change the digest.
    """
    text = json.dumps(executable_parts_to_data(plan, _device_to_data), allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@validate_arguments(PlanError, text=TEXT)
def plan_from_json(text: str) -> Plan:
    """Read a plan from the JSON text of `plan_to_json`, and verify it like a new plan.

    This machine must have the same kinds of devices. Raises `PlanError` for any other text, and `BackendError` if a
    device is missing.
    """
    try:
        document = json.loads(text)
        if document["format"] != PLAN_FORMAT:
            raise PlanError(f"format is {document['format']!r:.60}; this reads {PLAN_FORMAT}")
        machines = document.get("machines", {})
        plan = unverified_plan_from_data(document, lambda entry: _device_from_data(entry, machines))
        _verify_plan_is_well_formed(plan)
        verify_plan(plan)
        return plan
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, RecursionError) as why:
        raise PlanError(
            f"not a plan in JSON ({type(why).__name__}: {_format_one_line(why)}); write one with --json"
        ) from None
    except GraphError as why:
        raise PlanError(f"not a plan in JSON: its graph is illegal: {_format_one_line(why)}") from None


def _format_one_line(why: Exception) -> str:
    return " ".join(str(why).split())[:200]


# ----------------------------------------------------------------------------------------------------------- devices


def _device_to_data(device_plan: DevicePlan) -> dict[str, Any]:
    device = device_plan.device
    numbers = {"part": device.part, "multiprocessors": device.multiprocessors}
    division = {key: number for key, number in numbers.items() if number is not None}
    return {"backend": device_plan.backend.name, "kind": device.kind, "index": device.index, **division}


def _device_from_data(entry: Mapping[str, Any], machines: Mapping[str, Any]) -> tuple[Backend, Device]:
    """Return the backend and the device that a JSON entry describes.

    Args:
        entry: The entry of the device.
        machines: The data sheets of simulated device kinds that are not built in, by kind.
    """
    kind, index = require_text(entry["kind"]), require_nonnegative_integer(entry["index"])
    if entry["backend"] == SIMULATED_BACKEND_NAME:
        absent = build_simulated_backend(kind, _machine_from_data(machines[kind]) if kind in machines else None)
        return absent, absent.device(index)
    numbers = {k: require_nonnegative_integer(entry[k]) for k in ("part", "multiprocessors") if k in entry}
    backend, device = find_device(str(DeviceName(kind, index, **numbers)))
    if backend.name != entry["backend"]:
        raise BackendError(f"the plan is for backend {entry['backend']!r:.60}, but {device} is of {backend.name!r}")
    return backend, device


def _machine_from_data(entry: Mapping[str, Any]) -> DataSheet:
    words: dict[str, Any] = {key: require_text(entry[key]) for key in ("link", "capability", "backend", "like")}
    figures: dict[str, Any] = {key: require_nonnegative_number(entry[key]) for key in ("flops", "bandwidth", "launch")}
    return DataSheet(**words, **figures, memory=require_nonnegative_integer(entry["memory"]))


# ----------------------------------------------------------------------------------------------------------- checking


def _verify_plan_is_well_formed(plan: Plan) -> None:
    """Check that a plan from a file is well-formed, so that the plan verifier can read it.

    Raises:
        PlanError: The plan is malformed.
        GraphError: One of its graphs is illegal.
    """
    verify(plan.graph)
    _require_condition(bool(plan.device_plans), "it has no devices")
    _require_condition(
        len({str(device_plan.device) for device_plan in plan.device_plans}) == len(plan.device_plans),
        "it names a device twice",
    )
    done: set[int] = set()
    for device_plan in plan.device_plans:
        if id(device_plan.graph) not in done:
            done.add(id(device_plan.graph))
            if device_plan.graph.nodes:  # a device may have no work
                verify(device_plan.graph)
            _verify_stored_specs(device_plan)
    _require_condition(
        set(plan.leaves) == {n.name for n in plan.graph.nodes if n.is_leaf}, "its layouts are of other leaves"
    )
    _require_condition(set(plan.outputs) == set(plan.graph.outputs), "its layouts are of other outputs")
    _require_condition(len(plan.shares) in (0, len(plan.device_plans)), "it has shares for other devices")
    node_names = set(assign_names(plan.graph).values())
    for placed in plan.pinned_nodes:
        known = placed.device < len(plan.device_plans) and node_names.issuperset(placed.nodes)
        _require_condition(known, "it places nodes or names devices that there are not")
    for leaf in (n for n in plan.graph.nodes if n.is_leaf):
        _verify_leaf_shapes(plan, leaf)
    for name, value in plan.graph.outputs.items():
        _verify_layout(f"output {name!r:.60}", value.shape, plan.outputs[name], len(plan.device_plans))


def _require_condition(condition: bool, why: str) -> None:
    if not condition:
        raise PlanError(f"not a plan in JSON: {why}")


def _verify_stored_specs(device_plan: DevicePlan) -> None:
    """Raise `PlanError` if the backend of this machine would store a leaf in another shape or dtype than the plan."""
    for buffer in device_plan.program.buffers:
        if buffer.declared_spec is not None:
            stored = device_plan.backend.storage_spec(buffer.declared_spec, buffer.kind)
            same = buffer.stored_spec == stored and buffer.nbytes == stored.nbytes
            _require_condition(same, f"%{buffer.name!r:.60} is not stored as {device_plan.device} stores it")


def _verify_leaf_shapes(plan: Plan, leaf: Node) -> None:
    """Raise `PlanError` unless the device graphs have a leaf with the local shapes of its layout."""
    layout, spec = plan.leaves[leaf.name], leaf.specs[0]
    _verify_layout(f"%{leaf.label}", spec.shape, layout, len(plan.device_plans))
    for number, device_plan in enumerate(plan.device_plans):
        for own in (n for n in device_plan.graph.nodes if n.name == leaf.name and n.op == leaf.op):
            expected_spec = Spec(compute_local_shape(spec.shape, layout, number), spec.dtype)
            _require_condition(
                own.specs[0] == expected_spec,
                f"%{leaf.label} is {own.specs[0]} on {device_plan.device}, need {expected_spec}",
            )


def _verify_layout(subject: str, shape: tuple[int, ...], layout: Layout, devices: int) -> None:
    """Raise `PlanError` if a layout names axes, entries or devices that do not exist.

    Args:
        subject: The name of the value in messages.
        shape: The shape of the whole value.
        layout: The layout.
        devices: The number of devices.
    """
    if isinstance(layout, Shard):
        _require_condition(
            layout.axis < len(shape) and len(layout.index_ranges) == devices, f"{subject} is cut where it has no axis"
        )
        ends = [offset + n for runs in layout.index_ranges for offset, n in runs]
        _require_condition(max(ends, default=0) <= shape[layout.axis], f"{subject} is cut outside its axis")
    if isinstance(layout, Local):
        _require_condition(
            bool(layout.devices) and max(layout.devices) < devices, f"{subject} lies on a device there is not"
        )
