"""Every op has cases with NaN in their operands, and a backend that drops or misplaces NaN fails them."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends import find_device
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.cases.inputs import has_unquantised_floats
from hocket.conformance.generate_cases import select_quick_cases
from hocket.ops import REGISTRY

DROPPED = (
    "relu(x=f32[7,33], inputs=nan)",
    "clamp(x=f32[7,33], min=-0.5, max=0.5, inputs=nan)",
    "step(x=f32[7,33], inputs=nan)",
    "hardsigmoid(x=f32[7,33], inputs=nan)",
    "reglu(gate=f32[7,33], up=f32[7,33], inputs=nan)",
    "softmax(x=f32[2,7,33], inputs=nan)",
    "top_k(x=f32[7,33], k=4, inputs=nan)",
    "argsort(x=f32[7,33], inputs=nan)",
    "argmax(x=f32[7,33], inputs=nan)",
)
"""Cases that some kernel failed once."""


@pytest.mark.long(cases=4)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_op_of_numbers_has_cases_with_nan(name: str) -> None:
    op = REGISTRY[name]
    cases = [c for c in select_quick_cases(op) if any(has_unquantised_floats(s) for s in c.specs.values())]
    with_nan = [c for c in cases if c.inputs == "nan"]
    assert bool(with_nan) == bool(cases)


@pytest.mark.parametrize("device", ["reference:0", "numpy:0", "cpu:0"])
@pytest.mark.parametrize("text", DROPPED)
def test_nan_stays_where_it_belongs(text: str, device: str) -> None:
    result = run_case(parse_case(text), *find_device(device))
    assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize("columns", [4, 16, 33, 128])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_largest_numbers_come_before_nan(columns: int, k: int) -> None:
    rng = np.random.default_rng(columns + k)
    x = rng.standard_normal((50, columns)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = np.nan
    got = hocket.run(hocket.Graph({"y": ops.top_k(hocket.input("x", x.shape), k=k)}), {"x": x})["y"]
    assert np.array_equal(got, np.argsort(-x, axis=-1, kind="stable")[:, :k])


@pytest.mark.long
def test_a_query_with_nan_gives_nan_and_leaves_other_rows_alone() -> None:
    rng = np.random.default_rng(0)
    for tokens in (1, 4, 40):
        q, k, v = (rng.standard_normal((1, n, 2, 32)).astype(np.float32) for n in (tokens, 64, 64))
        q[0, 0, 1, 5] = np.nan
        mask = np.zeros((1, tokens, 64), np.float32)
        inputs = {"q": q, "k": k, "v": v, "mask": mask}
        leaves = (hocket.input(name, array.shape) for name, array in inputs.items())
        got = hocket.run(hocket.Graph({"y": ops.attention(*leaves, scale=0.2)}), inputs)["y"]
        want = np.zeros(got.shape, bool)
        want[0, 0, 1] = True
        assert np.array_equal(np.isnan(got), want)
