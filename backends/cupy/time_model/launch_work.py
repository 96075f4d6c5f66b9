"""Computes the work of launches from emulator counters and the machine code of their kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...thread_safe_cache import thread_safe_cache
from ..device import nvrtc
from ..device.driver import KernelSource
from ..emulation.access_counters import LaunchCounters
from .block_counts import estimate_block_executions
from .control_flow import BasicBlock, build_control_flow_graphs
from .launch_time import LaunchWork

UNIT_PRODUCT_SIZES = {"HMMA": 16 * 8 * 16, "HGMMA": 16 * 8 * 16, "IMMA": 16 * 8 * 32}
"""Multiplications in one unit of each kind of tensor core product."""
LINE_INFO_OPTION = "-lineinfo"
"""The compiler option for line information. It does not change the instructions."""


def estimate_launch_work(counted: LaunchCounters, arch: str) -> LaunchWork:
    """Estimate the work of a launch on a GPU, from memory accesses in the emulator and from the machine code.

    Args:
        counted: Access counters of the launch in the emulator.
        arch: Architecture of the GPU, such as ``sm_90a``.

    Raises:
        BackendError: NVRTC or nvdisasm is not installed.
    """
    launch = counted.launch
    code, takes = _compile_with_line_info(launch.kernel.single_kernel_source, arch)
    blocks, resources = code[launch.kernel.name], takes[launch.kernel.name]
    many, threads = math.prod(launch.grid), math.prod(launch.block)
    warps = many * -(-threads // 32)
    ran = estimate_block_executions(blocks, counted.sites, warps)
    products = dict.fromkeys(UNIT_PRODUCT_SIZES, 0.0)
    for times, block in zip(ran, blocks, strict=True):
        for (name, shape), number in block.products.items():
            products[name] += times * number * _count_multiplications_per_warp(shape) / UNIT_PRODUCT_SIZES[name]
    return LaunchWork(
        many,
        threads,
        resources.registers,
        resources.shared_bytes + launch.shared_bytes,
        sum(times * block.instruction_count for times, block in zip(ran, blocks, strict=True)),
        products["HMMA"],
        products["HGMMA"],
        products["IMMA"],
        float(sum(site.cost for site in counted.sites if site.is_shared)),
        float(counted.block_requested_bytes),
        float(counted.sector_bytes),
        _count_global_load_waits(blocks, ran) / warps,
    )


def _count_multiplications_per_warp(shape: str) -> float:
    """Return the number of scalar multiplications that one warp does in a tensor-core product of shape `shape`.

    Args:
        shape: The shape in the opcode. ``64x256x16`` is a warpgroup product, which four warps share equally. ``16816``
            is a product of one warp: the digits ``16``, ``8`` and ``16`` are its three sizes.
    """
    if "x" in shape:
        return math.prod(map(int, shape.split("x"))) / 4
    return 16 * 8 * int(shape.removeprefix("168"))


def _count_global_load_waits(blocks: Sequence[BasicBlock], executions: Sequence[float]) -> float:
    """Count how often all warps of a launch wait for loads from global memory.

    A warp waits where it uses a register that is still being loaded. After the wait, all earlier loads have arrived.
    The set of registers with pending loads is propagated along the control flow until it no longer grows. Blocks with 0
    executions add no loads.

    Args:
        blocks: Basic blocks of the kernel.
        executions: Warp executions of each block.
    """
    pending_at_entry: list[frozenset[int]] = [frozenset()] * len(blocks)
    waits = [0.0] * len(blocks)
    fresh = set(range(len(blocks)))
    while fresh:
        number = fresh.pop()
        pending, waits[number] = set(pending_at_entry[number]), 0.0
        for step in blocks[number].dependences:
            if pending & step.uses:
                waits[number] += step.wait_share
                pending.clear()
            pending |= step.loads
        for after in blocks[number].successors:
            if after >= 0 and executions[number] and not pending <= pending_at_entry[after]:
                pending_at_entry[after] |= pending
                fresh.add(after)
    return sum(times * wait for times, wait in zip(executions, waits, strict=True))


@thread_safe_cache
def _compile_with_line_info(
    source: KernelSource, arch: str
) -> tuple[Mapping[str, Sequence[BasicBlock]], Mapping[str, nvrtc.KernelResources]]:
    """Compile a source with line information; return the basic blocks and the resources of each kernel, by C++ name."""
    cubin = nvrtc.compile(source, arch, (*nvrtc.OPTIONS, LINE_INFO_OPTION))
    code = build_control_flow_graphs(cubin.image)
    return {name: code[low] for name, low in cubin.mangled_names.items()}, cubin.resources
