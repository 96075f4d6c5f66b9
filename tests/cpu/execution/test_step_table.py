"""How threads of a device share a program: the same bits as one thread, few meetings, and nothing written too early."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.base import Tensor
from hocket.backends.cpu import target_cpu
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import binding_cache, program_binding, replay
from hocket.backends.cpu.kernels.matmul.gated_matmul_many import TILE_SUFFIX
from hocket.backends.cpu.kernels.vector.elementwise import COPY
from hocket.backends.cpu.kernels.vector.expression_kernels import make_expression_kernel
from hocket.backends.cpu.simd.vectors import MANY_REGISTERS, count_vector_registers
from hocket.backends.cpu.steps.column_split import find_continued_column_split
from hocket.backends.cpu.steps.step_loop import BARRIER_FLAG
from hocket.backends.cpu.steps.step_table import RUN_STATUS_REGION, StepTableBuilder, ThreadWork
from hocket.backends.fusion.operands import MemoryRegion, Operand
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType

from ...given.models.goldens import path_of, tokens_of
from ...given.random_rows import nightly_unless, random_rows

RNG = np.random.default_rng(7)


def layers(count: int, rows: int, dtype: DType) -> hocket.Graph:
    """Scaled norms, products and gated units, some times over."""
    x = hocket.input("x", (rows, 192))
    for i in range(count):
        gate, up = (hocket.weight(f"{n}.{i}", (544, 192), dtype) for n in ("gate", "up"))
        down, scale = hocket.weight(f"down.{i}", (192, 544), DType.Q4_0), hocket.weight(f"scale.{i}", (192,))
        h = ops.mul(ops.rms_norm(x, eps=1e-6), scale)
        x = ops.add(x, ops.mul_mat(down, ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h))))
    return hocket.Graph({"y": x})


def values_of(graph: hocket.Graph) -> dict[str, np.ndarray]:
    def random_weight(w: hocket.Value) -> np.ndarray:
        if w.dtype.is_quantised:
            return random_rows(w.dtype, math.prod(w.shape[:-1]), w.shape[-1], RNG).reshape(*w.shape[:-1], -1)
        return RNG.standard_normal(w.shape).astype(w.dtype.storage)

    return {w.node.name: random_weight(w) for w in graph.weights}


def load_with_threads(graph: hocket.Graph, values: dict[str, np.ndarray], threads: int):
    backend = CpuBackend(threads)
    return hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), values)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.F16, DType.F32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40, 530])
def test_threads_with_work_items_and_copies_of_their_own_compute_the_bits_of_one(rows: int, dtype: DType, monkeypatch):
    graph = layers(3, rows, dtype)
    values, x = values_of(graph), RNG.standard_normal((rows, 192))
    results = [
        load_with_threads(graph, values, threads).run({"x": x})["y"] for threads in (1, 2, 3, 7) for _ in range(3)
    ]
    monkeypatch.setattr(program_binding, "FUSED", {})
    results += [load_with_threads(graph, values, threads).run({"x": x})["y"] for threads in (1, 2)]
    assert np.isfinite(results[0]).all()
    assert all(np.array_equal(f, results[0]) for f in results)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-rope-freqs", "qwen3-q4_k_m", "qwen35", "qwen35moe"])
def test_a_model_computes_the_same_bits_without_fused_kernels(name: str, threads: int, monkeypatch):
    model, tokens = open_model(path_of(name)), tokens_of(name)

    def logits() -> np.ndarray:
        session = Session(model, on=DeviceGroup(threads=threads))
        return np.concatenate([session.evaluate([part])[0] for part in (tokens[:9], tokens[9:10], tokens[10:11])])

    fused = logits()
    monkeypatch.setattr(program_binding, "FUSED", {})
    monkeypatch.setattr(binding_cache, "find_binding_file", lambda *args: None)  # the cache has them
    assert np.array_equal(fused, logits())


WIDE = count_vector_registers() == MANY_REGISTERS or target_cpu.find_native_or_emulated_amx() is not None
"""Whether a tile has two groups of vectors, as a gate and its gated values need."""
BAD = {"none": 1.0, "nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def rows_with_outlier(rows: int, columns: int = 192, bad: float = 1.0) -> np.ndarray:
    """Return rows; the last one contains `bad`, and the first one is so small that its scale is raised."""
    x = RNG.standard_normal((rows, columns)).astype(np.float32)
    x[0] *= np.float32(1e-20) if rows > 1 else 1
    x[-1, columns // 2] = bad
    return x


DIGEST = re.compile(r"\.[0-9a-f]{12}$")
"""The digest at the end of the name of a generated kernel."""


def kernels_of(graph: hocket.Graph, inputs: dict[str, object], threads: int) -> list[str]:
    """The names of the kernels that run a graph with random weights, which must compute the bits that others do."""
    values = values_of(graph)
    run = load_with_threads(graph, values, threads)
    fused = run.run(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_binding, "FUSED", {})
        plain = load_with_threads(graph, values, 1).run(inputs)
    for name, array in plain.items():
        assert np.array_equal(fused[name].view(np.uint32), array.view(np.uint32)), name
    return [
        DIGEST.sub("", name.removesuffix(TILE_SUFFIX).replace("tiled.", "products."))
        for name in run.list_kernel_names()
    ]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 20, 70])
def test_norms_and_units_that_are_rounded_at_once_are_the_same_bits(rows: int, threads: int, bad: float):
    names = kernels_of(layers(2, rows, DType.Q8_0), {"x": rows_with_outlier(rows, bad=bad)}, threads)
    unit = ["packed_matmul.multiply.q8_0"] * 2 + ["gated_units.combine.swiglu"]
    if rows == 20 and threads == 2 and not WIDE:  # each thread has 272 columns, which end within a block of 32
        unit[2:] = ["rows.neg.exp.add.div.mul", "activation_quantisation.quantise_activation_rows"]
    if rows < 20:
        unit = ["gated_matmul_few.multiply.q8_0.swiglu"]
    elif rows == 70 and WIDE:
        unit = ["gated_matmul_many.multiply.q8_0.swiglu"]
    norm = ["norms.scaled_rms_norm"]
    if rows == 70:
        unit = norm + unit
    elif rows == 20:  # the norm and the gate are the prologue of the other matmul
        unit = unit[1:]
    assert names == [*unit, "packed_matmul.multiply.q4_0"] * 2


UNIT_TYPES = (DType.Q4_1, DType.Q5_0, DType.Q6_K, DType.MXFP4)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 262])
@pytest.mark.parametrize("dtype", nightly_unless((DType.Q4_1, DType.Q6_K), UNIT_TYPES), ids=str)
def test_a_unit_is_computed_with_its_products_whatever_type_they_have(dtype: DType, rows: int, threads: int):
    x = hocket.input("x", (rows, 1024))
    gate, up = (hocket.weight(n, (736, 1024), dtype) for n in ("gate", "up"))
    down = hocket.weight("down", (64, 736), DType.Q8_0)
    y = ops.mul_mat(down, ops.geglu(ops.mul_mat(gate, x), ops.mul_mat(up, x)))
    names = kernels_of(hocket.Graph({"y": y}), {"x": rows_with_outlier(rows, 1024)}, threads)
    if rows < 8 or WIDE:
        pair = "gated_matmul_few.multiply" if rows < 8 else "gated_matmul_many.multiply"
        assert names == [
            "activation_quantisation.quantise_activation_rows",
            f"{pair}.{dtype}.geglu",
            "packed_matmul.multiply.q8_0",
        ]


@pytest.mark.long
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "half"), [(1, 96), (1, 1056), (1, 40), (2, 96), (5, 40), (20, 96), (50, 1056), (50, 40)]
)
def test_halves_of_one_product_are_a_unit_where_both_begin_with_a_group(
    rows: int, half: int, threads: int, swapped: bool
):
    x, w = hocket.input("x", (rows, 64)), hocket.weight("w", (2 * half, 64), DType.Q8_0)
    y = ops.glu(ops.mul_mat(w, x), kind="reglu", swapped=swapped)
    names = kernels_of(hocket.Graph({"y": y}), {"x": rows_with_outlier(rows, 64)}, threads)
    assert ("gated_matmul_few.multiply.q8_0.reglu" in names) == (rows < 20 and half % 16 == 0)
    assert ("gated_matmul_many.multiply.q8_0.reglu" in names) == (WIDE and rows == 50 and half % 16 == 0)


@pytest.mark.parametrize("total", [0, 7])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 90])
def test_units_of_routed_experts_are_computed_with_their_products(rows: int, threads: int, total: int):
    """Experts that a token chooses twice, or that are on another device."""
    x, ids = hocket.input("x", (rows, 64)), hocket.input("ids", (rows, 4), "i32")
    gate, up = (hocket.weight(n, (5, 416, 64), DType.Q4_0) for n in ("gate", "up"))
    down, where = hocket.weight("down", (5, 64, 416), DType.Q8_0), {"first": 2 if total else 0, "total": total}
    h = ops.reshape(x, shape=(rows, 1, 64))
    unit = ops.swiglu(ops.mul_mat_id(gate, h, ids, **where), ops.mul_mat_id(up, h, ids, **where))
    graph = hocket.Graph({"y": ops.mul_mat_id(down, unit, ids, **where)})
    chosen = np.array([[0, 4, 3, 4], [2, 2, 2, 2], [1, 4, 0, 2]] * 30, np.int32)[:rows]
    names = kernels_of(graph, {"x": rows_with_outlier(rows, 64), "ids": chosen}, threads)
    assert ("gated_matmul_few.multiply.q4_0.swiglu" in names) == (rows < 90)
    assert ("gated_moe_amx.multiply.q4_0.swiglu" in names) == (
        rows == 90 and target_cpu.find_native_or_emulated_amx() is not None
    )
    assert names.count("activation_quantisation.quantise_activation_rows") == 1


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("reader", ["none", "float product", "other code", "sum", "output", "part"])
def test_whatever_else_reads_a_norm_or_a_unit_finds_it(reader: str, rows: int, threads: int):
    x = hocket.input("x", (rows, 192))

    def read(value: hocket.Value, name: str) -> dict[str, hocket.Value]:
        n = value.shape[-1]
        if reader == "float product":
            return {name: ops.mul_mat(hocket.weight(f"{name}.f", (48, n)), value)}
        if reader == "other code":
            return {name: ops.mul_mat(hocket.weight(f"{name}.q", (544, n), DType.Q5_0), value)}
        if reader == "sum":
            return {name: ops.add(value, value)}
        if reader == "part":
            return {name: ops.neg(ops.slice_(value, axis=1, start=32, stop=64))}
        return {name: value} if reader == "output" else {}

    gate, up = (hocket.weight(n, (544, 192), DType.Q8_0) for n in ("gate", "up"))
    down = hocket.weight("down", (192, 544), DType.Q4_0)
    h = ops.mul(ops.rms_norm(x, eps=1e-6), hocket.weight("scale", (192,)))
    unit = ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h))
    outputs = {"y": ops.add(x, ops.mul_mat(down, unit)), **read(h, "norm"), **read(unit, "unit")}
    names = kernels_of(hocket.Graph(outputs), {"x": rows_with_outlier(rows)}, threads)
    assert ("activation_quantisation.quantise_activation_rows" in names) == (reader == "output")


@pytest.mark.parametrize("reader", ["gate", "up"])
def test_a_product_that_others_read_is_not_hidden_in_a_unit(reader: str):
    x = hocket.input("x", (1, 192))
    both = {n: ops.mul_mat(hocket.weight(n, (544, 192), DType.Q8_0), x) for n in ("gate", "up")}
    graph = hocket.Graph({"y": ops.swiglu(both["gate"], both["up"]), "z": ops.neg(both[reader])})
    assert kernels_of(graph, {"x": rows_with_outlier(1)}, 2).count("packed_matmul.multiply.q8_0") == 2


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("rows", [2, 3])
def test_rounded_rows_stay_valid_while_others_of_equal_size_are_rounded(rows: int, again: bool):
    """Norms, units and products all have as many columns, and lie where their sources did or are read again later."""
    x = hocket.input("x", (rows, 192))
    outputs = {}
    for i in range(3):
        a, b, c = (hocket.weight(f"{n}.{i}", (192, 192), DType.Q8_0) for n in "abc")
        h = ops.mul(ops.rms_norm(x, eps=1e-6), hocket.weight(f"scale.{i}", (192,)))
        first = ops.swiglu(ops.mul_mat(a, h), ops.mul_mat(b, h))
        both = hocket.weight(f"both.{i}", (384, 192), DType.Q8_0)
        second = ops.glu(ops.mul_mat(both, first), kind="swiglu")
        x = ops.mul_mat(a, second)
        if again:
            outputs |= {f"y{i}": ops.neg(ops.mul_mat(b, first)), f"z{i}": ops.neg(ops.mul_mat(c, h))}
    for threads in (1, 2):
        kernels_of(hocket.Graph(outputs | {"x": x}), {"x": rows_with_outlier(rows)}, threads)


def test_threads_synchronise_twice_in_a_gated_unit_of_one_token():
    """Before the norm, which needs all of the sum, and before the last product, which needs all of the unit."""
    compiled: list[replay.Replay] = []

    class Watched(CpuBackend):
        def compile(self, *args):
            compiled.append(super().compile(*args))
            return compiled[-1]

    graph, backend = layers(5, 1, DType.Q8_0), Watched(2)
    run = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), values_of(graph))
    run.run({"x": RNG.standard_normal((1, 192))})
    assert [int((s.table[0, :, 2] & BARRIER_FLAG).sum()) for _, s in compiled[0].work] == [2 * 5 - 1]


def delta_layer(heads: int) -> hocket.Graph:
    """One token: the gated delta rule, a gated norm of its heads, and a product."""
    width, wide = 128, 128 * heads
    x = hocket.input("x", (1, 256))
    q, k, v, z = (ops.mul_mat(hocket.weight(n, (wide, 256), DType.Q8_0), x) for n in ("q", "k", "v", "z"))
    q, k, v, z = (ops.reshape(y, shape=(1, heads, width)) for y in (q, k, v, z))
    q, k = ops.l2_norm(q), ops.l2_norm(k)
    beta, state = hocket.input("beta", (1, heads)), hocket.state("s", (heads, width, width))
    out, new = ops.gated_delta_net(q, k, v, ops.reshape(beta, shape=(1, heads, 1)), beta, state)
    normed = ops.mul(ops.mul(ops.rms_norm(out), hocket.weight("n", (width,))), ops.silu(z))
    y = ops.mul_mat(hocket.weight("o", (256, wide), DType.Q8_0), ops.reshape(normed, shape=(1, wide)))
    return hocket.Graph({"y": y}, {state: new})


@pytest.mark.parametrize("heads", [8, 6, 3])
def test_threads_continue_with_their_heads_after_the_delta_rule(heads: int):
    """The bits are the same for any thread count, also if threads have no whole heads, or none."""
    graph = delta_layer(heads)
    values = values_of(graph)
    inputs = {"x": RNG.standard_normal((1, 256)), "beta": -RNG.uniform(0.01, 0.1, (1, heads))}
    results = []
    for threads in (1, 2, 3, 4, 7):
        run = load_with_threads(graph, values, threads)
        results.append([run.run(inputs)["y"] for _ in range(9)])
    assert np.isfinite(results[0]).all()
    assert all(np.array_equal(some, results[0]) for some in results)


def test_a_gated_norm_of_heads_needs_no_barrier_after_the_delta_rule():
    program = load_with_threads(delta_layer(8), values_of(delta_layer(8)), 2).plan.device_plans[0].program
    found = program_binding.find_or_choose_fusions(program)
    (steps,) = program_binding._split_into_compiled_segments(*found, StepTableBuilder(2))
    names = [(step.kernel.name.split(".")[0], step.has_barrier) for step in steps]
    assert names[-3:] == [("gated_delta_net", True), ("packed_matmul", True), ("packed_matmul", True)]
    assert len(names) == 7, "norms and gate are hooks of products, as is the rounding of their result"


@pytest.mark.parametrize("unit_count", [1, 2, 3, 5, 8])
def test_a_thread_owns_the_columns_of_its_units(unit_count: int):
    steps = StepTableBuilder(2)
    kernel, each = make_expression_kernel(COPY, (False,)), 8192
    row = steps.allocate_memory(4 * unit_count * each)
    tensor = Tensor(0, 0, (1, unit_count, each), (unit_count * each, each, 1), DType.F32)
    out = Operand(row.address, tensor)
    steps.add_units(kernel, [], unit_count, reads=[], writes=[out], of_units=[out])
    bounds = steps.find_column_bounds_written_since_barrier([out])
    assert bounds == [0, -(-unit_count // 2) * each, unit_count * each]
    split = find_continued_column_split(steps, [out], out, whole_rows=True)
    assert split is not None
    parts = [None if o is None else ThreadWork([], [o], []) for o in split.slice_by_thread(out)]
    steps.add_per_thread(kernel, parts)
    steps.add_per_thread(kernel, [ThreadWork([], [out], [])] * 2)
    assert [s.has_barrier for s in steps.take_steps()] == [False, False, True]


@pytest.mark.parametrize("threads", [2, 3])
def test_no_thread_writes_a_state_before_it_is_certain_that_no_other_has_stopped(threads: int):
    """Check a first thread that stops at an id while other threads could write their part into the state."""
    first, cache = hocket.state("first", (8, 32)), hocket.state("cache", (4, 512))
    w, x, ids = hocket.weight("w", (512, 32)), hocket.input("x", (1, 32)), hocket.input("ids", (1,), "i32")
    new = ops.set_rows(cache, ops.mul_mat(w, x), hocket.input("at", (1,), "i32"))
    updates = {first: ops.set_rows(first, x, ids), cache: new}
    run = load_with_threads(hocket.Graph({"y": ops.neg(x)}, updates), {"w": np.ones((512, 32), np.float32)}, threads)
    for bad in ({"ids": [99], "at": [2]}, {"ids": [1], "at": [4]}):
        for _ in range(50):
            with pytest.raises(hocket.BackendError, match="names no row"):
                run.run({**bad, "x": np.ones((1, 32))})
            assert not any(np.asarray(run.store.state(name)[...]).any() for name in ("first", "cache"))
    run.run({"ids": [1], "at": [2], "x": np.ones((1, 32))})
    assert (np.asarray(run.store.state("cache")[...]).sum(-1) == [0, 0, 32 * 512, 0]).all()


def test_what_may_stop_the_run_and_what_writes_a_state_are_apart_unless_one_thread_does_both():
    assert RUN_STATUS_REGION.overlaps(RUN_STATUS_REGION)
    assert not RUN_STATUS_REGION.overlaps(MemoryRegion(0, 0, 1 << 40))
    steps = StepTableBuilder(2)
    memory = [steps.allocate_memory(64) for _ in range(2)]
    steps.add(make_expression_kernel(COPY, (False,)), [], reads=[], writes=[memory[0]], stops=True)
    steps.add(make_expression_kernel(COPY, (False,)), [], reads=[], writes=[memory[1]], stops=True)
    assert [s.has_barrier for s in steps.take_steps()] == [False, False]
    steps.add(make_expression_kernel(COPY, (False,)), [], reads=[], writes=[memory[0]], nbytes=1 << 20, stops=True)
    steps.add(make_expression_kernel(COPY, (False,)), [], reads=[], writes=[memory[1]], stops=True)
    assert [s.has_barrier for s in steps.take_steps()] == [False, True]


@pytest.mark.parametrize("threads", [2, 3])
def test_a_run_that_was_stopped_leaves_no_work_item_of_the_next_one_undone(threads: int):
    """The first thread stops at an id while others could take pieces of a product that does not depend on it."""
    table, w, x = hocket.state("table", (8, 64)), hocket.weight("w", (544, 64), DType.Q8_0), hocket.input("x", (40, 64))
    first, ids = hocket.input("first", (1, 64)), hocket.input("ids", (1,), "i32")
    graph = hocket.Graph({"y": ops.mul_mat(w, x)}, {table: ops.set_rows(table, first, ids)})
    values, inputs = values_of(graph), {"x": rows_with_outlier(40, 64), "first": rows_with_outlier(1, 64)}
    right = load_with_threads(graph, values, 1).run({**inputs, "ids": [1]})["y"]
    run = load_with_threads(graph, values, threads)
    for _ in range(20):
        with pytest.raises(hocket.BackendError, match="names no row"):
            run.run({**inputs, "ids": [99]})
        assert np.array_equal(run.run({**inputs, "ids": [1]})["y"], right)


def test_a_step_in_work_items_waits_for_errors_that_may_stop_the_run():
    steps = StepTableBuilder(2)
    memory = [steps.allocate_memory(64) for _ in range(3)]
    steps.add(make_expression_kernel(COPY, (False,)), [], reads=[], writes=[memory[0]], stops=True)
    for written in memory[1:]:
        kernel = make_expression_kernel(COPY, (False,))
        steps.add_queued(kernel, lambda tickets, to=written: ThreadWork([tickets], [], [to]))
    first, second = steps.steps[1:]
    assert [s.has_barrier for s in steps.take_steps()] == [False, True, False]
    assert all(not s.is_presplit and s.words[0][0] == s.words[1][0] != 0 for s in (first, second))
    assert first.words[0][0] != second.words[0][0]


def test_bands_of_the_same_rows_overlap_only_where_their_columns_do():
    band = MemoryRegion(0, 100, 1000, 64, 16)
    assert not band.overlaps(MemoryRegion(0, 116, 1016, 64, 48))
    assert not band.overlaps(MemoryRegion(0, 52, 1000, 64, 48))
    assert band.overlaps(MemoryRegion(0, 52, 1000, 64, 49))
    assert band.overlaps(MemoryRegion(0, 115, 1015, 64, 4))
    assert band.overlaps(MemoryRegion(0, 120, 130))
    assert not band.overlaps(MemoryRegion(1, 100, 1000, 64, 16))
