"""The CUDA backend on emulated devices: its kernels against the references, its programs and its error messages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hocket import ops
from hocket.backends import find_device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy import kernel_table as table
from hocket.backends.cupy.device.driver import KernelLaunch, KernelSource, read_kernel_text
from hocket.backends.cupy.emulation import compile_host as building
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernel_table import BINDINGS, KERNEL_FAMILIES, SOURCES
from hocket.cli import main
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.cases.case import get_tested_op
from hocket.conformance.checks.case_graph import build_case_graph, build_verified_device_plan
from hocket.conformance.generate_cases import select_quick_cases, select_relevant_layouts
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph import Graph, Spec, constant, input, state, weight
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError
from hocket.ops import COMPOSITE_OPS, REGISTRY
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load, plan, plan_for_group

from ..given.devices.emulation import EditedSource, needs_compiler
from ..given.fakes.fake_cupy import Event, Stream, install_fake_cupy
from ..given.models.goldens import FIXTURES, nmse, path_of


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("name", sorted(BINDINGS.keys() | COLLECTIVES))
def test_every_kernel_does_what_its_op_means(name):
    """Check forty cases of the quick run. ``hocket check --backend cuda-emulated`` runs all cases in two minutes.

    A case may have no reference, or exceed a limit of a kernel, but each op must have a kernel.
    """
    backend, cases = EmulatedBackend(), select_quick_cases(REGISTRY[name])
    for case in cases[:: max(1, len(cases) // 40)]:
        result = run_case(case, backend, backend.device(0))
        is_large = result.outcome is Outcome.UNSUPPORTED and " are too " in result.why
        assert is_large or result.outcome in (Outcome.PASS, Outcome.NO_REFERENCE), (
            f"{case}: {result.outcome}: {result.why}"
        )


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("name", COMPOSITE_OPS)
def test_the_kernels_of_a_composite_op_compute_its_reference(name):
    backend = EmulatedBackend()
    for number, text in enumerate(get_tested_op(name).samples[::2]):
        case = parse_case(f"{name}({text})")
        layouts = select_relevant_layouts(case)
        result = run_case(case.with_settings(layout=layouts[number % len(layouts)]), backend, backend.device(0))
        assert result.outcome is Outcome.PASS, f"{result.case}: {result.outcome}: {result.why}"


def test_every_op_has_a_kernel():
    computed = {name for name, op in REGISTRY.items() if not op.is_view}
    assert computed <= BINDINGS.keys() | COLLECTIVES


def test_every_kernel_is_declared_once():
    names = [(s.file, n) for s in SOURCES for n in s.names]
    assert len(names) == len(set(names))
    assert all(family.SOURCES for family in KERNEL_FAMILIES if hasattr(family, "SOURCES"))


@needs_compiler
def test_what_has_no_kernel_is_refused_with_the_reason():
    backend = EmulatedBackend()
    node = ops.clamp(input("x", (3,)), min=0.0, max=1.0).node
    assert backend.supports(node, backend.device(0)).ok
    quantised = ops.cast(weight("w", (2, 32), "q8_0"), dtype=DType.F32).node
    assert backend.supports(quantised, backend.device(0)).ok  # weights become float32 unless kernels read their type
    odd = ops.mul_mat(weight("w", (70000, 1, 4)), input("x", (70000, 1, 4))).node
    assert backend.supports(odd, backend.device(0)).reason == "70000 matrices are too many for one launch"


@needs_compiler
@pytest.mark.parametrize("layout", ["contiguous", "permuted", "sliced", "broadcast"])
def test_operands_are_read_as_they_lie(layout):
    """The planner puts in no copy."""
    backend = EmulatedBackend()
    case = parse_case(f"rms_norm(x=f32[3,4,5], layout={layout})")
    program = build_verified_device_plan(build_case_graph(case).graph, backend, backend.device(0)).program
    assert [i.op for i in program.instructions] == ["rms_norm"]


@needs_compiler
@pytest.mark.parametrize(
    "operands",
    [
        "w=f32[0,4,8], x=f32[3,1,8], ids=i32[3,2], first=8, total=8, layout=permuted",
        "w=f32[7,5,0], x=f32[11,2,0], ids=i32[11,6], layout=permuted",
        "w=iq2_xxs[3,4,256], x=f32[2,2,256], ids=i32[2,0], layout=broadcast",
    ],
)
def test_values_without_elements_have_valid_strides(operands):
    backend = EmulatedBackend()
    assert run_case(parse_case(f"mul_mat_id({operands})"), backend, backend.device(0)).outcome is Outcome.PASS


@needs_compiler
def test_weights_of_16_bits_stay_as_they_are():
    backend = EmulatedBackend()
    for dtype in (DType.F16, DType.BF16):
        assert backend.storage_spec(Spec((3, 4), dtype), "weight").dtype is dtype
        assert backend.storage_spec(Spec((4,), dtype), "weight").dtype is DType.F32
        assert backend.storage_spec(Spec((3, 4), dtype)).dtype is DType.F32


@needs_compiler
def test_a_constant_of_16_bits_is_read_as_what_it_is():
    table = np.arange(12, dtype=np.float16).reshape(3, 4)
    graph = Graph({"y": ops.add(input("x", (3, 4)), constant("c", table))})
    run = load(plan(graph, ("cuda-emulated:0",)), {})
    x = np.ones((3, 4), np.float32)
    assert (run.run({"x": x})["y"] == x + table).all()


# -------------------------------------------------------------------------------------------------- exact or fast

DELTA = "q=f32[{t},2,{d}], k=f32[{t},2,{d}], v=f32[{t},4,32], g=f32[{t},4,{g}], beta=f32[{t},4], state=f32[4,32,{d}]"


@needs_compiler
@pytest.mark.parametrize("more", ["", ", snapshots=3"])
@pytest.mark.parametrize(("t", "d", "g"), [(68, 64, 1), (130, 64, 1), (97, 64, 64)])
def test_a_delta_rule_that_need_not_be_exact_is_as_exact_as_bfloat16(t, d, g, more):
    backend, text = EmulatedBackend(), DELTA.format(t=t, d=d, g=g) + more
    exact, fast = (
        run_case(parse_case(f"gated_delta_net({text}{mode})"), backend, backend.device(0))
        for mode in ("", ", exact=false")
    )
    assert (exact.outcome, fast.outcome) == (Outcome.PASS, Outcome.PASS), f"{exact.why} {fast.why}"
    assert exact.difference.nmse < 1e-7 < fast.difference.nmse < 1e-3


@needs_compiler
def test_a_delta_rule_over_few_tokens_is_exact_whatever_is_asked():
    backend = EmulatedBackend()
    result = run_case(
        parse_case(f"gated_delta_net({DELTA.format(t=9, d=64, g=1)}, exact=false)"), backend, backend.device(0)
    )
    assert result.difference.nmse < 1e-12


# ------------------------------------------------------------------------------------------------- several devices


@needs_compiler
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_several_devices_compute_what_one_does(mode):
    x = input("x", (5, 8))
    hidden = ops.swiglu(ops.mul_mat(weight("gate", (12, 8)), x), ops.mul_mat(weight("up", (12, 8)), x))
    graph = Graph({"y": ops.softmax(ops.reshape(ops.mul_mat(weight("down", (8, 12)), hidden), shape=(1, 5, 8)))})
    rng = np.random.default_rng(0)
    weights = {w.node.name: rng.standard_normal(w.shape).astype(np.float32) for w in graph.weights}
    inputs = {"x": rng.standard_normal((5, 8)).astype(np.float32)}
    many = load(plan(graph, ("cuda-emulated:0", "cuda-emulated:1", "cuda-emulated:2"), split_mode=mode), weights)
    exact = load(plan(graph, ("reference:0",)), weights).run(inputs)["y"]
    for _ in range(3):
        np.testing.assert_allclose(many.run(inputs)["y"], exact, rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------------------------- the driver of devices


@pytest.fixture
def devices(monkeypatch):
    """The backend of real devices, over a stand-in for CuPy that emulates launches."""
    install_fake_cupy(monkeypatch)
    yield cuda_driver.CudaBackend()
    cuda_driver._compile_and_load_module.cache_clear()


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("name", ["add", "get_rows", "softmax", "mul_mat", "rope", "cast", "send", "all_reduce"])
def test_the_driver_of_devices_makes_the_launches_of_the_emulated_one(name, devices):
    cases = select_quick_cases(REGISTRY[name])
    for case in cases[:: max(1, len(cases) // 8)]:
        result = run_case(case, devices, devices.device(1))
        assert result.outcome in (Outcome.PASS, Outcome.NO_REFERENCE), f"{case}: {result.outcome}: {result.why}"


@needs_compiler
def test_a_program_of_several_launches_is_one_graph_and_its_faults_are_reported(devices):
    table, old_state = weight("table", (4, 2), "f16"), state("kept", (3, 2))
    new = ops.add(old_state, ops.get_rows(table, input("ids", (3,), "i32"), name="rows"))
    graph = Graph({"y": ops.scale(new, scale=2.0)}, updates={old_state: new})
    group = [(devices, devices.device(0))]
    run = load(plan_for_group(graph, group), {"table": np.arange(8, dtype=np.float16).reshape(4, 2)})
    assert run.run({"ids": [0, 1, 2]})["y"].tolist() == [[0, 2], [4, 6], [8, 10]]
    with pytest.raises(BackendError, match="%rows on cuda:0: id -1 names no row"):
        run.run({"ids": [0, -1, 2]})
    assert run.run({"ids": [0, 0, 0]})["y"].tolist() == [[0, 4], [4, 8], [8, 12]]
    with pytest.raises(BackendError, match="there is no device cuda:4; this machine has 4"):
        devices.device(4)


@needs_compiler
def test_a_run_waits_once_and_copies_its_inputs_together(devices, monkeypatch):
    """Check that a run also copies each result and the recorded errors once."""
    cupy, counted = devices.driver.cupy, []
    copy, wait, table = cupy.cuda.runtime.memcpyAsync, Event.synchronize, weight("table", (4, 2))
    rows = ops.get_rows(table, input("ids", (3,), "i32"))
    both = ops.add(ops.mul(rows, input("a", (3, 2))), input("b", (3, 2)))
    run = load(
        plan_for_group(Graph({"y": both, "z": ops.neg(both)}), [(devices, devices.device(0))]),
        {"table": np.ones((4, 2))},
    )
    monkeypatch.setattr(cupy.cuda.runtime, "memcpyAsync", lambda *args: (counted.append(args[3]), copy(*args)))
    monkeypatch.setattr(Event, "synchronize", lambda event: (counted.append("wait"), wait(event)))
    finish = Stream.synchronize
    monkeypatch.setattr(Stream, "synchronize", lambda stream: (counted.append("a second wait"), finish(stream)))
    for n in range(3):
        counted.clear()
        args = run.run({"ids": [0, 1, 2], "a": np.full((3, 2), n), "b": np.ones((3, 2))})
        assert (args["y"] == n + 1).all()
        assert (args["z"] == -n - 1).all()
        runtime = cupy.cuda.runtime
        assert counted == [runtime.memcpyHostToDevice, *[runtime.memcpyDeviceToHost] * 3, "wait"]
    with run.tracing():
        assert (run.run({"ids": [0, 1, 2], "a": np.full((3, 2), 7), "b": np.ones((3, 2))})["z"] == -8).all()


def test_a_session_that_may_be_fast_asks_for_it_and_says_no_where_it_is_to_be_exact():
    model = open_model(path_of("qwen35"))
    for fast in (False, True):
        session = Session(model, on=DeviceGroup(devices=("numpy:0",), fast=fast))
        (lane,) = session.plan(session.make_step(4, 4)).device_plans
        asked = {i.op: i.attrs["exact"] for i in lane.program.instructions if "exact" in i.attrs}
        assert asked.items() >= {"gated_delta_net": not fast, "mul_mat": not fast}.items()
    with pytest.raises(ModelError, match="leave out one of the two"):
        Session(model, on=DeviceGroup(fast=True, exact=True))


@pytest.mark.long
@needs_compiler
def test_the_command_takes_a_model_fast(tmp_path):
    model, logits = FIXTURES / "qwen35", []
    tokens = ",".join(map(str, np.load(model / "tokens.npy").tolist()))
    for number, flags in enumerate(((), ("--fast",))):
        out = str(tmp_path / f"{number}.npy")
        words = ["logits", str(model / "model.gguf"), "--tokens", tokens, "--out", out, "--devices", "cuda-emulated:0"]
        assert main([*words, *flags]) == 0
        logits.append(np.load(out))
    assert nmse(logits[1], logits[0]) <= 1e-3


# ----------------------------------------------------------------------------------------------------- measured times


def counting(group, **options):
    """A state that grows, ready to run."""
    old_state, x = state("kept", (3, 8)), input("x", (3, 8))
    new = ops.add(old_state, ops.mul_mat(weight("w", (8, 8)), x))
    graph = Graph({"y": ops.rms_norm(new, eps=1e-6)}, updates={old_state: new})
    return load(plan_for_group(graph, group, **options), {"w": np.eye(8, dtype=np.float32)})


@needs_compiler
@pytest.mark.parametrize("real", [False, True], ids=["emulated", "cuda"])
def test_a_run_is_measured_launch_by_launch(real, devices):
    backend = devices if real else EmulatedBackend()
    run, names = counting([(backend, backend.device(0))]), []
    for _ in range(2):
        run.bind({"x": np.ones((3, 8))})
        (steps,) = run.time_kernels()
        assert all(step.seconds > 0 for step in steps)
        names.append([step.kernel for step in steps])
    assert len(names[0]) >= 2
    assert names[0] == names[1]
    run.run({"x": np.ones((3, 8))})
    assert (np.asarray(run.store.state("kept")) == 3).all()  # each of them was one run


@needs_compiler
def test_what_devices_do_together_is_measured_too():
    backend = EmulatedBackend()
    run = counting([(backend, backend.device(i)) for i in range(2)], split_mode="tensor")
    run.bind({"x": np.ones((3, 8))})
    steps = run.time_kernels()
    assert len(steps) == 2
    assert all(step.seconds >= 0 for device in steps for step in device)
    assert {step.kernel.partition("<")[0] for step in steps[0]} & {"begin_run", "all_reduce"}, steps[0]


@pytest.mark.long
@needs_compiler
def test_the_command_shows_what_takes_how_long_on_a_device(capsys):
    words = ["bench", str(path_of("llama")), "-p", "4", "-n", "0", "-r", "1", "--profile"]
    assert main([*words, "--devices", "cuda-emulated:0"]) == 0
    assert "softmax" in (out := capsys.readouterr().out) or "attend" in out


# ----------------------------------------------------------------------------------------------------------- faults


@needs_compiler
def test_a_number_that_names_no_row_fails_the_run_and_takes_it_back():
    old_state = state("kept", (4, 2))
    new = ops.add(old_state, ops.get_rows(weight("table", (4, 2)), input("ids", (4,), "i32"), name="rows"), name="new")
    graph = Graph({"y": new}, updates={old_state: new})
    run = load(plan(graph, ("cuda-emulated:0",)), {"table": np.ones((4, 2), np.float32)})
    run.run({"ids": [0, 1, 2, 3]})
    with pytest.raises(BackendError) as caught:
        run.run({"ids": [0, 1, 7, 3]})
    assert str(caught.value) == "%rows on cuda-emulated:0: id 7 names no row of its table, which has 4"
    assert (np.asarray(run.store.state("kept")) == 1).all()
    assert (run.run({"ids": [0, 1, 2, 3]})["y"] == 2).all()


@needs_compiler
def test_a_kernel_that_fails_names_node_device_kernel_and_thread(monkeypatch):
    def one_more(launches, call):
        BINDINGS["neg"](launches, call)
        last = launches.items.pop()
        launches.items.append(dataclasses.replace(last, words=(last.words[0] + 1, *last.words[1:])))

    monkeypatch.setattr(table, "BINDINGS", {**BINDINGS, "neg": one_more})
    run = load(plan(Graph({"y": ops.neg(input("x", (8,)), name="minus")}), ("cuda-emulated:0",)), {})
    with pytest.raises(BackendError) as caught:
        run.run({"x": np.zeros(8, np.float32)})
    message = str(caught.value)
    assert message.startswith(
        "%minus on cuda-emulated:0: elementwise.cu: unary<function::neg>, block (0, 0, 0), thread (8,"
    )
    assert message.endswith("0 bytes past the end of word 12 and 23")


def test_without_a_compiler_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(BackendError, match="install g\\+\\+"):
        find_device("cuda-emulated:0")
    with pytest.raises(BackendError, match="install g\\+\\+"):
        EmulatedBackend().devices()


def test_a_cuda_device_that_is_not_there_is_explained():
    try:
        find_device("cuda:0")
    except BackendError as why:
        message = str(why)
    else:
        pytest.skip("this machine has a CUDA device, so that none is missing")
    assert "pip install" in message or "cuda-emulated:0 runs anywhere" in message
    assert "\n" not in message


@pytest.mark.long
@needs_compiler
def test_a_library_is_built_once_and_again_when_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    source = SOURCES[-1]
    building.load_emulated_library.cache_clear()
    try:
        building.load_emulated_library(source)
        (built,) = (tmp_path / "emulated").glob("*/*.so")
        before = built.stat().st_mtime_ns
        building.load_emulated_library.cache_clear()
        building.load_emulated_library(source)
        assert built.stat().st_mtime_ns == before
        other = tmp_path / "other"  # libraries that are loaded must not change under way
        monkeypatch.setenv("HOCKET_CACHE_DIR", str(other))
        damaged = other / built.relative_to(tmp_path)
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(b"no library")
        building.load_emulated_library.cache_clear()
        building.load_emulated_library(source)
        assert damaged.stat().st_size > 1000
    finally:
        building.load_emulated_library.cache_clear()


FILLED = """
struct Unused { i64 word; };
template <class Number> __device__ __forceinline__ void fill() {
    SHARED(held, Number[SIZE]);
    held[SIZE - 1 - threadIdx.x] = 0;
}
__global__ void filled(const __grid_constant__ Unused a) { fill<float>(); }
"""


@needs_compiler
def test_a_device_function_of_two_libraries_declares_shared_memory_in_each():
    headers = "".join(map(read_kernel_text, KernelSource("", ()).files[:-1]))
    for size in (32, 1 << 13):
        source = EditedSource("filled.cu", ("filled",), body=f"{headers}constexpr int SIZE = {size};{FILLED}")
        launch = KernelLaunch(source["filled"], (1, 1, 1), (32, 1, 1), 0, (0,), (), 0)
        EmulatedDriver(0).record([launch], None)()
