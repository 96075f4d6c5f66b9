"""What launches do, from their counters in the emulation and the machine code of their kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...once import once
from ..device import nvrtc
from ..device.driver import Source
from ..emulation.counted import Counted
from .executions import executions
from .flow import Block, flows
from .times import Work

UNITS = {"HMMA": 16 * 8 * 16, "HGMMA": 16 * 8 * 16, "IMMA": 16 * 8 * 32}
"""Multiplications by which products are counted."""
LINES = "-lineinfo"
"""Machine code stays the same with it."""


def work_of(counted: Counted, arch: str) -> Work:
    """What a launch does on a GPU of an architecture.  Raises `BackendError` without NVRTC or nvdisasm."""
    launch = counted.launch
    code, takes = _compiled(launch.kernel.alone, arch)
    blocks, resources = code[launch.kernel.name], takes[launch.kernel.name]
    many, threads = math.prod(launch.grid), math.prod(launch.block)
    warps = many * -(-threads // 32)
    ran = executions(blocks, counted.sites, warps)
    products = dict.fromkeys(UNITS, 0.0)
    for times, block in zip(ran, blocks, strict=True):
        for (name, shape), number in block.products.items():
            products[name] += times * number * _size(shape) / UNITS[name]
    return Work(
        many,
        threads,
        resources.registers,
        resources.shared + launch.shared_bytes,
        sum(times * block.instructions for times, block in zip(ran, blocks, strict=True)),
        products["HMMA"],
        products["HGMMA"],
        products["IMMA"],
        float(sum(site.cost for site in counted.sites if site.is_shared)),
        float(counted.asked),
        float(counted.moved),
        _rounds(blocks, ran) / warps,
    )


def _size(shape: str) -> float:
    """Multiplications that a product is of a warp: 16816 is one of 16 x 8 x 16; four warps make 64x256x16 together."""
    if "x" in shape:
        return math.prod(map(int, shape.split("x"))) / 4
    return 16 * 8 * int(shape.removeprefix("168"))


def _rounds(blocks: Sequence[Block], ran: Sequence[float]) -> float:
    """How often warps wait for global memory: where they use what is still under way.  All loads before that one have
    arrived then; blocks that do not run load nothing."""
    under_way: list[frozenset[int]] = [frozenset()] * len(blocks)
    waits = [0.0] * len(blocks)
    fresh = set(range(len(blocks)))
    while fresh:
        number = fresh.pop()
        pending, waits[number] = set(under_way[number]), 0.0
        for step in blocks[number].steps:
            if pending & step.uses:
                waits[number] += step.waits
                pending.clear()
            pending |= step.loads
        for after in blocks[number].after:
            if after >= 0 and ran[number] and not pending <= under_way[after]:
                under_way[after] |= pending
                fresh.add(after)
    return sum(times * wait for times, wait in zip(ran, waits, strict=True))


@once
def _compiled(source: Source, arch: str) -> tuple[Mapping[str, Sequence[Block]], Mapping[str, nvrtc.Resources]]:
    """By the names of the source: the blocks of each kernel, and what it takes."""
    cubin = nvrtc.compile(source, arch, (*nvrtc.OPTIONS, LINES))
    code = flows(cubin.image)
    return {name: code[low] for name, low in cubin.lowered.items()}, cubin.resources
