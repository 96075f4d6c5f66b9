"""A program bound: which instructions run together, compiled segments, and Python calls for what has no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...ops.collective import COLLECTIVES
from ..base import Called, Comm, Device, Instruction, Program, Source, Tensor
from ..flow import Flow
from ..liveness import readers_of
from ..operands import Bound, NoKernelError, Operand
from ..sources import source_of
from ..table import brought
from .kernels.table import BINDINGS, FUSED
from .replay import Crew, Replay, Segment, Work
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
    """A program ready to run; `in_python` gives the calls for an instruction that has no kernel."""
    flow, steps = _flow(program, [b.ctypes.data for b in buffers]), Steps(crew.threads, comm)
    work: Work = []
    for part in _parts(flow, steps):
        if isinstance(part, int):
            quietly = np.errstate(all="ignore")
            work += [(part, quietly(call)) for call in in_python(program.instructions[part])]
        else:
            work.append((part[0].number, Segment(part, crew.threads, steps.owned)))
    return Replay(program, on, work, flow.together(), flow.finished, crew, comm, buffers)


def foretold(program: Program, threads: int, in_python: Callable[[Instruction], Source]) -> Iterator[Called]:
    """What `bound` would call, found at addresses where nothing lies; how devices meet is not known before they do."""
    flow, steps = _flow(program, [(number + 1) << 40 for number in range(len(program.buffers))]), Steps(threads)
    parts = list(_parts(flow, steps))
    together = flow.together()
    for part in parts:
        if not isinstance(part, int):
            yield from (Called(s.kernel.name, source_of(s.kernel.body), together[s.number]) for s in part)
        elif (i := program.instructions[part]).op not in COLLECTIVES:
            yield Called("NumPy", in_python(i), (part,))


def _flow(program: Program, addresses: Sequence[int]) -> Flow:
    """The flow of a program whose buffers begin at these addresses."""

    def operand(tensor: Tensor) -> Operand:
        spec = program.buffers[tensor.buffer]
        return Operand(addresses[tensor.buffer] + tensor.offset, tensor, spec.declared, spec.stored)

    return Flow(program, readers_of(program, operand))


def _parts(flow: Flow, steps: Steps) -> Iterator[list[Step] | int]:
    """What runs in order: steps of compiled code that follow each other, and instructions that have no kernel."""
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
    """Bind an instruction by itself; False if there is no kernel for it."""
    if not any(t.tensor.spec.size for t in call.dst) and call.op not in COLLECTIVES:
        return True
    bind: Binding | None = BINDINGS.get(call.op) or brought(call.op, "cpu")
    return bind is not None and bind(steps, call)


def _chains(flow: Flow) -> dict[Sequence[int], Chain]:
    """The longest chain that begins with each instruction, by the group of instructions that now run together."""
    chains: dict[Sequence[int], Chain] = {}
    for number in range(len(flow.readers.program.instructions)):
        longest = max(_begun(flow, number), key=lambda chain: len(chain.numbers), default=None)
        if longest is not None:
            flow.gather(longest.numbers)
            chains[tuple(sorted(longest.numbers))] = longest
    return chains


def _begun(flow: Flow, number: int) -> Iterator[Chain]:
    """The chains that begin with an instruction, and that nothing has to run between."""
    for find in FUSED.get(flow.call(number).op, ()) if flow.is_free(number) else ():
        try:
            chain = find(flow, number)
        except NoKernelError as why:
            log.debug("%s %d: %s", find.__name__, number, why)
            continue
        if flow.can_meet(chain.numbers):
            yield chain
