"""Binding of a program: fused instructions, compiled segments, and Python calls for instructions without a kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...ops.collectives import COLLECTIVES
from ...ops.registry import BUILTIN_OPS
from ..abilities import STAND_IN, Called, Source
from ..base import Comm, Device, Instruction, Program, Tensor
from ..flow import Flow
from ..liveness import readers_of
from ..operands import Bound, NoKernelError, Operand
from ..sources import source_of
from ..table import brought
from .compiler import Kernel
from .crew import Crew
from .kernels.table import BINDINGS, FUSED
from .relocation import Nowhere, Relocatable, made_up, relocatable
from .replay import Replay, Segment, Work
from .steps import Binding, Chain, Step, Steps

log = logging.getLogger("hocket.kernels")


def bound(
    program: Program,
    buffers: Sequence[np.ndarray],
    on: Device,
    crew: Crew,
    comm: Comm,
    in_python: Callable[[Instruction], list[Callable[[], object]]],
) -> Replay:
    """Bind a program to its buffers.

    Args:
        program: The program.
        buffers: Its buffers in host memory.
        on: The device.
        crew: The worker threads of the device.
        comm: The communicator of the device.
        in_python: Makes the calls of an instruction that has no kernel.

    Returns:
        The program, ready to run.
    """
    addresses = [b.ctypes.data for b in buffers]
    flow, steps = _flow(program, addresses), Steps(crew.threads, comm)
    work: Work = []
    for part in _parts(flow, steps):
        if isinstance(part, int):
            quietly = np.errstate(all="ignore")
            work += [(part, quietly(call)) for call in in_python(program.instructions[part])]
        else:
            work.append((part[0].number, Segment.of(part, crew.threads, steps.owned)))
    return Replay(program, on, work, lambda: flow, crew, comm, buffers)


def foreseen(program: Program, threads: int) -> tuple[Relocatable | None, Sequence[Kernel]]:
    """Bind a program without buffers, and return its relocatable table and its kernels.

    The table is None if the binding depends on addresses, other devices, other packages or Python calls.
    """
    ours = all(i.op in BUILTIN_OPS and i.op not in COLLECTIVES for i in program.instructions)
    memory = Nowhere(made_up(len(program.buffers) + 1)[-1])
    parts = [*_parts(_nowhere(program), Steps(threads, owned=memory))] if ours else []
    if len(parts) != 1 or isinstance(parts[0], int):
        return None, ()
    tables = relocatable(parts[0], threads, memory, [b.nbytes for b in program.buffers])
    return tables, [step.kernel for step in parts[0]]


def arranged(program: Program) -> Flow:
    """Return the dataflow of a program with the same fusions as `bind_program`."""
    flow = _nowhere(program)
    _chains(flow)
    return flow


def foretold(program: Program, threads: int, in_python: Callable[[Instruction], Source]) -> Iterator[Called]:
    """List the kernels that `bind_program` would call, bound at placeholder addresses.

    Collectives are left out, because their kernels depend on the other devices.
    """
    flow = _nowhere(program)
    parts = list(_parts(flow, Steps(threads)))
    together = flow.together()
    for part in parts:
        if not isinstance(part, int):
            yield from (Called(s.kernel.name, source_of(s.kernel.body), together[s.number]) for s in part)
        elif (i := program.instructions[part]).op not in COLLECTIVES:
            yield Called(STAND_IN, in_python(i), (part,))


def kernels_of(program: Program, threads: int) -> Iterator[Kernel]:
    """Yield the kernels that `bind_program` would call."""
    return (
        step.kernel for part in _parts(_nowhere(program), Steps(threads)) if not isinstance(part, int) for step in part
    )


def _nowhere(program: Program) -> Flow:
    """Return the dataflow of a program at placeholder addresses."""
    return _flow(program, made_up(len(program.buffers)))


def _flow(program: Program, addresses: Sequence[int]) -> Flow:
    """Return the dataflow of a program with buffers at these addresses."""

    def operand(tensor: Tensor) -> Operand:
        spec = program.buffers[tensor.buffer]
        return Operand(addresses[tensor.buffer] + tensor.offset, tensor, spec.declared, spec.stored, spec.kind)

    return Flow(program, readers_of(program, operand))


def _parts(flow: Flow, steps: Steps) -> Iterator[list[Step] | int]:
    """Yield consecutive steps of compiled code as lists, and the numbers of instructions without a kernel, in order."""
    chains = _chains(flow)
    for group in flow.groups():
        steps.number = group[0]
        if group in chains:
            chains[group].bind(steps)
        elif not _bind(steps, flow.call(group[0])):
            if taken := steps.take():
                yield taken
            yield group[0]
            steps.forget([out.region for out in flow.call(group[0]).dst])
    if taken := steps.take():
        yield taken


def _bind(steps: Steps, call: Bound) -> bool:
    """Bind one instruction; return False if it has no kernel."""
    if not any(t.tensor.spec.size for t in call.dst) and call.op not in COLLECTIVES:
        return True
    bind: Binding | None = BINDINGS.get(call.op) or brought(call.op, "cpu")
    return bind is not None and bind(steps, call)


def _chains(flow: Flow) -> dict[Sequence[int], Chain]:
    """Return the longest fusion that begins at each instruction, by the group of its instructions."""
    chains: dict[Sequence[int], Chain] = {}
    for number in range(len(flow.readers.program.instructions)):
        longest = max(_begun(flow, number), key=lambda chain: len(chain.numbers), default=None)
        if longest is not None:
            flow.gather(longest.numbers)
            chains[tuple(sorted(longest.numbers))] = longest
    return chains


def _begun(flow: Flow, number: int) -> Iterator[Chain]:
    """Yield the fusions that begin at an instruction and can run as one group."""
    for find in FUSED.get(flow.call(number).op, ()) if flow.is_free(number) else ():
        try:
            chain = find(flow, number)
        except NoKernelError as why:
            log.debug("%s %d: %s", find.__name__, number, why)
            continue
        if flow.can_meet(chain.numbers):
            yield chain
