"""Programs with fused kernels: graphs of varied ops on one or two CPU devices, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from hocket import ops
from hocket.backends.base import Program
from hocket.backends.capabilities import ProgramFusion
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import program_binding
from hocket.graph import Graph, input, state, weight
from hocket.scheduler import plan_for_group

FusedProgram = tuple[Program, ProgramFusion]
ROWS, COLUMNS = 6, 128
A, B, C = (input(name, (ROWS, COLUMNS)) for name in "abc")
A3, B3, C3 = (input(f"{name}3", (2, ROWS, COLUMNS)) for name in "abc")
SQUARE, OTHER_SQUARE = (input(name, (COLUMNS, COLUMNS)) for name in ("square", "other_square"))
CUBE, FACES, PLANE = input("cube", (4, 4, 4)), input("faces", (4, 1, 4)), input("plane", (4, 4))
GAIN = weight("gain", (COLUMNS,), "f32")
W1, W2 = (weight(name, (COLUMNS, COLUMNS), "f32") for name in ("w1", "w2"))


def _norm() -> Graph:
    total = ops.add(A, B)
    normed = ops.mul(ops.rms_norm(total, eps=1e-5), GAIN)
    return Graph({"total": total, "y": ops.mul(ops.silu(normed), total)})


def _number_per_row() -> Graph:
    total = ops.sum_rows(ops.mul(A, B))
    return Graph({"total": total, "y": ops.div(A, ops.sqrt(ops.abs(total)))})


def _several_results() -> Graph:
    difference = ops.sub(A, B)
    power = ops.exp(difference)
    return Graph({"difference": difference, "power": power, "ratio": ops.div(difference, power)})


def _mean() -> Graph:
    mean = ops.mean(A)
    return Graph({"mean": mean, "y": ops.div(ops.sub(A, mean), ops.sum_rows(ops.abs(B)))})


def _views() -> Graph:
    transposed = ops.sub(ops.permute(input("transposed", (COLUMNS, ROWS)), axes=(1, 0)), B)
    part = ops.slice(input("wide", (ROWS, 2 * COLUMNS)), axis=1, start=COLUMNS, stop=2 * COLUMNS)
    return Graph({"y": ops.div(ops.neg(transposed), part)})


def _halves() -> Graph:
    wide = ops.neg(input("wide", (ROWS, 2 * COLUMNS)))
    left, right = (ops.slice(wide, axis=1, start=k * COLUMNS, stop=(k + 1) * COLUMNS) for k in range(2))
    return Graph({"y": ops.div(ops.exp(left), right)})


def _reshaped_value() -> Graph:
    rows = ops.reshape(ops.neg(A), shape=(2, ROWS, COLUMNS // 2))
    return Graph({"y": ops.sub(ops.softmax(rows), input("k", (2, ROWS, COLUMNS // 2)))})


def _transposed_result() -> Graph:
    value = ops.neg(SQUARE)
    return Graph({"y": ops.sub(value, ops.transpose(value))})


def _sum_read_as_row() -> Graph:
    total = ops.sum_rows(ops.neg(SQUARE))
    return Graph({"y": ops.div(SQUARE, ops.reshape(total, shape=(1, COLUMNS)))})


def _row_computed_inside() -> Graph:
    return Graph({"y": ops.sub(ops.div(A, ops.exp(ops.neg(input("row", (1, COLUMNS))))), B)})


def _state_read_and_written() -> Graph:
    s = state("s", (ROWS, COLUMNS))
    new = ops.sub(ops.exp(ops.sub(ops.neg(s), A)), s)
    return Graph({"y": ops.div(ops.neg(new), B)}, {s: new})


def _state_in_place() -> Graph:
    s = state("s", (ROWS, COLUMNS))
    return Graph({"y": ops.sub(ops.exp(ops.neg(s)), A)}, {s: ops.add(ops.mul(s, A), B)})


def _cache_rows() -> Graph:
    s, ids = state("cache", (16, COLUMNS)), input("ids", (ROWS,), "i32")
    new = ops.set_rows(s, ops.sub(ops.neg(A), B), ids)
    y = ops.sub(ops.exp(ops.neg(new)), input("z", (16, COLUMNS)))
    return Graph({"y": y, "u": ops.div(ops.sqr(ops.neg(A)), B)}, {s: new})


def _product_between() -> Graph:
    product = ops.mul_mat(W1, ops.sub(ops.neg(A), B))
    return Graph({"y": ops.sub(ops.exp(product), ops.sub(ops.neg(A), B)), "n": ops.neg(product)})


def _collective() -> Graph:
    hidden = ops.mul_mat(W1, ops.silu(ops.neg(A)))
    answer = ops.mul_mat(W2, ops.sub(ops.exp(hidden), hidden))
    apart = ops.div(ops.exp(C), ops.abs(C))
    return Graph({"y": ops.sub(ops.neg(ops.add(A, answer)), B), "apart": apart})


def _concatenation() -> Graph:
    """A rotation by halves, and a number per row from another kernel."""
    low, high = (ops.slice_(A, axis=-1, start=s, stop=s + COLUMNS // 2) for s in (0, COLUMNS // 2))
    return Graph({"y": ops.sub(ops.mul(A, B), ops.mul(ops.concat(ops.neg(high), low, axis=-1), C))})


GRAPH_BUILDERS: Mapping[str, Callable[[], Graph]] = {
    "clamped": lambda: Graph({"y": ops.clamp(ops.sub(ops.div(ops.neg(A), B), ops.mul(A, C)), min=-0.7, max=0.9)}),
    "scaled": lambda: Graph({"y": ops.scale(ops.scale(ops.sub(A, B), scale=0.3, bias=0.1), scale=0.7)}),
    "gated": lambda: Graph({"y": ops.mul(ops.swiglu(ops.neg(A), ops.abs(B)), C)}),
    "chosen": lambda: Graph({"y": ops.where(ops.compare(A, B, kind="lt"), ops.sub(A, B), ops.maximum(A, C))}),
    "norm": _norm,
    "layer norm": lambda: Graph({"y": ops.sub(ops.norm(ops.sub(A, B), eps=1e-5), C)}),
    "softmax": lambda: Graph({"y": ops.softmax(ops.sub(A3, B3)), "z": ops.div(ops.neg(A3), ops.exp(C3))}),
    "number per row": _number_per_row,
    "mean": _mean,
    "several results": _several_results,
    "views": _views,
    "concatenation": _concatenation,
    "halves": _halves,
    "reshaped": _reshaped_value,
    "square": lambda: Graph({"y": ops.div(ops.sub(SQUARE, OTHER_SQUARE), ops.exp(OTHER_SQUARE))}),
    "transposed result": _transposed_result,
    "sum read as row": _sum_read_as_row,
    "row computed inside": _row_computed_inside,
    "cube": lambda: Graph({"y": ops.sub(ops.div(CUBE, FACES), PLANE)}),
    "packed gate": lambda: Graph(
        {"y": ops.sub(ops.glu(ops.neg(input("wide", (ROWS, 2 * COLUMNS))), kind="swiglu"), A)}
    ),
    "cast": lambda: Graph({"y": ops.sub(ops.cast(ops.cast(ops.neg(A), dtype="f16"), dtype="f32"), B)}),
    "state read and written": _state_read_and_written,
    "state in place": _state_in_place,
    "cache rows": _cache_rows,
    "product between": _product_between,
    "collective": _collective,
    "collective, device 1": _collective,
}


@cache
def build_fused_program(name: str) -> FusedProgram:
    """Build the program of a graph of `GRAPH_BUILDERS` and its fused kernels on the CPU, without hooks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_binding, "choose_hooked_bodies", lambda flow, groups, patterns: [])
        backend = CpuBackend(1)
        count = 2 if name.startswith("collective") else 1
        group = [(backend, backend.device(k)) for k in range(count)]
        plan = plan_for_group(GRAPH_BUILDERS[name](), group, split_mode="tensor" if count > 1 else "auto")
        program = plan.device_plans[1 if name.endswith("device 1") else 0].program
        return program, backend.describe_fusion(program)
