"""Benchmark the gated delta net: decoding by batch size, prompts by mode and value slice, and the crossover point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hocket.backends.cupy.binding.launches import Launches
from hocket.backends.cupy.device.driver import Launch
from hocket.backends.cupy.kernels.recurrent import gated_delta_net as kernels
from hocket.backends.cupy.kernels.recurrent.states import carry
from hocket.backends.operands import Bound, Operand

from .bench import Bench, Case, Memory, Row, normalised_error
from .device import IN_A_GRAPH

ROOM = 48 << 30
"""The largest number of bytes of all states."""


@dataclass(frozen=True)
class Shape:
    """Key heads, value heads, their size, and whether each key channel has its own decay (KDA)."""

    key_heads: int
    heads: int
    size: int
    channels: bool = False

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.heads}×{self.size}{' KDA' if self.channels else ''}"

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.size**2

    def token_bytes(self) -> int:
        """Return the bytes of the operands and the result of one token."""
        decays = self.size if self.channels else 1
        return 4 * (2 * self.key_heads * self.size + self.heads * (2 * self.size + decays + 1))

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of the recurrence: two products with the state and one update."""
        return tokens * self.heads * 7 * self.size**2


@dataclass(frozen=True)
class Problem:
    """The operands of one gated delta net on the device; the results of its launches go to the state of the call."""

    shape: Shape
    rule: kernels.Rule
    state: Operand
    memory: Memory

    def call(self, state: Operand) -> Bound:
        """Return the instruction that updates `state`."""
        r = self.rule
        src = (r.q, r.k, r.v, r.g, r.beta, state)
        attrs = {"heads": "tiled", "snapshots": 1, "pool": "none"}
        return Bound("gated_delta_net", src, (r.out, state), attrs)


def problem(bench: Bench, shape: Shape, batch: int, tokens: int) -> Problem:
    """Create operands with numbers as in a model: normalised keys, most decays near one."""
    memory, rng = Memory(bench), bench.random
    lead, most = (batch, tokens), min(batch * tokens, 4096)

    def unit(heads: int) -> Operand:
        x = rng.standard_normal((most, heads, shape.size), dtype="f4")
        return memory.filled((*lead, heads, shape.size), x / np.linalg.norm(x, axis=-1, keepdims=True))

    decays = (shape.heads, shape.size if shape.channels else 1)
    q, k = unit(shape.key_heads), unit(shape.key_heads)
    v = memory.filled(
        (*lead, shape.heads, shape.size), rng.uniform(-1, 1, (most, shape.heads, shape.size)).astype("f4")
    )
    g = memory.filled((*lead, *decays), -rng.exponential(0.05, (most, *decays)).astype("f4"))
    beta = memory.filled((*lead, shape.heads), rng.uniform(0.1, 1, (most, shape.heads)).astype("f4"))
    out = memory.empty((*lead, shape.heads, shape.size))
    state = memory.filled((batch, shape.heads, shape.size, shape.size), rng.uniform(-1, 1, 1 << 16).astype("f4"))
    return Problem(shape, kernels.Rule(q, k, v, g, beta, out, tiled=True), state, memory)


def steps(bench: Bench, p: Problem, state: Operand) -> list[Launch]:
    """Return the launch that computes one token after the other."""

    def bind(to: Launches) -> None:
        carried = carry(to, p.call(state), p.rule.sequences, p.rule.tokens)
        kernels.launch_steps(to, p.rule, carried.begin, carried, carried.stored)

    return bench.bound(p.memory, bind)


def chunks(bench: Bench, p: Problem, state: Operand, exact: bool, values: int | None = None) -> list[Launch]:
    """Return the two launches that compute chunks of tokens: the preparation and the scan.

    Args:
        bench: The device.
        p: The operands.
        state: The state that is updated.
        exact: Use pairs of bfloat16 products instead of single ones.
        values: The width of a value slice; None for hocket's choice.
    """
    chunk = kernels.Chunk(p.shape.size, p.shape.channels, exact)

    def bind(to: Launches) -> None:
        carried = carry(to, p.call(state), p.rule.sequences, p.rule.tokens)
        kernels.launch_chunks(
            to, p.rule, carried, kernels.chunk_memory(to, p.rule, p.rule.tokens, chunk), chunk, values
        )

    return bench.bound(p.memory, bind)


# ---------------------------------------------------------------------------------------------------------- cases


def decode_cases(bench: Bench) -> Iterator[Case]:
    big, kda = bench.choose(Shape(16, 32, 128), Shape(1, 2, 64)), bench.choose(Shape(32, 32, 128, True), None)
    for batch in bench.choose((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2)):
        yield Case(f"{big}, batch {batch}", partial(_decode, bench, big, batch))
    for batch in bench.choose((1, 8, 64), ()):
        yield Case(f"{kda}, batch {batch}", partial(_decode, bench, kda, batch))
    if not bench.tiny:
        yield Case("4/8×128, batch 1", partial(_decode, bench, Shape(4, 8, 128), 1))


