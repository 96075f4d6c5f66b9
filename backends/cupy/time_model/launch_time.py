"""Predicts the time of a launch on a GPU, and the resource that limits it.

The input is the work of a launch: bytes and sectors from counters, instructions and products from machine code, and
the shape and resources of its thread blocks. The steps are:

1. Compute the seconds that each resource of the GPU would need alone. The longest time limits the launch.
2. Add the latency of the first load, because no other work can start before it.
3. If thread blocks run in several waves, add half the latency of the loads of one block.

Example: a product of a vector with 4096 x 4096 weights of 4 bits, in 128 thread blocks of 16 warps, on an H200:

    memory        9.5 MB at 4.3 TB/s                                         2.2 us   <- limits the launch
    instructions  591 per warp, 4 warps per scheduler, 0.64 per cycle        2.1 us
    latency       2.5 dependent loads                                        2.0 us

With the first load, the launch takes 3.0 us. The model has not been compared with a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..device.device_limits import (
    MULTIPROCESSORS,
    SCHEDULER_COUNT,
    KernelLimits,
    MultiprocessorLimits,
    find_kernel_limits,
)

COPY_EFFICIENCY = 0.9
"""The share of the data sheet's bandwidth that a copy reaches."""
ISSUE_RATE = 0.7
"""Instructions per cycle that a scheduler starts if it has many warps. A single warp reaches 0.5."""
HALF_RATE_WARPS = 0.4
"""Warps per scheduler that would reach half of `ISSUE_RATE`."""
MEMORY_LATENCY_SECONDS = 0.8e-6
"""Seconds of a load from busy global memory."""
CACHE_LATENCY_SECONDS = 0.3e-6
"""Seconds of a load from the L2 cache."""

WARPGROUP_CYCLES = 5
"""Cycles of a warpgroup product: 4 by the data sheet; large products of libraries reach four fifths of that speed."""


@dataclass(frozen=True, slots=True)
class GpuPerformanceModel:
    """The performance model of a kind of GPU: the properties that limit launches.

    A product in the attributes is one matrix product of a warp, given by its three sizes, such as 16 x 8 x 16.

    Attributes:
        arch: Architecture of its machine code, such as ``sm_90a``.
        multiprocessor_count: Multiprocessors.
        clock_hz: Clock under load.
        memory_bandwidth: Bytes/s of global memory, from the data sheet.
        cache_bandwidth: Bytes/s of the L2 cache.
        cycles_per_16bit_product: Cycles of a scheduler's tensor core for a product of 16 x 8 x 16 with 16-bit numbers.
        cycles_per_8bit_product: Cycles of a scheduler's tensor core for a product of 16 x 8 x 32 with bytes.
        cycles_per_warpgroup_product: Cycles for each 16 x 8 x 16 part of a warpgroup product with 16-bit numbers.
    """

    arch: str
    multiprocessor_count: int
    clock_hz: float
    memory_bandwidth: float
    cache_bandwidth: float
    cycles_per_16bit_product: float
    cycles_per_8bit_product: float
    cycles_per_warpgroup_product: float = math.inf

    @property
    def limits(self) -> KernelLimits:
        """The resource limits of kernels on this kind of GPU."""
        return find_kernel_limits(self.arch.removeprefix("sm_").removesuffix("a"))

    @property
    def multiprocessor_limits(self) -> MultiprocessorLimits:
        """The limits of one multiprocessor on this kind of GPU."""
        return MULTIPROCESSORS[self.arch]


