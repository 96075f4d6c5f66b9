"""Where a fault is planted: one instruction of a program, with its arrays, its memory and the right way to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.backends.base import Instruction
from hocket.backends.numpy.backend import NumpyBackend
from hocket.ops import REGISTRY


@dataclass
class FaultSite:
    """`src` and `dst` are views of device memory; `real` runs the kernel as it should be."""

    call: Instruction
    src: list
    dst: list
    buffers: Sequence
    real: Callable[[], None]

    @property
    def attrs(self):
        return self.call.attrs

    def right(self, src=None, **attrs) -> tuple:
        """The results for other operands or attributes, in float64."""
        arrays = [None if a is None else np.array(a) for a in (self.src if src is None else src)]
        exact = [a if a is None or a.dtype.kind in "iu" else a.astype(np.float64) for a in arrays]
        with np.errstate(all="ignore"):
            return REGISTRY[self.call.op].run_reference(exact, {**self.attrs, **attrs})

    def exact(self, i: int):
        """Operand `i` in float64 (or its integers), a copy; None where it was left out."""
        array = self.src[i] if i < len(self.src) else None
        return None if array is None else np.array(array, np.float64 if array.dtype.kind == "f" else None)

    def memory(self, tensor):
        """All of the buffer a tensor lies in, as its dtype, and the index of its first element there."""
        whole = self.buffers[tensor.buffer]
        size = tensor.dtype.storage.itemsize
        return whole[: len(whole) // size * size].view(tensor.dtype.storage), tensor.offset // size


TOO_FAR = "elements too far off|too far off as a whole"
NAN = "elements NaN"
INFINITE = "infinite where it should not be, or not where it should"
WRONG_SIGN = "zero with the wrong sign"
WRONG_INTEGER = "elements wrong"
NO_ZEROS = "zeros in .* give no zeros"
UNSTEADY = "the replay of the same inputs over other leftovers gives other bits"
PAST_THE_END = r"were written outside of all values, the first \d+ bytes past the end of one"
BEFORE_THE_START = r"were written outside of all values, the first \d+ bytes before of one"
OPERAND_CHANGED = "the run changed its operand"
WEIGHT_WRITTEN = "weight .* or the 1024 bytes after it were written"
READS_ELSEWHERE = f"{TOO_FAR}|{NAN}|{UNSTEADY}"
"""Memory that is no part of an operand may hold any number, NaN, or a number that changes from run to run."""


@dataclass(frozen=True)
class KernelFault:
    """A wrong kernel of `op`.

    Args:
        op: The op with the fault.
        name: The mistake in the kernel.
        plant: Build the wrong kernel of a site.
        symptom: A pattern of the message of a case that fails by this fault.
    """

    op: str
    name: str
    plant: Callable[[FaultSite], Callable[[], None]]
    symptom: str = TOO_FAR

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def fault_in_result(op: str, name: str, compute: Callable, *, symptom: str = TOO_FAR) -> KernelFault:
    """Build a fault in the computation: `compute(site)` returns the results, or None where this call is right."""

    def plant(site: FaultSite) -> Callable[[], None]:
        def run() -> None:
            with np.errstate(all="ignore"):
                numbers = None if any(d.size == 0 for d in site.dst) else compute(site)
            if numbers is None:
                site.real()
                return
            for target, result in zip(site.dst, numbers if isinstance(numbers, tuple) else (numbers,), strict=True):
                np.copyto(target, result, casting="unsafe")

        return run

    return KernelFault(op, name, plant, symptom)


def fault_after_result(
    op: str, name: str, spoil: Callable[[FaultSite], None], *, symptom: str = TOO_FAR
) -> KernelFault:
    """A fault that spoils right results."""

    def plant(site: FaultSite) -> Callable[[], None]:
        def run() -> None:
            site.real()
            if all(d.size for d in site.dst):
                spoil(site)

        return run

    return KernelFault(op, name, plant, symptom)


def round_to_half(x):
    """Rounded to float16."""
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float64)


class FaultyBackend(NumpyBackend):
    """The NumPy backend with a fault in one op; `broken` is an error of the fault itself, a mistake in the suite."""

    def __init__(self, fault: KernelFault) -> None:
        self.fault = fault
        self.broken: Exception | None = None

    def compile(self, program, buffers, on, comm):
        runs = []
        for call in program.instructions:
            real = super().compile(replace(program, instructions=(call,)), buffers, on, comm)
            runs.append(self._run_with_fault(call, real, buffers) if call.op == self.fault.op else real)

        def replay() -> None:
            for run in runs:
                run()

        return replay

    def _run_with_fault(self, call, real, buffers):
        src = [None if t is None else self.view(buffers[t.buffer], t) for t in call.src]
        dst = [self.view(buffers[t.buffer], t) for t in call.dst]
        planted = self.fault.plant(FaultSite(call, src, dst, buffers, real))

        def run() -> None:
            try:
                planted()
            except Exception as why:
                self.broken = why
                raise

        return run
