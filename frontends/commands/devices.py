"""``hocket devices``: the devices of this machine, with their memory bandwidth and arithmetic speed on request."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...backends import find_backends_by_device_kind
from ...backends.base import Device, load_backend
from ...backends.capabilities import SupportsTransports
from ...backends.host.host_backend import HostBackend
from ...graph import BackendError
from ...scheduler import format_bytes
from ..terminal.output import write_to_stdout_unless_closed

MATRIX_ROWS, MATRIX_COLUMNS = 16384, 4096
"""Shape of a float32 matrix of 256 MiB, larger than any cache."""
SQUARE_SIZE = 2048
MEASURED_RUNS = 5


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--measure", action="store_true", help="measure memory bandwidth and float32 arithmetic")
    sub.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: argparse.Namespace) -> int:
    measured = measure_host_bandwidth_and_flops() if args.measure else None
    rows: list[dict[str, object]] = []
    lines: list[str] = []
    for found in list_devices_of_all_backends():
        row: dict[str, object] = {"device": found.name, "memory": found.memory, "description": found.description}
        line = f"{found.name:14} {format_bytes(found.memory) if found.memory else '-':>12}  {found.description}"
        if measured and found.is_host:
            row |= {"read_bytes_per_second": measured.bandwidth, "f32_flops_per_second": measured.flops}
            line += f"; NumPy reads {measured.bandwidth / 1e9:.1f} GB/s, {measured.flops / 1e9:.1f} GFLOP/s in f32"
        rows.append(row)
        lines.append(line)
    write_to_stdout_unless_closed((json.dumps(rows) if args.json else "\n".join(lines)) + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class FoundDeviceOrReason:
    """A device that a backend has found; for a backend without devices, the reason why it has none."""

    kind: str
    device: Device | None = None
    problem: str = ""
    is_host: bool = False
    transport: str = ""
    """Transport of its collectives, for a backend with several transports and several devices."""

    @property
    def name(self) -> str:
        return self.kind if self.device is None else str(self.device)

    @property
    def memory(self) -> int | None:
        return None if self.device is None else self.device.memory

    @property
    def description(self) -> str:
        if self.device is None:
            return self.problem
        return self.device.description + (f"; meets others {self.transport}" if self.transport else "")


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """The measured speed of this machine: memory bandwidth in bytes/s, and float32 operations per second."""

    bandwidth: float
    flops: float


def list_devices_of_all_backends() -> Iterator[FoundDeviceOrReason]:
    """List the devices of every registered backend; a backend that cannot be loaded gives its error instead."""
    for kind in sorted(find_backends_by_device_kind()):
        try:
            backend = load_backend(kind)
            devices = backend.devices()
            how = (
                backend.describe_transport(devices)
                if isinstance(backend, SupportsTransports) and len(devices) > 1
                else ""
            )
            for device in devices:
                yield FoundDeviceOrReason(kind, device, is_host=isinstance(backend, HostBackend), transport=how)
        except BackendError as why:
            yield FoundDeviceOrReason(kind, problem=str(why))


def measure_host_bandwidth_and_flops() -> HostSpeed:
    """Measure the memory bandwidth and the arithmetic speed of this machine with NumPy, best of five runs.

    A matrix-vector product gives the bandwidth, as in decoding. A product of square matrices gives the arithmetic
    speed.
    """
    matrix, vector = np.ones((MATRIX_ROWS, MATRIX_COLUMNS), np.float32), np.ones(MATRIX_COLUMNS, np.float32)
    out = np.empty(MATRIX_ROWS, np.float32)
    bandwidth = matrix.nbytes / _measure_fastest_seconds_after_warm_up(lambda: np.dot(matrix, vector, out=out))
    square = np.ones((SQUARE_SIZE, SQUARE_SIZE), np.float32)
    result = np.empty_like(square)
    return HostSpeed(
        bandwidth,
        2 * SQUARE_SIZE**3 / _measure_fastest_seconds_after_warm_up(lambda: np.dot(square, square, out=result)),
    )


def _measure_fastest_seconds_after_warm_up(run: Callable[[], object]) -> float:
    """Call a function several times after a warm-up call, and return the seconds of the fastest call."""
    run()
    seconds = []
    for _ in range(MEASURED_RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
