"""Instructions that one launch does together, bound through a `Flow`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ...flow import Flow
from ...operands import NoKernelError, need
from ..device.driver import Single
from .launches import Launches

log = logging.getLogger("hocket.kernels")

Fused = Callable[[Launches, Flow, int], Sequence[int]]
"""Appends the launches of the chain that begins with instruction `number`, and says which instructions that were.
What only they read of each other is not written, so that they ask for no scratch.  Raises `NoKernelError` if it is no
such chain, or one that the kernels cannot do."""


def fuse(flow: Flow, launches: Launches, fused: Mapping[str, Sequence[Fused]], number: int) -> Sequence[int]:
    """Bind the longest chain that begins with this instruction, whose launches are appended; the instructions that now
    run together, none if there is no chain."""
    best: tuple[Sequence[int], list[Single]] = (), []
    for bind in fused.get(flow.call(number).op, ()):
        faults = len(launches.faults)
        launches.number, launches.taken = number, 0
        try:
            numbers = bind(launches, flow, number)
            need(not launches.taken, "a chain has no scratch")
            need(flow.can_meet(numbers), "something else has to run between the instructions")
        except NoKernelError as why:
            log.debug("%s %d: %s", bind.__name__, number, why)
            del launches.faults[faults:]
        else:
            best = max(best, (numbers, launches.items), key=lambda found: len(found[0]))
        launches.items = []
    numbers, launches.items = best
    if numbers:
        flow.gather(numbers)
    return numbers
