"""Binds a program to launches: first its fusions, then the remaining instructions, in execution order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ....ops.collectives import COLLECTIVES, as_integer
from ...abilities import Called, Source
from ...base import Instruction, Program, Tensor
from ...flow import Flow
from ...liveness import readers_of
from ...operands import Bound, Operand
from ...sources import short
from ..device.driver import KERNELS, Kernel, Launch, Single, place_of, text_of
from ..device.limits import Limits
from ..table import FUSED, binding
from .chains import fuse
from .launches import Launches, Wordless


@dataclass(frozen=True, slots=True)
class Met:
    """A collective between launches."""

    number: int
    instruction: Instruction
    bound: Bound

    @property
    def sequence(self) -> int:
        """The sequence number of the collective."""
        return as_integer(self.instruction.attrs["sequence"])


def bound_parts(flow: Flow, launches: Launches, operand: Callable[[Tensor], Operand]) -> Iterator[Single | Met]:
    """Yield the launches of a program and the collectives between them, in execution order.

    Args:
        flow: The dataflow of the program.
        launches: Receives the launches.
        operand: Returns the operand of a tensor.
    """
    program = flow.readers.program
    chains = _chains(flow, launches)
    for group in flow.groups():
        if group in chains:
            yield from chains[group]
            continue
        (number,) = group
        i = program.instructions[number]
        if i.op in COLLECTIVES:
            yield Met(number, i, flow.readers.bound(number))
        elif number not in flow.fixed:
            yield from _alone(flow, launches, operand, number)


def _chains(flow: Flow, launches: Launches) -> dict[Sequence[int], list[Single]]:
    """Bind all fusions, group their instructions in the dataflow, and return the launches of each."""
    chains: dict[Sequence[int], list[Single]] = {}
    for number in range(len(flow.readers.program.instructions)):
        if flow.is_free(number) and (numbers := fuse(flow, launches, FUSED, number)):
            chains[tuple(sorted(numbers))], launches.items = launches.items, []
    return chains


def _alone(flow: Flow, launches: Launches, operand: Callable[[Tensor], Operand], number: int) -> list[Single]:
    """Return the launches of one instruction."""
    i = flow.readers.program.instructions[number]
    launches.number, launches.taken = number, 0
    launches.scratch_at = operand(i.scratch).address if i.scratch is not None else 0
    bind = binding(i.op)
    assert bind is not None, "supports() was asked before"
    bind(launches, flow.readers.bound(number))
    room = i.scratch.shape[0] if i.scratch is not None else 0
    assert launches.taken <= room, f"{i.op} takes more than it asked for"
    bound, launches.items = launches.items, []
    return bound


def unplaced(program: Program, limits: Limits, processors: int = 1) -> tuple[Flow, Sequence[Single | Met]]:
    """Bind a program at placeholder addresses.

    Args:
        program: The program.
        limits: Resource limits of the device.
        processors: Multiprocessors of the device.

    Returns:
        The dataflow, and the launches and collectives.
    """
    operand = _nowhere(program)
    flow, launches = Flow(program, readers_of(program, operand)), _wordless(limits, processors)
    return flow, list(bound_parts(flow, launches, operand))


def foretold(program: Program, limits: Limits) -> Iterator[Called]:
    """List the kernels that a program would launch. Transports of collectives are not known yet."""
    flow, parts = unplaced(program, limits)
    together = flow.together()
    for part in parts:
        if isinstance(part, Launch):
            yield Called(part.kernel.name, _source(part.kernel), together[part.number])


def gathered(program: Program, limits: Limits) -> list[tuple[int, ...]]:
    """Return the instructions in execution order at placeholder addresses, with a tuple for each fusion."""
    flow = Flow(program, readers_of(program, _nowhere(program)))
    _chains(flow, _wordless(limits))
    return [*flow.groups()]


def _nowhere(program: Program) -> Callable[[Tensor], Operand]:
    """Return a function that makes operands at placeholder addresses."""

    @cache
    def operand(t: Tensor) -> Operand:
        spec = program.buffers[t.buffer]
        return Operand(((t.buffer + 1) << 40) + t.offset, t, spec.declared, spec.stored)

    return operand


def _wordless(limits: Limits, processors: int = 1) -> Wordless:
    return Wordless(keep=lambda array: 1 << 20, limits=limits, processors=processors)


@cache
def _source(kernel: Kernel) -> Source:
    """Find the definition of a kernel, in its own file or in a shared header."""
    head = re.compile(rf"^.*__global__[^;{{}}]*?\b{re.escape(kernel.name.partition('<')[0])}\s*\(", re.MULTILINE)
    for file in (kernel.source.file, *kernel.source.before):
        text = text_of(file)
        if at := head.search(text):
            end = text.find("\n}", at.start()) + len("\n}")
            line = text.count("\n", 0, at.start()) + 1
            return Source(f"{_place(file)}:{line}", short(text[at.start() : end]))
    return Source(_place(kernel.source.file))


def _place(file: str) -> str:
    """Return the path of a kernel file relative to the repository."""
    path = place_of(file)
    return (
        f"hocket/backends/cupy/kernels/{path.relative_to(KERNELS).as_posix()}" if path.is_relative_to(KERNELS) else file
    )
