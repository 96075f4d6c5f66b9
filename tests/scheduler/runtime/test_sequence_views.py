"""Stores over some sequences of another store, and copies of rows within a state."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.graph import PlanError
from hocket.scheduler import Store

ROWS, WIDTH, SEQUENCES = 8, 128, 4
VALUES = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 8
STORE_GROUPS = {
    "one device": ("numpy:0", "none"),
    "two devices": ("numpy:0,numpy:1", "tensor"),
    "two CPU devices": ("cpu:0,cpu:1", "tensor"),
}


def make_executor(devices: str, split_mode: str, rows: int = ROWS) -> hocket.Executor:
    """Return an executor that writes two rows of a state and returns their sums; tensor mode shards the columns."""
    table, ids = hocket.state("table", (rows, WIDTH)), hocket.input("ids", (2,), "i32")
    weight, x = hocket.weight("w", (WIDTH, 64)), hocket.input("x", (2, 64))
    changed = ops.set_rows(table, ops.mul_mat(weight, x), ids)
    graph = hocket.Graph({"y": ops.get_rows(changed, ids)}, {table: changed})
    return hocket.load(hocket.plan(graph, devices, split_mode=split_mode), {"w": np.ones((WIDTH, 64))})


@pytest.fixture(params=STORE_GROUPS)
def store(request: pytest.FixtureRequest) -> Store:
    filled = make_executor(*STORE_GROUPS[request.param]).store
    filled.state("table")[...] = VALUES
    assert str(filled.state("table").layout) == ("R" if request.param == "one device" else "S1(64|64)")
    return filled


def test_a_view_has_the_rows_of_its_sequences_in_the_same_memory(store: Store) -> None:
    view = store.view_sequences(2, 1, SEQUENCES)
    assert np.array_equal(view.state("table"), VALUES[4:6])
    view.state("table")[0] = np.float32(-1)
    store.state("table")[5, :100] = np.float32(-2)
    expected = VALUES.copy()
    expected[4], expected[5, :100] = -1, -2
    assert np.array_equal(store.state("table"), expected)
    assert np.array_equal(view.state("table"), expected[4:6])


def test_a_view_of_a_view_is_a_view(store: Store) -> None:
    half = store.view_sequences(2, 2, SEQUENCES)
    assert np.array_equal(half.view_sequences(1, 1, 2).state("table"), VALUES[6:])


@pytest.mark.parametrize("group", STORE_GROUPS)
def test_a_plan_for_fewer_rows_runs_in_a_view(group: str) -> None:
    store = make_executor(*STORE_GROUPS[group]).store
    store.state("table")[...] = VALUES
    small = make_executor(*STORE_GROUPS[group], rows=2)
    view = store.view_sequences(3, 1, SEQUENCES)
    view.bind("w", np.ones((WIDTH, 64)), hocket.weight("w", (WIDTH, 64)).spec, small.plan.leaves["w"])
    hocket.Executor(small.plan, view).run({"ids": [1, 0], "x": np.ones((2, 64))})
    assert np.array_equal(store.state("table")[:6], VALUES[:6])
    assert np.array_equal(store.state("table")[6:], np.full((2, WIDTH), 64))


@pytest.mark.parametrize(("source", "target", "count"), [(0, 4, 4), (6, 0, 2), (3, 3, 0), (7, 6, 1)])
def test_rows_are_copied(store: Store, source: int, target: int, count: int) -> None:
    store.copy_state_rows("table", source, target, count)
    expected = VALUES.copy()
    expected[target : target + count] = VALUES[source : source + count]
    assert np.array_equal(store.state("table"), expected)


@pytest.mark.parametrize(
    ("source", "target", "count"), [(0, 1, 2), (1, 0, 2), (0, 7, 2), (7, 0, 2), (0, 0, 1), (0, 9, 0)]
)
def test_rows_that_overlap_or_are_missing_are_refused(store: Store, source: int, target: int, count: int) -> None:
    with pytest.raises(PlanError, match=f"count {count} from {source} and {target}; need two parts of 8 rows"):
        store.copy_state_rows("table", source, target, count)
    assert np.array_equal(store.state("table"), VALUES)


def test_wrong_views_are_refused(store: Store) -> None:
    with pytest.raises(PlanError, match="sequences 3 to 4 are not all among 4"):
        store.view_sequences(3, 2, SEQUENCES)
    with pytest.raises(PlanError, match=r"state %table: f32\[8,128\] .* has no equal parts for 3 sequences"):
        store.view_sequences(0, 1, 3)
    with pytest.raises(PlanError, match="there is no state %other yet"):
        store.copy_state_rows("other", 0, 4, 4)


def executor_of(devices: str, shape: tuple[int, ...], split_mode: str) -> hocket.Executor:
    table, x = hocket.state("table", shape), hocket.input("x", shape)
    total = ops.add(table, x)
    return hocket.load(hocket.plan(hocket.Graph({"y": total}, {table: total}), devices, split_mode=split_mode), {})


def test_a_state_that_is_sharded_along_its_rows_has_no_views_and_no_copies() -> None:
    store = executor_of("numpy:0,numpy:1", (8, 16), "tensor").store
    assert str(store.state("table").layout) == "S0(4|4)"
    with pytest.raises(PlanError, match=r"f32\[8,16\] S0\(4\|4\) has no equal parts for 4 sequences"):
        store.view_sequences(0, 1, SEQUENCES)
    with pytest.raises(PlanError, match="%table is sharded along its rows"):
        store.copy_state_rows("table", 0, 4, 4)


def test_a_part_of_an_address_that_kernels_cannot_use_is_refused() -> None:
    store = executor_of("numpy:0", (4, 2), "none").store
    with pytest.raises(PlanError, match="state %table: a part of 8 bytes is no multiple of 16 bytes"):
        store.view_sequences(1, 1, SEQUENCES)


@pytest.mark.parametrize("value", [0, np.int64(0), False, 0.0, np.zeros(WIDTH, np.int8)])
def test_an_assignment_of_integers_keeps_the_fractions_of_other_rows(store: Store, value: object) -> None:
    """Sharded states are assembled for an assignment, in the dtype of the state and not of the value."""
    store.state("table")[1] = value
    expected = VALUES.copy()
    expected[1] = 0
    assert np.array_equal(store.state("table"), expected)
