"""Kernels of every type of integer and of ids, and of halves as weights and states hold them, on emulated devices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.conformance import Outcome, parse_case, run_case
from hocket.graph import DType, Graph, input, state, weight
from hocket.ops.quantisation import encode_array
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import needs_compiler

pytestmark = needs_compiler
INTEGERS = ("i8", "i16", "i32", "i64")
IDS = ("i32", "i64")
CASES = {
    "cast": [f"x={a}[3,32], dtype={b}" for a, b in product(("f32", *INTEGERS), INTEGERS)],
    "get_rows": [f"table={a}[5,9], ids={b}[7]" for a, b in product(INTEGERS, IDS)],
    "gather": [f"x={a}[2,3,5], ids={b}[2,3,4]" for a, b in product(INTEGERS, IDS)],
    "scatter": [f"into={a}[2,7], ids={b}[2,3], src={a}[2,3]" for a, b in product(INTEGERS, IDS)],
    "calculate": [f'a={a}[3,5], b={b}[5], kind="add"' for a, b in product(INTEGERS, INTEGERS)],
    "compare": [f'a={a}[3,8], b={b}[8], kind="lt"' for a, b in product(("f32", *INTEGERS), repeat=2)],
}


@pytest.mark.parametrize("op", CASES)
def test_integers_of_every_type(op):
    backend = EmulatedBackend()
    for operands in CASES[op]:
        result = run_case(parse_case(f"{op}({operands})"), backend, backend.device(0))
        assert result.outcome is Outcome.PASS, f"{operands}: {result.why}"


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=str)
def test_halves_as_they_lie(dtype, ids):
    """Whole numbers, which halves hold: a weight becomes integers and gives rows, a state takes some."""
    rng, backend = np.random.default_rng(0), EmulatedBackend()
    w, new = (rng.integers(-100, 100, shape).astype(np.float32) for shape in ((5, 9), (3, 9)))
    rows = np.array([4, 0, 2], DType[ids.upper()].storage)
    table, cache, at = weight("w", (5, 9), dtype), state("cache", (5, 9), dtype), input("ids", (3,), ids)
    written = ops.set_rows(cache, input("new", (3, 9)), at)
    outputs = {name: ops.cast(table, dtype=name) for name in INTEGERS}
    outputs |= {"rows": ops.get_rows(table, at), "cache": ops.cast(written, dtype="f32")}
    run = load(
        plan_for_group(Graph(outputs, {cache: written}), [(backend, backend.device(0))]), {"w": encode_array(w, dtype)}
    )
    got = run.run({"ids": rows, "new": new})
    for name in INTEGERS:
        assert np.array_equal(got[name], w.astype(DType[name.upper()].storage))
    assert np.array_equal(got["rows"], w[rows])
    want = np.zeros((5, 9), np.float32)
    want[rows] = new
    assert np.array_equal(got["cache"], want)
