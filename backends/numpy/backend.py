"""The processor in plain NumPy, exact: float32 throughout, every kernel bound to its arrays once and replayed.

Values declared in a narrower dtype are kept in float32 (quantised weights are expanded at load), so results are at
least as exact as declared; only `cast` rounds, since that is what it is for.
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
from ..abilities import Called
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor
from ..calls import Call, Replay
from ..host import HostBackend


class NumpyBackend(HostBackend):
    """Runs on this machine's processor as ``numpy:0`` (and any number of virtual devices)."""

    name = "numpy"

    def stored(self, spec: Spec, kind: str = "value") -> Spec:
        return Spec(spec.shape, spec.dtype if spec.dtype.is_integer else DType.F32)

    def settings(self) -> str:
        return ""

    def supports(self, node: Node, on: Device) -> Support:
        known = node.op in REGISTRY
        return Support(known, "" if known else f"there is no op {node.op!r}")

    def scratch(self, node: Node) -> int:
        from .table import kernel

        return 4 * kernel(node.op).scratch(node)

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        def view(tensor: Tensor) -> Array:
            return self.view(buffers[tensor.buffer], tensor)

        calls = [(n, call) for n, i in enumerate(program.instructions) for call in self.calls(i, buffers, view, comm)]
        return Replay(program, on, calls)

    def foretold(self, program: Program, on: Device) -> Sequence[Called]:
        from .table import source

        return [Called(i.op, source(i.op), (n,)) for n, i in enumerate(program.instructions)]

    def calls(
        self, i: Instruction, buffers: Sequence[Any], view: Callable[[Tensor], Array], comm: Comm
    ) -> list[Callable[[], object]]:
        """What computes one instruction; `view` gives the array of a tensor."""
        from .table import kernel  # who runs compiled kernels alone has no use for it

        src = [None if t is None else view(t) for t in i.src]
        dst = [view(t) for t in i.dst]
        scratch = np.empty(0, np.float32)
        if i.scratch is not None:
            start, end = i.scratch.offset, i.scratch.offset + i.scratch.shape[0]
            scratch = buffers[i.scratch.buffer][start:end].view(np.float32)
        if not any(d.size for d in dst) and i.op not in COLLECTIVES:
            return []  # nothing to write
        return kernel(i.op).bind(Call(src, dst, i.attrs, scratch, comm))
