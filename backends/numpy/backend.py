"""The NumPy backend: exact float32 arithmetic on the processor, with kernels that are bound to their arrays once.

Values of a narrower dtype are stored as float32, and quantised weights are dequantised when they are loaded. So results
are at least as exact as declared. Only `cast` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...graph.dtypes import DType
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops import REGISTRY
from ...ops.collectives import COLLECTIVES
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor
from ..capabilities import KernelCall
from ..host.bindings import HostInstruction, Replay
from ..host.host_backend import HostBackend


class NumpyBackend(HostBackend):
    """The backend that computes with NumPy.

    It has the device ``numpy:0`` and any number of virtual devices on the processor of this machine.
    """

    name = "numpy"

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return Spec(spec.shape, spec.dtype if spec.dtype.is_integer else DType.F32)

    def describe_settings(self) -> str:
        return ""

    def supports(self, node: Node, on: Device) -> Support:
        known = node.op in REGISTRY
        return Support(known, "" if known else f"there is no op {node.op!r}")

    def scratch(self, node: Node) -> int:
        from .kernel_table import find_or_make_binding

        return 4 * find_or_make_binding(node.op).scratch(node)

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        def view(tensor: Tensor) -> Array:
            return self.view(buffers[tensor.buffer], tensor)

        calls = [
            (n, call)
            for n, i in enumerate(program.instructions)
            for call in self.bind_instruction(i, buffers, view, comm)
        ]
        return Replay(program, on, calls)

    def list_kernels(self, program: Program, on: Device) -> Sequence[KernelCall]:
        from .kernel_table import locate_op_source

        return [KernelCall(i.op, locate_op_source(i.op), (n,)) for n, i in enumerate(program.instructions)]

    def bind_instruction(
        self, i: Instruction, buffers: Sequence[Any], view: Callable[[Tensor], Array], comm: Comm
    ) -> list[Callable[[], object]]:
        """Return the calls that compute one instruction on its arrays.

        Args:
            i: The instruction.
            buffers: Buffers of the program.
            view: Returns the array of a tensor.
            comm: Communicator of the device.
        """
        from .kernel_table import find_or_make_binding  # not needed by programs of compiled kernels only

        src = [None if t is None else view(t) for t in i.src]
        dst = [view(t) for t in i.dst]
        scratch = np.empty(0, np.float32)
        if i.scratch is not None:
            start, end = i.scratch.offset, i.scratch.offset + i.scratch.shape[0]
            scratch = buffers[i.scratch.buffer][start:end].view(np.float32)
        if not any(d.size for d in dst) and i.op not in COLLECTIVES:
            return []  # nothing to write
        return find_or_make_binding(i.op).bind(HostInstruction(src, dst, i.attrs, scratch, comm))
