"""The float64 references as a backend, slow and exact, with which others are compared (``--devices reference:0``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...graph.dtypes import DType
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES
from ..base import Array, Comm, Device, Instruction, Program, Support
from ..host.bindings import HostInstruction, Replay
from ..host.collectives import KERNELS
from ..host.host_backend import HostBackend


class ReferenceBackend(HostBackend):
    """Stores every number as float64 and runs the reference function of each op."""

    name = "reference"

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return Spec(spec.shape, spec.dtype if spec.dtype.is_integer else DType.F64)

    def supports(self, node: Node, on: Device) -> Support:
        known = node.op in REGISTRY
        return Support(known, "" if known else f"no op {node.op!r} is declared")

    def scratch(self, node: Node) -> int:
        return 0

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        calls: list[tuple[int, Callable[[], object]]] = []
        for number, instruction in enumerate(program.instructions):
            src = [None if t is None else self.view(buffers[t.buffer], t) for t in instruction.src]
            dst = [self.view(buffers[t.buffer], t) for t in instruction.dst]
            run = _bind_collective(instruction, src, dst, comm) or partial(
                _run_reference, instruction.op, src, dst, instruction.attrs
            )
            calls.append((number, run))
        return Replay(program, on, calls)


def _bind_collective(
    instruction: Instruction, src: list[Any], dst: list[Array], comm: Comm
) -> Callable[[], None] | None:
    """Bind a collective as the NumPy backend does; return None for any other op."""
    if instruction.op not in COLLECTIVES:
        return None
    scratch = np.empty(dst[0].size, dst[0].dtype)
    calls = KERNELS[instruction.op].bind(HostInstruction(src, dst, instruction.attrs, scratch, comm))

    def run() -> None:
        for call in calls:
            call()

    return run


def _run_reference(op: str, src: list[Array | None], dst: list[Array], attrs: Any) -> None:
    for target, result in zip(dst, REGISTRY[op].run_reference(src, attrs), strict=True):
        target[...] = result
