"""What devices of each compute capability have."""

from __future__ import annotations

from collections.abc import Mapping
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
MOST = max(SHARED.values())
LOCAL = 64 * KIB
"""Bytes that a block may ask for on devices of AMD that are simulated or emulated; a real one says what it has."""


def most_shared(capability: str) -> int:
    """Bytes of shared memory that a block may have; of a capability that nobody knew yet, what all have."""
    return SHARED.get(capability, EVERYWHERE)
