"""The check of fused kernels: each group of instructions against its instructions one by one, bit by bit.

The instructions of a group run twice on equal random bytes. First they are one program, for which the backend generates
one kernel. Then each instruction is a program, which no backend can fuse. The written results must have the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...backends.base import Backend, Device, Instruction, Program, Tensor
from ...backends.capabilities import FusedExpression, GeneratesFusedKernels
from ...graph.errors import BackendError, format_count
from ...graph.graph import Graph
from ...scheduler import SingleDeviceComm, plan_for_group
from ..cases.operand_layouts import Array
from ..cases.random_graphs import make_random_graph_and_weights
from .guarded_memory import copy_to_host

RANDOM_GRAPHS = 100
"""Random graphs of one check."""


@dataclass(frozen=True)
class FusedKernelResult:
    """The outcome of the check of one fused kernel against its single ops.

    `fault` describes the difference; it is empty if all bits are equal.
    """

    ops: tuple[str, ...]
    shape: tuple[int, ...]
    fault: str


def check_fused_kernels(
    graphs: Iterable[Graph], backend: Backend, device: Device, seed: int = 0
) -> Iterator[FusedKernelResult]:
    """Yield the results of all different fused kernels of graphs on one device.

    Raises:
        BackendError: the backend generates no kernels.
    """
    if not isinstance(backend, GeneratesFusedKernels):
        raise BackendError(f"{backend.name} generates no fused kernels; give --backend cpu")
    seen: set[Hashable] = set()
    for number, graph in enumerate(graphs):
        program = plan_for_group(graph, [(backend, device)]).device_plans[0].program
        for group in backend.describe_fusion(program).expressions:
            key = _make_fused_kernel_key(group)
            if key not in seen and len(group.instruction_numbers) > 1:  # a hook of one op is the kernel of the op
                seen.add(key)
                rng = np.random.default_rng((seed, number, group.instruction_numbers[0]))
                yield _compare_fused_with_single_instructions(program, group, backend, device, rng)


def make_random_graphs(seed: int) -> Iterator[Graph]:
    """Yield the random graphs that one check of fused kernels runs."""
    return (make_random_graph_and_weights(seed + number)[0] for number in range(RANDOM_GRAPHS))


def _make_fused_kernel_key(group: FusedExpression) -> Hashable:
    """Return a key of the kernel, shapes and numeric arguments of a fused group, so that each is checked once."""
    views = [t.strides for t in group.operands]
    in_place = [[(o.buffer, o.offset) == (t.buffer, t.offset) for o in group.operands] for _, t in group.results]
    return repr((group.steps, group.shape, views, in_place, sorted(group.attributes.items())))


def _compare_fused_with_single_instructions(
    program: Program, group: FusedExpression, backend: Backend, device: Device, rng: np.random.Generator
) -> FusedKernelResult:
    """Run a group fused in one program, and as single instructions, and compare the bits of the results."""
    instructions = [program.instructions[n] for n in group.instruction_numbers]
    ops = tuple(i.op for i in instructions)
    operands = {t: rng.standard_normal(t.shape).astype(np.float32) for t in group.operands}
    results = [t for _, t in group.results]
    fused, single = (
        _run_parts_as_programs(program, parts, operands, results, backend, device)
        for parts in ([instructions], [[i] for i in instructions])
    )
    assert isinstance(backend, GeneratesFusedKernels)
    alone = backend.describe_fusion(
        replace(program, instructions=tuple(instructions), outputs=_name_outputs(results), undo=())
    )
    if [e.steps for e in alone.expressions] != [group.steps]:
        return FusedKernelResult(ops, group.shape, "a program of these instructions alone has other fused kernels")
    for (step, _), got, expected in zip(group.results, fused, single, strict=True):
        different = int((got.view(np.uint32) != expected.view(np.uint32)).sum())
        if different:
            return FusedKernelResult(
                ops, group.shape, f"step {step}: {different} of {format_count(got.size, 'element')} differ"
            )
    return FusedKernelResult(ops, group.shape, "")


def _name_outputs(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def _run_parts_as_programs(
    program: Program,
    parts: Sequence[Sequence[Instruction]],
    operands: dict[Tensor, Array],
    results: Sequence[Tensor],
    backend: Backend,
    device: Device,
) -> list[Array]:
    """Run each list of instructions in `parts` as a program of its own, in order, and return the `results`."""
    buffers: list[Any] = [backend.alloc(b.nbytes, device) for b in program.buffers]
    for tensor, data in operands.items():
        backend.view(buffers[tensor.buffer], tensor)[...] = data
    make = partial(replace, program, inputs={}, undo=())
    for part in parts:
        outputs = results if len(part) > 1 else [t for i in part for t in i.dst]
        backend.compile(
            make(instructions=tuple(part), outputs=_name_outputs(outputs)), buffers, device, SingleDeviceComm()
        )()
    return [copy_to_host(backend.view(buffers[t.buffer], t)) for t in results]
