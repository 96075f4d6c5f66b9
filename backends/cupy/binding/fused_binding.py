"""Binds fusions: several instructions that one launch computes, found through the dataflow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ...fusion.dataflow import Dataflow
from ...fusion.operands import NoKernelError, require_supported
from ..device.driver import SingleStep
from .launch_builder import LaunchBuilder

log = logging.getLogger("hocket.kernels")

FusionBinder = Callable[[LaunchBuilder, Dataflow, int], Sequence[int]]
"""A function that binds a fusion.

It appends the launches of the fused pattern that begins with instruction `number`, and returns the fused instructions.
It writes no values that only these instructions read, and allocates no scratch. It raises `NoKernelError` for another
pattern, or without a suitable kernel.
"""


def bind_largest_fusion(
    flow: Dataflow, launches: LaunchBuilder, fused: Mapping[str, Sequence[FusionBinder]], number: int
) -> Sequence[int]:
    """Bind the largest fusion that begins with instruction `number`, and append its launches.

    Args:
        flow: The dataflow of the program. The fused instructions are grouped there.
        launches: Receives the launches.
        fused: Fusion binders by op.
        number: The first instruction.

    Returns:
        The fused instructions; empty if no pattern matches.
    """
    best: tuple[Sequence[int], list[SingleStep]] = (), []
    for bind in fused.get(flow.bound_instruction(number).op, ()):
        faults = len(launches.faults)
        launches.number, launches.scratch_bytes = number, 0
        try:
            numbers = bind(launches, flow, number)
            require_supported(not launches.scratch_bytes, "a chain has no scratch")
            require_supported(flow.can_group(numbers), "something else has to run between the instructions")
        except NoKernelError as why:
            log.debug("%s %d: %s", bind.__name__, number, why)
            del launches.faults[faults:]
        else:
            best = max(best, (numbers, launches.items), key=lambda found: len(found[0]))
        launches.items = []
    numbers, launches.items = best
    if numbers:
        flow.group_instructions(numbers)
    return numbers
