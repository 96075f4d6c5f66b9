"""Benchmark matmuls with weights of every dtype: few tokens as a share of the copy bandwidth, many tokens in FLOP/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from write_models import random_rows

from hocket import ops
from hocket.backends.cupy.binding.packing import PACKINGS
from hocket.graph import Graph, constant, input, weight
from hocket.graph.dtypes import DType
from hocket.graph.node import Node
from hocket.ops import op_of
from hocket.ops.quantisation import decode_array

from .bench import Bench, Case, Row, normalised_error

SQUARE = (4096, 4096)
OF_A_4B = ((9216, 2560), (2560, 9216), (8192, 2560), (2560, 4096))
"""Rows and columns of the matrices of Qwen3.5-4B."""


def cases(bench: Bench) -> Iterator[Case]:
    for dtype, is_exact in product((DType.BF16, DType.F16), (True, False)):
        title = f"{dtype} by clusters of blocks, {'exact' if is_exact else 'fast'}"
        yield Case(title, partial(_right, bench, dtype, bench.choose((4000, 4096, 500), (64, 64, 20)), is_exact))
    if bench.tiny:
        for tokens in (1, 5):
            yield Case(f"q8_0 64×64, {tokens} tokens", partial(measured, bench, DType.Q8_0, (64, 64), tokens))
        yield Case("q8_0, 2 of 4 experts", partial(_experts, bench, DType.Q8_0, 4, 2, (32, 64), 1))
        return
    for dtype in (*PACKINGS, DType.F16, DType.BF16):
        yield Case(f"{dtype} {SQUARE[0]}×{SQUARE[1]}, 1 token", partial(measured, bench, dtype, SQUARE, 1))
    for shape in OF_A_4B:
        yield Case(f"q4_K {shape[0]}×{shape[1]}, 1 token", partial(measured, bench, DType.Q4_K, shape, 1))
    yield Case("q6_K 248320×2560, 1 token", partial(measured, bench, DType.Q6_K, (248320, 2560), 1))
    for tokens in (2, 4, 8, 16, 32, 64, 512, 4096):
        for dtype in (DType.Q4_K, DType.Q8_0, DType.BF16):
            yield Case(f"{dtype} 4096×4096, {tokens} tokens", partial(measured, bench, dtype, SQUARE, tokens))
    for tokens in (1, 8, 512):
        title = f"q4_K, 10 of 512 experts of 512×2048, {tokens} tokens"
        yield Case(title, partial(_experts, bench, DType.Q4_K, 512, 10, (512, 2048), tokens))
    for dtype in (DType.Q4_0, DType.Q6_K):
        yield Case(f"{dtype} 4096×4096, 512 tokens", partial(measured, bench, dtype, SQUARE, 512))
    fast = partial(measured, bench, DType.BF16, SQUARE, 512, is_exact=False)
    yield Case("bf16 4096×4096, 512 tokens, fast", fast)


def measured(bench: Bench, dtype: DType, shape: tuple[int, int], tokens: int, is_exact: bool = True) -> Iterator[Row]:
    """Measure a matmul with copies of a weight, so that no cache holds the weight.

    Up to 16 tokens the copies together exceed every cache; for more tokens there are three copies.
    """
    rows, columns = shape
    raw = random_rows(dtype, rows, columns, bench.random)
    few = tokens <= 16
    copies = bench.choose(max(3, min(64, -(-bench.enough // 2 // raw.nbytes))) if few else 3, 2)
    x = input("x", (tokens, columns))
    graph = Graph({f"y{i}": ops.mul_mat(weight(f"w{i}", shape, dtype), x, exact=is_exact) for i in range(copies)})
    yield from _timed(bench, graph, {f"w{i}": raw for i in range(copies)}, {"x": _activations(bench, tokens, columns)})


def _right(bench: Bench, dtype: DType, shape: tuple[int, int, int], is_exact: bool) -> Iterator[Row]:
    """Run a matmul many times, and compare each result with float64 and, bit by bit, with the first result.

    Only a device shows whether the blocks of a cluster wait for each other correctly.
    """
    rows, columns, tokens = shape
    raw, x = random_rows(dtype, rows, columns, bench.random), _activations(bench, tokens, columns)
    graph = Graph({"y": ops.mul_mat(weight("w", (rows, columns), dtype), input("x", x.shape), exact=is_exact)})
    made, launches = bench.planned(graph, {"w": raw}, {"x": x})
    results = [made.run({"x": x})["y"].copy() for _ in range(bench.choose(50, 2))]
    wanted = x.astype(np.float64) @ decode_array(raw, dtype).astype(np.float64).T
    error, mode = normalised_error(results[0], wanted), "exact" if is_exact else "fast"
    is_right = error <= (1e-7 if is_exact else 1e-4) and all(np.array_equal(y, results[0]) for y in results)
    yield {"mode": mode, "NMSE": error, "right": is_right, "kernel": launches[-1].kernel.name}


def _experts(
    bench: Bench, dtype: DType, experts: int, chosen: int, shape: tuple[int, int], tokens: int
) -> Iterator[Row]:
    """Measure an MoE matmul in which each token uses `chosen` of `experts` experts."""
    rows, columns = shape
    raw = random_rows(dtype, experts * rows, columns, bench.random).reshape(experts, rows, -1)
    copies = 2 if bench.tiny else 4
    x = ops.reshape(input("x", (tokens, columns)), shape=(tokens, 1, columns))
    made, given = {}, {"x": _activations(bench, tokens, columns)}
    for i in range(copies):
        order = [bench.random.permutation(experts)[:chosen] for _ in range(tokens)]
        ids = constant(f"ids{i}", np.array(order, np.int32))  # a constant, so that no value reuses its memory
        made[f"y{i}"] = ops.mul_mat_id(weight(f"w{i}", (experts, *shape), dtype), x, ids)
    yield from _timed(bench, Graph(made), {f"w{i}": raw for i in range(copies)}, given)


def _activations(bench: Bench, tokens: int, columns: int) -> np.ndarray:
    return bench.random.standard_normal((tokens, columns), dtype="f4")


def _timed(bench: Bench, graph: Graph, weights: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> Iterator[Row]:
    """Measure one of the matmuls of a graph; all of its launches count, activation quantisation included."""
    _held, launches = bench.planned(graph, weights, inputs)
    products = [n for n in graph.nodes if n.op.startswith("mul_mat")]
    flops, nbytes = (sum(of(n) for n in products) for of in (_flops, _nbytes))
    count = len(products)
    row = bench.time_launches([launches], count).row(nbytes / count, flops / count, bench.copy_bandwidth)
    yield {**row, "launches": len(launches) / count, "kernel": launches[-1].kernel.name}


def _flops(node: Node) -> int:
    return op_of(node).count_flops(node)


def _nbytes(node: Node) -> int:
    return op_of(node).count_bytes(node)
