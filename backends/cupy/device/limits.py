"""What devices of each compute capability have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KIB = 1024
EVERYWHERE = 48 * KIB
"""Bytes of shared memory that any block may have, and that a launch may size without asking first."""
SHARED: Mapping[str, int] = MappingProxyType(
    {
        **{"70": 96 * KIB, "72": 96 * KIB, "75": 64 * KIB},
        **{"80": 163 * KIB, "86": 99 * KIB, "87": 163 * KIB, "89": 99 * KIB},
        **{"90": 227 * KIB, "100": 227 * KIB, "103": 227 * KIB, "110": 227 * KIB, "120": 99 * KIB, "121": 99 * KIB},
    }
)
"""Bytes of shared memory that a block may ask for, declared ones included, by compute capability.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""
WARPGROUPS = frozenset(("90",))
"""Compute capabilities whose warps multiply matrices in groups of four; later ones do it in another way."""

RESERVED = KIB
"""Bytes of shared memory that a device takes for itself of each block."""
REGISTERS = 64 * KIB
"""Of a multiprocessor; given to warps by `GIVEN`."""
GIVEN = 256
SCHEDULERS = 4


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Threads, blocks, and bytes of shared memory that it holds at once."""

    threads: int
    blocks: int
    shared: int

    def holds(self, threads: int, registers: int, shared: int) -> int:
        """Blocks at once that have so many threads, each with so many registers, and so many bytes of shared memory; 0
        if one does not fit."""
        warps, of_a_warp = -(-threads // 32), -(-registers * 32 // GIVEN) * GIVEN
        by_registers = REGISTERS // max(of_a_warp, GIVEN) // SCHEDULERS * SCHEDULERS // warps
        return min(self.blocks, self.threads // (32 * warps), by_registers, self.shared // (shared + RESERVED))


MULTIPROCESSORS: Mapping[str, Multiprocessor] = MappingProxyType(
    {
        "sm_80": Multiprocessor(2048, 32, 164 * KIB),
        "sm_86": Multiprocessor(1536, 16, 100 * KIB),
        "sm_89": Multiprocessor(1536, 24, 100 * KIB),
        "sm_90a": Multiprocessor(2048, 32, 228 * KIB),
        "sm_100": Multiprocessor(2048, 32, 228 * KIB),
        "sm_120": Multiprocessor(1536, 24, 100 * KIB),
    }
)
"""By architecture that kernels are compiled for.  Source: as above."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has: bytes of shared memory that a block may ask for, declared ones included, and whether products
    of warpgroups."""

    shared: int
    has_warpgroups: bool = False


MOST = Limits(max(SHARED.values()), has_warpgroups=True)
OF_HIP = Limits(64 * KIB)
"""Of devices of AMD that are simulated or emulated; a real one says what it has."""


def limits_of(capability: str) -> Limits:
    """Of a capability that nobody knew yet, what all have."""
    return Limits(SHARED.get(capability, EVERYWHERE), capability in WARPGROUPS)
