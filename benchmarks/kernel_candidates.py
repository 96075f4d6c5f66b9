"""Benchmark each `UnmeasuredKernelCandidate` and the kernels that are used now.

The results decide `ENABLED_CANDIDATES` in ``backends/cupy/device/device_limits.py``. A case of each family checks
the results, and cases that measure both kernels one after the other in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from hocket import ops
from hocket.backends.base import Device
from hocket.backends.cupy.device.device_limits import KernelLimits, UnmeasuredKernelCandidate
from hocket.backends.cupy.device.driver import Driver
from hocket.benchmarks.gpu.attention import SHAPES, AttentionShape, measure_attention
from hocket.benchmarks.gpu.delta_net import DeltaNetShape, bind_chunks, bind_steps, compute_output, make_problem
from hocket.benchmarks.gpu.harness import BenchmarkDevice, Case, ResultRow, compute_nmse
from hocket.benchmarks.gpu.matmul import GATE_UP_SHAPE, SQUARE_SHAPE, check_clusters, measure_matmul
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType

ALL_CANDIDATES: Mapping[str, tuple[UnmeasuredKernelCandidate, ...]] = MappingProxyType(
    {"candidates": tuple(UnmeasuredKernelCandidate)}
)
DELTA_CANDIDATES: Mapping[str, tuple[UnmeasuredKernelCandidate, ...]] = MappingProxyType(
    {
        "segments": (UnmeasuredKernelCandidate.DELTA_SEGMENTS,),
        "chunks of 64": (UnmeasuredKernelCandidate.DELTA_LONG_CHUNKS,),
        "both": (UnmeasuredKernelCandidate.DELTA_SEGMENTS, UnmeasuredKernelCandidate.DELTA_LONG_CHUNKS),
    }
)
"""Sets of candidates that are measured, by name."""


class CandidateDriver:
    """A driver of devices that use some candidates."""

    def __init__(
        self, driver: Driver, candidates: Iterable[UnmeasuredKernelCandidate] = UnmeasuredKernelCandidate
    ) -> None:
        self.driver, self.kind, self.candidates = driver, driver.kind, frozenset(candidates)

    def limits(self, on: Device) -> KernelLimits:
        """Return the limits of the device, with the candidates."""
        return replace(self.driver.limits(on), candidates=self.candidates)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)


def make_candidate_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    shapes = bench.select_size(SHAPES, (AttentionShape(4, 2, 32),))
    for shape in shapes:
        yield Case(f"attention, {shape}, results", partial(_check_attention, bench, shape))
    for shape in shapes:
        for tokens in bench.select_size((512, 2048, 8192), (40,)):
            measure = partial(measure_attention, shape=shape, tokens=tokens, cells=tokens, kind="f16")
            yield Case(f"attention, {shape}, {tokens} tokens", partial(_measure_both, bench, measure))
    sizes = bench.select_size((4000, 4096, 500), (64, 64, 20))
    for dtype in (DType.BF16, DType.F16):
        check = partial(check_clusters, dtype=dtype, shape=sizes, is_exact=False)
        yield Case(f"products, {dtype}, results", partial(_measure_both, bench, check))
    products = ((DType.BF16, GATE_UP_SHAPE, 8192), (DType.BF16, SQUARE_SHAPE, 512), (DType.Q4_K, GATE_UP_SHAPE, 8192))
    for dtype, matrix, tokens in bench.select_size(products, ((DType.BF16, (64, 64), 20),)):
        measure = partial(measure_matmul, dtype=dtype, shape=matrix, tokens=tokens, is_exact=False)
        yield Case(
            f"products, {dtype} {matrix[0]}×{matrix[1]}, {tokens} tokens", partial(_measure_both, bench, measure)
        )
    shapes_of_heads = (DeltaNetShape(16, 32, 128), DeltaNetShape(4, 8, 128), DeltaNetShape(2, 4, 128))
    for heads in bench.select_size(shapes_of_heads, (DeltaNetShape(1, 2, 64),)):
        for tokens in bench.select_size((2048, 8192, 32768), (260,)):
            for is_exact in (True, False):
                prefill = partial(_measure_delta_net, shape=heads, tokens=tokens, is_exact=is_exact)
                title = f"delta net, {heads}, {tokens} tokens, {'exact' if is_exact else 'fast'}"
                yield Case(title, partial(_measure_both, bench, prefill, DELTA_CANDIDATES))


def _measure_delta_net(
    bench: BenchmarkDevice, shape: DeltaNetShape, tokens: int, is_exact: bool
) -> Iterator[ResultRow]:
    """Measure a prompt in chunks; the error is relative to the result token by token."""
    p = make_problem(bench, shape, 1, tokens)
    bind = partial(bind_chunks, bench, p, exact=is_exact)
    expected = compute_output(bench, p, partial(bind_steps, bench, p))
    error, launches = compute_nmse(compute_output(bench, p, bind), expected), bind(p.state)
    kernels = ", ".join(dict.fromkeys(launch.kernel.name.partition("<")[0] for launch in launches))
    row = bench.measure_launches([launches]).as_row(flops=shape.compute_flops(tokens))
    first = launches[0].kernel.name  # its second number is the tokens of a chunk
    yield {"mode": "exact" if is_exact else "fast", **row, "NMSE": error, "kernels": kernels, "first": first}


def _measure_both(
    bench: BenchmarkDevice,
    measure: Callable[[BenchmarkDevice], Iterator[ResultRow]],
    candidates: Mapping[str, tuple[UnmeasuredKernelCandidate, ...]] = ALL_CANDIDATES,
) -> Iterator[ResultRow]:
    """Measure with the kernels that are used now, and with each set of candidates by its name."""
    drivers = {by: CandidateDriver(bench.driver.driver, own) for by, own in candidates.items()}
    benches = {by: bench.with_driver(driver) for by, driver in drivers.items()}
    for by, one in {"now": bench, **benches}.items():
        for row in measure(one):
            yield {"by": by, **row}


def _use_candidates(bench: BenchmarkDevice) -> BenchmarkDevice:
    return bench.with_driver(CandidateDriver(bench.driver.driver))


def _check_attention(bench: BenchmarkDevice, shape: AttentionShape) -> Iterator[ResultRow]:
    """Run causal attention many times; compare it with the kernel that is used now, and bit by bit with itself."""
    tokens = bench.select_size(600, 40)
    pos = np.arange(tokens, dtype=np.int32)[None]
    q = input("q", (1, tokens, shape.heads, shape.size))
    k, v = (weight(name, (1, tokens, shape.key_heads, shape.size), DType.F16) for name in "kv")
    mask = ops.causal_mask(input("pos", pos.shape, "i32"), cells=tokens)
    graph = Graph({"y": ops.attention(q, k, v, mask, scale=shape.size**-0.5)})
    weights = {x.node.name: bench.rng.standard_normal(x.shape, dtype="f4").astype(np.float16) for x in (k, v)}
    inputs = {"q": bench.rng.standard_normal(q.shape, dtype="f4"), "pos": pos}
    expected = bench.load_and_record(graph, weights, inputs)[0].run(inputs)["y"].copy()
    executor, launches = _use_candidates(bench).load_and_record(graph, weights, inputs)
    results = [executor.run(inputs)["y"].copy() for _ in range(bench.select_size(50, 2))]
    is_right = all(np.array_equal(y, results[0]) for y in results)
    kernels = ", ".join(dict.fromkeys(x.kernel.name for x in launches))
    yield {"mode": "fast", "NMSE": compute_nmse(results[0], expected), "right": is_right, "kernels": kernels}
