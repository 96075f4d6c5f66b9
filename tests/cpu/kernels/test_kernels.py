"""The compiled kernels of the CPU backend, each against its definition in NumPy."""

import doctest
import gc
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu import target_cpu
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.kernels.matmul import packed_matmul
from hocket.backends.cpu.kernels.packed import iq1_codes, weight_packing
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.simd import base3_codes, dot_tiles
from hocket.backends.cpu.steps import step_loop
from hocket.backends.cpu.steps.thread_sync import ASLEEP_FLAG
from hocket.frontends.terminal.compile_progress import show_compile_progress
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError
from hocket.graph.storage.disk_cache import _warn_unwritable_once, read_cached, write_cached
from hocket.ops.quantisation import dequantise

from ...given.packed_rows import RECORD, call, multiply_in_tiles, pack_rows, quantise_rows, target_of
from ...given.random_rows import random_rows
from ...given.waits import wait_until

RNG = np.random.default_rng(5)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_packing_loses_nothing(dtype: DType):
    rows, columns = 37, 512 if dtype.block > 32 else 544  # the last unit is not whole
    raw = random_rows(dtype, rows, columns, RNG)
    weight = pack_rows(dtype, raw, columns)
    assert np.array_equal(weight, pack_rows(dtype, raw, columns, threads=3))
    ids, out, scratch = (
        RNG.permutation(rows).astype(np.int32),
        np.zeros((rows, columns), np.float32),
        np.zeros(1024, np.uint8),
    )
    words = (weight, raw.shape[1], rows, columns, ids, out, 4 * columns, rows, scratch)
    assert call(weight_packing.make_dequantise_rows_by_id_kernel(FORMATS[dtype]), *words) == 0
    assert np.array_equal(out, dequantise(raw, dtype)[ids])
    ids[3] = rows
    assert (
        call(weight_packing.make_dequantise_rows_by_id_kernel(FORMATS[dtype]), *words)
        == weight_packing.INVALID_ROW | rows << 8
    ), "a row that is not there"


@pytest.mark.parametrize("zero", [0, 8])
def test_activations_are_rounded_to_127_steps_of_the_largest_in_a_block(zero: int):
    x = RNG.standard_normal((5, 96)).astype(np.float32)
    x[1, :32], x[1, 40:48], x[2] = 0.0, 0.0, x[2] * np.float32(1e-38)
    _, meant = quantise_rows(x, zero)
    step = np.abs(x.reshape(5, -1, 16)).max(-1, keepdims=True) / 127
    assert (np.abs(meant - x).reshape(5, -1, 16) <= 0.5001 * step + 1e-45).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_makes_its_whole_block_so(bad: float):
    x = RNG.standard_normal((2, 64)).astype(np.float32)
    x[1, 40] = bad
    records = target_of(x, 0).view(RECORD).reshape(2, 2)
    assert np.isfinite(records["scales"][0]).all()
    assert np.isfinite(records["scales"][1]).tolist() == [[True, True], [False, True]]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 18, 70, 600])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_packed_product_is_exact_in_its_rounded_activations(dtype: DType, count: int):
    rows, columns = 72, 768 if dtype.block > 32 else 864  # the last unit is not whole
    raw, x = random_rows(dtype, rows, columns, RNG), RNG.standard_normal((count, columns)).astype(np.float32)
    weight, (q, meant) = pack_rows(dtype, raw, columns), quantise_rows(x, FORMATS[dtype].zero_point)
    form = FORMATS[dtype]
    kernel = packed_matmul.make_packed_matmul_kernel(form)
    tiling = packed_matmul.make_packed_matmul_subroutines_and_tiling(form)
    multiply = partial(multiply_in_tiles, kernel, tiling, weight, raw.shape[1], (rows, columns), threads=2)
    y = multiply(q.reshape(count, -1))
    w = dequantise(raw, dtype).astype(np.float64)
    np.testing.assert_array_less(np.abs(y - meant @ w.T), 1e-6 * (np.abs(meant) @ np.abs(w).T) + 1e-30)
    for i in {0, count // 2, count - 1}:  # the bits of a row do not depend on its neighbours
        alone = multiply(q.reshape(count, -1)[i : i + 1])
        assert np.array_equal(alone[0].view(np.int32), y[i].view(np.int32)), i


def weights_of(graph: hocket.Graph) -> dict[str, np.ndarray]:
    return {w.node.name: random_rows(w.dtype, *w.shape, RNG) for w in graph.weights}


def layers(count: int) -> hocket.Graph:
    """Norm, quantised product and gated unit, some times over."""
    x = hocket.input("x", (5, 64))
    for i in range(count):
        gate, up = (hocket.weight(f"{n}.{i}", (96, 64), DType.Q8_0) for n in ("gate", "up"))
        down = hocket.weight(f"down.{i}", (64, 96), DType.Q4_0)
        h = ops.rms_norm(x, eps=1e-6)
        x = ops.add(x, ops.mul_mat(down, ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h))))
    return hocket.Graph({"y": x})


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int):
    graph = layers(4)
    weights, x = weights_of(graph), RNG.standard_normal((5, 64))
    results = []
    for count in (1, threads):
        backend = CpuBackend(count)
        run = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), weights)
        results += [run.run({"x": x})["y"] for _ in range(20)]
    assert all(np.array_equal(f, results[0]) for f in results)


