"""Measuring the speeds of devices with small graphs, as the plans of models use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import mean, median
from threading import Barrier

import numpy as np

from ...backends.base import Backend, Device
from ...graph import DType, Graph, Value, constant, input, state, weight
from ...ops import add, attention, causal_mask, gated_delta_net, mul_mat, reshape, rms_norm, swiglu
from ..machines.hardware import MANY, Counts, Work
from ..machines.speeds import Speeds
from ..plan import Plan
from ..planner import plan_for
from ..running.executor import Executor
from ..running.store import Store

KINDS = (
    *(DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K),
    *(DType.Q6_K, DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4, DType.F16, DType.BF16, DType.F32),
)
"""Dtypes of weights that are measured."""
ALONE = (DType.Q4_0, DType.Q8_0, DType.F16)
"""Those with which one device is measured while the others wait, too."""
WIDTH, READ, ROWS, PRODUCTS = 2048, 64 << 20, 512, 2
"""Weights are square; so many bytes of each dtype are read with a vector, in all more than caches hold, and so many
weights with so many rows, as of a prompt."""
SHORT, LONG, STEPS, LAYERS = 64, 1 << 18, 384, 3
"""Numbers of a value whose step is all launch, and of one whose message is all bandwidth; steps of a chain;
layers of what is no product."""
SUMMED, HIDDEN = 256, 512
"""Numbers of a value that devices sum, and those between two products, which they deal out."""
WARM = ("read", "rows", "few", "attention", "recurrence")
"""Runs that in models follow others like them: threads are awake, and a large last cache may hold what the token before
has read."""
ROUNDS = 11
BYTE = 0x21
"""Of all weights: memory that is written has pages of its own, and no number is NaN."""
Group = Sequence[tuple[Backend, Device]]
Clock = Callable[[Sequence[Executor]], float]


def middle(seconds: Sequence[float]) -> float:
    """The mean of times without the least and the greatest quarter, where a run was disturbed.

    A processor that others use too is now fast and now slow, and a probe of some milliseconds meets one or the other: a
    median is one of the two, while a run of a model, which lasts longer, meets both.
    """
    aside = len(seconds) // 4
    return mean(sorted(seconds)[aside : len(seconds) - aside])


class Watch:
    """Runs side by side, the first on this thread and the others on threads that stay, as the devices of a session do:
    a new thread may begin on the processor of one that computes."""

    def __init__(self, devices: int) -> None:
        self._others = ThreadPoolExecutor(max(1, devices - 1))

    def __call__(self, runs: Sequence[Executor]) -> float:
        """Seconds in which all have run once."""
        ready = Barrier(len(runs))

        def run(one: Executor) -> tuple[float, float]:
            ready.wait()
            start = time.perf_counter()
            one.replay()
            return start, time.perf_counter()

        others = [self._others.submit(run, one) for one in runs[1:]]
        starts, ends = zip(run(runs[0]), *(other.result() for other in others), strict=True)
        return max(ends) - min(starts)


def speeds_of(
    group: Group, clock: Clock | None = None, kinds: Sequence[DType] = KINDS, rounds: int = 1 + ROUNDS
) -> Speeds:
    """The speeds of devices, all at work at once; of sums and messages of the first two if there are two."""
    probes = Probes(group, kinds, clock)
    return probes.speeds([probes.seconds() for _ in range(rounds)][rounds > 1 :])


class Probes:
    """Runs whose seconds say how fast devices are.

    A round runs each of them once, one after the other.  So what disturbs for a while meets all of them, and the
    weights of one have left the caches before it runs again.
    """

    def __init__(self, group: Group, kinds: Sequence[DType] = KINDS, clock: Clock | None = None) -> None:
        self.kinds, self.clock = kinds, clock or Watch(len(group))
        graphs = {"launches": chain(SHORT), "values": handed_on(), "attention": attended(), "recurrence": recurrent()}
        for kind in kinds:
            graphs[f"read {kind}"] = products(kind, READ // weight("w", (WIDTH, WIDTH), kind).spec.nbytes, 1)
            graphs[f"rows {kind}"] = products(kind, PRODUCTS, ROWS)
            graphs[f"few {kind}"] = products(kind, PRODUCTS, MANY)
        self.runs = {name: [bound(plan_for(graph, [one])) for one in group] for name, graph in graphs.items()}
        self.is_linked = len(group) > 1
        of = [kind for kind in kinds if kind in ALONE] or [*kinds[:1]]
        self.shared = [f"{what} {kind}" for what in ("read", "rows") for kind in of] if self.is_linked else []
        if self.is_linked:
            place = tuple((rf"{letter}\..*", str(device)) for letter, (_, device) in zip("ab", group, strict=False))
            for length in (SHORT, LONG):
                self.runs[f"there {length}"] = [bound(plan_for(chain(length), group[:2], place=place))]
                self.runs[f"here {length}"] = [bound(plan_for(chain(length), group[:1]))]
            self.runs["sums"] = [bound(plan_for(summed(HIDDEN), group[:2], split_mode="tensor"))]
            self.runs["summands"] = [bound(plan_for(summed(HIDDEN // 2), [one])) for one in group[:2]]

    def seconds(self) -> dict[str, float]:
        """One round: the seconds of each run; of what follows others like it in models those of a second run."""

        def last(name: str, runs: Sequence[Executor]) -> float:
            return [self.clock(runs) for _ in range(2 if name.startswith(WARM) else 1)][-1]

        return {name: last(name, runs) for name, runs in self.runs.items()} | {
            f"alone {name}": last(name, self.runs[name][:1]) for name in self.shared
        }

    def speeds(self, rounds: Sequence[Mapping[str, float]]) -> Speeds:
        """What rounds say in their middle."""
        seconds = {name: middle([each[name] for each in rounds]) for name in rounds[0]}
        plans = {name: runs[0].plan for name, runs in self.runs.items()}
        launch = seconds["launches"] / sum(plans["launches"].lanes[0].launches())
        beyond = {name: _beyond(seconds[name], plan, launch) for name, plan in plans.items()}
        work = {name: _work(plan) for name, plan in plans.items()}
        a_plain, a_value = _each(
            [(work[name].flops, work[name].nbytes, beyond[name]) for name in ("attention", "values")]
        )

        def each(name: str, count: float, others: float) -> float:
            """Seconds of one of so many that a run is mostly about; `others` are those of all else, which are few."""
            return max(beyond[name] - others, beyond[name] / 10) / count

        def each_flop(name: str) -> float:
            """A second run finds in caches what it reads."""
            return each(name, work[name].flops, work[name].nbytes * a_value)

        def each_of_many(kind: str) -> tuple[float, float]:
            """Seconds of a FLOP and of a byte of weights where these are multiplied with many vectors."""
            names = (f"rows {kind}", f"few {kind}")
            return _each([(work[name].flops, work[name].kept, beyond[name]) for name in names])

        def each_byte(kind: str) -> float:
            read = work[f"read {kind}"]
            return each(f"read {kind}", read.kept, max(read.flops * a_flop[kind], (read.nbytes - read.kept) * a_value))

        kinds = [*map(str, self.kinds)]
        of_many = {kind: each_of_many(kind) for kind in kinds}
        a_flop = {kind: flop for kind, (flop, _) in of_many.items()}
        speeds = Speeds(
            {kind: 1 / each_byte(kind) for kind in kinds},
            {kind: 1 / a_flop[kind] for kind in kinds},
            launch,
            plain_flops=1 / a_plain,
            recurrent_flops=1 / each_flop("recurrence"),
            value_bandwidth=1 / a_value,
            unpacking={kind: 1 / byte for kind, (_, byte) in of_many.items()},
        )
        if not self.is_linked:
            return speeds
        short, long, latency = (
            max(0.0, seconds[with_it] - seconds[without]) / max(1, plans[with_it].cost.meetings)
            for with_it, without in (*((f"there {n}", f"here {n}") for n in (SHORT, LONG)), ("sums", "summands"))
        )
        moved = 4 * (LONG - SHORT)
        alone = {name: beyond[name] / _beyond(seconds[f"alone {name}"], plans[name], launch) for name in self.shared}
        faster, wider = (
            max(1.0, median(times for name, times in alone.items() if name.startswith(what)))
            for what in ("rows", "read")
        )
        link = moved / max(long - short, moved / 1e13)
        return replace(speeds, link_bandwidth=link, link_latency=latency, alone_flops=faster, alone_bandwidth=wider)


def chain(length: int) -> Graph:
    """Steps that follow each other, half of them sums of a row, half element by element."""
    x: Value = input("x", (1, length))
    for n in range(STEPS):
        name = f"{'ab'[n % 2]}.{n}"
        x = rms_norm(x, eps=1e-6, name=name) if n % 4 < 2 else add(x, x, name=name)
    return Graph({"y": x})


def handed_on() -> Graph:
    """What layers do with the values of a prompt between products."""
    x: Value = input("x", (ROWS, WIDTH))
    for _ in range(LAYERS):
        x = add(x, swiglu(rms_norm(x, eps=1e-6), x))
    return Graph({"y": x})


def products(kind: DType, number: int, rows: int) -> Graph:
    """Products of `rows` vectors with so many weights."""
    x: Value = input("x", (rows, WIDTH))
    for n in range(number):
        x = mul_mat(weight(f"w{n}", (WIDTH, WIDTH), kind), x)
    return Graph({"y": x})


def summed(hidden: int) -> Graph:
    """Pairs of products that two devices deal out, and whose results they sum, as the layers of a model: plans have far
    more sums than messages, and these take longer, since whoever waits for one goes to sleep."""
    x: Value = input("x", (1, SUMMED))
    up, down = weight("up", (hidden, SUMMED), DType.F32), weight("down", (SUMMED, hidden), DType.F32)
    for _ in range(STEPS // 2):
        x = mul_mat(down, mul_mat(up, x))
    return Graph({"y": x})


def attended() -> Graph:
    """The second half of a prompt, which sees the first: arithmetic without weights.  Keys and values are states, since
    a backend keeps those in the dtype that they have in models."""
    q = input("q", (ROWS, 8, 64))
    k, v = (reshape(state(name, (2 * ROWS, 2 * 64), "f16"), shape=(2 * ROWS, 2, 64)) for name in "kv")
    places = constant("places", np.arange(ROWS, 2 * ROWS, dtype=np.int32))
    mask = causal_mask(places, cells=2 * ROWS)
    return Graph({f"y{n}": attention(q, k, v, mask, scale=0.125 + n / 8) for n in range(PRODUCTS)})


def recurrent() -> Graph:
    """A prompt whose tokens follow each other through a state."""
    q, k, v = (input(name, (ROWS, 8, 128)) for name in "qkv")
    g, beta = input("g", (ROWS, 8, 1)), input("beta", (ROWS, 8))
    y, _ = gated_delta_net(q, k, v, g, beta, input("state", (8, 128, 128)))
    return Graph({"y": y})


def bound(plan: Plan) -> Executor:
    """A plan with weights of equal bytes, and inputs of zeros."""
    store = Store(plan.group)
    for v in plan.graph.weights:
        dtype = v.dtype
        row = v.shape[-1] // dtype.block * dtype.block_bytes
        data = np.full((*v.shape[:-1], row), BYTE, np.uint8) if dtype.is_quantised else np.ones(v.shape, dtype.storage)
        store.bind(v.node.name, data, v.spec, plan.leaves[v.node.name])
    executor = Executor(plan, store)
    executor.bind({v.node.name: np.zeros(v.shape, v.dtype.storage) for v in plan.graph.inputs})
    return executor


def _work(plan: Plan) -> Work:
    """What the first device does in all."""
    counts = Counts()
    each = [counts.of(node) for node in plan.graph.nodes if not node.is_leaf]
    return Work(sum(w.flops for w in each), sum(w.nbytes for w in each), sum(w.kept for w in each))


def _each(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of one of a first thing and of one of a second, where so many of them take so many seconds together; the
    first equation is mostly about the first thing, the other about the second, whose tenth each takes at least."""
    (a, b, s), (c, d, t) = equations
    first, second = (s * d - t * b) / (a * d - c * b), (t * a - s * c) / (a * d - c * b)
    return max(first, s / a / 10), max(second, t / d / 10)


def _beyond(seconds: float, plan: Plan, launch: float) -> float:
    """The seconds that are no launches; at least a tenth."""
    return max(seconds - launch * sum(plan.lanes[0].launches()), seconds / 10)
