"""Arithmetic of integers at the ends of their types, against Python's own, which has no ends."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, input
from hocket.ops.elementwise.integers import INTEGER_OPERATIONS
from hocket.scheduler import load, plan

from ..given.devices.emulation import needs_compiler

ENDS = {
    "i8": [-128, -7, -1, 0, 1, 5, 127],
    "i32": [-(2**31), -9, -1, 0, 1, 2, 7, 40, 2**31 - 1],
    "i64": [-(2**63), -(2**40), -9, -1, 0, 1, 3, 31, 70, 2**63 - 1],
}


def towards_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


RULES = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floor_div": lambda a, b: a // b if b else 0,
    "trunc_div": lambda a, b: towards_zero(a, b) if b else 0,
    "floor_mod": lambda a, b: a % b if b else 0,
    "trunc_mod": lambda a, b: a - towards_zero(a, b) * b if b else 0,
    "max": max,
    "min": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift_left": lambda a, b: a << b if 0 <= b < 64 else 0,
    "shift_right": lambda a, b: a >> b if 0 <= b < 64 else -(a < 0),
}


@pytest.mark.parametrize(
    "device", ["reference:0", "numpy:0", "cpu:0", pytest.param("cuda-emulated:0", marks=needs_compiler)]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", INTEGER_OPERATIONS)
def test_results_wrap_and_division_by_zero_gives_zero(kind, device):
    for a, b in itertools.product(ENDS, ENDS):
        graph = Graph({"y": ops.calculate(input("a", (len(ENDS[a]), 1), a), input("b", (1,), b), kind=kind)})
        run = load(plan(graph, device), {}).run
        bits = 8 * np.dtype(a.replace("i", "int")).itemsize
        for right in ENDS[b]:
            expected = [RULES[kind](left, right) for left in ENDS[a]]
            wrapped = [(n + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for n in expected]
            assert run({"a": np.array(ENDS[a])[:, None], "b": np.array([right])})["y"][:, 0].tolist() == wrapped
