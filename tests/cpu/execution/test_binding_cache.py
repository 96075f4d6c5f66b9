"""Bindings in the disk cache: relocated to new buffers they compute the results of a new binding, and run no other
code.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.base import find_device
from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.execution import binding_cache, program_binding
from hocket.backends.cpu.execution.relocatable_tables import (
    PLACEHOLDER_ZONE,
    PlaceholderMemory,
    build_relocatable_table,
    make_placeholder_addresses,
    parse_relocatable_table,
)
from hocket.backends.cpu.kernels.vector.elementwise import COPY
from hocket.backends.cpu.kernels.vector.expression_kernels import make_expression_kernel
from hocket.backends.cpu.steps.step_table import StepTableBuilder
from hocket.scheduler import Executor, Store, plan_with_cache

RNG = np.random.default_rng(3)


def attending() -> hocket.Graph:
    """Attention over a state, which has tables of addresses, and a rotary embedding, which has tables of numbers."""
    x, places = hocket.input("x", (4, 2, 64)), hocket.input("places", (4,), "i32")
    state = hocket.state("kept", (8, 128))
    new_cache = ops.set_rows(state, ops.reshape(x, shape=(4, 128)), places)
    keys = ops.reshape(new_cache, shape=(8, 2, 64))
    seen = ops.attention(ops.rope(x, places, n_dims=64), keys, keys, hocket.input("mask", (4, 8)), scale=0.125)
    w = hocket.weight("w", (256, 128))
    return hocket.Graph({"y": ops.mul_mat(w, ops.reshape(seen, shape=(4, 128)))}, {state: new_cache})


INPUTS = {
    "x": RNG.standard_normal((4, 2, 64)).astype(np.float32),
    "places": np.array([1, 2, 5, 7], np.int32),
    "mask": np.zeros((4, 8), np.float32),
}
W = RNG.standard_normal((256, 128)).astype(np.float32)


def compute_outputs(threads: int, *, is_cached: bool = True) -> np.ndarray:
    backend, device = find_device("cpu:0")
    plan = plan_with_cache(attending(), [(backend.with_threads(threads), device)])
    if not is_cached:
        plan = hocket.scheduler.plan_for_group(attending(), plan.group)
    assert bool(plan.device_plans[0].program.cache_name) is is_cached
    store = Store(plan.group)
    store.bind("w", W, plan.graph.weights[0].spec, plan.leaves["w"])
    run = Executor(plan, store)
    return np.concatenate([run.run(INPUTS)["y"] for _ in range(2)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans and bindings are kept; kernels stay where they are."""
    real = compiler.cache_folder()
    monkeypatch.setattr(compiler, "cache_folder", lambda: real)
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    return tmp_path / "bindings"


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_a_cached_binding_computes_the_bits_of_a_new_one(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch):
    new = compute_outputs(threads, is_cached=False)
    assert np.abs(new).max() > 0
    assert not folder.exists()
    assert np.array_equal(compute_outputs(threads), new)
    assert len([*folder.iterdir()]) == 1
    monkeypatch.setattr(program_binding, "bind_relocatable_program", lambda *_: pytest.fail("bound anew"))
    assert np.array_equal(compute_outputs(threads), new)


def test_verification_and_binding_share_one_choice_of_fusions(folder: Path, monkeypatch: pytest.MonkeyPatch):
    choose, flows = program_binding._choose_fusions, []
    monkeypatch.setattr(program_binding, "_choose_fusions", lambda flow: flows.append(flow) or choose(flow))
    compute_outputs(1)
    assert len(flows) == 2, "one before the layout of memory, one of the program"


def test_a_damaged_binding_is_built_again(folder: Path):
    whole = compute_outputs(1)
    (file,) = folder.iterdir()
    data = file.read_bytes()
    for damaged in (b"", data[:-8], data[:600] + bytes([data[600] ^ 1]) + data[601:]):
        file.write_bytes(damaged)
        assert np.array_equal(compute_outputs(1), whole)
        assert file.read_bytes() == data


def test_a_binding_with_missing_kernels_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    whole = compute_outputs(1)
    monkeypatch.setattr(binding_cache, "find_cached_kernel_addresses", lambda names: arguments.pop(0)(names))
    arguments = [lambda names: None]
    assert np.array_equal(compute_outputs(1), whole)
    assert not arguments
    assert compiler.find_cached_kernel_addresses(["elementwise.no_such_kernel"]) is None


def test_what_is_read_is_what_was_written(folder: Path):
    backend, device = find_device("cpu:0")
    plan = plan_with_cache(attending(), [(backend.with_threads(2), device)])
    tables, _ = program_binding.bind_relocatable_program(plan.device_plans[0].program, 2)
    assert tables is not None
    again = parse_relocatable_table(tables.to_bytes())
    assert again is not None
    assert again.to_bytes() == tables.to_bytes()
    assert len(tables.base_buffers) > 20
    assert parse_relocatable_table(b"") is None
    assert parse_relocatable_table(b'{"names": 3}\n') is None


def test_a_word_that_looks_like_an_address_is_not_cached():
    def is_relocated(word: int) -> bool:
        memory = PlaceholderMemory(make_placeholder_addresses(3)[-1])
        steps = StepTableBuilder(1, table_memory=memory)
        steps.add(make_expression_kernel(COPY, (False,)), [word], reads=[], writes=[])
        return build_relocatable_table(steps.take_steps(), 1, memory, [64, 128]) is not None

    assert all(
        map(
            is_relocated,
            (
                0,
                1 << 40,
                -5,
                PLACEHOLDER_ZONE,
                PLACEHOLDER_ZONE + 64,
                make_placeholder_addresses(2)[1] + 128,
                make_placeholder_addresses(3)[2],
            ),
        )
    )
    assert not any(
        map(
            is_relocated,
            (
                PLACEHOLDER_ZONE - 1,
                PLACEHOLDER_ZONE + 65,
                make_placeholder_addresses(2)[1] - 8,
                make_placeholder_addresses(2)[1] + 129,
                make_placeholder_addresses(4)[3],
            ),
        )
    )


@pytest.mark.long
def test_a_second_run_of_a_model_imports_no_planner_no_compiler_and_no_bindings():
    code = (
        "import sys; from hocket.cli import main; main(['run', '-n', '1'])\n"
        "heavy = ('numba', 'networkx', 'tqdm', 'jinja2', 'hocket.scheduler.planning.planner',"
        " 'hocket.scheduler.verifier',"
        " 'hocket.backends.cpu.execution.program_binding')\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or 0)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    assert runs[1].returncode == 0, runs[1].stderr
