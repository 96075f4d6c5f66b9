"""Calibration: measure the speeds of devices by small graphs, the probes, for the plans of models.

1. `BoundCalibrationProbes` plans and binds the graphs of `probe_graphs` for a device group.
2. A round runs each probe in turn and takes its seconds.
3. `compute_trimmed_mean` reduces the seconds of a probe over several rounds to one number.
4. `SpeedFit` computes the speeds from the plans and the seconds of all probes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from threading import Barrier

import numpy as np

from ...backends.base import Backend, Device
from ...graph import DType
from ..costs.hardware import FULL_UNPACK_ROWS
from ..costs.speeds import Speeds
from ..ir.execution_plan import Plan
from ..planning.planner import plan_for_group
from ..runtime.executor import Executor
from ..runtime.store import Store
from .fit_speeds import SpeedFit
from .probe_graphs import (
    LONG_CHAIN_WIDTH,
    PROMPT_MATMUL_COUNT,
    PROMPT_ROWS,
    SHARDED_HIDDEN_WIDTH,
    SHORT_CHAIN_WIDTH,
    build_collective_matmul_graph,
    build_decode_attention_graph,
    build_delta_rule_graph,
    build_launch_and_message_chain_graph,
    build_matmul_chain_graph,
    build_matvec_chain_graph,
    build_prefill_activation_graph,
    build_prefill_attention_graph,
)

PROBED_DTYPES = (
    *(DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K),
    *(DType.Q6_K, DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4, DType.F16, DType.BF16, DType.F32),
    *(DType.IQ1_S, DType.IQ1_M, DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S, DType.IQ3_XXS, DType.IQ3_S),
    *(DType.TQ1_0, DType.TQ2_0, DType.Q1_0, DType.Q2_0, DType.NVFP4),
)
"""The dtypes of weights that are measured."""
QUICK_DTYPES = (DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.F16, DType.F32)
"""The dtypes that ``hocket calibrate --quick`` measures. Other dtypes get the speeds of the slowest of them."""
SOLO_PROBED_DTYPES = (DType.Q4_0, DType.Q8_0, DType.F16)
"""The dtypes that are also measured on one device while all other devices wait."""
MEMORY_PROBE_BYTES, CACHE_PROBE_BYTES = 64 << 20, 16 << 20
"""Bytes of weights of each dtype in matrix-vector probes.

All probes of `MEMORY_PROBE_BYTES` together exceed the caches. A probe of `CACHE_PROBE_BYTES` fits into a cache."""
REREAD_SIZES_MIB = (64, 96, 128, 192, 256, 384, 512)
"""Sizes in MiB of weights that runs read repeatedly, as decode steps do; a large last-level cache holds a share."""
RUN_COUNTS_BY_PROBE = {
    **dict.fromkeys(("rows", "few", "attention", "recurrence"), (2, 1)),
    **dict.fromkeys(("cached", "again"), (8, 4)),
}
"""The runs of a probe in a row, and the number of last runs that are timed, by the first word of the probe name.

In models, similar ops precede these probes. Therefore untimed runs fill the caches first. All other probes run once:
caches then contain other data, and the preceding probe has woken the threads."""
PROBE_ROUNDS = 11
"""The number of timed rounds of ``hocket calibrate``."""
QUICK_PROBE_ROUNDS = 3
"""The number of timed rounds of ``hocket calibrate --quick``."""
WEIGHT_FILL_BYTE = 0x21
"""The value of each byte of quantised weights. Written memory has its own pages, and this byte yields no NaN."""
Group = Sequence[tuple[Backend, Device]]
"""The devices of a group with their backends."""
Clock = Callable[[Sequence[Executor]], float]
"""A function that runs all executors once at the same time and returns the seconds."""


def compute_trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean of measured times without the shortest and the longest quarter of them.

    A shared processor alternates between fast and slow phases. A probe of some milliseconds runs in one phase, so a
    median would be the time of one phase only. The run of a model lasts longer and includes both phases.
    """
    omitted = len(seconds) // 4
    return mean(sorted(seconds)[omitted : len(seconds) - omitted])


