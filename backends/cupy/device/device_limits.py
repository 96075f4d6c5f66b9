"""Resource limits of devices by compute capability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

KIB = 1024
DEFAULT_SHARED_BYTES = 48 * KIB
"""Shared-memory bytes of a block on every device, available to a launch without an attribute."""
MAX_SHARED_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **{"70": 96 * KIB, "72": 96 * KIB, "75": 64 * KIB},
        **{"80": 163 * KIB, "86": 99 * KIB, "87": 163 * KIB, "89": 99 * KIB},
        **{"90": 227 * KIB, "100": 227 * KIB, "103": 227 * KIB, "110": 227 * KIB, "120": 99 * KIB, "121": 99 * KIB},
    }
)
"""Maximum shared-memory bytes of a block by compute capability, declared bytes included.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""
WARPGROUP_CAPABILITIES = frozenset(("90",))
"""Compute capabilities with matrix products of four warps (wgmma). Later capabilities use other instructions."""


class UnmeasuredKernelCandidate(StrEnum):
    """New kernels that are off by default until a measurement on a GPU shows that they are faster.

    - `ATTENTION_ROLES`: `attend_roles` in place of `attend_warpgroups`.
    - `PRODUCT_ROLES`: `multiply_by_roles` in place of `clustered` with one term.
    - `DELTA_SEGMENTS`: several scans of a prompt at once, where few heads leave multiprocessors idle.
    - `DELTA_LONG_CHUNKS`: chunks of 64 tokens in place of 32 for gated delta rules with one decay per head.
    """

    ATTENTION_ROLES = "attention-roles"
    PRODUCT_ROLES = "product-roles"
    DELTA_SEGMENTS = "delta-segments"
    DELTA_LONG_CHUNKS = "delta-long-chunks"


ENABLED_CANDIDATES: Mapping[str, frozenset[UnmeasuredKernelCandidate]] = MappingProxyType({"90": frozenset()})
"""Candidates that devices use, by compute capability: none, because none is measured.

The part `candidates` of ``benchmarks/run_gpu.py`` measures each candidate and the kernels that are used now. Add a
candidate here where it is faster, and delete the kernel that it replaces.
"""

RESERVED_SHARED_BYTES = KIB
"""Shared-memory bytes of each block that the device reserves."""
REGISTER_COUNT = 64 * KIB
"""Registers of a multiprocessor, which warps get in multiples of `REGISTER_GRANULARITY`."""
REGISTER_GRANULARITY = 256
SCHEDULER_COUNT = 4


@dataclass(frozen=True, slots=True)
class MultiprocessorLimits:
    """Limits of one multiprocessor: the maximum threads, blocks and shared-memory bytes that are resident at once."""

    threads: int
    blocks: int
    shared_bytes: int

    def compute_resident_blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many blocks of a kernel run on one multiprocessor at once; 0 if one block does not fit.

        Args:
            threads: Threads of a block.
            registers: Registers of a thread.
            shared_bytes: Shared-memory bytes of a block.
        """
        warps, of_a_warp = -(-threads // 32), -(-registers * 32 // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
        by_registers = (
            REGISTER_COUNT // max(of_a_warp, REGISTER_GRANULARITY) // SCHEDULER_COUNT * SCHEDULER_COUNT // warps
        )
        return min(
            self.blocks,
            self.threads // (32 * warps),
            by_registers,
            self.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
        )


MULTIPROCESSORS: Mapping[str, MultiprocessorLimits] = MappingProxyType(
    {
        "sm_80": MultiprocessorLimits(2048, 32, 164 * KIB),
        "sm_86": MultiprocessorLimits(1536, 16, 100 * KIB),
        "sm_89": MultiprocessorLimits(1536, 24, 100 * KIB),
        "sm_90a": MultiprocessorLimits(2048, 32, 228 * KIB),
        "sm_100": MultiprocessorLimits(2048, 32, 228 * KIB),
        "sm_120": MultiprocessorLimits(1536, 24, 100 * KIB),
    }
)
"""Multiprocessor limits by architecture of compiled kernels. Source: CUDA C++ Programming Guide, as above."""


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """The resource limits of a device that decide which kernels can run on it.

    - `shared_bytes_per_block`: the maximum of declared and dynamic shared memory together.
    - `has_warpgroups`: whether the device has matrix products of four warps (wgmma).
    - `candidates`: the candidates that the device uses; see `ENABLED_CANDIDATES`.
    - `computes_operands`: whether kernels do work that other launches could do: rows of products, logits of gates,
      heads of attention, the sum of key splits, and gathered sums. Without it programs have the launches of the steps
      that were measured on H100 and H200.
    """

    shared_bytes_per_block: int
    has_warpgroups: bool = False
    candidates: frozenset[UnmeasuredKernelCandidate] = frozenset()
    computes_operands: bool = True


LARGEST_LIMITS = KernelLimits(max(MAX_SHARED_BYTES.values()), has_warpgroups=True)
HIP_LIMITS = KernelLimits(64 * KIB)
"""Limits of simulated and emulated AMD devices. A real device reports its own."""


def find_kernel_limits(capability: str) -> KernelLimits:
    """Return the resource limits of a compute capability such as ``90``; an unknown one gets the common minimum."""
    return KernelLimits(
        MAX_SHARED_BYTES.get(capability, DEFAULT_SHARED_BYTES),
        capability in WARPGROUP_CAPABILITIES,
        ENABLED_CANDIDATES.get(capability, frozenset()),
    )
