"""How long a launch would take on a GPU that is not here, and what sets that time.

What a launch does is known: bytes and sectors from counters, instructions and products from machine code, blocks and
what they take from the launch.  Each resource of a GPU is given the time that it would need alone; the longest one sets
the time.  Before anything else can happen the first load waits, and at the end, where blocks have followed one another,
the last ones are alone for half of their own time.

A product of a vector with 4096 x 4096 weights in 4 bits, 128 blocks of 16 warps on an H200:

    memory        9.5 MB at 4.3 TB/s            2.2 us   <- sets the time
    instructions  591 a warp, 4 warps each of 4 schedulers, 0.64 a cycle   2.1 us
    latency       2.5 loads after one another   2.0 us

which with the first load is 3.0 us.  It is a model: what it says has been compared with no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..device.limits import MULTIPROCESSORS, SCHEDULERS, Limits, Multiprocessor, limits_of

COPY_EFFICIENCY = 0.9
"""Of the bandwidth of a data sheet, what a copy reaches."""
ISSUE_RATE = 0.7
"""Instructions a scheduler starts a cycle, where many warps share it; one warp alone 0.5."""
HALF_RATE_WARPS = 0.4
MEMORY_LATENCY_SECONDS = 0.8e-6
"""Seconds from a load to its number, where memory is busy."""
CACHE_LATENCY_SECONDS = 0.3e-6
"""Where it is in the second cache."""

WARPGROUP_CYCLES = 5
"""Cycles of products of warpgroups: 4 by the data sheet, of which large products of libraries reach four fifths."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What a kind of GPU has: architecture whose machine code it runs; multiprocessors; Hz under load; bytes/s of
    memory and of its second cache; and cycles in which a scheduler's tensor core makes a product of 16 x 8 x 16 16-bit
    numbers, one of 16 x 8 x 32 bytes, and a part of as many 16-bit numbers of a product of a warpgroup."""

    arch: str
    multiprocessor_count: int
    clock_hz: float
    memory_bandwidth: float
    cache_bandwidth: float
    cycles_per_16bit_product: float
    cycles_per_8bit_product: float
    cycles_per_warpgroup_product: float = math.inf

    @property
    def limits(self) -> Limits:
        return limits_of(self.arch.removeprefix("sm_").removesuffix("a"))

    @property
    def multiprocessor(self) -> Multiprocessor:
        return MULTIPROCESSORS[self.arch]


GPUS: Mapping[str, GpuModel] = MappingProxyType(
    {
        "h200": GpuModel("sm_90a", 132, 1.755e9, 4.8e12, 5.5e12, 6, 6, WARPGROUP_CYCLES),
        "h100": GpuModel("sm_90a", 132, 1.755e9, 3.35e12, 5.5e12, 6, 6, WARPGROUP_CYCLES),
        "a100": GpuModel("sm_80", 108, 1.41e9, 2.04e12, 4.0e12, 8, 8),
        "rtx4090": GpuModel("sm_89", 128, 2.52e9, 1.01e12, 4.0e12, 32, 16),
        "rtx3090": GpuModel("sm_86", 82, 1.695e9, 0.936e12, 2.0e12, 32, 16),
    }
)


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """What one launch does: its blocks, their threads, registers of a thread and bytes of shared memory of a block; and
    of all blocks together instructions and products of warps (`grouped`: their parts of those of warpgroups),
    wavefronts of shared memory, bytes of sectors that are asked of the second cache and bytes of memory; and how many
    loads of a warp come after one another."""

    block_count: int
    block_threads: int
    thread_registers: int
    block_shared_bytes: int
    warp_instructions: float
    products_16bit: float
    warpgroup_products: float
    products_8bit: float
    wavefronts: float
    cache_bytes: float
    memory_bytes: float
    dependent_loads: float

    def multiply(self, blocks: float, each: float = 1.0) -> LaunchWork:
        """As many times the blocks, each of which does `each` times as much."""
        by = blocks * each
        return LaunchWork(
            round(self.block_count * blocks),
            self.block_threads,
            self.thread_registers,
            self.block_shared_bytes,
            self.warp_instructions * by,
            self.products_16bit * by,
            self.warpgroup_products * by,
            self.products_8bit * by,
            self.wavefronts * by,
            self.cache_bytes * by,
            self.memory_bytes * by,
            self.dependent_loads * each,
        )

    def extrapolate(self, longer: LaunchWork, times: float) -> LaunchWork:
        """With as many times what a longer launch does beyond this one."""

        def reached(here: float, there: float) -> float:
            return here + times * (there - here)

        return LaunchWork(
            round(reached(self.block_count, longer.block_count)),
            self.block_threads,
            self.thread_registers,
            self.block_shared_bytes,
            reached(self.warp_instructions, longer.warp_instructions),
            reached(self.products_16bit, longer.products_16bit),
            reached(self.warpgroup_products, longer.warpgroup_products),
            reached(self.products_8bit, longer.products_8bit),
            reached(self.wavefronts, longer.wavefronts),
            reached(self.cache_bytes, longer.cache_bytes),
            reached(self.memory_bytes, longer.memory_bytes),
            reached(self.dependent_loads, longer.dependent_loads),
        )


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Seconds that each resource would need alone, and of the begin and the end, when none is busy."""

    resource_seconds: Mapping[str, float]
    idle_seconds: float

    @property
    def limiting_resource(self) -> str:
        """What sets the time."""
        return max(self.resource_seconds, key=lambda part: self.resource_seconds[part])

    @property
    def total_seconds(self) -> float:
        return self.resource_seconds[self.limiting_resource] + self.idle_seconds


def estimate_launch_time(work: LaunchWork, gpu: GpuModel, cached: bool = False) -> LaunchTime:
    """How long a launch takes, without what the device needs between two launches; `cached` says that what it reads is
    in the second cache, as the launch before has just written it.  Raises `ValueError` if a block does not fit."""
    latency = CACHE_LATENCY_SECONDS if cached else MEMORY_LATENCY_SECONDS
    most = -(-work.block_count // gpu.multiprocessor_count)  # blocks of the processor that has most of them
    together = min(gpu.multiprocessor.holds(work.block_threads, work.thread_registers, work.block_shared_bytes), most)
    if together == 0:
        raise ValueError("a block takes more than a multiprocessor has")
    warps = together * -(-work.block_threads // 32)
    schedulers = min(SCHEDULERS, warps)
    share = most / work.block_count / gpu.clock_hz  # of the work of all blocks, for one processor
    on_each = warps / schedulers
    issued = ISSUE_RATE * on_each / (on_each + HALF_RATE_WARPS)
    waves = math.ceil(most / together)
    of_groups = work.warpgroup_products * gpu.cycles_per_warpgroup_product if work.warpgroup_products else 0.0
    parts = {
        "memory": work.memory_bytes / (COPY_EFFICIENCY * gpu.memory_bandwidth),
        "second cache": work.cache_bytes / gpu.cache_bandwidth,
        "instructions": work.warp_instructions * share / (schedulers * issued),
        "tensor cores": (
            work.products_16bit * gpu.cycles_per_16bit_product
            + of_groups
            + work.products_8bit * gpu.cycles_per_8bit_product
        )
        * share
        / schedulers,
        "shared memory": work.wavefronts * share,
        "latency": waves * work.dependent_loads * latency,
    }
    drained = work.dependent_loads * latency / 2 if waves > 1 else 0.0
    return LaunchTime(MappingProxyType(parts), latency + drained)