def test_devices_of_several_threads_agree_with_one():
    graph = layers(3)
    weights, x = weights_of(graph), RNG.standard_normal((5, 64))
    results = []
    for devices in (1, 2, 3):
        backend = CpuBackend(2)
        group = [(CpuBackend(2), backend.device(i)) for i in range(devices)]
        run = hocket.load(hocket.scheduler.plan_for_group(graph, group, split_mode="tensor"), weights)
        results += [run.run({"x": x})["y"] for _ in range(10)]
        assert all(np.array_equal(f, results[-1]) for f in results[-10:])
    assert all(np.abs(f - results[0]).max() <= 1e-5 * np.abs(results[0]).max() for f in results)


def test_an_id_that_is_no_row_stops_all_threads_with_an_error():
    table, ids = hocket.weight("table", (8, 64), DType.Q8_0), hocket.input("ids", (3,), DType.I32)
    backend = CpuBackend(3)
    graph = hocket.Graph({"y": ops.get_rows(table, ids)})
    run = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), weights_of(graph))
    good = run.run({"ids": [0, 7, 3]})["y"]
    with pytest.raises(hocket.BackendError, match="on cpu:0: id 8 names no row"):
        run.run({"ids": [0, 8, 3]})
    assert np.array_equal(run.run({"ids": [0, 7, 3]})["y"], good)


def test_threads_of_a_device_end_with_it():
    def helpers() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name in ("hocket.1", "hocket.2")} - others

    graph = hocket.Graph({"y": ops.mul_mat(hocket.weight("w", (512, 512), DType.Q8_0), hocket.input("x", (3, 512)))})
    others: set[threading.Thread] = set()
    others, backend = helpers(), CpuBackend(3)
    run = hocket.load(hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), weights_of(graph))
    assert not helpers(), "nothing has run yet"
    run.run({"x": np.ones((3, 512))})
    assert len(helpers()) == 2
    del run, backend
    gc.collect()
    wait_until(lambda: not helpers())


def test_threads_of_a_device_follow_awake_or_asleep_whoever_calls():
    graph = hocket.Graph({"y": ops.mul_mat(hocket.weight("w", (512, 512), DType.Q8_0), hocket.input("x", (3, 512)))})
    backend, inputs = CpuBackend(4), {"x": np.ones((3, 512))}
    plan, weights = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]), weights_of(graph)
    runs = [hocket.load(plan, weights) for _ in range(3)]
    expected = runs[0].run(inputs)["y"]
    assert np.array_equal(runs[0].run(inputs)["y"], expected), "awake"
    wait_until(lambda: (backend._thread_pool._states[1:4] == ASLEEP_FLAG).all())
    assert np.array_equal(runs[1].run(inputs)["y"], expected), "asleep"
    with ThreadPoolExecutor(3) as callers:
        results = callers.map(lambda run: [run.run(inputs)["y"] for _ in range(30)], runs)
        assert all(np.array_equal(y, expected) for ys in results for y in ys)


