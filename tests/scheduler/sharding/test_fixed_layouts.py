"""Plans over weights and states on the devices: graphs that read them in another way than the first one."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hocket import Executor, Graph, PlanError, Value, load, ops, plan
from hocket.graph import input, state, weight

ROWS, COLUMNS = 24, 12


def graph_of(seed: int) -> Graph:
    """Build a graph over the weights and states that all seeds share, with its own slices of each."""
    rng = random.Random(seed)
    x = input("x", (3, COLUMNS))
    tall = [weight("w", (ROWS, COLUMNS)), state("kept", (ROWS, COLUMNS))]
    wide = [weight("v", (COLUMNS, ROWS)), state("seen", (COLUMNS, ROWS))]

    def random_slice(value: Value) -> Value:
        axis = rng.randrange(2)
        start = rng.randrange(value.shape[axis] - 2)
        return ops.slice_(value, axis=axis, start=start, stop=rng.randrange(start + 1, value.shape[axis] + 1))

    def roll_entries(value: Value) -> Value:
        """Its entries along one axis from somewhere on, then those before."""
        axis = rng.randrange(2)
        size, at = value.shape[axis], rng.randrange(1, value.shape[axis])
        ends = [ops.slice_(value, axis=axis, start=a, stop=b) for a, b in ((at, size), (0, at))]
        return ops.concat(*(ops.silu(end) if rng.random() < 0.5 else end for end in ends), axis=axis)

    reading: list[Callable[[Value, Value], Value]] = [
        lambda t, _: ops.mul_mat(t, x),
        lambda t, w: ops.mul_mat(w, ops.silu(ops.mul_mat(t, x))),
        lambda t, w: ops.mul_mat(roll_entries(w), ops.mul_mat(roll_entries(t), x)),
        lambda t, _: ops.mul_mat(t, t),
        lambda t, w: random_slice(t) * 2.0 if rng.random() < 0.5 else random_slice(w),
        lambda t, w: ops.add(t, ops.cont(ops.permute(w, axes=(1, 0)))),
        lambda t, _: ops.rms_norm(roll_entries(t), eps=1e-5),
        lambda t, _: t,
    ]
    outputs = {f"y{n}": rng.choice(reading)(rng.choice(tall), rng.choice(wide)) for n in range(rng.randrange(1, 4))}
    outputs |= {f"of {v.node.name}": random_slice(v) if rng.random() < 0.5 else ops.neg(v) for v in (*tall, *wide)}
    updates = {v: ops.tanh(roll_entries(v)) if rng.random() < 0.5 else ops.neg(v) for v in (tall[1], wide[1])}
    return Graph(outputs, {v: new for v, new in updates.items() if rng.random() < 0.6})


SPLITS = [("tensor", ()), ("auto", ()), ("layer", ()), ("tensor", (1, 2, 1)), ("tensor", (0, 1, 3))]


@pytest.mark.nightly(cases=14)
@pytest.mark.parametrize("seed", range(40))
def test_a_graph_runs_over_leaves_as_another_left_them(seed):
    rng = np.random.default_rng(seed)
    first, second = graph_of(2 * seed), graph_of(2 * seed + 1)
    mode, split = SPLITS[seed % len(SPLITS)]
    weights = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in first.weights}
    before = {v.node.name: rng.standard_normal(v.shape) for v in first.states}
    feed = {"x": rng.standard_normal((3, COLUMNS))}

    def steps(devices: int) -> list[dict[str, np.ndarray]]:
        group = [f"reference:{i}" for i in range(devices)]
        asked = plan(first, group, split_mode=mode, tensor_split=split if devices > 1 else ())
        run = load(asked, weights)
        for name, array in before.items():
            run.store.state(name)[...] = array
        group = [str(device) for _, device in asked.group]  # `auto` may leave some free
        place = [("w|seen", group[-1])] if seed % 2 else []
        follows = Executor(plan(second, group, like=asked, place=place), run.store)
        again = Executor(plan(first, group, like=follows.plan), run.store)
        feeds = [
            (r, {n: feed[n] for n in feed if n in {v.node.name for v in r.plan.graph.inputs}})
            for r in (run, follows, again)
        ]
        results = [{name: np.array(array) for name, array in r.run(fed).items()} for r, fed in feeds]
        return [*results, {name: np.array(run.store.state(name)) for name in before}]

    for got, expected in zip(steps(3), steps(1), strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-9, err_msg=name)


def test_slices_of_packed_rows_that_cannot_be_joined_are_refused_in_a_line():
    x, packed = input("x", (3, 64)), weight("packed", (24, 64), "q8_0")
    whole = Graph({"y": ops.silu(ops.mul_mat(packed, x))})
    ends = [ops.slice_(packed, axis=0, start=a, stop=b) for a, b in ((0, 7), (7, 24))]
    group = [f"reference:{i}" for i in range(3)]
    with pytest.raises(PlanError, match="in other pieces than an earlier plan has cut it"):
        plan(
            Graph({f"y{n}": ops.mul_mat(end, x) for n, end in enumerate(ends)}),
            group,
            like=plan(whole, group, split_mode="tensor"),
        )
