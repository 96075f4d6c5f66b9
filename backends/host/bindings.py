"""Binding of ops to NumPy arrays: a binding receives the arrays once and returns the calls that compute the op.

A call is a function without arguments, mostly a `functools.partial` of a ufunc with ``out=``. So a run is a flat list
of calls and allocates no memory. Temporaries come from the scratch memory that the memory planner placed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph.attrs import Attrs
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node
from ...graph.old_names import make_module_getattr
from ...ops import Op
from ..base import Array, Comm, Device, Program, run_calls
from ..capabilities import TimedKernel

Float32Array = npt.NDArray[np.float32]
Calls = list[Callable[[], object]]
NumberedCalls = Sequence[tuple[int, Callable[[], object]]]
"""Calls in order, each with the number of its instruction."""


@dataclass(slots=True)
class HostInstruction:
    """One instruction with the NumPy arrays of its operands and results, its attributes and its scratch memory.

    A kernel takes its temporary float32 arrays from the scratch memory by `take_scratch`.
    """

    src: list[Array | None]
    dst: list[Array]
    attrs: Attrs
    scratch: Float32Array
    comm: Comm
    _used_scratch: int = field(default=0)

    @property
    def out(self) -> Array:
        return self.dst[0]

    def operand(self, index: int) -> Array:
        """Return operand number `index`, which must be present."""
        array = self.src[index]
        assert array is not None
        return array

    def optional_operand(self, index: int) -> Array | None:
        return self.src[index] if index < len(self.src) else None

    def number_attribute(self, name: str) -> float:
        value = self.attrs[name]
        assert isinstance(value, int | float)
        return value

    def take_scratch(self, *shape: int) -> Float32Array:
        """Return the next unused slice of the float32 scratch memory, with the given shape."""
        n = math.prod(shape)
        view = self.scratch[self._used_scratch : self._used_scratch + n].reshape(shape)
        self._used_scratch += n
        return view


@dataclass(frozen=True, slots=True)
class Binding:
    """The NumPy kernel of an op.

    `bind` returns the calls that compute an instruction. `scratch` returns the float32 elements of scratch for a node.
    """

    bind: Callable[[HostInstruction], Calls]
    scratch: Callable[[Node], int]


def make_float32_reference_binding(op: Op[Any]) -> Binding:
    """Make a binding that runs the reference function of an op in float32.

    It is correct for every op, but allocates memory in each call. It is for ops that take little time.
    """

    def bind(call: HostInstruction) -> Calls:
        def run() -> None:
            for target, result in zip(call.dst, op.run_reference(call.src, call.attrs), strict=True):
                np.copyto(target, result, casting="unsafe")

        return [run]

    return Binding(bind, lambda node: 0)


def count_no_scratch_elements(node: Node) -> int:
    return 0


def count_result_elements(node: Node) -> int:
    """Return the number of elements of a node's first result, which is the scratch size of many kernels."""
    return node.specs[0].size


def bind_copy(call: HostInstruction) -> Calls:
    return [partial(np.copyto, call.out, call.operand(0))]


def make_binding_without_scratch(bind: Callable[[HostInstruction], Calls]) -> Binding:
    return Binding(bind, count_no_scratch_elements)


class Replay:
    """A compiled program of the NumPy backend: its calls, in order."""

    def __init__(self, program: Program, on: Device, calls: NumberedCalls) -> None:
        self.program, self.on, self.calls = program, on, calls

    def __call__(self) -> None:
        self._run(self.calls)

    def _run(self, calls: Iterable[tuple[int, Callable[[], object]]]) -> None:
        with np.errstate(all="ignore"):  # IEEE results (inf, NaN) are results here
            run_calls(self.program, self.on, calls)

    def kernels(self) -> list[str]:
        """Return the names of the ops that a run computes, in order."""
        return [self.program.instructions[number].op for number in dict.fromkeys(n for n, _ in self.calls)]

    def run_timed(self) -> Iterator[TimedKernel]:
        """Run the program once and return the start and end time of each op."""
        times: list[tuple[int, float, float]] = []

        def run_and_time(number: int, call: Callable[[], object]) -> None:
            start = time.monotonic()
            call()
            times.append((number, start, time.monotonic()))

        self._run((number, partial(run_and_time, number, call)) for number, call in self.calls)
        return self._make_timed_kernels(times)

    def _make_timed_kernels(self, times: Iterable[tuple[int, float, float]]) -> Iterator[TimedKernel]:
        for number, calls in groupby(times, key=lambda call: call[0]):
            (_, start, end), *more = calls
            yield TimedKernel(self.program.instructions[number].op, (number,), start, more[-1][2] if more else end)


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Call="HostInstruction")
