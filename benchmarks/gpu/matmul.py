"""Benchmark matmuls with weights of every dtype: few tokens as a share of the copy bandwidth, many tokens in FLOP/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from hocket import ops
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.benchmarks.write_models import make_random_rows
from hocket.graph import Graph, constant, input, weight
from hocket.graph.dtypes import DType
from hocket.graph.node import Node
from hocket.ops import op_of
from hocket.ops.quantisation import decode_array

from .harness import BenchmarkDevice, Case, ResultRow, compute_nmse

SQUARE_SHAPE = (4096, 4096)
QWEN_4B_SHAPES = ((9216, 2560), (2560, 9216), (8192, 2560), (2560, 4096))
"""Rows and columns of the matrices of Qwen3.5-4B."""
GATE_UP_SHAPE = (18432, 2560)
"""Rows and columns of both matrices of the FFN of Qwen3.5-4B in one."""


def make_matmul_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    for dtype, is_exact in product((DType.BF16, DType.F16), (True, False)):
        title = f"{dtype} by clusters of blocks, {'exact' if is_exact else 'fast'}"
        yield Case(
            title, partial(check_clusters, bench, dtype, bench.select_size((4000, 4096, 500), (64, 64, 20)), is_exact)
        )
    if bench.tiny:
        for tokens in (1, 5):
            yield Case(f"q8_0 64×64, {tokens} tokens", partial(measure_matmul, bench, DType.Q8_0, (64, 64), tokens))
        yield Case("q8_0, 2 of 4 experts", partial(_measure_experts, bench, DType.Q8_0, 4, 2, (32, 64), 1))
        return
    for dtype in (*PLANE_LAYOUTS, DType.F16, DType.BF16):
        yield Case(
            f"{dtype} {SQUARE_SHAPE[0]}×{SQUARE_SHAPE[1]}, 1 token",
            partial(measure_matmul, bench, dtype, SQUARE_SHAPE, 1),
        )
    for shape in QWEN_4B_SHAPES:
        yield Case(f"q4_K {shape[0]}×{shape[1]}, 1 token", partial(measure_matmul, bench, DType.Q4_K, shape, 1))
    yield Case("q6_K 248320×2560, 1 token", partial(measure_matmul, bench, DType.Q6_K, (248320, 2560), 1))
    for tokens in (2, 4, 8, 16, 32, 64, 512, 4096):
        for dtype in (DType.Q4_K, DType.Q8_0, DType.BF16):
            yield Case(
                f"{dtype} 4096×4096, {tokens} tokens", partial(measure_matmul, bench, dtype, SQUARE_SHAPE, tokens)
            )
    for tokens in (1, 8, 512):
        title = f"q4_K, 10 of 512 experts of 512×2048, {tokens} tokens"
        yield Case(title, partial(_measure_experts, bench, DType.Q4_K, 512, 10, (512, 2048), tokens))
    for dtype in (DType.Q4_0, DType.Q6_K):
        yield Case(f"{dtype} 4096×4096, 512 tokens", partial(measure_matmul, bench, dtype, SQUARE_SHAPE, 512))
    for mode, is_exact in (("", True), (", fast", False)):
        large = partial(measure_matmul, bench, DType.BF16, GATE_UP_SHAPE, 8192, is_exact=is_exact)
        yield Case(f"bf16 {GATE_UP_SHAPE[0]}×{GATE_UP_SHAPE[1]}, 8192 tokens{mode}", large)
    fast = partial(measure_matmul, bench, DType.BF16, SQUARE_SHAPE, 512, is_exact=False)
    yield Case("bf16 4096×4096, 512 tokens, fast", fast)


def measure_matmul(
    bench: BenchmarkDevice, dtype: DType, shape: tuple[int, int], tokens: int, is_exact: bool = True
) -> Iterator[ResultRow]:
    """Measure a matmul with copies of a weight, so that no cache holds the weight.

    Up to 16 tokens the copies together exceed every cache; for more tokens there are three copies.
    """
    rows, columns = shape
    raw = make_random_rows(dtype, rows, columns, bench.rng)
    few = tokens <= 16
    copies = bench.select_size(max(3, min(64, -(-bench.uncached_bytes // 2 // raw.nbytes))) if few else 3, 2)
    x = input("x", (tokens, columns))
    graph = Graph({f"y{i}": ops.mul_mat(weight(f"w{i}", shape, dtype), x, exact=is_exact) for i in range(copies)})
    yield from _time_graph(
        bench, graph, {f"w{i}": raw for i in range(copies)}, {"x": _make_activations(bench, tokens, columns)}
    )


def check_clusters(
    bench: BenchmarkDevice, dtype: DType, shape: tuple[int, int, int], is_exact: bool
) -> Iterator[ResultRow]:
    """Run a matmul many times, and compare each result with float64 and, bit by bit, with the first result.

    Only a device shows whether the blocks of a cluster wait for each other correctly.
    """
    rows, columns, tokens = shape
    raw, x = make_random_rows(dtype, rows, columns, bench.rng), _make_activations(bench, tokens, columns)
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", x.shape), exact=is_exact)})
    executor, launches = bench.load_and_record(graph, {"w": raw}, {"x": x})
    results = [executor.run({"x": x})["y"].copy() for _ in range(bench.select_size(50, 2))]
    expected = x.astype(np.float64) @ decode_array(raw, dtype).astype(np.float64).T
    error, mode = compute_nmse(results[0], expected), "exact" if is_exact else "fast"
    is_right = error <= (1e-7 if is_exact else 1e-4) and all(np.array_equal(y, results[0]) for y in results)
    yield {"mode": mode, "NMSE": error, "right": is_right, "kernel": launches[-1].kernel.name}


def _measure_experts(
    bench: BenchmarkDevice, dtype: DType, experts: int, chosen: int, shape: tuple[int, int], tokens: int
) -> Iterator[ResultRow]:
    """Measure an MoE matmul in which each token uses `chosen` of `experts` experts."""
    rows, columns = shape
    raw = make_random_rows(dtype, experts * rows, columns, bench.rng).reshape(experts, rows, -1)
    copies = 2 if bench.tiny else 4
    x = ops.reshape(input("x", (tokens, columns)), shape=(tokens, 1, columns))
    results, inputs = {}, {"x": _make_activations(bench, tokens, columns)}
    for i in range(copies):
        order = [bench.rng.permutation(experts)[:chosen] for _ in range(tokens)]
        ids = constant(f"ids{i}", np.array(order, np.int32))  # a constant, so that no value reuses its memory
        results[f"y{i}"] = ops.mul_mat_id(weight(f"w{i}", (experts, *shape), dtype), x, ids)
    yield from _time_graph(bench, Graph(results), {f"w{i}": raw for i in range(copies)}, inputs)


def _make_activations(bench: BenchmarkDevice, tokens: int, columns: int) -> np.ndarray:
    return bench.rng.standard_normal((tokens, columns), dtype="f4")


def _time_graph(
    bench: BenchmarkDevice, graph: Graph, weights: dict[str, np.ndarray], inputs: dict[str, np.ndarray]
) -> Iterator[ResultRow]:
    """Measure one of the matmuls of a graph; all of its launches count, activation quantisation included."""
    _executor, launches = bench.load_and_record(graph, weights, inputs)
    products = [n for n in graph.nodes if n.op.startswith("mul_mat")]
    flops, nbytes = (sum(of(n) for n in products) for of in (_count_flops, _count_bytes))
    count = len(products)
    row = bench.measure_launches([launches], count).as_row(nbytes / count, flops / count, bench.copy_bandwidth)
    yield {**row, "launches": len(launches) / count, "kernel": launches[-1].kernel.name}


def _count_flops(node: Node) -> int:
    return op_of(node).count_flops(node)


def _count_bytes(node: Node) -> int:
    return op_of(node).count_bytes(node)
