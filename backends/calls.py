"""How an op is bound on the host: a binding is given arrays once and returns the calls that compute them.

A call is a function without arguments (mostly `functools.partial` of a ufunc with ``out=``), so that replay is a flat
list and allocates nothing; temporaries come from the scratch that the memory planner placed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.attrs import Attrs
from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..ops import Op
from .abilities import Timed
from .base import Array, Comm, Device, Program, run_calls

F32 = npt.NDArray[np.float32]
Calls = list[Callable[[], object]]
NumberedCalls = Sequence[tuple[int, Callable[[], object]]]
"""What is called in order, each with the number of its instruction."""


@dataclass(slots=True)
class Call:
    """The arrays of one instruction, and its float32 scratch, handed out piece by piece."""

    src: list[Array | None]
    dst: list[Array]
    attrs: Attrs
    scratch: F32
    comm: Comm
    _taken: int = field(default=0)

    @property
    def out(self) -> Array:
        return self.dst[0]

    def operand(self, index: int) -> Array:
        """An operand that is always there."""
        array = self.src[index]
        assert array is not None
        return array

    def optional(self, index: int) -> Array | None:
        return self.src[index] if index < len(self.src) else None

    def number(self, name: str) -> float:
        value = self.attrs[name]
        assert isinstance(value, int | float)
        return value

    def take(self, *shape: int) -> F32:
        """The next piece of scratch."""
        n = math.prod(shape)
        piece = self.scratch[self._taken : self._taken + n].reshape(shape)
        self._taken += n
        return piece


@dataclass(frozen=True, slots=True)
class Binding:
    """How an op is bound: `bind` gives the calls, `scratch` the float32 elements of temporary memory for a node."""

    bind: Callable[[Call], Calls]
    scratch: Callable[[Node], int]


def through_reference(op: Op[Any]) -> Binding:
    """The op's reference run in float32: right for every op, allocating, so only for those that are rarely hot."""

    def bind(call: Call) -> Calls:
        def run() -> None:
            for target, result in zip(call.dst, op.run_reference(call.src, call.attrs), strict=True):
                np.copyto(target, result, casting="unsafe")

        return [run]

    return Binding(bind, lambda node: 0)


def no_scratch(node: Node) -> int:
    return 0


def one_result(node: Node) -> int:
    """Scratch as large as the first result."""
    return node.specs[0].size


def copy(call: Call) -> Calls:
    return [partial(np.copyto, call.out, call.operand(0))]


def plain(bind: Callable[[Call], Calls]) -> Binding:
    return Binding(bind, no_scratch)


class Replay:
    """A program ready to run: its calls, one after the other."""

    def __init__(self, program: Program, on: Device, calls: NumberedCalls) -> None:
        self.program, self.on, self.calls = program, on, calls

    def __call__(self) -> None:
        self._run(self.calls)

    def _run(self, calls: Iterable[tuple[int, Callable[[], object]]]) -> None:
        with np.errstate(all="ignore"):  # IEEE results (inf, NaN) are results here
            run_calls(self.program, self.on, calls)

    def kernels(self) -> list[str]:
        """The ops that a run computes, in order."""
        return [self.program.instructions[number].op for number in dict.fromkeys(n for n, _ in self.calls)]

    def measured(self) -> Iterator[Timed]:
        """Run once; when each of these ops was computed, for whom asks after the run."""
        times: list[tuple[int, float, float]] = []

        def timed(number: int, call: Callable[[], object]) -> None:
            start = time.monotonic()
            call()
            times.append((number, start, time.monotonic()))

        self._run((number, partial(timed, number, call)) for number, call in self.calls)
        return self._told(times)

    def _told(self, times: Iterable[tuple[int, float, float]]) -> Iterator[Timed]:
        for number, calls in groupby(times, key=lambda call: call[0]):
            (_, start, end), *more = calls
            yield Timed(self.program.instructions[number].op, (number,), start, more[-1][2] if more else end)
