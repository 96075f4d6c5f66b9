"""Arrays for leaves: all backends refuse wrong arrays in the same words."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops

BACKENDS = ("cpu:0", "numpy:0", "reference:0")
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)


def rows_of(device: str) -> hocket.Executor:
    table, ids = hocket.weight("table", (5, 2)), hocket.input("ids", (2,), "i32")
    return hocket.load(hocket.plan(hocket.Graph({"y": ops.get_rows(table, ids)}), device), {"table": TABLE})


WRONG = {
    "beyond the dtype": ([0, 2**32 + 3], r"%ids: got integers from 0 to 4294967299, need i32\[2\]"),
    "floats": ([0.0, 1.0], r"%ids: got float64, need i32\[2\]"),
    "complex": ([0, 1j], "%ids has NumPy dtype complex128; it must be real numbers"),
    "None": ([0, None], "%ids has NumPy dtype object"),
    "text": (["0", "1"], "%ids has NumPy dtype <U1"),
    "ragged": ([[0], [1, 2]], "%ids: got a list, need an array of numbers"),
    "another shape": ([0, 1, 2], r"%ids: got shape \[3\], need i32\[2\]"),
}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("what", WRONG)
def test_an_input_that_does_not_fit_is_refused(device, what):
    argument, message = WRONG[what]
    with pytest.raises(hocket.PlanError, match=message):
        rows_of(device).run({"ids": argument})


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("argument", [[0, -1], [0, 5]])
def test_an_id_of_no_row_is_an_error_of_the_run(device, argument):
    with pytest.raises(hocket.BackendError, match=str(argument[1])):
        rows_of(device).run({"ids": argument})


def test_the_oracle_counts_no_id_from_the_end():
    table, ids, new = hocket.weight("table", (5, 2)), hocket.input("ids", (1,), "i32"), hocket.input("new", (1, 2))
    bound = {"table": TABLE, "ids": [-1], "new": np.zeros((1, 2))}
    for y in (ops.get_rows(table, ids), ops.set_rows(table, new, ids)):
        with pytest.raises(hocket.BackendError, match="ids run from -1 to -1"):
            ops.evaluate(hocket.Graph({"y": y}), bound)


def test_integers_of_any_width_are_taken_where_they_fit():
    for dtype in ("u1", "i1", "u2", "i2", "u4", "i8", "u8"):
        np.testing.assert_array_equal(rows_of("numpy:0").run({"ids": np.array([1, 4], dtype)})["y"], TABLE[[1, 4]])


def test_a_quantised_weight_is_as_many_bytes_as_its_blocks():
    q = hocket.weight("q", (3, 64), "q8_0")
    plan = hocket.plan(hocket.Graph({"y": ops.mul_mat(q, hocket.input("x", (1, 64)))}), "numpy:0")
    right = np.zeros((3, 68), np.uint8)
    for argument in (right, right.reshape(-1), right.view(np.int8), right.reshape(6, 34)):
        hocket.load(plan, {"q": argument})
    for argument in (right[:2], right.astype(np.float32), np.zeros((3, 64), np.float32), b"\0" * 204):
        with pytest.raises(hocket.PlanError, match=r"weight %q.*(need q8_0\[3,64\]: 204 bytes|NumPy dtype)"):
            hocket.load(plan, {"q": argument})


def test_what_is_assigned_to_a_state_fits_it():
    s, at = hocket.state("s", (3, 4)), hocket.state("at", (2,), "i32")
    run = hocket.load(hocket.plan(hocket.Graph({"y": ops.neg(s), "z": ops.cont(at)}), "numpy:0"), {})
    state, numbers = run.store.state("s"), run.store.state("at")
    state[1] = np.arange(4)
    state[:, 0] = 7
    numbers[...] = [1, 2]
    assert state.tolist() == [[7, 0, 0, 0], [7, 1, 2, 3], [7, 0, 0, 0]]
    for argument, message in (
        (np.zeros(3), r"state %s: f32\[3,4\]: got shape \[3\]"),
        (1j, "dtype complex128"),
        ("text", "dtype <U4"),
        ([[1], [2, 3]], "got a list, need an array of numbers"),
    ):
        with pytest.raises(hocket.PlanError, match=message):
            state[...] = argument
    for argument in ([0.5, 1.0], [2**40, 0]):
        with pytest.raises(hocket.PlanError, match=r"state %at: got .* need i32\[2\]"):
            numbers[...] = argument
