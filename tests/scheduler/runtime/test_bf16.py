"""Inputs, states, weights and outputs of bf16, on backends that keep wider numbers and on one that keeps its bits."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import run_calls
from hocket.backends.numpy.backend import NumpyBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph import DType, Graph, input, state, weight
from hocket.ops import REGISTRY
from hocket.ops.quantisation import bf16_to_f32, decode_array, encode_array, f32_to_bf16
from hocket.scheduler import load, plan_for_group

from ...given.arrays import assert_elements_close


class NarrowBackend(ReferenceBackend):
    """The references on memory in which every value has its declared dtype."""

    def storage_spec(self, spec, kind="value"):
        return spec

    def compile(self, program, buffers, on, comm):
        def run(i):
            src = [
                None if t is None else np.array(decode_array(self.view(buffers[t.buffer], t), t.dtype)) for t in i.src
            ]
            for t, result in zip(i.dst, REGISTRY[i.op].run_reference(src, i.attrs), strict=True):
                self.view(buffers[t.buffer], t)[...] = encode_array(np.asarray(result), t.dtype)

        return lambda: run_calls(program, on, [(n, lambda i=i: run(i)) for n, i in enumerate(program.instructions)])


BACKENDS = (NumpyBackend, ReferenceBackend, NarrowBackend)


def graph() -> Graph:
    """Rows of bf16 set in a state of bf16, and both read."""
    x, cache = input("x", (2, 4), "bf16"), state("cache", (5, 4), "bf16")
    new = ops.set_rows(cache, x, input("ids", (2,), "i32"))
    w = weight("w", (3, 4), "bf16")
    half = ops.cast(ops.mul_mat(w, x), dtype=DType.BF16)
    return Graph({"y": half, "x": ops.scale(x, scale=1.0), "cache": ops.scale(new, scale=1.0)}, {cache: new})


@pytest.mark.parametrize("bits", [False, True], ids=["numbers", "bits"])
@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda b: b.__name__)
def test_bf16_is_bound_and_read_as_numbers_or_as_bits(make_backend, bits):
    backend = make_backend()
    rng = np.random.default_rng(0)
    x, w, old = (bf16_to_f32(f32_to_bf16(rng.standard_normal(s))) for s in ((2, 4), (3, 4), (5, 4)))
    give = f32_to_bf16 if bits else np.asarray
    run = load(plan_for_group(graph(), [(backend, backend.device(0))]), {"w": give(w)})
    run.store.state("cache")[...] = give(old)
    np.testing.assert_array_equal(np.asarray(run.store.state("cache")), old)
    out = run.run({"x": give(x), "ids": [3, 1]})
    new = old.copy()
    new[[3, 1]] = x
    np.testing.assert_array_equal(np.asarray(run.store.state("cache")), new)
    np.testing.assert_array_equal(out["cache"], new)
    np.testing.assert_array_equal(out["x"], x)
    assert_elements_close(out["y"], x.astype(np.float64) @ w.astype(np.float64).T, rtol=2.0**-7)
    run.store.state("cache")[2] = give(x[0])
    np.testing.assert_array_equal(run.store.state("cache")[2], x[0])


def test_memory_of_bf16_holds_the_bits_of_its_numbers():
    backend = NarrowBackend()
    run = load(plan_for_group(graph(), [(backend, backend.device(0))]), {"w": np.full((3, 4), -2.5)})
    run.run({"x": np.full((2, 4), 1.5), "ids": [0, 4]})
    (part,) = run.store.state("cache").parts.values()
    assert part.dtype is DType.BF16
    np.testing.assert_array_equal(part.memory_view[[0, 4]], f32_to_bf16(np.full((2, 4), 1.5, np.float32)))


@pytest.mark.parametrize("make_backend", BACKENDS, ids=lambda b: b.__name__)
def test_a_sharded_state_of_bf16_is_assigned_and_read_whole(make_backend):
    backend = make_backend()
    group = [(backend, backend.device(i)) for i in range(2)]
    cache = state("cache", (4, 6), "bf16")
    built = Graph({"y": ops.scale(cache, scale=1.0)}, {cache: ops.scale(cache, scale=2.0)})

    def columns(graph, factors):
        return frozenset(f for v in graph.states for f in factors.factors_of(v) if f.size == 6)

    sharded_plan = plan_for_group(built, group, choose=columns)
    assert sharded_plan.sharded_factors
    run = load(sharded_plan, {})
    values = np.arange(24.0).reshape(4, 6)
    run.store.state("cache")[...] = values
    np.testing.assert_array_equal(run.run({})["y"], values)
    np.testing.assert_array_equal(np.asarray(run.store.state("cache")), 2 * values)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float or d.is_integer], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_numbers_come_back_from_memory_of_every_dtype(dtype, shape):
    numbers = np.full(shape, 7)
    encoded = encode_array(numbers, dtype)
    assert (encoded.dtype, encoded.shape) == (dtype.storage, shape)
    np.testing.assert_array_equal(decode_array(encoded, dtype), numbers)
