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
from hocket.backends.base import find
from hocket.backends.cpu import binding, compiler, kept
from hocket.backends.cpu.kernels.rows import unary
from hocket.backends.cpu.relocation import ZONE, Nowhere, made_up, read, relocatable
from hocket.backends.cpu.steps import Steps
from hocket.scheduler import Executor, Store, kept_plan

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
    backend, device = find("cpu:0")
    plan = kept_plan(attending(), [(backend.with_threads(threads), device)])
    if not is_cached:
        plan = hocket.scheduler.plan_for(attending(), plan.group)
    assert bool(plan.lanes[0].program.kept) is is_cached
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cached_binding_computes_the_bits_of_a_new_one(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch):
    new = compute_outputs(threads, is_cached=False)
    assert np.abs(new).max() > 0
    assert not folder.exists()
    assert np.array_equal(compute_outputs(threads), new)
    assert len([*folder.iterdir()]) == 1
    monkeypatch.setattr(binding, "foreseen", lambda *_: pytest.fail("bound anew"))
    assert np.array_equal(compute_outputs(threads), new)


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
    monkeypatch.setattr(kept, "stored_addresses", lambda names: arguments.pop(0)(names))
    arguments = [lambda names: None]
    assert np.array_equal(compute_outputs(1), whole)
    assert not arguments
    assert compiler.stored_addresses(["rows.no_such_kernel"]) is None


def test_what_is_read_is_what_was_written(folder: Path):
    backend, device = find("cpu:0")
    plan = kept_plan(attending(), [(backend.with_threads(2), device)])
    tables, _ = binding.foreseen(plan.lanes[0].program, 2)
    assert tables is not None
    again = read(tables.data())
    assert again is not None
    assert again.data() == tables.data()
    assert len(tables.moved) > 20
    assert read(b"") is None
    assert read(b'{"names": 3}\n') is None


def test_a_word_that_looks_like_an_address_is_not_cached():
    def is_relocated(word: int) -> bool:
        memory = Nowhere(made_up(3)[-1])
        steps = Steps(1, owned=memory)
        steps.add(unary("copy"), [word], reads=[], writes=[])
        return relocatable(steps.take(), 1, memory, [64, 128]) is not None

    assert all(map(is_relocated, (0, 1 << 40, -5, ZONE, ZONE + 64, made_up(2)[1] + 128, made_up(3)[2])))
    assert not any(map(is_relocated, (ZONE - 1, ZONE + 65, made_up(2)[1] - 8, made_up(2)[1] + 129, made_up(4)[3])))


@pytest.mark.long
def test_a_second_run_of_a_model_imports_no_planner_no_compiler_and_no_bindings():
    code = (
        "import sys; from hocket.cli import main; main(['run', '-n', '1'])\n"
        "heavy = ('numba', 'networkx', 'tqdm', 'jinja2', 'hocket.scheduler.planner', 'hocket.scheduler.verifier',"
        " 'hocket.backends.cpu.binding')\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or 0)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    assert runs[1].returncode == 0, runs[1].stderr
