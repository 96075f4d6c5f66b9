"""The backends and devices that a device group names; with several processes, the devices of all processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ...backends.base import Backend, Device, compute_threads_per_device, find_device
from ...backends.capabilities import SupportsExactMode
from ...backends.device_name import DeviceName
from ...distributed import SINGLE_PROCESS, World
from ...graph.errors import BackendError
from ...graph.old_names import make_module_getattr
from ...graph.validation import format_value
from ..errors import ModelError
from ..run_config import ONE_DEVICE as ONE_DEVICE
from ..run_config import DeviceGroup as DeviceGroup


def resolve_devices(on: DeviceGroup, world: World = SINGLE_PROCESS) -> list[tuple[Backend, Device]]:
    """Return the backend and the device of each name in a group, with a thread count and the exact mode applied.

    Without `on.threads` the devices of a machine share its processors. With several processes, a name without a rank,
    such as ``cpu:0``, means that device of each process. The properties of a device come from its own process.

    Raises:
        ModelError: A device or a rank does not exist, or two names mean the same device with exact results.
    """
    try:
        return _resolve_devices(on, world)
    except (BackendError, ModelError) as why:
        raise ModelError(f"devices={format_value(','.join(on.devices))}: {why}") from None


def _resolve_devices(on: DeviceGroup, world: World) -> list[tuple[Backend, Device]]:
    device_of_name: dict[str, str] = {}
    for device in on.devices:
        other = device_of_name.setdefault(name := resolve_device_name_for_exact_results(device, on), device)
        if on.exact and other != device:
            raise ModelError(f"devices {other} and {device}: exact results of both are computed on {name}; name one")
    names = [resolve_device_name_for_exact_results(name, on) for name in on.devices]
    if world.size > 1:
        own = [name for name in names if DeviceName.parse(name).rank is None]
        everywhere = [f"{name}@{rank}" for rank in range(world.size) for name in own]
        names = [name for name in names if name not in own] + everywhere
    group = _exchange_device_properties([find_device(name) for name in names], world)
    here = [device for _, device in group if world.hosts[device.rank or 0] == world.hosts[world.rank]]
    threads = compute_threads_per_device(len(here), on.threads)
    exact = (
        (b.with_float32_matmuls() if on.exact and isinstance(b, SupportsExactMode) else b, device)
        for b, device in group
    )
    return [(backend.with_threads(threads), device) for backend, device in exact]


def _exchange_device_properties(group: Sequence[tuple[Backend, Device]], world: World) -> list[tuple[Backend, Device]]:
    """Return the devices of all ranks, each with the properties that its own process has measured.

    Devices of different processes on one machine share its memory as devices of one process do.
    """
    if strange := [device for _, device in group if (device.rank or 0) >= world.size]:
        process_count = max((device.rank or 0) for device in strange) + 1
        started = "one process runs" if world.size == 1 else f"{world.size} processes run"
        raise ModelError(
            f"device {strange[0]}: {started}; start {process_count} or more, as mpiexec -n {process_count} hocket ..."
        )
    if world.size == 1:
        return list(group)
    own = {i: asdict(device) for i, (_, device) in enumerate(group) if device.rank == world.rank}
    reports = [json.loads(text) for text in world.all_gather_bytes(json.dumps(own).encode())]
    devices = [Device(**reports[device.rank or 0][str(i)]) for i, (_, device) in enumerate(group)]
    joined = [replace(d, memory_of=d.memory_of and f"{d.memory_of} of {world.hosts[d.rank or 0]}") for d in devices]
    return [(backend, device) for (backend, _), device in zip(group, joined, strict=True)]


def resolve_device_name_for_exact_results(device: str, on: DeviceGroup) -> str:
    """Return the name of the device that replaces `device` if exact results are requested; otherwise `device` itself.

    NumPy computes exact results instead of the CPU backend, so ``cpu:1`` becomes ``numpy:1``.
    """
    name = DeviceName.parse(device)
    return str(replace(name, kind="numpy") if on.exact and name.kind == "cpu" else name)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Group="DeviceGroup")
