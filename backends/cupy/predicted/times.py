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

REACHED = 0.9
"""Of the bandwidth of a data sheet, what a copy reaches."""
ISSUED = 0.7
"""Instructions a scheduler starts a cycle, where many warps share it; one warp alone 0.5."""
ALONE = 0.4
LATENCY = 0.8e-6
"""Seconds from a load to its number, where memory is busy."""
CACHED_LATENCY = 0.3e-6
"""Where it is in the second cache."""

GROUPED = 5
"""Cycles of products of warpgroups: 4 by the data sheet, of which large products of libraries reach four fifths."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a kind of GPU has: architecture whose machine code it runs; multiprocessors; Hz under load; bytes/s of
    memory and of its second cache; and cycles in which a scheduler's tensor core makes a product of 16 x 8 x 16 16-bit
    numbers, one of 16 x 8 x 32 bytes, and a part of as many 16-bit numbers of a product of a warpgroup."""

    arch: str
    processors: int
    clock: float
    bandwidth: float
    cache_bandwidth: float
    halves: float
    bytes: float
    grouped: float = math.inf

    @property
    def limits(self) -> Limits:
        return limits_of(self.arch.removeprefix("sm_").removesuffix("a"))

    @property
    def processor(self) -> Multiprocessor:
        return MULTIPROCESSORS[self.arch]


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h200": Gpu("sm_90a", 132, 1.755e9, 4.8e12, 5.5e12, 6, 6, GROUPED),
        "h100": Gpu("sm_90a", 132, 1.755e9, 3.35e12, 5.5e12, 6, 6, GROUPED),
        "a100": Gpu("sm_80", 108, 1.41e9, 2.04e12, 4.0e12, 8, 8),
        "rtx4090": Gpu("sm_89", 128, 2.52e9, 1.01e12, 4.0e12, 32, 16),
        "rtx3090": Gpu("sm_86", 82, 1.695e9, 0.936e12, 2.0e12, 32, 16),
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does: its blocks, their threads, registers of a thread and bytes of shared memory of a block; and
    of all blocks together instructions and products of warps (`grouped`: their parts of those of warpgroups),
    wavefronts of shared memory, bytes of sectors that are asked of the second cache and bytes of memory; and how many
    loads of a warp come after one another."""

    blocks: int
    threads: int
    registers: int
    shared: int
    instructions: float
    halves: float
    grouped: float
    bytes: float
    wavefronts: float
    asked: float
    moved: float
    rounds: float

    def times(self, blocks: float, each: float = 1.0) -> Work:
        """As many times the blocks, each of which does `each` times as much."""
        by = blocks * each
        return Work(
            round(self.blocks * blocks),
            self.threads,
            self.registers,
            self.shared,
            self.instructions * by,
            self.halves * by,
            self.grouped * by,
            self.bytes * by,
            self.wavefronts * by,
            self.asked * by,
            self.moved * by,
            self.rounds * each,
        )

    def extended(self, longer: Work, times: float) -> Work:
        """With as many times what a longer launch does beyond this one."""

        def reached(here: float, there: float) -> float:
            return here + times * (there - here)

        return Work(
            round(reached(self.blocks, longer.blocks)),
            self.threads,
            self.registers,
            self.shared,
            reached(self.instructions, longer.instructions),
            reached(self.halves, longer.halves),
            reached(self.grouped, longer.grouped),
            reached(self.bytes, longer.bytes),
            reached(self.wavefronts, longer.wavefronts),
            reached(self.asked, longer.asked),
            reached(self.moved, longer.moved),
            reached(self.rounds, longer.rounds),
        )


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds that each resource would need alone, and of the begin and the end, when none is busy."""

    parts: Mapping[str, float]
    ends: float

    @property
    def limit(self) -> str:
        """What sets the time."""
        return max(self.parts, key=lambda part: self.parts[part])

    @property
    def total(self) -> float:
        return self.parts[self.limit] + self.ends


def time_of(work: Work, gpu: Gpu, cached: bool = False) -> Time:
    """How long a launch takes, without what the device needs between two launches; `cached` says that what it reads is
    in the second cache, as the launch before has just written it.  Raises `ValueError` if a block does not fit."""
    latency = CACHED_LATENCY if cached else LATENCY
    most = -(-work.blocks // gpu.processors)  # blocks of the processor that has most of them
    together = min(gpu.processor.holds(work.threads, work.registers, work.shared), most)
    if together == 0:
        raise ValueError("a block takes more than a multiprocessor has")
    warps = together * -(-work.threads // 32)
    schedulers = min(SCHEDULERS, warps)
    share = most / work.blocks / gpu.clock  # of the work of all blocks, for one processor
    on_each = warps / schedulers
    issued = ISSUED * on_each / (on_each + ALONE)
    waves = math.ceil(most / together)
    of_groups = work.grouped * gpu.grouped if work.grouped else 0.0
    parts = {
        "memory": work.moved / (REACHED * gpu.bandwidth),
        "second cache": work.asked / gpu.cache_bandwidth,
        "instructions": work.instructions * share / (schedulers * issued),
        "tensor cores": (work.halves * gpu.halves + of_groups + work.bytes * gpu.bytes) * share / schedulers,
        "shared memory": work.wavefronts * share,
        "latency": waves * work.rounds * latency,
    }
    drained = work.rounds * latency / 2 if waves > 1 else 0.0
    return Time(MappingProxyType(parts), latency + drained)
