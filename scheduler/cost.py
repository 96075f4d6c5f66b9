"""What a run would cost: a model of devices and links, and the time of an assignment under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.graph import Graph
from ..graph.node import Node, Value
from ..ops import op_of
from .assign import Assignment, Conversion, P
from .factors import Factor
from .layout import Shares


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds of one kind of device and of the link between two of them, in FLOP/s, bytes/s and seconds."""

    flops: float = 100e9
    bandwidth: float = 20e9
    launch: float = 2e-6
    link_bandwidth: float = 10e9
    link_latency: float = 5e-6

    def compute(self, flops: float, nbytes: float) -> float:
        """Time of a kernel: whichever of arithmetic and memory takes longer, and its launch."""
        return max(flops / self.flops, nbytes / self.bandwidth) + self.launch


CPU = Hardware()
"""Virtual CPU devices on one machine: a guess that `hocket devices --measure` replaces."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one run: in kernels (of the slowest device) and in collectives, and how many of those."""

    compute: float
    collectives: float
    meetings: int

    @property
    def total(self) -> float:
        return self.compute + self.collectives


def largest_share(factor: Factor, shares: Shares) -> float:
    """The fraction of a factor's work that the busiest device does."""
    if not factor.size:
        return 1.0
    return max(high - low for low, high in shares.of(factor)) / factor.size


def estimate(graph: Graph, assignment: Assignment, devices: int, hardware: Hardware) -> Estimate:
    """The predicted time of one run over equal devices."""
    compute = 0.0
    for node in graph.nodes:
        if not node.is_leaf and not op_of(node).is_view:
            compute += node_time(node, assignment, devices, hardware)
    sent = [c for c in assignment.conversions if not c.is_free]
    return Estimate(compute, sum(conversion_time(c, devices, hardware) for c in sent), len(sent))


def node_time(node: Node, assignment: Assignment, devices: int, hardware: Hardware) -> float:
    """Seconds of `node` on the busiest device."""
    declared, by = op_of(node), assignment.by[node]
    flops, nbytes = float(declared.flops(node)), float(declared.nbytes(node))
    if isinstance(by, Factor):
        share = -(-by.size // devices) / by.size if by.size else 1.0
        flops *= share
        whole = [v for v, want in zip(node.inputs, assignment.wants[node], strict=True) if not isinstance(want, Factor)]
        whole += [v for v in node.results if not isinstance(assignment.made[v], Factor)]
        uncut = min(nbytes, sum(v.spec.nbytes for v in whole))
        nbytes = uncut + (nbytes - uncut) * share
    return hardware.compute(flops, nbytes)


def conversion_time(conversion: Conversion, devices: int, hardware: Hardware) -> float:
    """Seconds of a collective: a ring moves 2(N-1)/N of the bytes to reduce, half of that to gather."""
    if conversion.is_free or devices == 1:
        return 0.0
    rounds = 2 if conversion.before is P else 1
    share = rounds * (devices - 1) / devices
    return hardware.link_latency + share * conversion.value.spec.nbytes / hardware.link_bandwidth


def moved_bytes(conversions: Sequence[Conversion], devices: int) -> int:
    """Bytes every device sends in one run."""
    return sum(
        (2 if c.before is P else 1) * (devices - 1) * c.value.spec.nbytes // devices
        for c in conversions
        if not c.is_free
    )


def stored_values(graph: Graph) -> list[Value]:
    """Weights and states: what a device keeps."""
    return [*graph.weights, *graph.states]
