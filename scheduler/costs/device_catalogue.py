"""The known kinds of devices and links by name, with the speeds of their data sheets.

FLOP/s are for dense 16-bit products on tensor cores. For AMD they are for 32-bit vector arithmetic, because kernels use
no matrix cores there. Bandwidths are in bytes/s: for memory, and for one direction of a link.
Source: the data sheets of the makers, as of November 2026. The entry ``cpu`` is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DataSheet:
    """The data sheet of one kind of device: speeds, memory, link and GPU architecture.

    Attributes:
        flops: Floating-point operations per second.
        bandwidth: Bytes per second of the device memory.
        memory: Bytes of the device memory.
        link: The name of the default link between devices of this kind.
        capability: The compute capability (``90``) or the architecture (``gfx942``) of a GPU; empty otherwise.
        backend: The backend that runs on a real GPU of this kind.
        launch: Seconds to launch one kernel.
        like: The built-in kind from which the file of a machine derives this kind; empty otherwise.
    """

    flops: float
    bandwidth: float
    memory: int
    link: str
    capability: str = ""
    backend: str = "cuda"
    launch: float = 2e-6
    like: str = ""


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """The speeds of one kind of link: latency in seconds, and bandwidth in bytes/s in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class DeviceAndLinkCatalogue:
    """The known kinds of devices and of links, by name."""

    data_sheets: Mapping[str, DataSheet]
    links: Mapping[str, LinkSpeeds]


DATA_SHEETS: Mapping[str, DataSheet] = MappingProxyType(
    {
        "b300": DataSheet(2250e12, 8e12, 270 * 10**9, "nvlink5", "103"),
        "b200": DataSheet(2250e12, 8e12, 180 * 10**9, "nvlink5", "100"),
        "h200": DataSheet(989e12, 4.8e12, 141 * 10**9, "nvlink", "90"),
        "h100": DataSheet(989e12, 3.35e12, 80 * 10**9, "nvlink", "90"),
        "a100": DataSheet(312e12, 2.04e12, 80 * 10**9, "nvlink3", "80"),
        "l40s": DataSheet(362e12, 0.864e12, 48 * GIB, "pcie4", "89"),
        "l4": DataSheet(121e12, 0.3e12, 24 * GIB, "pcie4", "89"),
        "rtx5090": DataSheet(209.5e12, 1.792e12, 32 * GIB, "pcie5", "120"),
        "rtx4090": DataSheet(165e12, 1.01e12, 24 * GIB, "pcie4", "89"),
        "rtx3090": DataSheet(71e12, 0.936e12, 24 * GIB, "pcie4", "86"),
        "mi355x": DataSheet(157.3e12, 8e12, 288 * 10**9, "xgmi38", "gfx950", "hip"),
        "mi300x": DataSheet(163.4e12, 5.3e12, 192 * 10**9, "xgmi", "gfx942", "hip"),
        "cpu": DataSheet(100e9, 20e9, 64 * GIB, "memory"),
    }
)
"""The built-in kinds of devices."""
LINKS: Mapping[str, LinkSpeeds] = MappingProxyType(
    {
        "nvlink5": LinkSpeeds(5e-6, 900e9),
        "nvlink": LinkSpeeds(5e-6, 450e9),
        "nvlink3": LinkSpeeds(5e-6, 300e9),
        "xgmi38": LinkSpeeds(10e-6, 537.6e9),
        "xgmi": LinkSpeeds(10e-6, 448e9),
        "pcie5": LinkSpeeds(10e-6, 50e9),
        "pcie4": LinkSpeeds(10e-6, 25e9),
        "ib400": LinkSpeeds(15e-6, 50e9),
        "ib200": LinkSpeeds(15e-6, 25e9),
        "ethernet": LinkSpeeds(50e-6, 1.25e9),
        "memory": LinkSpeeds(5e-6, 10e9),
    }
)
"""The built-in kinds of links."""
CATALOGUE = DeviceAndLinkCatalogue(DATA_SHEETS, LINKS)
"""All built-in kinds of devices and links."""
