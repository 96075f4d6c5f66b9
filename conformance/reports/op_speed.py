"""The speed of an op with cold buffers, and its fraction of the measured limit of the device.

A case is planned once and bound to several copies of its memory, which together exceed the last-level cache and run in
turn. The limits are measured in the same run, on the same device, through the same backend.
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
from ...ops import REGISTRY, Op
from ...ops.elementwise.binary import cont
from ...ops.matrix.matmul import mul_mat
from ...scheduler import DevicePlan
from ..cases.case import Case, make_case
from ..cases.grow_shapes import OpCall, grow_cases_from_samples, is_legal_call, resize_call, resolve_call_sizes
from ..cases.inputs import generate_random_operands
from ..checks.case_graph import build_case_graph, build_verified_device_plan, find_unsupported_reason
from ..checks.guarded_memory import GuardedProgram

MAX_COPY_BYTES = 1 << 30
"""Maximum bytes of all copies; a large cache may then hold a part of them."""
MAX_COPIES = 64
"""Maximum copies of the memory of a case."""
MAX_ELEMENTS = 1 << 21
"""Maximum elements of an operand."""
TARGET_SECONDS = 0.2
"""Seconds of measurement per case."""
MIN_RUNS, MAX_RUNS = 5, 2000
"""Minimum and maximum runs of a measurement."""


PRODUCTS = ("mul_mat", "mul_mat_id")
"""Ops that compute in the number format of their weight: with 8-bit integers if the weight is quantised."""


class MeasuredLimits:
    """The measured limits of a device: bytes per second and floating-point operations per second.

    * Bytes per second: of a copy or of a product with one row, the faster of both.
    * Operations per second: of a large product, with weights of the dtype of a case.
    """

    def __init__(self, backend: Backend, device: Device) -> None:
        self._measure = lambda case: measure_op_speed_with_cold_buffers(case, backend, device)
        copy = make_case(cont, {"x": Spec((1 << 24,))})
        read = make_case(mul_mat, {"w": Spec((4096, 4096)), "x": Spec((1, 4096))})
        self.bandwidth = max(self._measure(case).bytes_per_second for case in (copy, read))
        self._flops: dict[str, float] = {}

    def measure_matmul_flops_once_per_dtype(self, dtype: str) -> float:
        """Measure the operations per second of a large matrix product with weights of `dtype`, once per dtype."""
        if dtype not in self._flops:
            w, x = make_spec((1024, 1024), dtype), Spec((1024, 1024))
            self._flops[dtype] = self._measure(make_case(mul_mat, {"w": w, "x": x})).flops_per_second
        return self._flops[dtype]

    def measure_matmul_flops_per_second_for_case(self, case: Case) -> float:
        """Return the operations per second that a case could reach, measured on a matrix product.

        For a product, the weights have the dtype of the weights of the case; for other ops float32.
        """
        return self.measure_matmul_flops_once_per_dtype(
            case.operands[0][1].dtype.text if case.op in PRODUCTS else "f32"
        )


@dataclass(frozen=True, slots=True)
class OpSpeed:
    """The measured seconds of one run of a case, with its bytes and floating-point operations.

    `median_seconds` and `interquartile_seconds` are statistics of single runs. `cold` states whether the copies of the
    memory exceed the cache.
    """

    case: Case
    median_seconds: float
    interquartile_seconds: float
    nbytes: int
    flops: int
    cold: bool

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.median_seconds

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations per second."""
        return self.flops / self.median_seconds

    def compute_fraction_of_limit(self, limits: MeasuredLimits) -> float:
        """Return the reached fraction of the measured limits: of bytes or of operations, the larger one."""
        return max(
            self.bytes_per_second / limits.bandwidth,
            self.flops_per_second / limits.measure_matmul_flops_per_second_for_case(self.case),
        )

    def format_line(self, limits: MeasuredLimits) -> str:
        """Return the measurement as one line of text."""
        return (
            f"{self.median_seconds * 1e6:10.1f} us ±{self.interquartile_seconds * 1e6:8.1f}  "
            f"{self.bytes_per_second / 1e9:8.2f} GB/s  {self.flops_per_second / 1e9:9.2f} GFLOP/s  "
            f"{self.compute_fraction_of_limit(limits):5.0%}  {'cold' if self.cold else 'warm'}  {self.case}"
        )