class ConcurrentTimer:
    """Times a run that several devices execute at the same time, each device on its own thread.

    The first device runs on the calling thread. The other threads stay alive between runs, as in a session. A new
    thread for each run might start on a processor that is busy with another thread.
    """

    def __init__(self, devices: int) -> None:
        self._other_threads = ThreadPoolExecutor(max(1, devices - 1))

    def __call__(self, runs: Sequence[Executor]) -> float:
        """Run all executors once at the same time, and return the seconds from the first start to the last end."""
        ready = Barrier(len(runs))

        def run(executor: Executor) -> tuple[float, float]:
            ready.wait()
            start = time.perf_counter()
            executor.replay()
            return start, time.perf_counter()

        others = [self._other_threads.submit(run, executor) for executor in runs[1:]]
        starts, ends = zip(run(runs[0]), *(other.result() for other in others), strict=True)
        return max(ends) - min(starts)


def measure_speeds(
    group: Group, clock: Clock | None = None, kinds: Sequence[DType] = PROBED_DTYPES, rounds: int = 1 + PROBE_ROUNDS
) -> Speeds:
    """Measure the speeds of devices while all of them work, and the speed of communication between the first two.

    Args:
        group: The devices and their backends.
        clock: The function that times runs; None for a `ConcurrentTimer`.
        kinds: The dtypes of weights to measure.
        rounds: Number of rounds. The first of several rounds is a warm-up and does not count.
    """
    probes = BoundCalibrationProbes(group, kinds, clock)
    return probes.fit_speeds([probes.measure_round_seconds() for _ in range(rounds)][rounds > 1 :])


