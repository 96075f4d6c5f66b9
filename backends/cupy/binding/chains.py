"""Instructions that one launch does together, bound through a `Flow`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...flow import Flow
from ...operands import NoKernelError, Operand, need
from ..device.driver import Step
from .launches import Launches

log = logging.getLogger("hocket.kernels")

Fused = Callable[[Launches, Flow, int], Sequence[int]]
"""Appends the launches of the chain that begins with instruction `number`, and says which instructions that were.
What only they read of each other is not written, so that they ask for no scratch.  Raises `NoKernelError` if it is no
such chain, or one that the kernels cannot do."""


def apart(out: Operand, sources: Iterable[Operand | None], same: Iterable[Operand | None] = ()) -> None:
    """Need that a kernel may write `out` while it reads the sources: they lie elsewhere, and each of `same`, whose
    elements are read by the very thread that writes those of `out`, elsewhere or exactly there."""
    for source in sources:
        need(source is None or not source.region.overlaps(out.region), "a result lies where something is still read")
    for source in same:
        free = source is None or lies_as(source, out) or not source.region.overlaps(out.region)
        need(free, "a result lies across what is still read")


def lies_as(one: Operand, other: Operand) -> bool:
    """Whether both are the same elements in the same order."""
    alike = (one.shape, one.strides) == (other.shape, other.strides)
    dense = one.is_dense and other.is_dense and one.tensor.spec.size == other.tensor.spec.size
    return one.address == other.address and (alike or dense)


def fuse(flow: Flow, launches: Launches, fused: Mapping[str, Sequence[Fused]], number: int) -> int | None:
    """Bind the longest chain that begins with this instruction; in whose place it runs, None if there is none.  Its
    launches are appended."""
    best: tuple[Sequence[int], list[Step]] = (), []
    for bind in fused.get(flow.call(number).op, ()):
        faults = len(launches.faults)
        launches.number, launches.taken = number, 0
        try:
            numbers = bind(launches, flow, number)
            need(not launches.taken, "a chain has no scratch")
            need(flow.place_for(numbers) is not None, "something else has to run between the instructions")
        except NoKernelError as why:
            log.debug("%s %d: %s", bind.__name__, number, why)
            del launches.faults[faults:]
        else:
            best = max(best, (numbers, launches.items), key=lambda found: len(found[0]))
        launches.items = []
    numbers, launches.items = best
    at = flow.place_for(numbers) if numbers else None
    if at is not None:
        flow.gather(numbers, at)
    return at
