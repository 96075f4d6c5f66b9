"""How fast an op runs with cold buffers, and what share of the machine's own limit that is.

A case is planned once and bound to several copies of its memory, together larger than the last-level cache, which are
run in turn.  The limits are measured in the same run, on the same device, all through the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.base import Backend, Device
from ...graph.errors import BackendError
from ...graph.spec import Spec, make_spec
from ...ops import Op
from ...ops.elementwise.binary import cont
from ...ops.matrix.matmul import mul_mat
from ...scheduler import Lane
from ..judging.build import build, lane_for
from ..judging.guarded import Guarded
from ..trials.case import Case, make_case
from ..trials.grow import Point, legal, points, rebuilt, sizes_of
from ..trials.inputs import draw

MOST_BYTES = 1 << 30
"""Of copies, whatever the cache: a machine may have a cache larger than what a test should take."""
MOST_COPIES = 64
LARGEST = 1 << 21
"""Elements of an operand."""
WANTED_SECONDS = 0.2
FEWEST_RUNS, MOST_RUNS = 5, 2000


PRODUCTS = ("mul_mat", "mul_mat_id")
"""Ops whose arithmetic is that of their weight's type: rows of 8-bit integers, where it is packed."""


class Limits:
    """What a device reaches with ops that come nearest to doing nothing else: bytes a second of a copy or of a matrix
    that is only read, and operations a second of a large product of matrices, whose weights are of the type that the
    case at hand has."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self._measure = lambda case: measure(case, backend, device)
        copy = make_case(cont, {"x": Spec((1 << 24,))})
        read = make_case(mul_mat, {"w": Spec((4096, 4096)), "x": Spec((1, 4096))})
        self.bandwidth = max(self._measure(case).bandwidth for case in (copy, read))
        self._flops: dict[str, float] = {}

    def flops(self, dtype: str) -> float:
        """Operations a second of a large product with weights of that type, measured when it is first asked for."""
        if dtype not in self._flops:
            w, x = make_spec((1024, 1024), dtype), Spec((1024, 1024))
            self._flops[dtype] = self._measure(make_case(mul_mat, {"w": w, "x": x})).throughput
        return self._flops[dtype]

    def flops_for(self, case: Case) -> float:
        """Operations a second that the arithmetic of a case could reach."""
        return self.flops(case.operands[0][1].dtype.text if case.op in PRODUCTS else "f32")


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one run: median and interquartile range; `cold` is whether the copies exceed the cache."""

    case: Case
    median: float
    spread: float
    nbytes: int
    flops: int
    cold: bool

    @property
    def bandwidth(self) -> float:
        return self.nbytes / self.median

    @property
    def throughput(self) -> float:
        return self.flops / self.median

    def share(self, limits: Limits) -> float:
        """Of the time the device would need at its measured limit for bytes or operations, whichever takes longer."""
        return max(self.bandwidth / limits.bandwidth, self.throughput / limits.flops_for(self.case))

    def line(self, limits: Limits) -> str:
        return (
            f"{self.median * 1e6:10.1f} us ±{self.spread * 1e6:8.1f}  {self.bandwidth / 1e9:8.2f} GB/s  "
            f"{self.throughput / 1e9:9.2f} GFLOP/s  {self.share(limits):5.0%}  {'cold' if self.cold else 'warm'}  "
            f"{self.case}"
        )


def last_level_cache() -> int:
    """Bytes of the largest cache of this machine, where the system says; else 32 MiB."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text("ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdecimal() else 0)
    return max(sizes)


def measure(case: Case, backend: Backend, device: Device) -> Speed:
    """Time `case`.  Raises `BackendError` where the device does not support it."""
    support = backend.supports(build(case).node, device)
    if not support.ok:
        raise BackendError(f"{case} cannot run on {device}: {support.why}")
    built = build(case)
    lane = lane_for(built.graph, backend, device)
    size = max(1, sum(lane.memory().values()))
    cache = last_level_cache()
    copies = max(1, min(MOST_COPIES, MOST_BYTES // size, -(-2 * cache // size)))
    units = draw(case)
    leaves = built.leaves(units, 0.0)
    runs = [_bound(lane, built.stored_weights(leaves), leaves) for _ in range(copies)]
    seconds = _times(runs)
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    op: Op[Any] = case.declared
    return Speed(
        case,
        float(middle),
        float(high - low),
        op.count_bytes(built.node),
        op.count_flops(built.node),
        copies * size > cache,
    )


def _bound(lane: Lane, weights: dict[str, Any], leaves: dict[str, Any]) -> Callable[[], None]:
    guarded = Guarded(lane, weights)
    guarded.poison(0)
    guarded.bind({n: leaves[n] for n in guarded.program.inputs})
    return lambda: guarded.replay()  # compiled code knows addresses only: memory lives as long as what runs on it


def _times(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of single runs, the copies in turn."""
    for run in runs[:2]:
        run()
    times: list[float] = []
    end = time.perf_counter() + WANTED_SECONDS
    while len(times) < FEWEST_RUNS or (time.perf_counter() < end and len(times) < MOST_RUNS):
        run = runs[len(times) % len(runs)]
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def perf_cases(op: Op[Any]) -> list[Case]:
    """One case for each choice of dtypes: a sample, every dimension doubled in turn for as long as it may grow."""
    samples: dict[str, Case] = {}
    for case in points(op):
        if case.dtypes not in samples and all(s.size > 1 for _, s in case.operands):
            samples[case.dtypes] = case
    return [_enlarged(op, case) for case in samples.values()]


def _enlarged(op: Op[Any], case: Case) -> Case:
    parts: Point = {**case.specs, **dict(case.attrs)}
    growing = True
    while growing:
        growing = False
        known = sizes_of(op, parts)
        assert known is not None
        named, leading = dict(known[1].by_name), known[1].leading
        steps = [({**named, n: 2 * size}, leading) for n, size in named.items() if n != op.sequential and size > 1]
        if not steps and leading:
            steps = [(named, (2 * leading[0], *leading[1:]))]
        for changed, ahead in steps:
            now = sizes_of(op, parts)
            assert now is not None
            # One dimension after the other, each from what the one before left.
            merged = {n: max(size, now[1].by_name[n]) for n, size in changed.items()}
            grown = rebuilt(op, parts, merged, ahead)
            if legal(op, grown, LARGEST):
                parts, growing = grown, True
    return make_case(op, parts)