# ------------------------------------------------------------------------------------------------ stored kernels

SCRIPT = """
import numpy as np, platform, sys
from pathlib import Path
from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.compilation.compiler import KERNEL_FUNCTION
compiler.PRECOMPILED_FOLDER = Path("nowhere")
from hocket.backends.cpu.kernels.packed.activation_quantisation import quantise_activation_rows
x, q = np.arange(32, dtype=np.float32), np.zeros(64, np.uint8)
words = np.array([x.ctypes.data, 128, 1, 32, 1, q.ctypes.data, 56, 0], np.int64)
assert KERNEL_FUNCTION(quantise_activation_rows.address)(words.ctypes.data, 0, 1) == 0
compilers = "llvmlite.binding" if (sys.platform, platform.machine()) == ("linux", "x86_64") else "numba"
print(q[:32].view(np.int8).tolist(), compilers in sys.modules)
"""


def start(folder) -> subprocess.Popen:
    environment = {**os.environ, "HOCKET_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[str, bool]:
    """The codes it printed, and whether it had to compile."""
    out = process.communicate()[0]
    assert process.returncode == 0
    codes, _, compiled = out.strip().rpartition(" ")
    return codes, compiled == "True"


@pytest.mark.long
def test_kernels_are_compiled_once_and_a_damaged_file_is_built_again(tmp_path):
    first = [start(tmp_path) for _ in range(3)]  # at once: none may see half a file
    answers = {finish(p) for p in first}
    assert len(answers) == 1
    ((codes, compiled),) = answers
    assert compiled
    assert finish(start(tmp_path)) == (codes, False)
    (file,) = (tmp_path / "kernels").iterdir()
    whole = file.read_bytes()
    assert read_cached(file) == whole[32:]
    file.write_bytes(whole[:-100])
    assert finish(start(tmp_path)) == (codes, True)
    assert file.read_bytes() == whole


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_which_kernel_is_compiled_and_nothing_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    terminal, other = Terminal(), io.StringIO()
    with show_compile_progress(terminal), show_compile_progress(other):
        for name in ("test.one", "test.two"):
            assert call(compiler.Kernel(name, lambda a, thread, threads: threads)) == 1
    lines = [part.strip() for part in terminal.getvalue().split("\r")]
    assert "compiling kernels: 1 of 1, first run only (test.one)" in lines
    assert "compiling kernels: 2 of 2, first run only (test.two)" in lines
    assert lines[-1] == ""
    assert not other.getvalue()


def test_a_folder_that_cannot_be_written_is_reported_in_one_line_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path / "file"))
    _warn_unwritable_once.cache_clear()
    terminal = Terminal()
    with show_compile_progress(terminal):
        for name in ("test.three", "test.four"):
            assert call(compiler.Kernel(name, lambda a, thread, threads: threads)) == 1
    messages = [line for line in terminal.getvalue().split("\n") if "cannot be kept in" in line]
    assert len(messages) == 1
    assert "file (Not a directory), so each start makes them anew; free space, or set HOCKET_CACHE_DIR" in messages[0]


@pytest.mark.long
def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert finish(start(blocked))[1]


def test_features_that_are_left_out_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOCKET_WITHOUT", "avx")
    features = target_cpu.find_host_or_requested_target.__wrapped__().features
    assert features
    assert not any(there for name, there in features.items() if name.startswith("avx"))


def test_code_with_tiles_of_the_processor_is_not_taken_where_they_are_emulated(monkeypatch: pytest.MonkeyPatch):
    """Check that kernels compiled at installation are found by the name of the target alone."""
    native = target_cpu.find_host_or_requested_target.__wrapped__().name
    monkeypatch.setenv("HOCKET_AMX", target_cpu.EMULATED)
    assert target_cpu.find_host_or_requested_target.__wrapped__().name != native


