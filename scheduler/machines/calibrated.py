"""Speeds that were measured on this machine, kept in the cache folder for the plans of later processes.

A file is for one processor and one version of hocket.  What is damaged or of others is left aside, which is said once;
a group for which nothing was measured is estimated with built-in speeds.
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

from ...backends.abilities import SupportsPlanCache, SupportsThreads
from ...backends.cache import cache_folder, log, read_cached, write_cached
from ...graph import Graph
from ..lowering.lane import Devices
from .hardware import BUILT_IN, CPU, Hardware
from .speeds import Speeds

UNFIT = "%s is damaged, or of another processor or version of hocket, so times are estimated; run hocket calibrate"


def hardware_of(graph: Graph, group: Devices) -> Hardware:
    """The measured speeds of such devices, else built-in ones."""
    if any(device.rank is not None for _, device in group):
        return CPU  # processes have to plan the same, whatever each has measured; `shared_speeds` is for them
    speeds = speeds_here(group)
    return built_in(group) if speeds is None else replace(speeds.hardware(graph), source=calibrated_source())


def built_in(group: Devices) -> Hardware:
    """The built-in speeds of a group: `CPU` is a device that has all processors of a machine.

    Virtual devices of one machine share its processors and its memory.  Each has the share of its threads, so that
    two of them are as fast together as one that has the threads of both.
    """
    threads = [backend.threads for backend, _ in group if isinstance(backend, SupportsThreads)]
    if not threads or len(threads) < len(group):
        return CPU
    processors = os.cpu_count() or 1
    share = min(threads) / max(processors, sum(threads))
    return replace(CPU, flops=share * CPU.flops, bandwidth=share * CPU.bandwidth) if share < 1 else CPU


def speeds_here(group: Devices) -> Speeds | None:
    """What this machine has kept of such devices, whichever of its processes have them."""
    file = speeds_file()
    if not file.exists():
        return None
    known = read_speeds(file)
    if known is None:
        _say_unfit(str(file))
        return None
    return known.get(group_name(group))


def told_speeds(hardware: Hardware) -> str:
    """The source of the speeds of a plan, in words."""
    return f"{hardware.source}; hocket calibrate measures them" if hardware.source == BUILT_IN else hardware.source


def calibrated_source() -> str:
    """The source of kept speeds, with the day on which they were measured."""
    with suppress(ValueError, AttributeError):
        return f"calibrated {json.loads(read_cached(speeds_file()) or b'{}').get('date', 'on an unknown day')}"
    return "calibrated on an unknown day"


def group_name(group: Devices) -> str:
    """What groups of the same speed have in common."""
    return ", ".join(
        sorted(f"{d.kind} with {b.describe_settings() if isinstance(b, SupportsPlanCache) else '-'}" for b, d in group)
    )


def speeds_file() -> Path:
    """Where speeds are kept."""
    return cache_folder() / "speeds" / "speeds.json"


def keep_speeds(known: Mapping[str, Speeds], note: str = "") -> Path:
    """Replace the kept speeds of groups; plans name the day and `note` as their source."""
    day = f"{date.today()}{note and ', '}{note}"
    of = {name: speeds_data(speeds) for name, speeds in known.items()}
    write_cached(
        speeds_file(),
        json.dumps({"of": _here(), "date": day, "speeds": of}, allow_nan=False, indent=1).encode(),
    )
    return speeds_file()


def read_speeds(file: Path) -> dict[str, Speeds] | None:
    """What `keep_speeds` has written, here and by this version; None if it is damaged or of another."""
    data = read_cached(file)
    if data is None:
        return None
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        document = json.loads(data, parse_int=float)  # of which none is too large to be compared
        known = {str(name): Speeds(**of) for name, of in document["speeds"].items()}
        if document["of"] == _here() and all(map(_is_possible, known.values())):
            return known
    return None


def speeds_data(speeds: Speeds) -> dict[str, float | dict[str, float]]:
    """As JSON takes them, and `Speeds` by name."""
    figures = {f.name: getattr(speeds, f.name) for f in fields(speeds)}
    return {name: dict(figure) if isinstance(figure, Mapping) else figure for name, figure in figures.items()}


def _is_possible(s: Speeds) -> bool:
    each = replace(s.machine, op_flops=s.flops, op_bandwidth=s.bandwidth)  # every type's, as every op's would be
    others = (s.machine.op_bandwidth, s.unpacking, s.cached)
    held = [(float(size), share) for size, share in s.held.items()]
    return (
        bool(s.bandwidth and s.flops)
        and all(replace(each, op_bandwidth=speeds).is_possible for speeds in (s.bandwidth, *others))
        and held == sorted(held)
        and all(0 < size < math.inf and 0 <= share <= 1 for size, share in held)
    )


@cache
def _here() -> str:
    """This processor and this version."""
    version = import_module(__name__.partition(".")[0]).__version__
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"hocket {version} on {os.cpu_count()} x {model}"


@cache
def _say_unfit(file: str) -> None:
    log.warning(UNFIT, file)
