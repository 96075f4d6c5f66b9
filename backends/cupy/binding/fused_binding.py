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
"""A function that binds a fused pattern: instructions with a fixed dataflow that one launch computes.

It adds the launches of the pattern that begins with instruction `number`, and returns the indices of all its
instructions. The launches write no value that only these instructions read. They may use the scratch of one of these
instructions (`LaunchBuilder.use_scratch_of_fused_instruction`). The function raises `NoKernelError` for another
pattern, or without a suitable kernel.
"""


def bind_largest_fusion(
    flow: Dataflow, launches: LaunchBuilder, fused: Mapping[str, Sequence[FusionBinder]], number: int
) -> Sequence[int]:
    """Find the largest group of instructions, from `number` on, that one fused kernel can compute; add its launches.

    Args:
        flow: The dataflow of the program. The function groups the fused instructions there.
        launches: Receives the launches of the fusion.
        fused: The functions that match patterns and add launches, by the op of the first instruction.
        number: Index of the first instruction.

    Returns:
        The indices of the fused instructions; empty if no pattern matches.
    """
    best: tuple[Sequence[int], list[SingleStep]] = (), []
    for bind in fused.get(flow.bound_instruction(number).op, ()):
        faults = len(launches.faults)
        launches.number = number
        launches.use_scratch_of_fused_instruction(None)
        try:
            numbers = bind(launches, flow, number)
            require_supported(launches.scratch_bytes <= launches.scratch_limit, "a fusion has less scratch")
            require_supported(flow.can_group(numbers), "something else has to run between the instructions")
            require_supported(flow.reads_inner_values_once(numbers), "a value that is not written is read twice")
        except NoKernelError as why:
            log.debug("%s %d: %s", bind.__name__, number, why)
            del launches.faults[faults:]
        else:
            best = max(best, (numbers, launches.items), key=lambda found: len(found[0]))
        launches.items = []
    numbers, launches.items = best
    if numbers:
        flow.group_instructions_unchecked(numbers)
    return numbers
