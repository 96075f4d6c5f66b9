"""How threads of a device share a program: the same bits as one thread, few meetings, and nothing written too early."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.numpy import replay
from hocket.backends.numpy.cpu import CpuBackend
from hocket.backends.numpy.kernels.rows import unary
from hocket.backends.numpy.steps import RUN, Steps
from hocket.backends.operands import Region
from hocket.frontends.open import open_model
from hocket.frontends.session import Group, Session
from hocket.graph.dtypes import DType

from .random_rows import random_rows

RNG = np.random.default_rng(7)
FIXTURES = Path(__file__).parent / "fixtures"


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
    def drawn(w: hocket.Value) -> np.ndarray:
        if w.dtype.is_quantised:
            return random_rows(w.dtype, *w.shape, RNG)
        return RNG.standard_normal(w.shape).astype(w.dtype.storage)

    return {w.node.name: drawn(w) for w in graph.weights}


def loaded(graph: hocket.Graph, values: dict[str, np.ndarray], threads: int):
    backend = CpuBackend(threads)
    return hocket.load(hocket.scheduler.plan_for(graph, [(backend, backend.device(0))]), values)


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.F16, DType.F32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_threads_with_pieces_and_copies_of_their_own_compute_the_bits_of_one(rows: int, dtype: DType, monkeypatch):
    graph = layers(3, rows, dtype)
    values, x = values_of(graph), RNG.standard_normal((rows, 192))
    found = [loaded(graph, values, threads).run({"x": x})["y"] for threads in (1, 2, 3, 7) for _ in range(3)]
    monkeypatch.setattr(replay, "FUSED", {})
    found += [loaded(graph, values, threads).run({"x": x})["y"] for threads in (1, 2)]
    assert np.isfinite(found[0]).all()
    assert all(np.array_equal(f, found[0]) for f in found)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-rope-freqs", "qwen3-q4_k_m", "qwen35moe"])
def test_a_model_computes_the_same_bits_without_fused_kernels(name: str, threads: int, monkeypatch):
    model, tokens = open_model(FIXTURES / name / "model.gguf"), np.load(FIXTURES / name / "tokens.npy").tolist()

    def logits() -> np.ndarray:
        session = Session(model, on=Group(threads=threads))
        return np.concatenate([session.evaluate([part])[0] for part in (tokens[:9], tokens[9:10], tokens[10:11])])

    fused = logits()
    monkeypatch.setattr(replay, "FUSED", {})
    assert np.array_equal(fused, logits())


def test_threads_meet_twice_in_a_gated_unit_of_one_token():
    """Before the norm, which needs all of the sum, and before the last product, which needs all of the unit."""
    graph = layers(5, 1, DType.Q8_0)
    run = loaded(graph, values_of(graph), 2)
    run.run({"x": RNG.standard_normal((1, 192))})
    segments = [s for s in gc.get_objects() if type(s) is replay.Segment and len(s.steps) > 20]
    assert [sum(step.meets for step in s.steps) for s in segments] == [2 * 5 - 1]


@pytest.mark.parametrize("threads", [2, 3])
def test_no_thread_writes_a_state_before_it_is_certain_that_no_other_has_stopped(threads: int):
    """The first thread stops at an id while others could go on to write what they have of a row into the state."""
    first, cache = hocket.state("first", (8, 32)), hocket.state("cache", (4, 512))
    w, x, ids = hocket.weight("w", (512, 32)), hocket.input("x", (1, 32)), hocket.input("ids", (1,), "i32")
    new = ops.set_rows(cache, ops.mul_mat(w, x), hocket.input("at", (1,), "i32"))
    updates = {first: ops.set_rows(first, x, ids), cache: new}
    run = loaded(hocket.Graph({"y": ops.neg(x)}, updates), {"w": np.ones((512, 32), np.float32)}, threads)
    for bad in ({"ids": [99], "at": [2]}, {"ids": [1], "at": [4]}):
        for _ in range(50):
            with pytest.raises(hocket.BackendError, match="names no row"):
                run.run({**bad, "x": np.ones((1, 32))})
            assert not any(np.asarray(run.store.state(name)[...]).any() for name in ("first", "cache"))
    run.run({"ids": [1], "at": [2], "x": np.ones((1, 32))})
    assert (np.asarray(run.store.state("cache")[...]).sum(-1) == [0, 0, 32 * 512, 0]).all()


def test_what_may_stop_the_run_and_what_writes_a_state_are_apart_unless_one_thread_does_both():
    assert RUN.overlaps(RUN)
    assert not RUN.overlaps(Region(0, 0, 1 << 40))
    steps = Steps(2)
    memory = [steps.memory(64) for _ in range(2)]
    steps.add(unary("copy"), [], reads=[], writes=[memory[0]], stops=True)
    steps.add(unary("copy"), [], reads=[], writes=[memory[1]], stops=True)
    assert [s.meets for s in steps.take()] == [False, False]
    steps.add(unary("copy"), [], reads=[], writes=[memory[0]], nbytes=1 << 20, stops=True)
    steps.add(unary("copy"), [], reads=[], writes=[memory[1]], stops=True)
    assert [s.meets for s in steps.take()] == [False, True]


def test_bands_of_the_same_rows_overlap_only_where_their_columns_do():
    band = Region(0, 100, 1000, 64, 16)
    assert not band.overlaps(Region(0, 116, 1016, 64, 48))
    assert not band.overlaps(Region(0, 52, 1000, 64, 48))
    assert band.overlaps(Region(0, 52, 1000, 64, 49))
    assert band.overlaps(Region(0, 115, 1015, 64, 4))
    assert band.overlaps(Region(0, 120, 130))
    assert not band.overlaps(Region(1, 100, 1000, 64, 16))
