"""A program bound: which instructions run together, compiled segments, and Python calls for what has no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...ops.collective import COLLECTIVES
from ..base import Comm, Device, Instruction, Program, Tensor
from ..flow import Flow
from ..liveness import readers_of
from ..operands import Bound, NoKernelError, Operand
from ..table import brought
from .kernels.table import BINDINGS, FUSED
from .replay import Crew, Replay, Segment, Work
from .steps import Binding, Chain, Steps

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

    def operand(tensor: Tensor) -> Operand:
        spec = program.buffers[tensor.buffer]
        return Operand(buffers[tensor.buffer].ctypes.data + tensor.offset, tensor, spec.declared, spec.stored)

    flow = Flow(program, readers_of(program, operand))
    work = _work(flow, crew, comm, in_python)
    return Replay(program, on, work, flow.together(), flow.finished, crew, comm, buffers)


def _work(flow: Flow, crew: Crew, comm: Comm, in_python: Callable[[Instruction], list[Callable[[], object]]]) -> Work:
    work: Work = []
    steps, chains = Steps(crew.threads, comm), _chains(flow)

    def close() -> None:
        if taken := steps.take():
            work.append((taken[0].number, Segment(taken, crew.threads, steps.owned)))

    for group in flow.groups():
        steps.number = group[0]
        if group in chains:
            chains[group].bind(steps)
        elif not _bind(steps, flow.call(group[0])):
            close()
            quietly = np.errstate(all="ignore")
            instruction = flow.readers.program.instructions[group[0]]
            work += [(group[0], quietly(call)) for call in in_python(instruction)]
            steps.forget([out.region for out in flow.call(group[0]).dst])
    close()
    return work


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
