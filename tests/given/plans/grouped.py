"""Plans of random graphs over several reference devices, and functions that run them."""

from __future__ import annotations

import random

import numpy as np

from hocket import ops
from hocket.backends.base import find_device
from hocket.graph import DType, Graph, input, state, weight
from hocket.ops.quantisation import encode_array
from hocket.scheduler import Executor, Plan, Store, load, plan_for_group
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.search.greedy_search import find_conflicting_leaf, group_factors

from ..graphs.random_graphs import bindings, seeded_graph


def devices(n: int, kind: str = "cpu") -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(n))


def as_file_bytes(array, dtype: DType):
    """Bound as a file holds it; a quantised weight as zero blocks with scales of one or so."""
    if not dtype.is_quantised:
        return encode_array(array, dtype)
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 255, (*array.shape[:-1], array.shape[-1] // dtype.block, dtype.block_bytes))
    blocks = blocks.astype(np.uint8)
    if blocks.size:
        blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def everything_that_fits(graph: Graph, factors: Factors, dice: random.Random):
    """A random choice of factors to cut: far more than the search would choose."""
    chosen: frozenset = frozenset()
    for members in sorted(group_factors(graph, factors).items(), key=lambda _: dice.random()):
        if find_conflicting_leaf(graph, factors, chosen | set(members[1])) is None:
            chosen |= set(members[1])
    return chosen


def group_of(n: int, kind: str = "reference"):
    return [find_device(name) for name in devices(n, kind)]


def weights_of(graph: Graph, values):
    """Weights as files hold them."""
    return {v.node.name: as_file_bytes(values[v.node.name], v.dtype) for v in graph.weights}


def run_of(plan, values, feed=None):
    run = load(plan, weights_of(plan.graph, values))
    return run.run(feed or {v.node.name: values[v.node.name] for v in plan.graph.inputs})


def random_plan(seed: int, mode: str):
    """A random graph on several reference devices, cut wherever it can be or by layers, and bindings."""
    graph, dice = seeded_graph(seed), random.Random(seed)
    n = dice.choice([2, 3, 4])
    shares = [dice.choice([0, 1, 1, 2]) for _ in range(n - 1)] + [1]
    group = [find_device(name) for name in devices(n, "reference")]
    if mode == "layer":
        plan = plan_for_group(graph, group, split_mode="layer", tensor_split=shares)
    else:
        plan = plan_for_group(graph, group, tensor_split=shares, choose=lambda g, f: everything_that_fits(g, f, dice))
    return plan, plan_for_group(graph, group[:1]), bindings(graph, np.random.default_rng(seed))


def make_binder(graph: Graph, values, leaves):
    def bind(store: Store) -> None:
        for v in graph.weights:
            store.bind(v.node.name, as_file_bytes(values[v.node.name], v.dtype), v.spec, leaves[v.node.name])

    return bind


def cached_product(tokens: int) -> Graph:
    cache = state("cache", (16, 8))
    rows = ops.mul_mat(weight("k", (8, 4)), input("x", (tokens, 4)))
    new = ops.set_rows(cache, rows, input("ids", (tokens,), "i32"))
    return Graph({"y": ops.mul_mat(new, ops.silu(rows))}, {cache: new})


def equal_to_one(graph, group, seed, *, mode, place=(), reference=None, tolerance=1e-9):
    """Two runs of a graph on a group, the second by a plan over the same weights and states, equal those on one device
    that does everything; states too."""
    dice, options = random.Random(seed), {"place": place, "split_mode": mode}
    if mode == "cut":
        options = {"place": place, "choose": lambda g, f: everything_that_fits(g, f, dice)}
    many = plan_for_group(graph, group, **options)
    one = plan_for_group(graph, reference or group_of(1))
    values, results = bindings(graph, np.random.default_rng(seed)), []
    for each_plan in (one, many):
        run = load(each_plan, weights_of(graph, values))
        for v in graph.states:
            run.store.state(v.node.name)[...] = values[v.node.name]
        feed = {v.node.name: values[v.node.name] for v in graph.inputs}
        later = plan_for_group(graph, each_plan.group, like=each_plan, place=place if each_plan is many else ())
        outputs = [run.run(feed), Executor(later, run.store).run(feed)]
        results.append([*outputs, {name: np.array(run.store.state(name)) for name in run.store.states}])
    for want, got in zip(*results, strict=True):
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=tolerance, atol=tolerance)
    return many


def reductions(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    collectives = [n for n in plan.device_plans[0].graph.nodes if n.op.startswith(("all_", "reduce_scatter"))]
    return [(n.op, n.specs[0].shape) for n in collectives]