def read_last_level_cache_bytes() -> int:
    """Return the bytes of the largest processor cache, as Linux reports them. The result is at least 32 MiB."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text("ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdecimal() else 0)
    return max(sizes)


def measure_op_speed_with_cold_buffers(case: Case, backend: Backend, device: Device) -> OpSpeed:
    """Measure the seconds of runs of a case on a device with cold buffers.

    Raises:
        BackendError: the device does not support the case.
    """
    built = build_case_graph(case)
    if why := find_unsupported_reason(built.graph, backend, device):
        raise BackendError(f"{case} cannot run on {device}: {why}")
    device_plan = build_verified_device_plan(built.graph, backend, device)
    size = max(1, sum(device_plan.count_memory_bytes_by_kind().values()))
    cache = read_last_level_cache_bytes()
    copies = max(1, min(MAX_COPIES, MAX_COPY_BYTES // size, -(-2 * cache // size)))
    units = generate_random_operands(case)
    leaves = built.build_leaf_arrays(units, 0.0)
    runs = [_bind_plan_to_case(device_plan, built.encode_weights(leaves), leaves) for _ in range(copies)]
    seconds = _measure_run_seconds_with_cold_cache(runs)
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    nodes = [node for node in built.graph.nodes if not node.is_leaf]
    return OpSpeed(
        case,
        float(middle),
        float(high - low),
        sum(REGISTRY[node.op].count_bytes(node) for node in nodes),
        sum(REGISTRY[node.op].count_flops(node) for node in nodes),
        copies * size > cache,
    )


def _bind_plan_to_case(device_plan: DevicePlan, weights: dict[str, Any], leaves: dict[str, Any]) -> Callable[[], None]:
    """Bind a plan to new memory with the data of a case, and return a function that runs the plan once."""
    guarded = GuardedProgram(device_plan, weights)
    guarded.poison_arena_and_guard_zones(0)
    guarded.encode_and_write_inputs({n: leaves[n] for n in guarded.program.inputs})
    return lambda: guarded.replay()  # the closure keeps the memory alive


def _measure_run_seconds_with_cold_cache(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Measure the seconds of each run of a case; the copies of the case run in turn, so that each finds a cold cache.

    Args:
        runs: for each copy, a function that runs it once.
    """
    for run in runs[:2]:
        run()
    times: list[float] = []
    end = time.perf_counter() + TARGET_SECONDS
    while len(times) < MIN_RUNS or (time.perf_counter() < end and len(times) < MAX_RUNS):
        run = runs[len(times) % len(runs)]
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def generate_large_case_per_dtypes(op: Op[Any]) -> list[Case]:
    """Return one large case for each combination of operand dtypes of an op."""
    samples: dict[str, Case] = {}
    for case in grow_cases_from_samples(op):
        if case.dtype_names not in samples and all(s.size > 1 for _, s in case.operands):
            samples[case.dtype_names] = case
    return [_double_dimensions_to_limit(op, case) for case in samples.values()]


def _double_dimensions_to_limit(op: Op[Any], case: Case) -> Case:
    """Double the dimensions of a case in turn while operands have at most `MAX_ELEMENTS` elements."""
    parts: OpCall = {**case.specs, **dict(case.attrs)}
    growing = True
    while growing:
        growing = False
        known = resolve_call_sizes(op, parts)
        assert known is not None
        named, leading = dict(known[1].by_name), known[1].leading
        steps = [({**named, n: 2 * size}, leading) for n, size in named.items() if n != op.sequential and size > 1]
        if not steps and leading:
            steps = [(named, (2 * leading[0], *leading[1:]))]
        for changed, ahead in steps:
            now = resolve_call_sizes(op, parts)
            assert now is not None
            # One dimension after the other; each step starts from the result of the step before.
            merged = {n: max(size, now[1].by_name[n]) for n, size in changed.items()}
            grown = resize_call(op, parts, merged, ahead)
            if is_legal_call(op, grown, MAX_ELEMENTS):
                parts, growing = grown, True
    return make_case(op, parts)
