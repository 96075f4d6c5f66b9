"""A float attribute beyond float32 is refused by one line when the node is built; every other value runs."""

from __future__ import annotations

import math
import shutil
import struct
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends import find_device
from hocket.backends.fusion.operands import float32_bits
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.cases.case import Case
from hocket.ops import REGISTRY
from hocket.ops.declaration.signature import SignatureMismatch

MAX_FLOAT32 = float(np.finfo(np.float32).max)
BEYOND = (1e39, -1e300, 1.7e308, 3.4028236e38, np.float64(-1e40), 10**100)
"""Numbers that float32 rounds to an infinity."""
EXTREMES = (MAX_FLOAT32, -MAX_FLOAT32, 1e-46, -1e-300, math.inf, -math.inf, math.nan, -0.0)
FLOATS = [(name, key) for name, op in REGISTRY.items() for key, kind in op.attribute_types.items() if kind == "float"]
"""All ops with float attributes, with each attribute."""


def replace_attribute(name: str, key: str, value: object) -> Case:
    """Return the first sample of an op with another value of one attribute."""
    case = parse_case(f"{name}({REGISTRY[name].samples[0]})")
    values = {**dict(case.attrs), key: value}
    return replace(case, attrs=tuple((k, values[k]) for k in REGISTRY[name].attribute_types if k in values))


def build_node(case: Case) -> object:
    """Call the op of a case on inputs with the specs of its operands."""
    operands = [hocket.input(name, spec.shape, spec.dtype) for name, spec in case.operands]
    return getattr(ops, case.op)(*operands, **dict(case.attrs))


def test_there_are_ops_with_float_attributes() -> None:
    assert len({name for name, _ in FLOATS}) >= 20


@pytest.mark.parametrize("value", BEYOND, ids=str)
@pytest.mark.parametrize(("name", "key"), FLOATS)
def test_a_number_beyond_float32_is_refused_when_the_node_is_built(name: str, key: str, value: float) -> None:
    case = replace_attribute(name, key, value)
    if hasattr(ops, name):
        with pytest.raises(hocket.GraphError, match=rf"^{name}\(.*\): {key} is .*at most 3.4028235e38") as caught:
            build_node(case)
        assert "\n" not in str(caught.value)
    with pytest.raises(SignatureMismatch, match=f"^{key} is "):
        REGISTRY[name].normalise_attributes(dict(case.attrs))


@pytest.mark.parametrize("device", ["numpy:0", "cpu:0", "cuda-emulated:0"])
@pytest.mark.parametrize(("name", "key"), FLOATS)
def test_every_number_of_float32_runs_or_is_refused(name: str, key: str, device: str) -> None:
    """Sums may overflow in float32, so the oracle here is that no backend raises an error of its own."""
    if device.startswith("cuda") and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    for value in EXTREMES if device != "cuda-emulated:0" else EXTREMES[:3]:
        case = replace_attribute(name, key, value)
        with suppress(hocket.HocketError), warnings.catch_warnings(action="error"):
            result = run_case(case, *find_device(device))
            assert result.outcome in (Outcome.PASS, Outcome.UNSUPPORTED) or " of " in result.why, result


@pytest.mark.parametrize("device", ["numpy:0", "cpu:0"])
@pytest.mark.parametrize("limit", [MAX_FLOAT32, math.inf])
def test_a_limit_that_excludes_nothing_keeps_the_values(device: str, limit: float) -> None:
    x = np.array([-MAX_FLOAT32, -1.0, -0.0, 3.5, MAX_FLOAT32], np.float32)
    y = ops.clamp(hocket.input("x", x.shape), min=-limit, max=limit)
    assert np.array_equal(hocket.run(hocket.Graph({"y": y}), {"x": x}, devices=device)["y"], x)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, 1e-46, 1e39, -1e300, MAX_FLOAT32, 3.4028235677973366e38, math.inf])
def test_an_argument_word_is_the_number_rounded_to_float32(value: float) -> None:
    with np.errstate(over="ignore"):
        assert struct.pack("<I", float32_bits(value)) == np.float32(value).tobytes()
