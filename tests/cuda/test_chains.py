"""Chains of instructions that CUDA devices do in one launch: the same as one by one, wherever that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy import program_binding
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.binding.weight_packing import PLANE_LAYOUTS
from hocket.backends.cupy.cuda_driver import CudaDriver, SimulatedGpuDriver
from hocket.backends.cupy.device.device_limits import DEFAULT_SHARED_BYTES, find_kernel_limits
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.kernels.attention.kinds import PLACING_CELL_SOURCES
from hocket.backends.cupy.kernels.products import packed, same_rows
from hocket.backends.cupy.program_binding import bind_program_at_placeholders
from hocket.backends.fusion.operands import NoKernelError
from hocket.benchmarks.gpu import random_models
from hocket.benchmarks.gpu.random_models import qwen_80b
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case
from hocket.conformance.checks.case_graph import build_verified_device_plan
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph import BackendError, DType, Graph, StepError, Value, constant, input, state, weight
from hocket.scheduler import load, plan_for_group

from ..given.devices.chains import (
    CHAINS,
    RecordingDriver,
    all_experts,
    answers,
    assert_equal_runs,
    delta_layer,
    norm_before_products,
    run_graph,
)
from ..given.devices.emulation import needs_compiler
from ..given.devices.routing_graphs import routed_products, router
from ..given.models.goldens import FLOAT_CACHES, allowed_nmse, golden, nmse, path_of, tokens_of

pytestmark = needs_compiler
WEIGHTS = (DType.F32, DType.F16, DType.BF16, *PLANE_LAYOUTS)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_what_its_instructions_are_one_by_one(name, monkeypatch):
    chain = CHAINS[name]
    fused = run_graph(chain.graph(False), True)
    single = run_graph(chain.graph(False), False)
    assert (fused.launches, single.launches) == chain.launches
    assert_equal_runs(fused, single, chain.tolerance)


@pytest.mark.parametrize("name", [name for name, chain in CHAINS.items() if chain.forbids])
def test_what_something_else_reads_is_written(name, monkeypatch):
    chain = CHAINS[name]
    fused = run_graph(chain.graph(True), True)
    single = run_graph(chain.graph(True), False)
    longer = fused.launches - single.launches - (chain.launches[0] - chain.launches[1])
    assert longer == 0 if chain.writes else longer > 0, "the chain is shorter, or none"
    assert_equal_runs(fused, single, chain.tolerance)


@pytest.mark.parametrize("is_output", [False, True], ids=["is read", "is an output"])
@pytest.mark.parametrize("also", ["q", "k", "steps", "decay", "rates"])
def test_an_operand_of_the_delta_rule_that_something_else_reads_is_written(also, is_output):
    graph = delta_layer(64, "interleaved", False, (2,), 2, also, is_output)(True)
    fused, single = run_graph(graph, True), run_graph(graph, False)
    assert fused.launches < single.launches
    assert_equal_runs(fused, single, 1e-5)


@pytest.mark.parametrize("sequences", [(), (1, 2)])
def test_a_delta_rule_of_other_axes_than_batch_and_tokens_computes_no_operands(sequences):
    graph = delta_layer(64, "tiled", True, sequences, 2)(False)
    assert_equal_runs(run_graph(graph, True), run_graph(graph, False), 1e-5)


def exchange_after_norm() -> Graph:
    normed = ops.rms_norm(input("x", (32, 32)), eps=1e-6)
    return Graph({"y": ops.mul(ops.transpose(normed), weight("w", (32,)))})


def exchange_gates() -> Graph:
    return Graph({"y": ops.mul(input("x", (32, 32)), ops.transpose(ops.silu(input("z", (32, 32)))))})


def exchange_half_of_unit() -> Graph:
    x = input("x", (4, 64))
    gate, up = (ops.mul_mat(weight(n, (4, 64)), x) for n in ("gate", "up"))
    return Graph({"y": ops.swiglu(gate, ops.transpose(up))})


@pytest.mark.parametrize(
    "graph",
    [
        exchange_after_norm(),
        exchange_gates(),
        exchange_half_of_unit(),
        delta_layer(64, "tiled", True, (1,), 2, exchanged="queries and keys")(False),
        delta_layer(64, "tiled", True, (1,), 4, exchanged="padding")(False),
    ],
    ids=["norm", "gates", "unit", "queries and keys", "padding"],
)
def test_values_with_exchanged_axes_of_one_size_are_read_so(graph):
    assert_equal_runs(run_graph(graph, True), run_graph(graph, False), 1e-5)


def attend_to_cache(
    stored: int = 1,
    joined_heads: int = 1,
    mask: tuple[int, ...] | None = None,
    sizes: tuple[int, int] = (64, 64),
    dtype: DType = DType.F16,
) -> Graph:
    """Attention of one token over two caches of 16 cells, with RoPE of queries and of `stored` keys."""
    ids, updates = input("ids", (stored,), "i32"), dict[Value, Value]()
    size, value_size = sizes

    def store_in_cache(name: str, y: Value, size: int) -> Value:
        cache = state(name, (16, 2 * size), dtype)
        updates[cache] = new = ops.set_rows(cache, ops.reshape(y, shape=(stored, 2 * size)), ids, name=f"new_{name}")
        return ops.reshape(new, shape=(1, 16, 2, size))

    def rotate_heads(name: str, tokens: int, heads: int, size: int) -> Value:
        positions = input(f"{name}_positions", (1, tokens), "i32")
        return ops.rope(ops.neg(input(name, (1, tokens, heads, size))), positions, n_dims=size, mode="neox")

    q = ops.reshape(rotate_heads("q", 1, 4 // joined_heads, size * joined_heads), shape=(1, 1, 4, size))
    keys = store_in_cache("keys", rotate_heads("k", stored, 2, size), size)
    values = store_in_cache("values", ops.neg(input("v", (1, stored, 2, value_size))), value_size)
    return Graph({"y": ops.attention(q, keys, values, mask and input("mask", mask), scale=0.2)}, updates)


@pytest.mark.parametrize(
    ("more", "is_fused"),
    [({}, True), ({"stored": 2}, False), ({"joined_heads": 2}, False), ({"mask": (1, 16)}, False)],
    ids=["one token", "two stored tokens", "heads of RoPE are others", "a mask of two axes"],
)
def test_attention_computes_the_heads_of_one_token_only_where_its_kernel_can(more, is_fused):
    """A reviewer found wrong states, reads outside of memory and shifted arguments in such graphs."""
    graph = attend_to_cache(**more)
    fused, single = run_graph(graph, True), run_graph(graph, False)
    assert (fused.launches == 4) == is_fused, "three negations, then attention"
    assert_equal_runs(fused, single, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACING_CELL_SOURCES, ids=lambda kind: kind.name_with_heads)
def test_every_kernel_that_computes_heads_is_what_its_instructions_are(kind):
    graph = attend_to_cache(sizes=(kind.size, kind.width), dtype=kind.cells)
    (device_plan,) = plan_for_group(graph, [(EmulatedBackend(), EmulatedBackend().device(0))]).device_plans
    assert kind.name_with_heads in {call.kernel for call in device_plan.predicted_kernel_calls}
    fused, single = run_graph(graph, True), run_graph(graph, False)
    assert fused.launches < single.launches
    assert_equal_runs(fused, single, 1e-5)


@pytest.mark.nightly(cases=16)
@pytest.mark.long
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 2560), (2, 512), (4, 256)])
def test_a_norm_in_a_product_has_the_bits_of_its_own_kernel(dtype, tokens, columns, monkeypatch):
    graph = norm_before_products(dtype, tokens, columns)(True)
    fused = run_graph(graph, True)

    def find_none(*_: object) -> None:
        raise NoKernelError("no prologue")

    monkeypatch.setattr(same_rows, "find_row_prologue", find_none)
    alone = run_graph(graph, True)
    assert alone.launches == fused.launches + 1
    assert_equal_runs(fused, alone, 0.0)


SUPER_BLOCKS = [t for t in PLANE_LAYOUTS if t not in packed.BLOCK_RECORD_DTYPES]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("dtype", SUPER_BLOCKS, ids=str)
def test_few_rows_are_shared_out_in_half_tiles(dtype, monkeypatch):
    """Five tiles of 8 rows are uneven on two multiprocessors; ten tiles of 4 rows are even."""
    case = parse_test_case(f"mul_mat(w={dtype}[40,1024], x=f32[1,1024])")
    driver = RecordingDriver()
    backend = DriverBackend(driver)
    assert run_case(case, backend, backend.device(0)).outcome is Outcome.PASS
    assert {launch.kernel.name for launch in driver.launches} == {f"few<{dtype.name}, 1, 4>"}


def build_gated_unit_of_scaled_rows() -> Graph:
    """A norm that a router reads too, with another scale for each product of a gated unit."""
    h = ops.mul(ops.rms_norm(input("x", (1, 512)), eps=1e-6), weight("w", (512,)))
    gate, up = (
        ops.mul_mat(weight(name, (70, 512), DType.Q4_K), ops.mul(h, weight(f"scale_{name}", (512,))))
        for name in ("gate", "up")
    )
    return Graph({"y": ops.swiglu(gate, up), "router": ops.mul_mat(weight("router", (8, 512)), h)})


def test_products_of_different_rows_in_the_same_memory_share_no_prologue():
    fused, single = (run_graph(build_gated_unit_of_scaled_rows(), is_fused) for is_fused in (True, False))
    assert_equal_runs(fused, single, 1e-5)


@pytest.mark.parametrize(("dtype", "tokens", "columns"), [(DType.IQ3_S, 4, 6144), (DType.IQ3_S, 2, 12288)])
def test_a_prologue_and_a_code_book_fit_the_shared_memory_of_a_launch(dtype, tokens, columns):
    x = ops.mul(ops.rms_norm(input("x", (tokens, columns)), eps=1e-6), weight("w", (columns,)))
    graph = Graph({"y": ops.swiglu(*(ops.mul_mat(weight(n, (9216, columns), dtype), x) for n in ("gate", "up")))})
    limits = find_kernel_limits("90")
    backend = DriverBackend(SimulatedGpuDriver(CudaDriver, limits))
    device_plan = build_verified_device_plan(graph, backend, *backend.devices())
    launches = [
        s for s in bind_program_at_placeholders(device_plan.program, limits, 132)[1] if isinstance(s, KernelLaunch)
    ]
    assert any(s.kernel.name.startswith("few<") for s in launches)
    book = packed.count_code_book_bytes(dtype)
    assert all(s.shared_bytes + book <= DEFAULT_SHARED_BYTES for s in launches if s.kernel.name.startswith("few<"))


@pytest.mark.parametrize(("rows", "half"), [([2560], 4), ([9216, 9216], 8), ([8192, 4096], 8)])
def test_blocks_of_an_h200_share_the_rows_of_a_model(rows, half):
    """A token of Qwen3.5-4B: 132 multiprocessors, rows of 4,096 columns."""
    assert packed._choose_gemv_tile_for_grid(DType.Q4_K, 1, rows, 4096, 132, 1)[0] == half


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("graph", "dtype"),
    [
        pytest.param(graph, t, id=f"{graph.__name__}-{t}", marks=[pytest.mark.nightly(cases=0)] * ((n + which) % 2))
        for n, t in enumerate(WEIGHTS)
        for which, graph in enumerate((answers, all_experts))
    ],
)
def test_experts_of_any_type_are_what_their_instructions_are_one_by_one(graph, dtype):
    chain = graph(dtype, columns=256)(False)
    fused, single = run_graph(chain, True), run_graph(chain, False)
    assert fused.launches < single.launches
    assert_equal_runs(fused, single, 1e-4)


@pytest.mark.parametrize("count", [5, 40, 100, 200, 300, 600])
def test_a_router_of_any_number_of_experts_is_what_its_instructions_are(count):
    graph = router(ops.softmax, count=count)(False)
    fused = run_graph(graph, True)
    assert fused.launches == 1
    assert_equal_runs(fused, run_graph(graph, False), 1e-6)


@pytest.mark.parametrize(("count", "tokens"), [(8, 1), (33, 4), (128, 2), (256, 4), (512, 1), (1000, 3)])
def test_a_product_of_any_number_of_experts_and_tokens_chooses_them(count, tokens):
    graph = routed_products(ops.softmax, count, tokens=tokens)(False)
    fused = run_graph(graph, True)
    assert fused.launches == 1
    assert_equal_runs(fused, run_graph(graph, False), 1e-5)


@pytest.mark.parametrize("gating", [ops.softmax, ops.sigmoid])
def test_equal_and_unordered_scores_choose_the_experts_that_instructions_choose(gating):
    """Scores of the four tokens: some numbers, all zero, all NaN, and infinities of both signs."""
    factors = np.zeros((4, 1, 96), np.float32)
    factors[0], factors[2, 0, 5], factors[3, 0, 5] = 1, np.nan, np.inf
    graph = routed_products(gating, tokens=4, factors=constant("factors", factors))(False)
    fused, single = run_graph(graph, True), run_graph(graph, False)
    assert fused.launches == 1
    assert [*fused.outputs[0]["ids"][1]] == [0, 1, 2, 3, 4]
    assert np.isnan(fused.outputs[0]["shares"][2]).all()
    assert_equal_runs(fused, single, 1e-5)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["gated unit, float", "products, float", "sum, norm and factor"])
def test_chains_of_two_devices_are_those_of_one(name):
    graph = CHAINS[name].graph(False)
    assert_equal_runs(run_graph(graph, True, devices=2), run_graph(graph, False), 1e-5)


# ---------------------------------------------------------------------------------------------------------- models


def logits_of(name: str, devices: int, fused: bool) -> tuple[np.ndarray, int]:
    """Of a prompt and some tokens one by one; and the launches of one of those."""
    tokens = tokens_of(name)[:12]
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(program_binding, "FUSED", {})
        names = tuple(f"cuda-emulated:{i}" for i in range(devices))
        group = DeviceGroup(devices=names, split_mode="tensor" if devices > 1 else "none", **FLOAT_CACHES)
        session = Session(open_model(path_of(name)), on=group)
        parts = [session.evaluate([p], every_position=True)[0] for p in (tokens[:8], *([t] for t in tokens[8:]))]
        replay = session.executor(session.make_step(1, len(tokens)))._program_runners[0]
    return np.concatenate(parts), sum(isinstance(part, KernelLaunch) for part in replay._parts)


@pytest.mark.nightly(cases=5)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next"])
def test_a_model_has_the_logits_of_llama_cpp_with_chains_and_without(name, devices):
    want = golden(name)[1][:12]
    (fused, few), (single, many) = logits_of(name, devices, True), logits_of(name, devices, False)
    for logits in (fused, single):
        assert nmse(logits.ravel(), want.ravel()) <= allowed_nmse(name)  # the limit is one over all rows
    assert few < (0.7 if devices == 1 else 0.8) * many


@pytest.mark.long
@pytest.mark.parametrize(("model", "launches"), [("4b", 165), ("80b", 53)])
def test_a_token_of_a_model_takes_so_many_launches_on_an_h200(model, launches, tmp_path):
    """Qwen3.5-4B in Q4_K, and eight layers of Qwen3-Next-80B in Q4_0, with 8,192 cells."""
    path = tmp_path / "model.gguf"
    header = random_models.write_qwen35_header(path, random_models.SIZE_4B) if model == "4b" else qwen_80b(path, 8)
    limits = find_kernel_limits("90")
    backend = DriverBackend(SimulatedGpuDriver(CudaDriver, limits))
    step = Step(1, 1, 8192, 8192, 1, keys=DType.F16, values=DType.F16)
    graph = open_model(str(header), header_only=True).graph(step)
    program = build_verified_device_plan(graph, backend, *backend.devices()).program
    assert len(bind_program_at_placeholders(program, limits, 132)[1]) == launches


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_number_that_names_no_row_is_reported_with_its_instruction():
    graph = CHAINS["a head into a cache"].graph(False)
    backend = EmulatedBackend()
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {"w": np.ones(24, np.float32)})
    x = np.ones((1, 1, 2, 24), np.float32)
    run.run({"x": x, "pos": [[1]], "ids": [4]})
    with pytest.raises(BackendError, match=r"^%new on cuda-emulated:0: id 9 names no row of its table, which has 9"):
        run.run({"x": x, "pos": [[2]], "ids": [9]})


def test_a_launch_of_a_chain_that_fails_names_one_of_its_instructions_and_takes_back_what_ran(monkeypatch):
    def with_wrong_numbers(launches, flow, number):
        numbers = plain(launches, flow, number)
        last = launches.items.pop()
        words = tuple(word + (at == 0) for at, word in enumerate(last.words))
        launches.items.append(replace(last, words=words))
        return numbers

    plain, *_ = program_binding.FUSED["sigmoid"]
    monkeypatch.setattr(program_binding, "FUSED", {**program_binding.FUSED, "sigmoid": (with_wrong_numbers,)})
    cache, x = state("cache", (8, 48)), input("x", (1, 48))
    new = ops.set_rows(cache, x, input("ids", (1,), "i32"), name="new")
    y = ops.mul(ops.sum_rows(new), ops.sigmoid(input("z", (8, 1)), name="gate"), name="gated")
    backend = EmulatedBackend()
    run = load(plan_for_group(Graph({"y": y}, {cache: new}), [(backend, backend.device(0))]), {})
    run.store.state("cache")[...] = 3.0
    with pytest.raises(StepError, match=r"^%(gate|gated) on cuda-emulated:0: elementwise.cu"):
        run.run({"x": np.ones((1, 48), np.float32), "z": np.ones((8, 1), np.float32), "ids": [2]})
    assert (np.asarray(run.store.state("cache")) == 3.0).all()


def routed_by_own_rows() -> Graph:
    shares = ops.sigmoid(input("x", (4, 1, 64)))
    flat = ops.reshape(shares, shape=(4, 64))
    ids = ops.top_k(ops.add(flat, ops.slice_(flat, axis=0, start=0, stop=1)), k=5)
    taken = ops.reshape(ops.get_rows(ops.reshape(shares, shape=(4, 64, 1)), ids), shape=(4, 1, 5))
    return Graph({"ids": ids, "shares": ops.scale(taken, scale=2.5)})


def scaled_by_own_row() -> Graph:
    rows = ops.rms_norm(input("x", (2, 64)), eps=1e-6)
    return Graph({"y": ops.mul(rows, ops.slice_(rows, axis=0, start=0, stop=1))})


def squared_unit() -> Graph:
    unit = ops.sigmoid(input("x", (2, 64)))
    return Graph({"y": ops.mul(unit, unit)})


@pytest.mark.parametrize("build", [routed_by_own_rows, scaled_by_own_row, squared_unit])
def test_a_value_that_one_instruction_reads_twice_is_written(build: Callable[[], Graph]):
    """A fused kernel computed it for one operand, and read the other from memory that nothing had written."""
    fused, single = run_graph(build(), True), run_graph(build(), False)
    assert_equal_runs(fused, single, 1e-6)
