"""Plans with a chain of devices, with states of every kind on each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hocket import ops
from hocket.graph import Graph, input, state, weight
from hocket.scheduler import DEFAULT_HARDWARE, Plan, Store, plan_for_group, run_pipelined

from ..devices.faulty import FaultyReference, raise_planted_error
from .grouped import everything_that_fits

ROWS, WIDTH, RUNS = 3, 4, 5


def chain(devices: int, backend: Any = None, *, group_size: int = 1) -> tuple[Plan, Any]:
    """Return a plan of `devices` stages and the backend that runs it.

    Each stage has states that are written whole, or in rows that inputs or another state number. A stage is on one
    device, or sharded over a group of `group_size`.
    """
    x, slot, following = input("x", (ROWS, WIDTH)), input("slot", (ROWS,), "i32"), input("next", (1,), "i32")
    updates = {}
    for d in range(devices):
        cache, total = state(f"cache.{d}", (20, WIDTH)), state(f"sum.{d}", (ROWS, WIDTH))
        at, turn = state(f"at.{d}", (1,), "i32"), state(f"turn.{d}", (8, WIDTH))
        x = ops.mul_mat(weight(f"w.{d}", (WIDTH, WIDTH)), x, name=f"y.{d}")
        written, summed = ops.set_rows(cache, x, slot, name=f"written.{d}"), ops.add(total, x, name=f"summed.{d}")
        first = ops.slice(x, axis=0, start=0, stop=1, name=f"first.{d}")
        updates |= {cache: written, total: summed, turn: ops.set_rows(turn, first, at, name=f"turned.{d}")}
        updates[at] = following
        x = ops.add(ops.get_rows(written, slot, name=f"read.{d}"), summed, name=f"z.{d}")
    backend = backend or FaultyReference()
    graph, group = Graph({"y": x}, updates), [(backend, backend.device(d)) for d in range(devices * group_size)]
    if group_size > 1:
        choose_sharding = partial(everything_that_fits, dice=random.Random(0))
        machines = replace(DEFAULT_HARDWARE, machine=group_size)
        return plan_for_group(
            graph, group, split_mode="layer,tensor", hardware=machines, choose=choose_sharding
        ), backend
    place = [(rf"\.{d}$", f"{backend.name}:{d}") for d in range(devices)]
    return plan_for_group(graph, group, split_mode="layer", place=place), backend


def feeds(runs: int = RUNS) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.standard_normal((ROWS, WIDTH)), "slot": ROWS * run + np.arange(ROWS), "next": [run + 1]}
        for run in range(runs)
    ]


def follow(pipeline, inputs):
    return run_pipelined([(pipeline, one) for one in inputs])


def make_store(plan):
    store, rng = Store(plan.group), np.random.default_rng(1)
    for value in plan.graph.weights:
        store.bind(value.node.name, rng.standard_normal(value.shape), value.spec, plan.leaves[value.node.name])
    return store


def copy_states(store):
    return {name: np.asarray(store.state(name)).copy() for name in store.states}


def same(one, two):
    return all(np.array_equal(one[name], two[name]) for name in one)


def plant_fault(backend, device, number: int, run: int, what: Callable[[], None] = raise_planted_error) -> None:
    """In that run an instruction of a device does `what`: before it runs, or in the first run behind it."""

    def skips() -> None:
        if left:
            left.pop()
            backend.plan_fault(device, number, late=run == 0, what=skips)
        else:
            what()

    left = [0] * run
    backend.plan_fault(device, number, late=run == 0, what=skips)