class BoundCalibrationProbes:
    """The calibration probes of a device group: small graphs, planned and bound to memory, that are ready to be timed.

    A round runs all probes in turn. Therefore a temporary disturbance affects all of them, and the weights of a probe
    leave the caches before the next round.
    """

    def __init__(self, group: Group, kinds: Sequence[DType] = PROBED_DTYPES, clock: Clock | None = None) -> None:
        """Plan and bind all probes.

        Args:
            group: The devices and their backends. All of them run most probes; the first two run collectives.
            kinds: The dtypes of weights to measure.
            clock: The function that times runs; None for a `ConcurrentTimer`.
        """
        self.dtypes, self.clock, self.device_count = kinds, clock or ConcurrentTimer(len(group)), len(group)
        graphs = {
            "launches": build_launch_and_message_chain_graph(SHORT_CHAIN_WIDTH),
            "values": build_prefill_activation_graph(),
            "recurrence": build_delta_rule_graph(),
            "attention": build_prefill_attention_graph(),
        }
        graphs["states"] = build_decode_attention_graph(MEMORY_PROBE_BYTES)
        for kind in kinds:
            graphs[f"rows {kind}"] = build_matmul_chain_graph(kind, PROMPT_MATMUL_COUNT, PROMPT_ROWS)
            graphs[f"few {kind}"] = build_matmul_chain_graph(kind, PROMPT_MATMUL_COUNT, FULL_UNPACK_ROWS)
            graphs[f"cached {kind}"] = build_matvec_chain_graph(kind, CACHE_PROBE_BYTES)
            graphs[f"read {kind}"] = build_matvec_chain_graph(kind, MEMORY_PROBE_BYTES)
        self.executors = {
            name: [load_probe_plan_with_fill_data(plan_for_group(graph, [one])) for one in group]
            for name, graph in graphs.items()
        }
        sizes = {
            name: sum(v.spec.nbytes for v in graphs[name].weights) for name in _list_matvec_probe_names_by_size(kinds)
        }
        self.reread_probes = {
            f"again {size}": names
            for size in REREAD_SIZES_MIB
            if (names := _select_probes_up_to_bytes(size << 20, sizes))
        }
        solo = [kind for kind in kinds if kind in SOLO_PROBED_DTYPES] or [*kinds[:1]]
        self.solo_probes = (
            [f"{work} {kind}" for work in ("read", "rows") for kind in solo] if self.device_count > 1 else []
        )
        if self.device_count > 1:
            place = tuple((rf"{prefix}\..*", str(device)) for prefix, (_, device) in zip("ab", group, strict=False))
            for length in (SHORT_CHAIN_WIDTH, LONG_CHAIN_WIDTH):
                self.executors[f"there {length}"] = [
                    load_probe_plan_with_fill_data(
                        plan_for_group(build_launch_and_message_chain_graph(length), group[:2], place=place)
                    )
                ]
                self.executors[f"here {length}"] = [
                    load_probe_plan_with_fill_data(
                        plan_for_group(build_launch_and_message_chain_graph(length), group[:1])
                    )
                ]
            self.executors["sums"] = [
                load_probe_plan_with_fill_data(
                    plan_for_group(build_collective_matmul_graph(SHARDED_HIDDEN_WIDTH), group[:2], split_mode="tensor")
                )
            ]
            self.executors["summands"] = [
                load_probe_plan_with_fill_data(
                    plan_for_group(build_collective_matmul_graph(SHARDED_HIDDEN_WIDTH // 2), [one])
                )
                for one in group[:2]
            ]

    def measure_round_seconds(self) -> dict[str, float]:
        """Run each probe once, and return the measured seconds by probe name.

        A name ``alone ...`` is a probe that runs on the first device only. A name ``again ...`` is a group of probes
        that run one after another.
        """

        def time_last(name: str, *probes: Sequence[Executor]) -> float:
            run_count, timed_count = RUN_COUNTS_BY_PROBE.get(name.partition(" ")[0], (1, 1))
            return mean([sum(self.clock(runs) for runs in probes) for _ in range(run_count)][-timed_count:])

        return (
            {name: time_last(name, runs) for name, runs in self.executors.items()}
            | {f"alone {name}": time_last(name, self.executors[name][:1]) for name in self.solo_probes}
            | {
                name: time_last(name, *(self.executors[each] for each in names))
                for name, names in self.reread_probes.items()
            }
        )

    def fit_speeds(self, rounds: Sequence[Mapping[str, float]]) -> Speeds:
        """Compute the speeds of the devices from several rounds of measurements.

        Args:
            rounds: The seconds of each probe by name, one mapping for each round. The trimmed mean of a probe is used.
        """
        seconds = {name: compute_trimmed_mean([each[name] for each in rounds]) for name in rounds[0]}
        plans = {name: runs[0].plan for name, runs in self.executors.items()}
        return SpeedFit(
            plans, seconds, [*map(str, self.dtypes)], self.device_count, self.reread_probes
        ).compute_speeds()


def load_probe_plan_with_fill_data(plan: Plan) -> Executor:
    """Load the plan of a probe with made-up data, so that it can be timed.

    Quantised weights have `WEIGHT_FILL_BYTE` in each byte. Other weights are ones, and inputs are zeros.
    """
    store = Store(plan.group)
    for v in plan.graph.weights:
        dtype = v.dtype
        row = v.shape[-1] // dtype.block * dtype.block_bytes
        data = (
            np.full((*v.shape[:-1], row), WEIGHT_FILL_BYTE, np.uint8)
            if dtype.is_quantised
            else np.ones(v.shape, dtype.storage)
        )
        store.bind(v.node.name, data, v.spec, plan.leaves[v.node.name])
    executor = Executor(plan, store)
    executor.bind({v.node.name: np.zeros(v.shape, v.dtype.storage) for v in plan.graph.inputs})
    return executor


def _list_matvec_probe_names_by_size(kinds: Sequence[DType]) -> list[str]:
    """List the names of the matrix-vector probes (small timed graphs), largest first.

    Probes of one size are in the reverse order of `kinds`: the dtypes with the longest read time come first.
    """
    return [f"{work} {kind}" for work in ("read", "cached") for kind in reversed(kinds)]


def _select_probes_up_to_bytes(nbytes: int, sizes: Mapping[str, int]) -> list[str]:
    """Select probes that together read from 15/16 of `nbytes` to `nbytes` bytes of weights.

    Return an empty list if the selected probes would read less.

    Args:
        nbytes: The largest number of bytes to read.
        sizes: Bytes of weights of each probe by name. Each probe that still fits is taken, in this order.
    """
    names, rest_bytes = [], nbytes
    for name, size in sizes.items():
        if size <= rest_bytes:
            names.append(name)
            rest_bytes -= size
    return names if rest_bytes < nbytes / 16 else []
