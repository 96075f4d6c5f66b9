"""Element by element: of a large result a thread takes several elements, of a small one each takes one."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import Graph, input, load, ops, plan
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device.driver import read_kernel_text
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels import elementwise
from hocket.backends.cupy.kernels.elementwise import (
    ELEMENTS_PER_THREAD,
    ELEMENTWISE_THREADS,
    MIN_MULTI_ELEMENT_COUNT,
    count_elementwise_blocks,
)
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.ops import REGISTRY

from ...given.devices.emulation import FaultyDriver, needs_compiler

OPS = ("neg", "add", "cast", "cont", "compare", "where", "calculate", "tri")
ROUNDS = parse_case(
    "xielu(x=f32[4099,3], alpha_n=4.0, alpha_p=20.0, beta=0.5, eps=1e-07, layout=contiguous, inputs=constant)"
)
"""Where terms of its result nearly cancel."""


def outcomes(driver, op):
    backend = DriverBackend(driver)
    return {run_case(case, backend, backend.device(0)).outcome for case in select_quick_cases(REGISTRY[op])}


def test_kernels_and_bindings_agree_how_many_elements_a_thread_takes():
    assert f"constexpr int ELEMENTS = {ELEMENTS_PER_THREAD};" in read_kernel_text("elements.cuh")
    assert count_elementwise_blocks(MIN_MULTI_ELEMENT_COUNT) == MIN_MULTI_ELEMENT_COUNT // ELEMENTWISE_THREADS
    assert (
        count_elementwise_blocks(MIN_MULTI_ELEMENT_COUNT + 1)
        == MIN_MULTI_ELEMENT_COUNT // ELEMENTWISE_THREADS // ELEMENTS_PER_THREAD + 1
    )


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("op", OPS)
def test_threads_that_take_several_elements_are_right(op, monkeypatch):
    monkeypatch.setattr(elementwise, "MIN_MULTI_ELEMENT_COUNT", 0)
    assert Outcome.PASS in (found := outcomes(EmulatedDriver(), op))
    assert Outcome.FAIL not in found


FAULTS = (
    ("end = all - begin < size ? all : begin + size", "end = begin + size"),
    ("e * blockDim.x < end) put", "e * blockDim.x < end && e < 3) put"),
    ("rest[e] = first + e * blockDim.x", "rest[e] = first + e * 32"),
    ("begin = blockIdx.x * size", "begin = blockIdx.x * blockDim.x"),
)


@pytest.mark.long
@pytest.mark.nightly(cases=2)
@needs_compiler
@pytest.mark.parametrize(("good", "bad"), FAULTS)
def test_a_mistake_in_what_a_thread_takes_is_found(good, bad, monkeypatch):
    monkeypatch.setattr(elementwise, "MIN_MULTI_ELEMENT_COUNT", 0)
    assert Outcome.FAIL in outcomes(FaultyDriver("elements.cuh", good, bad), "add")


@needs_compiler
@pytest.mark.parametrize("size", [MIN_MULTI_ELEMENT_COUNT, MIN_MULTI_ELEMENT_COUNT + 1])
def test_results_are_the_same_however_many_elements_a_thread_takes(size, monkeypatch):
    x, y = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)

    def result():
        graph = Graph({"y": ops.swiglu(input("x", (size,)), input("y", (size,)))})
        return load(plan(graph, ("cuda-emulated:0",)), {}).run({"x": x, "y": y})["y"].view(np.uint32)

    usual = result()
    monkeypatch.setattr(elementwise, "MIN_MULTI_ELEMENT_COUNT", 0 if size == MIN_MULTI_ELEMENT_COUNT else size)
    assert np.array_equal(result(), usual)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("to", ["1.0f", "-1.0f"])
def test_xielu_is_right_though_expm1_is_off_by_its_last_bit(to):
    """As it may be on a device."""
    off = ("return expm1f(y) - x", f"return nextafterf(expm1f(y), {to}) - x")
    edit = ("if (y < -1.0f) return expm1f(y) - x", f"return nextafterf(expm1f(y), {to}) - x")

    def outcome(good, bad):
        backend = DriverBackend(FaultyDriver("elementwise.cu", good, bad))
        return run_case(ROUNDS, backend, backend.device(0)).outcome

    assert outcome(*off) is Outcome.PASS
    assert outcome(*edit) is Outcome.FAIL
