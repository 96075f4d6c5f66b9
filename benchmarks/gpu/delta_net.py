"""Benchmark the gated delta net: decoding by batch size, prompts by mode and value slice, and the crossover point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import KernelLaunch
from hocket.backends.cupy.kernels.recurrent import gated_delta_net as kernels
from hocket.backends.cupy.kernels.recurrent.delta_tokens import launch_delta_rule_by_token
from hocket.backends.cupy.kernels.recurrent.states import bind_states_and_prepare_memory
from hocket.backends.fusion.operands import BoundInstruction, Operand

from .device_limits import DELTA_NET_LAYERS
from .harness import BenchmarkDevice, Case, DeviceMemory, ResultRow, compute_nmse

MAX_STATE_BYTES = 48 << 30
"""The largest number of bytes of all states."""


@dataclass(frozen=True)
class DeltaNetShape:
    """Key heads, value heads, their size, and whether each key channel has its own decay (KDA)."""

    key_heads: int
    heads: int
    size: int
    decays_per_channel: bool = False

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.heads}×{self.size}{' KDA' if self.decays_per_channel else ''}"

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.size**2

    def compute_token_bytes(self) -> int:
        """Return the bytes of the operands and the result of one token."""
        decays = self.size if self.decays_per_channel else 1
        return 4 * (2 * self.key_heads * self.size + self.heads * (2 * self.size + decays + 1))

    def compute_flops(self, tokens: int) -> int:
        """Return the FLOPs of the recurrence: two products with the state and one update."""
        return tokens * self.heads * 7 * self.size**2


@dataclass(frozen=True)
class DeltaNetProblem:
    """The operands of one gated delta net on the device; the results of its launches go to the state of the call."""

    shape: DeltaNetShape
    rule: kernels.Rule
    state: Operand
    memory: DeviceMemory

    def make_call(self, state: Operand) -> BoundInstruction:
        """Return the instruction that updates `state`."""
        r = self.rule
        src = (r.q, r.k, r.v, r.g, r.beta, state)
        attrs = {"heads": "tiled", "snapshots": 1, "pool": "none"}
        return BoundInstruction("gated_delta_net", src, (r.out, state), attrs)


def make_problem(bench: BenchmarkDevice, shape: DeltaNetShape, batch: int, tokens: int) -> DeltaNetProblem:
    """Create operands with numbers as in a model: normalised keys, most decays near one."""
    memory, rng = DeviceMemory(bench), bench.rng
    lead, row_count = (batch, tokens), min(batch * tokens, 4096)

    def unit(heads: int) -> Operand:
        x = rng.standard_normal((row_count, heads, shape.size), dtype="f4")
        return memory.make_repeated((*lead, heads, shape.size), x / np.linalg.norm(x, axis=-1, keepdims=True))

    decays = (shape.heads, shape.size if shape.decays_per_channel else 1)
    q, k = unit(shape.key_heads), unit(shape.key_heads)
    v = memory.make_repeated(
        (*lead, shape.heads, shape.size), rng.uniform(-1, 1, (row_count, shape.heads, shape.size)).astype("f4")
    )
    g = memory.make_repeated((*lead, *decays), -rng.exponential(0.05, (row_count, *decays)).astype("f4"))
    beta = memory.make_repeated((*lead, shape.heads), rng.uniform(0.1, 1, (row_count, shape.heads)).astype("f4"))
    out = memory.make_zeros((*lead, shape.heads, shape.size))
    state = memory.make_repeated((batch, shape.heads, shape.size, shape.size), rng.uniform(-1, 1, 1 << 16).astype("f4"))
    return DeltaNetProblem(shape, kernels.DeltaRuleOperands(q, k, v, g, beta, out, has_tiled_heads=True), state, memory)


def bind_steps(bench: BenchmarkDevice, p: DeltaNetProblem, state: Operand) -> list[KernelLaunch]:
    """Return the launch that computes one token after the other."""

    def bind(to: LaunchBuilder) -> None:
        carried = bind_states_and_prepare_memory(to, p.make_call(state), p.rule.sequences, p.rule.tokens)
        launch_delta_rule_by_token(to, p.rule, carried.begin_fields, carried, carried.stored_snapshots)

    return bench.bind_launches(p.memory, bind)


def bind_chunks(
    bench: BenchmarkDevice, p: DeltaNetProblem, state: Operand, exact: bool, values: int | None = None
) -> list[KernelLaunch]:
    """Return the two launches that compute chunks of tokens: the preparation and the scan.

    Args:
        bench: The device.
        p: The operands.
        state: The state that is updated.
        exact: Use pairs of bfloat16 products instead of single ones.
        values: The width of a value slice; None for hocket's choice.
    """

    def bind(to: LaunchBuilder) -> None:
        chunk = kernels.choose_chunk_variant(to, p.rule, exact)
        carried = bind_states_and_prepare_memory(to, p.make_call(state), p.rule.sequences, p.rule.tokens)
        kernels.launch_delta_rule_by_chunks(
            to,
            p.rule,
            carried,
            kernels.allocate_key_and_value_chunk_scratch(to, p.rule, p.rule.tokens, chunk),
            chunk,
            values,
        )

    return bench.bind_launches(p.memory, bind)


# ---------------------------------------------------------------------------------------------------------- cases


def make_decode_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    big, kda = (
        bench.select_size(DeltaNetShape(16, 32, 128), DeltaNetShape(1, 2, 64)),
        bench.select_size(DeltaNetShape(32, 32, 128, True), None),
    )
    for batch in bench.select_size((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2)):
        yield Case(f"{big}, batch {batch}", partial(_measure_decode, bench, big, batch))
    for batch in bench.select_size((1, 8, 64), ()):
        yield Case(f"{kda}, batch {batch}", partial(_measure_decode, bench, kda, batch))
    if not bench.tiny:
        yield Case("4/8×128, batch 1", partial(_measure_decode, bench, DeltaNetShape(4, 8, 128), 1))


def _measure_decode(bench: BenchmarkDevice, shape: DeltaNetShape, batch: int, tokens: int = 1) -> Iterator[ResultRow]:
    """Measure decode steps in graphs that read more states than any cache holds."""
    p, inside = make_problem(bench, shape, batch, tokens), bench.select_size(DELTA_NET_LAYERS, 3)
    nbytes = 2 * batch * shape.state_bytes + batch * tokens * shape.compute_token_bytes()
    needed_count = max(2, -(-bench.uncached_bytes // (batch * shape.state_bytes)))
    count = min(needed_count, max(2, MAX_STATE_BYTES // (batch * shape.state_bytes)))
    values = bench.rng.uniform(-1, 1, 1 << 16).astype(np.float32)
    states = [p.state, *(p.memory.make_repeated(p.state.shape, values) for _ in range(count - 1))]
    bound = [bind_steps(bench, p, state)[0] for state in states]
    graphs = -(-count // inside)
    sets = [[bound[(g * inside + i) % count] for i in range(inside)] for g in range(graphs)]
    row = bench.measure_launches(sets, inside).as_row(nbytes, copy=bench.copy_bandwidth)
    yield {"kernel": bound[0].kernel.name, **row, "GB of states": round(count * batch * shape.state_bytes / 1e9, 3)}


def make_prefill_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    big = bench.select_size(DeltaNetShape(16, 32, 128), DeltaNetShape(1, 2, 64))
    for tokens in bench.select_size([64 << i for i in range(10)], (65,)):
        yield Case(f"{big}, {tokens} tokens", partial(_measure_prefill, bench, big, 1, tokens))
    if bench.tiny:
        return
    for shape, batch, tokens in (
        (big, 4, 2048),
        (big, 4, 8192),
        (DeltaNetShape(4, 8, 128), 1, 8192),
        (DeltaNetShape(32, 32, 128, True), 1, 2048),
        (DeltaNetShape(32, 32, 128, True), 1, 8192),
    ):
        yield Case(f"{shape}, {batch} × {tokens} tokens", partial(_measure_prefill, bench, shape, batch, tokens))


def _measure_prefill(bench: BenchmarkDevice, shape: DeltaNetShape, batch: int, tokens: int) -> Iterator[ResultRow]:
    """Measure a prompt token by token, and in chunks for every mode and value slice.

    The error is relative to the result of the token-by-token kernel on the same device.
    """
    p, each = make_problem(bench, shape, batch, tokens), bench.select_size(max(1, 4096 // tokens), 1)
    nbytes = 2 * batch * shape.state_bytes + batch * tokens * shape.compute_token_bytes()
    numbers = {"nbytes": nbytes, "flops": batch * shape.compute_flops(tokens), "copy": bench.copy_bandwidth}
    exactly = None
    if tokens <= 8192:
        plain = bind_steps(bench, p, p.state)
        exactly = compute_output(bench, p, partial(bind_steps, bench, p))
        yield {"mode": "one by one", **bench.measure_launches([plain * each], each).as_row(**numbers)}
    for exact in (True, False):
        bind = partial(bind_chunks, bench, p, exact=exact)
        error: ResultRow = {} if exactly is None else {"NMSE": compute_nmse(compute_output(bench, p, bind), exactly)}
        ours = bind(p.state)[1].kernel.name
        for values in bench.select_size(kernels.SLICE_ROWS, kernels.SLICE_ROWS[-1:]):
            launches = bind(p.state, values=values)
            measured: ResultRow = {"mode": "exact" if exact else "fast", "slice": values}
            measured["ours"] = launches[1].kernel.name == ours
            measured |= bench.measure_launches([launches * each], each).as_row(**numbers)
            for name, launch in zip(("prepare µs", "scan µs"), launches, strict=True):
                measured[name] = bench.measure_launches([[launch] * each], each).seconds * 1e6
            yield measured | error


def compute_output(
    bench: BenchmarkDevice, p: DeltaNetProblem, bind: Callable[[Operand], list[KernelLaunch]]
) -> np.ndarray:
    """Return the output of a launch from a fresh state."""
    state = p.memory.make_repeated(p.state.shape, np.full(1, 0.25, np.float32))
    bench.driver.driver.record(bind(state), bench.on)()
    bench.driver.synchronise(bench.on)
    return np.array(p.memory.view_array(p.rule.out))


def make_crossover_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    """Make the cases that show from which prompt length on chunks are faster than single tokens."""
    for shape in bench.select_size(
        (DeltaNetShape(16, 32, 128), DeltaNetShape(4, 8, 128), DeltaNetShape(32, 32, 128, True)),
        (DeltaNetShape(1, 2, 64),),
    ):
        for tokens in bench.select_size((8, 16, 24, 32, 48, 64, 65, 96, 128, 192, 256), (16,)):
            yield Case(f"{shape}, {tokens} tokens", partial(_measure_crossover, bench, shape, tokens))


def _measure_crossover(bench: BenchmarkDevice, shape: DeltaNetShape, tokens: int) -> Iterator[ResultRow]:
    """Measure a prompt token by token and in chunks, exact and fast, and name the fastest."""
    p, repeat = make_problem(bench, shape, 1, tokens), bench.select_size(8, 1)
    variants = {
        "one by one": bind_steps(bench, p, p.state),
        "exact": bind_chunks(bench, p, p.state, True),
        "fast": bind_chunks(bench, p, p.state, False),
    }
    times = {f"{name} µs": bench.measure_launches([variants[name] * repeat], repeat).seconds * 1e6 for name in variants}
    yield {**times, "fastest": min(times, key=lambda name: times[name]).removesuffix(" µs")}
