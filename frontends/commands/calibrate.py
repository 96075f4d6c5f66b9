"""``hocket calibrate``: measures the speeds for the cost model and stores them for later plans on this machine."""

from __future__ import annotations

import argparse

from ...scheduler.costs.calibration_file import format_saved_speeds_key, read_speeds, write_speeds
from ...scheduler.costs.speeds import Speeds
from ...scheduler.measurement.calibrate import (
    PROBE_ROUNDS,
    PROBED_DTYPES,
    QUICK_DTYPES,
    QUICK_PROBE_ROUNDS,
    measure_speeds,
)
from ..errors import ModelError
from ..flag_values import parse_devices
from ..inference.device_group import DeviceGroup, resolve_devices
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed

CALIBRATED_GROUPS = (("cpu:0",), ("cpu:0", "cpu:1"))
"""Device groups that are measured without `--devices`; the devices of a group share processors and memory."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.epilog = (
        "It takes some minutes, and about one minute with --quick. Other processes make the measured speeds too low. "
        "It measures cpu:0 alone, and cpu:0 with cpu:1. Name other groups with --devices; plans for groups that were "
        "never measured use built-in speeds."
    )
    sub.add_argument(
        "--devices",
        type=parse_devices,
        metavar="LIST",
        help="measure this device group only, such as cpu:0,cpu:1,cpu:2; saved speeds of other groups stay",
    )
    kinds = ", ".join(map(str, QUICK_DTYPES))
    sub.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_PROBE_ROUNDS} rounds instead of {PROBE_ROUNDS}, and only weights of {kinds}",
    )


def run(args: argparse.Namespace) -> int:
    kinds, rounds, note = (
        (QUICK_DTYPES, QUICK_PROBE_ROUNDS, "quick") if args.quick else (PROBED_DTYPES, PROBE_ROUNDS, "")
    )
    known: dict[str, Speeds] = {}
    for devices in (args.devices,) if args.devices else CALIBRATED_GROUPS:
        group = resolve_devices(DeviceGroup(devices=devices))
        speeds = known[format_saved_speeds_key(group)] = measure_speeds(group, kinds=kinds, rounds=1 + rounds)
        write_to_stdout_unless_closed(
            "\n".join(format_measured_speeds(format_saved_speeds_key(group), speeds, len(group))) + "\n"
        )
    file = write_speeds(known, note)
    if not (read_speeds(file) or {}).items() >= known.items():
        raise ModelError(
            f"{file} cannot be written, so no plan uses these speeds; name another folder in HOCKET_CACHE_DIR"
        )
    write_line_to_stderr(f"kept in {file}; plans on such devices use it from now on")
    return 0


def format_measured_speeds(name: str, speeds: Speeds, devices: int) -> list[str]:
    """Format the measured speeds of a device group as lines of text.

    Args:
        name: Name of the device group.
        speeds: The measured speeds.
        devices: Number of devices of the group.
    """
    link = f"; a meeting {speeds.link_latency * 1e6:.1f} us, messages {speeds.link_bandwidth / 1e9:.1f} GB/s"
    rows = [
        f"{name}: a launch {speeds.launch * 1e6:.2f} us{link if devices > 1 else ''}",
        f"  attention {speeds.plain_flops / 1e9:.1f} GFLOP/s, recurrences {speeds.recurrent_flops / 1e9:.1f} GFLOP/s, "
        f"states {speeds.state_bandwidth / 1e9:.1f} GB/s, values between ops {speeds.value_bandwidth / 1e9:.1f} GB/s",
    ]
    if speeds.held:
        cached_parts = [f"{share:.0%} of {float(size) / 1e6:.0f} MB" for size, share in speeds.held.items()]
        rows.append(f"  of weights that each token reads caches hold {', '.join(cached_parts)}")
    if devices > 1:
        rows.append(
            f"  while the others wait one computes {speeds.alone_flops:.2f} times as fast, "
            f"and reads memory {speeds.alone_bandwidth:.2f} times"
        )
    rows += [
        f"  {kind:5} a vector {rate / 1e9:6.1f} GB/s, in caches {speeds.cached.get(kind, rate) / 1e9:6.1f} GB/s, "
        f"a prompt {speeds.flops[kind] / 1e9:7.1f} GFLOP/s, unpacked {speeds.unpacking[kind] / 1e9:5.1f} GB/s"
        for kind, rate in speeds.bandwidth.items()
    ]
    return rows
