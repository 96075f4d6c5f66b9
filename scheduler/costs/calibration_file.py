"""Saved speeds of devices, which ``hocket calibrate`` measured on this machine for the plans of later processes.

The file is in the cache folder and valid for one processor and one version of hocket. A damaged or foreign file is
ignored with one warning. A device group without saved speeds has the built-in speeds.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path

from ...backends.capabilities import SupportsPlanCache, SupportsThreads
from ...graph import Graph
from ...graph.storage.disk_cache import cache_folder, log, read_cached, write_cached
from ..lowering.device_plan import Devices
from .hardware import BUILT_IN_SOURCE, DEFAULT_HARDWARE, Hardware
from .speeds import Speeds

UNUSABLE_FILE_MESSAGE = (
    "%s is damaged, or of another processor or version of hocket, so times are estimated; run hocket calibrate"
)
"""The warning about a file of saved speeds that is not used; its argument is the path."""


def choose_calibrated_or_built_in_hardware(graph: Graph, group: Devices) -> Hardware:
    """Return the calibrated (saved) speeds of a device group for a graph; without a calibration the built-in speeds.

    A group with devices of several processes has the built-in speeds here, because all processes need equal speeds.
    """
    if any(device.rank is not None for _, device in group):
        # all processes need the same plan, but each may have other measurements; see `rank_speeds`
        return DEFAULT_HARDWARE
    speeds = find_saved_speeds(group)
    return (
        scale_built_in_hardware_by_threads(group)
        if speeds is None
        else replace(speeds.hardware_for(graph), source=format_calibrated_with_day(group))
    )


def scale_built_in_hardware_by_threads(group: Devices) -> Hardware:
    """Return the built-in speeds, scaled by the thread count of the devices in a group.

    `DEFAULT_HARDWARE` is one device with all processors of a machine. Virtual devices share the processors and the
    memory of their machine, so the speed of a device is proportional to its threads. All devices of a group have the
    speed of the device with the fewest threads. Devices without a thread count have the speeds of `DEFAULT_HARDWARE`.
    """
    threads = [backend.threads for backend, _ in group if isinstance(backend, SupportsThreads)]
    if not threads or len(threads) < len(group):
        return DEFAULT_HARDWARE
    processors = os.cpu_count() or 1
    share = min(threads) / max(processors, sum(threads))
    return (
        replace(DEFAULT_HARDWARE, flops=share * DEFAULT_HARDWARE.flops, bandwidth=share * DEFAULT_HARDWARE.bandwidth)
        if share < 1
        else DEFAULT_HARDWARE
    )


def find_saved_speeds(group: Devices) -> Speeds | None:
    """Return the speeds that an earlier calibration on this machine saved for a device group; None without one.

    The devices may belong to this process or to others.
    """
    file = make_saved_speeds_path()
    if not file.exists():
        return None
    known = read_speeds(file)
    if known is None:
        _warn_of_unusable_file(str(file))
        return None
    return known.get(format_saved_speeds_key(group))


def describe_speed_source(hardware: Hardware) -> str:
    """Return a text that says where the speeds of a plan come from, such as a calibration or a data sheet.

    For built-in speeds the text includes a hint how to measure them.
    """
    return (
        f"{hardware.source}; hocket calibrate measures them" if hardware.source == BUILT_IN_SOURCE else hardware.source
    )


def format_calibrated_with_day(group: Devices) -> str:
    """Return ``calibrated`` with the day on which a group was measured; plans store it as `Hardware.source`."""
    return f"calibrated {_read_calibration_dates().get(format_saved_speeds_key(group), 'on an unknown day')}"


def _read_calibration_dates() -> dict[str, str]:
    """Read the day on which each device group was measured, by key. There are none if the file is unusable."""
    with suppress(ValueError, AttributeError):
        dates = json.loads(read_cached(make_saved_speeds_path()) or b"{}").get("dates", {})
        return {name: str(day) for name, day in dates.items()}
    return {}


def format_saved_speeds_key(group: Devices) -> str:
    """Return the key under which the speeds of a device group are saved: the kind and the settings of each device.

    Groups that are equally fast have equal keys.
    """
    return ", ".join(
        sorted(f"{d.kind} with {b.describe_settings() if isinstance(b, SupportsPlanCache) else '-'}" for b, d in group)
    )


def make_saved_speeds_path() -> Path:
    """Return the path of the file in which a calibration of this machine saves its speeds."""
    return cache_folder() / "speeds" / "speeds.json"


def write_speeds(speeds_by_key: Mapping[str, Speeds], note: str = "") -> Path:
    """Save the speeds of device groups in the file of this machine; return its path.

    Groups that the file has and that are not measured again keep their speeds.

    Args:
        speeds_by_key: The speeds of each device group, by `format_saved_speeds_key`.
        note: A text that plans name, with the date, as the source of the speeds.
    """
    file = make_saved_speeds_path()
    dates = dict.fromkeys(speeds_by_key, f"{date.today()}{note and ', '}{note}")
    saved = read_speeds(file) or {}
    document = {
        "of": _describe_version_and_processors(),
        "dates": {name: day for name, day in _read_calibration_dates().items() if name in saved} | dates,
        "speeds": {name: speeds_to_data(speeds) for name, speeds in {**saved, **speeds_by_key}.items()},
    }
    write_cached(file, json.dumps(document, allow_nan=False, indent=1).encode())
    return file


def read_speeds(file: Path) -> dict[str, Speeds] | None:
    """Read the saved speeds of all device groups, by key; return None if the file is unusable.

    A file is unusable if it is damaged, or if another processor or another version of hocket wrote it.
    """
    data = read_cached(file)
    if data is None:
        return None
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        document = json.loads(data, parse_int=float)  # a huge integer becomes inf, which is invalid
        known = {str(name): Speeds(**of) for name, of in document["speeds"].items()}
        if document["of"] == _describe_version_and_processors() and all(map(_is_valid_speeds, known.values())):
            return known
    return None


def speeds_to_data(speeds: Speeds) -> dict[str, float | dict[str, float]]:
    """Convert `speeds` to a dict of its fields, which can be written as JSON and passed to ``Speeds(**data)``."""
    figures = {f.name: getattr(speeds, f.name) for f in fields(speeds)}
    return {name: dict(figure) if isinstance(figure, Mapping) else figure for name, figure in figures.items()}


def _is_valid_speeds(s: Speeds) -> bool:
    """Return whether all figures of speeds from a file are in range.

    The byte counts for which the cached share was measured must also ascend.
    """
    # speeds by dtype are checked as speeds by op
    each = replace(s.hardware_without_weight_speeds, op_flops=s.flops, op_bandwidth=s.bandwidth)
    others = (s.hardware_without_weight_speeds.op_bandwidth, s.unpacking, s.cached)
    cache_shares = [(float(size), share) for size, share in s.held.items()]
    return (
        bool(s.bandwidth and s.flops)
        and all(replace(each, op_bandwidth=speeds).is_valid for speeds in (s.bandwidth, *others))
        and cache_shares == sorted(cache_shares)
        and all(0 < size < math.inf and 0 <= share <= 1 for size, share in cache_shares)
    )


@cache
def _describe_version_and_processors() -> str:
    """Return a text that identifies this version of hocket and the processors of this machine.

    Saved speeds carry this text. Speeds with another text are outdated and not used.
    """
    version = import_module(__name__.partition(".")[0]).__version__
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"hocket {version} on {os.cpu_count()} x {model}"


@cache
def _warn_of_unusable_file(file: str) -> None:
    """Log a warning that the file of saved speeds is unusable; each file is named once in each process."""
    log.warning(UNUSABLE_FILE_MESSAGE, file)