def _decode(bench: Bench, shape: Shape, batch: int, tokens: int = 1) -> Iterator[Row]:
    """Measure decode steps in graphs that read more states than any cache holds."""
    p, inside = problem(bench, shape, batch, tokens), bench.choose(IN_A_GRAPH, 3)
    nbytes = 2 * batch * shape.state_bytes + batch * tokens * shape.token_bytes()
    wanted = max(2, -(-bench.enough // (batch * shape.state_bytes)))
    count = min(wanted, max(2, ROOM // (batch * shape.state_bytes)))
    values = bench.random.uniform(-1, 1, 1 << 16).astype(np.float32)
    states = [p.state, *(p.memory.filled(p.state.shape, values) for _ in range(count - 1))]
    bound = [steps(bench, p, state)[0] for state in states]
    graphs = -(-count // inside)
    sets = [[bound[(g * inside + i) % count] for i in range(inside)] for g in range(graphs)]
    row = bench.time_launches(sets, inside).row(nbytes, copy=bench.copy_bandwidth)
    yield {"kernel": bound[0].kernel.name, **row, "GB of states": round(count * batch * shape.state_bytes / 1e9, 3)}


def prefill_cases(bench: Bench) -> Iterator[Case]:
    big = bench.choose(Shape(16, 32, 128), Shape(1, 2, 64))
    for tokens in bench.choose([64 << i for i in range(10)], (65,)):
        yield Case(f"{big}, {tokens} tokens", partial(_prefill, bench, big, 1, tokens))
    if bench.tiny:
        return
    for shape, batch, tokens in (
        (big, 4, 2048),
        (big, 4, 8192),
        (Shape(4, 8, 128), 1, 8192),
        (Shape(32, 32, 128, True), 1, 2048),
        (Shape(32, 32, 128, True), 1, 8192),
    ):
        yield Case(f"{shape}, {batch} × {tokens} tokens", partial(_prefill, bench, shape, batch, tokens))


def _prefill(bench: Bench, shape: Shape, batch: int, tokens: int) -> Iterator[Row]:
    """Measure a prompt token by token, and in chunks for every mode and value slice.

    The error is relative to the result of the token-by-token kernel on the same device.
    """
    p, each = problem(bench, shape, batch, tokens), bench.choose(max(1, 4096 // tokens), 1)
    nbytes = 2 * batch * shape.state_bytes + batch * tokens * shape.token_bytes()
    numbers = {"nbytes": nbytes, "flops": batch * shape.flops(tokens), "copy": bench.copy_bandwidth}
    exactly = None
    if tokens <= 8192:
        plain = steps(bench, p, p.state)
        exactly = _result(bench, p, partial(steps, bench, p))
        yield {"mode": "one by one", **bench.time_launches([plain * each], each).row(**numbers)}
    for exact in (True, False):
        bind = partial(chunks, bench, p, exact=exact)
        error: Row = {} if exactly is None else {"NMSE": normalised_error(_result(bench, p, bind), exactly)}
        ours = bind(p.state)[1].kernel.name
        for values in bench.choose(kernels.SLICES, kernels.SLICES[-1:]):
            launches = bind(p.state, values=values)
            measured: Row = {"mode": "exact" if exact else "fast", "slice": values}
            measured["ours"] = launches[1].kernel.name == ours
            measured |= bench.time_launches([launches * each], each).row(**numbers)
            for name, launch in zip(("prepare µs", "scan µs"), launches, strict=True):
                measured[name] = bench.time_launches([[launch] * each], each).seconds * 1e6
            yield measured | error


def _result(bench: Bench, p: Problem, bind: Callable[[Operand], list[Launch]]) -> np.ndarray:
    """Return the output of a launch from a fresh state."""
    state = p.memory.filled(p.state.shape, np.full(1, 0.25, np.float32))
    bench.driver.driver.record(bind(state), bench.on)()
    bench.driver.synchronise(bench.on)
    return np.array(p.memory.view(p.rule.out))


def crossover_cases(bench: Bench) -> Iterator[Case]:
    """Make the cases that show from which prompt length on chunks are faster than single tokens."""
    for shape in bench.choose((Shape(16, 32, 128), Shape(4, 8, 128), Shape(32, 32, 128, True)), (Shape(1, 2, 64),)):
        for tokens in bench.choose((8, 16, 24, 32, 48, 64, 65, 96, 128, 192, 256), (16,)):
            yield Case(f"{shape}, {tokens} tokens", partial(_crossover, bench, shape, tokens))


def _crossover(bench: Bench, shape: Shape, tokens: int) -> Iterator[Row]:
    """Measure a prompt token by token and in chunks, exact and fast, and name the fastest."""
    p, repeat = problem(bench, shape, 1, tokens), bench.choose(8, 1)
    ways = {
        "one by one": steps(bench, p, p.state),
        "exact": chunks(bench, p, p.state, True),
        "fast": chunks(bench, p, p.state, False),
    }
    times = {f"{name} µs": bench.time_launches([ways[name] * repeat], repeat).seconds * 1e6 for name in ways}
    yield {**times, "fastest": min(times, key=lambda name: times[name]).removesuffix(" µs")}
