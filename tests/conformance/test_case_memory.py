"""Cases with a long axis, and cases with operands that overlap in memory."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends import find_device
from hocket.conformance import parse_case
from hocket.conformance.cases.grow_shapes import LONG_AXIS
from hocket.conformance.cases.inputs import generate_random_operands
from hocket.conformance.checks.case_graph import build_case_graph, build_verified_device_plan
from hocket.conformance.generate_cases import generate_full_cases
from hocket.ops import REGISTRY


def test_overlapping_operands_lie_one_element_apart():
    case = parse_case("add(a=f32[3,4,5], b=f32[3,4,5], layout=overlap)")
    program = build_verified_device_plan(build_case_graph(case).graph, *find_device("cpu:0")).program
    a, b = program.instructions[-1].src
    assert (a.buffer, b.offset - a.offset) == (b.buffer, 4)
    operands = generate_random_operands(case)
    assert np.array_equal(operands["a"].reshape(-1)[1:], operands["b"].reshape(-1)[:-1])


@pytest.mark.long
def test_one_case_of_an_op_has_a_long_axis():
    for name in ("softmax", "top_k", "argsort", "get_rows", "mul_mat", "add", "concat", "lightning_indexer"):
        long = [c for c in generate_full_cases(REGISTRY[name]) if any(LONG_AXIS in s.shape for _, s in c.operands)]
        assert len(long) == 1 or name == "concat"  # its result would be too large
