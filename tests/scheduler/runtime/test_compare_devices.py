"""A wrong kernel is found by its node, on one device and on three; statistics cover the whole value."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.backends.numpy.backend import NumpyBackend
from hocket.graph import Graph, PlanError, input, weight
from hocket.scheduler import (
    Executor,
    NodeComparer,
    Statistics,
    load,
    plan_for_group,
    select_matching_values,
    select_observed_outputs,
    with_observed_values,
)
from hocket.scheduler.measurement.observe_values import collect_computed_values

from ...given.graphs.random_graphs import bindings
from ...given.plans.faults import SLOW, decoder
from ...given.plans.grouped import weights_of

GRAPH = decoder()
VALUES = bindings(GRAPH, np.random.default_rng(0))
FEED = {"x": VALUES["x"], "ids": np.arange(3)}
REFERENCE = find_device("reference:0")
COMPUTED = {name: value for name, value in collect_computed_values(GRAPH).items() if not ops.op_of(value.node).is_view}


class Spoiled(NumpyBackend):
    """The NumPy backend with an error at one node on one device: its result is a little larger."""

    def __init__(self, node: str, device: int, unless_seen: str = "") -> None:
        self.node, self.index, self.unless_seen = node, device, unless_seen

    def compile(self, program, buffers, on, comm):
        runs = []
        for i in program.instructions:
            runs.append(super().compile(replace(program, instructions=(i,), undo=()), buffers, on, comm))
            is_observed = any(self.unless_seen in name for name in program.outputs) if self.unless_seen else False
            if i.node == self.node and on.index == self.index and not is_observed:
                out = self.view(buffers[i.dst[0].buffer], i.dst[0])
                runs.append(partial(np.multiply, out, 1.01, out=out))
        return lambda: [run() for run in runs]


def differences(backend, devices, mode):
    group = [(backend, backend.device(i)) for i in range(devices)]
    plan = plan_for_group(GRAPH, group, split_mode=mode, hardware=SLOW)
    return list(
        NodeComparer(
            plan, load(plan, weights_of(GRAPH, VALUES)).store, weights_of(GRAPH, VALUES), REFERENCE
        ).compare_step_values_with_reference(FEED)
    )


@pytest.mark.parametrize(("devices", "mode"), [(1, "none"), (3, "tensor"), (3, "layer")])
def test_right_kernels_are_found_right(devices, mode):
    found = differences(NumpyBackend(), devices, mode)
    assert {d.name for d in found} == set(COMPUTED)
    assert not any(d.is_wrong for d in found)


FLOATS = [name for name, value in COMPUTED.items() if not name.isdecimal() and value.node.op != "causal_mask"]


@pytest.mark.parametrize(("devices", "mode"), [(1, "none"), (3, "tensor")])
@pytest.mark.parametrize("name", FLOATS)
def test_a_wrong_kernel_is_found_by_its_node(name, devices, mode):
    """Of three devices only the second is wrong: also where each has the whole value."""
    wrong = [d for d in differences(Spoiled(name, int(devices > 1)), devices, mode) if d.is_wrong]
    assert wrong[0].name == name
    assert f"> %{name} = " in wrong[0].surrounding_lines
    assert wrong[0].error < 0.02


def test_a_kernel_that_is_wrong_only_without_observers_is_found_too():
    """As one that computes several nodes at once, which gives way where one between them is wanted."""
    (name,) = {d.name for d in differences(Spoiled("act", 0, unless_seen="gateed"), 1, "none") if d.is_wrong}
    assert name == "act"


@pytest.mark.parametrize(("devices", "mode"), [(3, "tensor"), (3, "layer")])
def test_statistics_on_three_devices_are_those_on_one(devices, mode):
    def statistics(n, split):
        group = [find_device(f"numpy:{i}") for i in range(n)]
        like = plan_for_group(GRAPH, group, split_mode=split, hardware=SLOW)
        plan = plan_for_group(with_observed_values(GRAPH, select_matching_values(GRAPH, ".")), group, like=like)
        outputs = Executor(plan, load(like, weights_of(GRAPH, VALUES)).store).run(FEED)
        return {name: Statistics.of(array) for name, array in select_observed_outputs(outputs).items()}

    one, many = statistics(1, "none"), statistics(devices, mode)
    assert one.keys() == many.keys() == set(collect_computed_values(GRAPH))
    for name, s in one.items():
        t = many[name]
        assert (t.shape, t.nans) == (s.shape, s.nans)
        numbers = ((x.least, x.most, x.mean, x.norm) for x in (t, s))
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6 * max(s.norm, 1) if s.norm < np.inf else 1e-5)


def test_statistics_of_what_is_no_number_and_of_nothing():
    some = Statistics.of(np.array([[1, np.nan, -3, np.nan]], np.float32))
    assert (some.shape, some.least, some.most, some.mean, some.nans) == ((1, 4), -3, 1, -1, 2)
    assert some.norm == pytest.approx(10**0.5)
    none = Statistics.of(np.full(3, np.nan))
    assert none.nans == 3
    assert np.isnan([none.least, none.most, none.mean, none.norm]).all()
    assert Statistics.of(np.zeros((0, 2), np.int32)).norm == 0
    assert str(Statistics.of(np.array([1, 2]))) == "[2] min 1 max 2 mean 1.5 norm 2.23607 NaN 0"


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "is no regular expression"), ("nobody", "no value has 'nobody'")]
)
def test_a_pattern_that_finds_nothing_is_refused(pattern, message):
    with pytest.raises(PlanError, match=message):
        select_matching_values(GRAPH, pattern)


def test_infinities_and_integers_have_to_be_the_same():
    x = input("x", (1, 4))
    graph = Graph({"order": ops.argsort(ops.add(x, weight("w", (4,)), name="sum"), name="order")})
    weights = {"w": np.array([0, np.inf, -np.inf, np.nan], np.float32)}
    plan = plan_for_group(graph, [find_device("numpy:0")])
    run = NodeComparer(plan, load(plan, weights).store, weights, REFERENCE)
    assert [d.error for d in run.compare_step_values_with_reference({"x": np.ones((1, 4))})] == [0, 0, 0]