GPUS: Mapping[str, GpuPerformanceModel] = MappingProxyType(
    {
        "h200": GpuPerformanceModel("sm_90a", 132, 1.755e9, 4.8e12, 5.5e12, 6, 6, WARPGROUP_CYCLES),
        "h100": GpuPerformanceModel("sm_90a", 132, 1.755e9, 3.35e12, 5.5e12, 6, 6, WARPGROUP_CYCLES),
        "a100": GpuPerformanceModel("sm_80", 108, 1.41e9, 2.04e12, 4.0e12, 8, 8),
        "rtx4090": GpuPerformanceModel("sm_89", 128, 2.52e9, 1.01e12, 4.0e12, 32, 16),
        "rtx3090": GpuPerformanceModel("sm_86", 82, 1.695e9, 0.936e12, 2.0e12, 32, 16),
    }
)


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """The work of one launch: its blocks, instructions, matrix products and memory traffic.

    A product is a matrix product of one warp, given by its three sizes.

    Attributes:
        block_count: Thread blocks.
        block_threads: Threads per block.
        thread_registers: Registers per thread.
        block_shared_bytes: Bytes of shared memory per block.
        warp_instructions: Instructions of all warps.
        products_16bit: Products of 16 x 8 x 16 with 16-bit numbers, of all warps.
        warpgroup_products: Warpgroup products with 16-bit numbers, of all warps, counted in parts of 16 x 8 x 16.
        products_8bit: Products of 16 x 8 x 32 with bytes, of all warps.
        wavefronts: Wavefronts of shared memory, of all blocks.
        cache_bytes: Bytes of the sectors that all blocks request from the L2 cache.
        memory_bytes: Bytes of the distinct sectors in global memory.
        dependent_loads: How often one warp waits for global memory.
    """

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

    def scale_blocks_and_block_work(self, block_factor: float, work_factor: float = 1.0) -> LaunchWork:
        """Return the work of `block_factor` times as many thread blocks, each with `work_factor` times the work."""
        by = block_factor * work_factor
        return LaunchWork(
            round(self.block_count * block_factor),
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
            self.dependent_loads * work_factor,
        )

    def extrapolate(self, longer: LaunchWork, difference_factor: float) -> LaunchWork:
        """Extrapolate the work of a launch linearly from this launch and a longer one.

        Args:
            longer: The work of the longer launch.
            difference_factor: The factor of the difference between the two launches, which is added to this work.
        """

        def extend(here: float, there: float) -> float:
            return here + difference_factor * (there - here)

        return LaunchWork(
            round(extend(self.block_count, longer.block_count)),
            self.block_threads,
            self.thread_registers,
            self.block_shared_bytes,
            extend(self.warp_instructions, longer.warp_instructions),
            extend(self.products_16bit, longer.products_16bit),
            extend(self.warpgroup_products, longer.warpgroup_products),
            extend(self.products_8bit, longer.products_8bit),
            extend(self.wavefronts, longer.wavefronts),
            extend(self.cache_bytes, longer.cache_bytes),
            extend(self.memory_bytes, longer.memory_bytes),
            extend(self.dependent_loads, longer.dependent_loads),
        )


@dataclass(frozen=True, slots=True)
class LaunchTimeByResource:
    """The predicted time of a launch, for each resource of the GPU such as memory or tensor cores.

    Attributes:
        resource_seconds: Seconds that each resource would need alone, by the name of the resource.
        idle_seconds: Seconds at the start and at the end without a busy resource.
    """

    resource_seconds: Mapping[str, float]
    idle_seconds: float

    @property
    def limiting_resource(self) -> str:
        """The name of the resource that limits the launch: the one that needs the longest time."""
        return max(self.resource_seconds, key=lambda part: self.resource_seconds[part])

    @property
    def total_seconds(self) -> float:
        """The predicted seconds of the launch: the time of the limiting resource plus the idle seconds."""
        return self.resource_seconds[self.limiting_resource] + self.idle_seconds


def estimate_launch_time(work: LaunchWork, gpu: GpuPerformanceModel, cached: bool = False) -> LaunchTimeByResource:
    """Estimate the time that a launch takes on a GPU, without the gap to the next launch.

    Args:
        work: Work of the launch.
        gpu: Kind of GPU.
        cached: Whether the operands are in the L2 cache, because the previous launch wrote them.

    Raises:
        ValueError: A thread block does not fit on a multiprocessor.
    """
    latency = CACHE_LATENCY_SECONDS if cached else MEMORY_LATENCY_SECONDS
    max_blocks = -(-work.block_count // gpu.multiprocessor_count)  # blocks of the busiest multiprocessor
    together = min(
        gpu.multiprocessor_limits.compute_resident_blocks(
            work.block_threads, work.thread_registers, work.block_shared_bytes
        ),
        max_blocks,
    )
    if together == 0:
        raise ValueError("a block takes more than a multiprocessor has")
    warps = together * -(-work.block_threads // 32)
    schedulers = min(SCHEDULER_COUNT, warps)
    share = (
        max_blocks / work.block_count / gpu.clock_hz
    )  # seconds per cycle of all blocks' work, on the busiest multiprocessor
    on_each = warps / schedulers
    issued = ISSUE_RATE * on_each / (on_each + HALF_RATE_WARPS)
    waves = math.ceil(max_blocks / together)
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
    return LaunchTimeByResource(MappingProxyType(parts), latency + drained)
