"""Measuring the speeds of devices with small graphs, as the plans of models use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..backends.base import Backend, Device
from ..graph import DType, Graph, Value, constant, input, weight
from ..ops import add, attention, causal_mask, mul_mat, rms_norm
from .plan import Plan
from .planner import plan_for
from .running.executor import Executor
from .running.store import Store
from .speeds import Speeds

KINDS = (DType.Q4_0, DType.Q4_1, DType.Q4_K, DType.Q6_K, DType.Q8_0, DType.F16, DType.F32)
"""Dtypes of weights that are measured."""
WIDTH, READ, ROWS, PRODUCTS = 2048, 64 << 20, 256, 2
"""Weights are square; so many bytes of them, more than caches hold, are read with a vector, and so many of them with so
many rows, as of a prompt."""
SHORT, LONG, STEPS = 64, 1 << 18, 384
"""Numbers of a value whose step is all launch, and of one whose message is all bandwidth; steps of a chain."""
REPEATS = 11
Group = Sequence[tuple[Backend, Device]]
Clock = Callable[[Sequence[Executor]], float]


def seconds_of(runs: Sequence[Executor]) -> float:
    """Seconds in which all have run, side by side, at best: what disturbs a run makes it slower."""
    seconds = []
    with ThreadPoolExecutor(len(runs)) as pool:
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            list(pool.map(Executor.replay, runs))
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def speeds_of(group: Group, clock: Clock = seconds_of, kinds: Sequence[DType] = KINDS) -> Speeds:
    """The speeds of devices, all at work at once; of the link between the first two if there are two."""
    steps = [one_by_one(chain(SHORT), group, at) for at in range(len(group))]
    launch = clock(steps) / sum(steps[0].plan.lanes[0].launches())
    bandwidth, flops = {}, {}
    for kind in kinds:
        spec = weight("w", (WIDTH, WIDTH), kind).spec
        read = [one_by_one(products(kind, READ // spec.nbytes, 1), group, at) for at in range(len(group))]
        rows = [one_by_one(products(kind, PRODUCTS, ROWS), group, at) for at in range(len(group))]
        bandwidth[str(kind)] = _nbytes(read[0].plan) / _beyond(clock(read), read[0].plan, launch)
        flops[str(kind)] = rows[0].plan.flops() / _beyond(clock(rows), rows[0].plan, launch)
    seen = [one_by_one(attended(), group, at) for at in range(len(group))]
    plain = seen[0].plan.flops() / _beyond(clock(seen), seen[0].plan, launch)
    if len(group) == 1:
        return Speeds(bandwidth, flops, launch, plain_flops=plain)
    latency, each = (message(group[:2], length, clock) for length in (SHORT, LONG))
    moved = 4 * (LONG - SHORT)
    return Speeds(bandwidth, flops, launch, moved / max(each - latency, moved / 1e13), latency, plain)


def chain(length: int) -> Graph:
    """Steps that follow each other, half of them sums of a row, half element by element."""
    x: Value = input("x", (1, length))
    for n in range(STEPS):
        name = f"{'ab'[n % 2]}.{n}"
        x = rms_norm(x, eps=1e-6, name=name) if n % 4 < 2 else add(x, x, name=name)
    return Graph({"y": x})


def products(kind: DType, number: int, rows: int) -> Graph:
    """Products of `rows` vectors with so many weights."""
    x: Value = input("x", (rows, WIDTH))
    for n in range(number):
        x = mul_mat(weight(f"w{n}", (WIDTH, WIDTH), kind), x)
    return Graph({"y": x})


def attended() -> Graph:
    """The second half of a prompt, which sees the first: arithmetic without weights."""
    q, k, v = input("q", (ROWS, 8, 64)), input("k", (2 * ROWS, 2, 64), "f16"), input("v", (2 * ROWS, 2, 64), "f16")
    places = constant("places", np.arange(ROWS, 2 * ROWS, dtype=np.int32))
    mask = causal_mask(places, cells=2 * ROWS)
    return Graph({f"y{n}": attention(q, k, v, mask, scale=0.125 + n / 8) for n in range(PRODUCTS)})


def message(group: Group, length: int, clock: Clock) -> float:
    """Seconds in which a value of so many numbers gets from one device to the other, beside the steps themselves."""
    graph, (a, b) = chain(length), (str(device) for _, device in group)
    there = bound(plan_for(graph, group, place=((r"a\..*", a), (r"b\..*", b))))
    return max(0.0, clock([there]) - clock([one_by_one(graph, group, 0)])) / max(1, there.plan.cost.meetings)


def one_by_one(graph: Graph, group: Group, at: int) -> Executor:
    """The graph on one device of the group."""
    return bound(plan_for(graph, [group[at]]))


def bound(plan: Plan) -> Executor:
    """A plan with weights of zeros, and inputs of zeros."""
    store = Store(plan.group)
    for v in plan.graph.weights:
        dtype = v.dtype
        row = v.shape[-1] // dtype.block * dtype.block_bytes
        data = np.zeros((*v.shape[:-1], row), np.uint8) if dtype.is_quantised else np.zeros(v.shape, dtype.storage)
        store.bind(v.node.name, data, v.spec, plan.leaves[v.node.name])
    executor = Executor(plan, store)
    executor.bind({v.node.name: np.zeros(v.shape, v.dtype.storage) for v in plan.graph.inputs})
    return executor


def _nbytes(plan: Plan) -> float:
    return sum(plan.prices[0].of(at).nbytes for at in range(len(plan.lanes[0].program.instructions)))


def _beyond(seconds: float, plan: Plan, launch: float) -> float:
    """The seconds that are no launches; at least a tenth."""
    return max(seconds - launch * sum(plan.lanes[0].launches()), seconds / 10)
