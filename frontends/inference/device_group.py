"""The devices of a session, and how the devices share a model; with several processes, the devices of all processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...backends.base import THREADS_KIND, Backend, Device, DeviceName, compute_threads_per_device, find_device
from ...backends.capabilities import SupportsExactMode
from ...distributed import SINGLE_PROCESS, World
from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import make_module_getattr
from ...graph.storage.disk_cache import cache_folder
from ...graph.validation import BOOL, NONE, TEXT, ArgumentKind, list_of, number_between, pair_of, require
from ...scheduler.runtime.packed_weight_files import PackedWeightFiles
from ..errors import ModelError

TRANSFER_DTYPES = {str(dtype): dtype for dtype in (DType.F32, DType.BF16)}
"""Dtypes in which GPUs may exchange large sums."""
CACHE_DTYPES = {str(dtype): dtype for dtype in STATE_DTYPES}
"""Dtypes that KV caches may have."""


def make_dtype_name_validator(dtypes_by_name: Mapping[str, DType]) -> ArgumentKind:
    """Make the validator of an argument that must be one of the given dtype names."""
    return ArgumentKind(" or ".join(dtypes_by_name), lambda v: isinstance(v, str) and v in dtypes_by_name)


GROUP_FIELD_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "devices": list_of(TEXT, "a sequence of texts"),
        "split_mode": TEXT,
        "tensor_split": list_of(number_between(-(2.0**63), 2.0**63), "a sequence of finite numbers"),
        "place": list_of(pair_of(TEXT, TEXT), "a sequence of pairs (regular expression, device)"),
        "threads": THREADS_KIND,
        "exact": BOOL,
        "wire": make_dtype_name_validator(TRANSFER_DTYPES),
        "fast": BOOL,
        "cache_type_k": make_dtype_name_validator(CACHE_DTYPES) | NONE,
        "cache_type_v": make_dtype_name_validator(CACHE_DTYPES) | NONE,
        "keep_packed": BOOL,
    }
)
"""The argument kind that validates each field of a `DeviceGroup`, by field name."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The devices of a session and how they share the model; see `hocket.plan` for the split modes.

    - `threads` holds for each device; by default the devices share the processors.
    - `exact` computes in float32 throughout, with weights as float32. Backends round activations to 8 bits by default
      where weights are quantised. Several devices add in another order than one: logits of SmolLM2 on three devices
      differ by an NMSE of 5e-4, with `exact` by 2.5e-13.
    - `fast` lets backends round to 16 bits where they compute exactly by default. This applies to factors of products
      in the delta rule. Activations that meet weights of 16 bits are rounded to the dtype of the weights.
    - `wire` is the dtype in which GPUs exchange large sums: ``f32``, or ``bf16``, which has half the bytes and is not
      exact (`hocket.backends.base.Comm.wire`).
    - `cache_type_k` and `cache_type_v` are the dtypes of cached keys and values: ``f16`` by default, ``f32`` with
      `exact`; ``q8_0`` and ``q4_0`` take blocks of 32 numbers.
    - `keep_packed` keeps the packed weights of ``cpu`` on disk, next to its kernels. Later processes map these weights,
      share their memory and start without packing.
    """

    devices: tuple[str, ...] = ("cpu:0",)
    split_mode: str = "auto"
    tensor_split: tuple[float, ...] = ()
    place: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    exact: bool = False
    wire: str = "f32"
    fast: bool = False
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    keep_packed: bool = False

    def __post_init__(self) -> None:
        for name, kind in GROUP_FIELD_KINDS.items():
            require(ModelError, "DeviceGroup", name, getattr(self, name), kind)

    @property
    def packed_weight_files(self) -> PackedWeightFiles | None:
        """The disk cache of packed weights, or `None` if packed weights are not kept."""
        return PackedWeightFiles(cache_folder() / "packed") if self.keep_packed else None

    @property
    def cache_dtypes(self) -> tuple[DType, DType]:
        """The dtypes of cached keys and of cached values."""
        usual = "f32" if self.exact else "f16"
        return CACHE_DTYPES[self.cache_type_k or usual], CACHE_DTYPES[self.cache_type_v or usual]


ONE_DEVICE = DeviceGroup()


def resolve_devices(on: DeviceGroup, world: World = SINGLE_PROCESS) -> list[tuple[Backend, Device]]:
    """Return the backend and the device of each name in a group, with a thread count and the exact mode applied.

    Without `on.threads` the devices of a machine share its processors. With several processes, a name without a rank,
    such as ``cpu:0``, means that device of each process. The properties of a device come from its own process.

    Raises:
        ModelError: A rank does not exist, or two device names mean the same device with exact results.
    """
    device_of_name: dict[str, str] = {}
    for device in on.devices:
        other = device_of_name.setdefault(name := resolve_exact_device_name(device, on), device)
        if on.exact and other != device:
            raise ModelError(f"devices {other} and {device}: exact results of both are computed on {name}; name one")
    names = [resolve_exact_device_name(name, on) for name in on.devices]
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


def resolve_exact_device_name(device: str, on: DeviceGroup) -> str:
    """Return the name of the device that runs the ops of `device`.

    The names differ only for exact results: NumPy computes instead of the CPU backend, so ``cpu:1`` becomes
    ``numpy:1``.
    """
    name = DeviceName.parse(device)
    return str(replace(name, kind="numpy") if on.exact and name.kind == "cpu" else name)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Group="DeviceGroup")
