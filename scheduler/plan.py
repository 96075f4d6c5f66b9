"""A plan: the graph as it will run, its program, its memory; data that prints and explains itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.base import Backend, Device, Program, find
from ..graph.graph import Graph
from ..ops import REGISTRY, verify
from .check import check
from .lower import lower


@dataclass(frozen=True, eq=False)
class Plan:
    """What `graph` becomes on `device`: nothing is allocated yet, so a plan costs no device."""

    graph: Graph
    program: Program
    backend: Backend
    device: Device

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights, states and constants as stored, and the arena of intermediate values."""
        return {kind: self.program.nbytes(kind) for kind in ("weight", "state", "constant", "arena")}

    def flops(self) -> int:
        """Floating-point operations of one run."""
        return sum(REGISTRY[n.op].flops(n) for n in self.graph.nodes if not n.is_leaf)

    def explain(self) -> str:
        """One line a step: what runs, from where to where."""
        lines = [str(self)]
        for step, i in enumerate(self.program.instructions):
            reads = ", ".join("_" if t is None else f"{self._where(t.buffer)}+{t.offset}" for t in i.src)
            writes = ", ".join(f"{self._where(t.buffer)}+{t.offset} {t.spec}" for t in i.dst)
            lines.append(f"{step:5}  {self.program.device}  {i.op:16} %{i.node}: {reads} -> {writes}")
        return "\n".join(lines)

    def _where(self, buffer: int) -> str:
        spec = self.program.buffers[buffer]
        return spec.name or spec.kind

    def __str__(self) -> str:
        memory = "  ".join(f"{kind} {nbytes_text(n)}" for kind, n in self.memory().items())
        views = sum(not n.is_leaf and REGISTRY[n.op].is_view for n in self.graph.nodes)
        return (
            f"{len(self.graph.nodes)} nodes, {views} of them views; {len(self.program.instructions)} steps on "
            f"{self.program.device}; {self.flops() / 1e6:.1f} MFLOP\n{memory}"
        )


def plan(graph: Graph, device: str = "cpu:0") -> Plan:
    """Verify `graph` and plan it for one device.  Raises `GraphError`, `PlanError` or `BackendError`."""
    backend, on = find(device)
    return plan_for(graph, backend, on)


def plan_for(graph: Graph, backend: Backend, on: Device) -> Plan:
    """`plan` for a backend object that is already at hand."""
    verify(graph)
    lowered, program = lower(graph, backend, on)
    check(lowered, program)
    return Plan(lowered, program, backend, on)


def nbytes_text(n: float) -> str:
    """Bytes for people: ``4.2 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
