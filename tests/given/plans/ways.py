"""All modes to plan a graph, and whether each gives the results of one device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np

from hocket.backends.base import find_device
from hocket.graph import Graph, HocketError
from hocket.scheduler import Executor, Plan, load, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.sharding.axes import Factor
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.search.greedy_search import find_conflicting_leaf, group_factors

from ..graphs.random_graphs import bindings
from .grouped import as_file_bytes

SLOW = Hardware(flops=1e3, bandwidth=1e3, launch=0, link_latency=1e-9)
"""Devices so slow that every cut pays."""
WORST, NMSE = 1e-6, 1e-12
MAY_BE_REFUSED = (
    "no node, weight or state has such a name",
    "finds nothing to cut within a stage",
    "would go back from stage",
)
"""Messages about requests that a random graph or random options do not allow."""


def values_of(graph: Graph, seed: int) -> Mapping[str, np.ndarray]:
    return bindings(graph, np.random.default_rng(seed))


def results(plan: Plan, values: Mapping[str, np.ndarray]) -> list[Mapping[str, np.ndarray]]:
    """Outputs of two runs in turn, the second by a plan over the same weights and states; and the states at the end."""
    graph = plan.graph
    run = load(plan, {v.node.name: as_file_bytes(values[v.node.name], v.dtype) for v in graph.weights})
    for v in graph.states:
        run.store.state(v.node.name)[...] = values[v.node.name]
    feed = {v.node.name: values[v.node.name] for v in graph.inputs}
    first = {k: np.array(v) for k, v in run.run(feed).items()}
    second = {
        k: np.array(v) for k, v in Executor(plan_for_group(graph, plan.group, like=plan), run.store).run(feed).items()
    }
    return [first, second, {name: np.array(run.store.state(name)) for name in run.store.states}]


def difference(got: np.ndarray, want: np.ndarray) -> str:
    """How two arrays differ: by shape, by the worst element, or in a row; empty where they agree."""
    if got.shape != want.shape:
        return f"is {got.shape} and not {want.shape}"
    finite = np.isfinite(want) & (np.abs(want) < 1e100)
    a, b = (np.where(finite, np.nan_to_num(np.asarray(x, float)), 0.0) for x in (got, want))
    if not a.size:
        return ""
    scale = max(1.0, float(np.abs(b).max()))
    worst = float(np.abs(a - b).max()) / scale
    rows = (np.atleast_1d(x).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (a, b))
    mine, theirs = rows
    power = np.maximum((theirs**2).sum(1), (1e-6 * scale) ** 2 * theirs.shape[1])
    nmse = float((((mine - theirs) ** 2).sum(1) / power).max())
    return "" if worst <= WORST and nmse <= NMSE else f"differs by {worst:.1e}, NMSE of the worst row {nmse:.1e}"


def compare_results(got: list[Mapping[str, np.ndarray]], want: list[Mapping[str, np.ndarray]]) -> str:
    for what, mine, theirs in zip(("first run", "second run", "states"), got, want, strict=True):
        for name, array in theirs.items():
            if why := difference(np.asarray(mine[name]), np.asarray(array)):
                return f"{what}: {name} {why}"
    return ""


def some_that_fit(graph: Graph, factors: Factors, dice: random.Random) -> frozenset[Factor]:
    """A random choice of factors to cut: all that fit together, or a few of them."""
    chosen, part = frozenset[Factor](), dice.choice((1.0, 0.5, 0.2))
    for members in sorted(group_factors(graph, factors).values(), key=lambda _: dice.random()):
        if dice.random() < part and find_conflicting_leaf(graph, factors, chosen | set(members)) is None:
            chosen |= set(members)
    return chosen


def options(graph: Graph, dice: random.Random) -> Iterator[tuple[str, int, dict[str, object]]]:
    """Yield plans of all kinds: their name, the number of devices, and the options of `plan_for`."""
    placed = dice.choice([n.name for n in graph.nodes if n.name] or ["y"])
    for mode in ("none", "layer", "tensor", "auto", "cut", "cut", "placed"):
        n = dice.randint(1, 5)
        shares = [dice.choice([0, 1, 1, 2, 5]) for _ in range(dice.randint(0, n - 1))] + [1]
        options_of_plan: dict[str, object] = {"tensor_split": shares if dice.random() < 0.7 else ()}
        if mode in ("tensor", "auto"):
            options_of_plan["hardware"] = SLOW if dice.random() < 0.8 else Hardware()
        if mode == "cut":
            own = random.Random(dice.random())
            options_of_plan["choose"] = lambda g, f, own=own: some_that_fit(g, f, own)
        elif mode == "placed":
            options_of_plan |= {"split_mode": dice.choice(("tensor", "auto", "layer", "none")), "hardware": SLOW}
            options_of_plan["place"] = [(f"^{placed}$", f"reference:{dice.randrange(n)}")]
        else:
            options_of_plan["split_mode"] = mode
        yield f"{mode} {n} {options_of_plan['tensor_split']} {options_of_plan.get('place', '')}", n, options_of_plan
    own, n = random.Random(dice.random()), dice.choice((4, 6))
    options_of_plan = {"split_mode": "layer,tensor", "hardware": SLOW, "choose": lambda g, f: some_that_fit(g, f, own)}
    yield f"layer,tensor {n}", n, options_of_plan


def try_all_modes(graph: Graph, seed: int) -> Iterator[tuple[str, str]]:
    """Yield each mode to plan `graph`, with its error; the error is empty if the plan is right."""
    dice, values = random.Random(seed), values_of(graph, seed)
    want = results(plan_for_group(graph, [find_device("reference:0")]), values)
    for name, n, options_of_plan in options(graph, dice):
        try:
            new_plan = plan_for_group(graph, [find_device(f"reference:{d}") for d in range(n)], **options_of_plan)
            yield name, compare_results(results(new_plan, values), want)
        except HocketError as why:
            fault = str(why)
            yield name, "" if any(why in fault for why in MAY_BE_REFUSED) else f"refused: {fault}"
        except Exception as why:  # every raw error is a fault of its own
            yield name, f"RAW {type(why).__name__}: {why}"
