"""Measuring the speeds of devices with small graphs, as the plans of models use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from threading import Barrier

import numpy as np

from ...backends.base import Backend, Device
from ...graph import DType
from ..machines.hardware import MANY
from ..machines.speeds import Speeds
from ..plan import Plan
from ..planner import plan_for_group
from ..running.executor import Executor
from ..running.store import Store
from .probe_graphs import (
    HIDDEN,
    LONG,
    PRODUCTS,
    ROWS,
    SHORT,
    build_activation_graph,
    build_decode_attention_graph,
    build_launch_chain_graph,
    build_matmul_graph,
    build_matvec_graph,
    build_prefill_attention_graph,
    build_recurrence_graph,
    build_sharded_matmul_graph,
)
from .reckoning import Reckoning

PROBED_DTYPES = (
    *(DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K),
    *(DType.Q6_K, DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4, DType.F16, DType.BF16, DType.F32),
)
"""Dtypes of weights that are measured."""
QUICK_DTYPES = (DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.F16, DType.F32)
"""Dtypes that ``hocket calibrate --quick`` measures; the others count as the slowest of them."""
ALONE = (DType.Q4_0, DType.Q8_0, DType.F16)
"""Those with which one device is measured while the others wait, too."""
READ, CACHED = 64 << 20, 16 << 20
"""Bytes of weights of each dtype that are multiplied with a vector: in all more than caches hold, and fewer."""
AGAIN = (64, 96, 128, 192, 256, 384, 512)
"""MiB that are read again and again, as by tokens: a large last cache holds a share of so many."""
TURNS = {
    **dict.fromkeys(("rows", "few", "attention", "recurrence"), (2, 1)),
    **dict.fromkeys(("cached", "again"), (8, 4)),
}
"""Runs in a row, and how many of the last count, where in models others like them go before: caches hold what they will
hold.  Others run once: they are to find caches full of something else, and threads awake by what ran before."""
ROUNDS = 11
QUICK_ROUNDS = 3
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
    group: Group, clock: Clock | None = None, kinds: Sequence[DType] = PROBED_DTYPES, rounds: int = 1 + ROUNDS
) -> Speeds:
    """The speeds of devices, all at work at once; of sums and messages of the first two if there are two."""
    probes = Probes(group, kinds, clock)
    return probes.speeds([probes.seconds() for _ in range(rounds)][rounds > 1 :])


class Probes:
    """Runs whose seconds say how fast devices are.

    A round runs each of them once, one after the other.  So what disturbs for a while meets all of them, and the
    weights of one have left the caches before it runs again.
    """

    def __init__(self, group: Group, kinds: Sequence[DType] = PROBED_DTYPES, clock: Clock | None = None) -> None:
        self.kinds, self.clock, self.devices = kinds, clock or Watch(len(group)), len(group)
        graphs = {
            "launches": build_launch_chain_graph(SHORT),
            "values": build_activation_graph(),
            "recurrence": build_recurrence_graph(),
            "attention": build_prefill_attention_graph(),
        }
        graphs["states"] = build_decode_attention_graph(READ)
        for kind in kinds:
            graphs[f"rows {kind}"] = build_matmul_graph(kind, PRODUCTS, ROWS)
            graphs[f"few {kind}"] = build_matmul_graph(kind, PRODUCTS, MANY)
            graphs[f"cached {kind}"] = build_matvec_graph(kind, CACHED)
            graphs[f"read {kind}"] = build_matvec_graph(kind, READ)
        self.runs = {name: [bound(plan_for_group(graph, [one])) for one in group] for name, graph in graphs.items()}
        sizes = {name: sum(v.spec.nbytes for v in graphs[name].weights) for name in _read_again(kinds)}
        self.again = {f"again {size}": names for size in AGAIN if (names := _up_to(size << 20, sizes))}
        of = [kind for kind in kinds if kind in ALONE] or [*kinds[:1]]
        self.shared = [f"{what} {kind}" for what in ("read", "rows") for kind in of] if self.devices > 1 else []
        if self.devices > 1:
            place = tuple((rf"{letter}\..*", str(device)) for letter, (_, device) in zip("ab", group, strict=False))
            for length in (SHORT, LONG):
                self.runs[f"there {length}"] = [
                    bound(plan_for_group(build_launch_chain_graph(length), group[:2], place=place))
                ]
                self.runs[f"here {length}"] = [bound(plan_for_group(build_launch_chain_graph(length), group[:1]))]
            self.runs["sums"] = [
                bound(plan_for_group(build_sharded_matmul_graph(HIDDEN), group[:2], split_mode="tensor"))
            ]
            self.runs["summands"] = [
                bound(plan_for_group(build_sharded_matmul_graph(HIDDEN // 2), [one])) for one in group[:2]
            ]

    def seconds(self) -> dict[str, float]:
        """One round: the seconds of each run, or of several one after the other, where others like it go before."""

        def last(name: str, *several: Sequence[Executor]) -> float:
            turns, counted = TURNS.get(name.partition(" ")[0], (1, 1))
            return mean([sum(self.clock(runs) for runs in several) for _ in range(turns)][-counted:])

        return (
            {name: last(name, runs) for name, runs in self.runs.items()}
            | {f"alone {name}": last(name, self.runs[name][:1]) for name in self.shared}
            | {name: last(name, *(self.runs[each] for each in names)) for name, names in self.again.items()}
        )

    def speeds(self, rounds: Sequence[Mapping[str, float]]) -> Speeds:
        """What rounds say in their middle."""
        seconds = {name: middle([each[name] for each in rounds]) for name in rounds[0]}
        plans = {name: runs[0].plan for name, runs in self.runs.items()}
        return Reckoning(plans, seconds, [*map(str, self.kinds)], self.devices, self.again).speeds()


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


def _read_again(kinds: Sequence[DType]) -> list[str]:
    """Products with a vector, the larger ones first; of each size those whose weights take the longest to read."""
    return [f"{what} {kind}" for what in ("read", "cached") for kind in reversed(kinds)]


def _up_to(nbytes: int, sizes: Mapping[str, int]) -> list[str]:
    """Runs that read almost so many bytes, or none if all together do not."""
    names, left = [], nbytes
    for name, size in sizes.items():
        if size <= left:
            names.append(name)
            left -= size
    return names if left < nbytes / 16 else []