def test_kernels_for_other_processors_run_where_their_features_are(monkeypatch: pytest.MonkeyPatch):
    wide, v3, arm = target_cpu.PRECOMPILED_TARGETS
    assert v3.can_run_on(wide)
    assert not wide.can_run_on(v3)
    assert not v3.can_run_on(arm)
    assert not arm.can_run_on(wide)
    monkeypatch.setattr(target_cpu, "find_host_or_requested_target", lambda: wide)
    assert target_cpu.list_runnable_precompiled_targets() == (wide, v3)
    monkeypatch.undo()
    with pytest.raises(hocket.BackendError, match="one of avx512-vnni-bf16, x86-64-v3, aarch64"):
        read_target("x86-64-v2", monkeypatch)
    assert read_target("aarch64", monkeypatch) == arm


def read_target(target: str, monkeypatch: pytest.MonkeyPatch) -> target_cpu.Target:
    monkeypatch.setenv("HOCKET_TARGET", target)
    return target_cpu.find_host_or_requested_target.__wrapped__()


SHIPS = """
import sys
from pathlib import Path
from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.steps import step_loop
compiler.PRECOMPILED_FOLDER = Path(sys.argv[1])
compiler.compile_kernels_into_package([step_loop.run_step_table])
"""
MACHINES = {"avx512-vnni-bf16": 62, "x86-64-v3": 62, "aarch64": 183}
"""Numbers of ELF."""


@pytest.mark.long
@pytest.mark.parametrize("target", MACHINES)
def test_kernels_are_compiled_for_other_processors(target: str, tmp_path):
    environment = {**os.environ, "HOCKET_TARGET": target}
    subprocess.run([sys.executable, "-c", SHIPS, str(tmp_path)], env=environment, check=True)
    (file,) = (tmp_path / target).iterdir()
    code = read_cached(file)
    assert code is not None
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == MACHINES[target]
    assert b"hocket.step_loop.run_step_table" in code


def test_kernels_that_came_with_the_package_are_not_compiled(tmp_path, monkeypatch: pytest.MonkeyPatch):
    one = step_loop.run_step_table
    monkeypatch.setattr(compiler, "PRECOMPILED_FOLDER", tmp_path)
    file = tmp_path / target_cpu.PRECOMPILED_TARGETS[1].name / compiler._make_cache_file_name(one)
    monkeypatch.setattr(
        target_cpu,
        "list_runnable_precompiled_targets",
        lambda: (target_cpu.find_host_or_requested_target(), target_cpu.PRECOMPILED_TARGETS[1]),
    )
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path / "cache"))
    assert compiler._read_shipped_or_cached_code(one) is None
    write_cached(file, b"code")
    assert compiler._is_cached(one)
    assert compiler._read_shipped_or_cached_code(one) == b"code"
    file.write_bytes(file.read_bytes() + b"?")
    assert compiler._read_shipped_or_cached_code(one) is None


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_constant_matrix_of_halves_is_read_as_what_it_is(dtype: type):
    table = np.arange(64, dtype=dtype).reshape(2, 32)
    rows = ops.cast(hocket.constant("table", table), dtype=DType.F32)
    graph = hocket.Graph({"y": ops.add(hocket.input("x", (2, 32)), rows)})
    assert np.array_equal(hocket.load(hocket.plan(graph, "cpu"), {}).run({"x": np.zeros((2, 32))})["y"], table)


def test_the_worked_example_of_tiles_holds():
    results = doctest.testmod(dot_tiles)
    assert results.attempted > 4
    assert not results.failed


def test_the_worked_example_of_digits_to_base_3_holds():
    assert doctest.testmod(base3_codes) == (0, 3)


def test_a_code_book_keeps_its_entries_in_every_order():
    numbers = iq1_codes._compute_iq1_entry_numbers_in_kernels()
    assert sorted(iq1_codes.list_iq1_entries_in_kernel_order()) == sorted(numbers) == [*range(2048)]


def test_a_kernel_that_may_raise_is_refused():
    """The step of its range may be zero."""

    def count_steps(a, thread, threads):
        steps = 0
        for _ in range(thread, a, threads):
            steps += 1
        return steps

    with pytest.raises(BackendError, match=r"walked may raise, and nothing would catch it; give range\(\) a step"):
        compiler._emit_object_code(compiler.Kernel("walked", count_steps))
