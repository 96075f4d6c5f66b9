"""How fast devices are with weights of each dtype, measured or predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field, replace

from ...graph import Graph
from ...graph.records import dataclass
from .hardware import CPU, Hardware


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a group of devices at work together: by dtype of weights the bytes/s in which a vector is multiplied and the
    FLOP/s in which many are; seconds of a launch; bytes/s of a message between two, and the seconds in which they meet;
    FLOP/s of what reads none; how many times as fast one of them computes, and reads memory, while the others wait;
    bytes/s of values that ops hand on; FLOP/s of tokens that follow each other through a state; and by dtype of weights
    the bytes/s in which they are unpacked for many vectors."""

    bandwidth: Mapping[str, float]
    flops: Mapping[str, float]
    launch: float
    link_bandwidth: float = CPU.link_bandwidth
    link_latency: float = CPU.link_latency
    plain_flops: float = 0.0
    alone_flops: float = 1.0
    alone_bandwidth: float = 1.0
    value_bandwidth: float = 0.0
    recurrent_flops: float = 0.0
    unpacking: Mapping[str, float] = field(default_factory=dict)

    def hardware(self, graph: Graph) -> Hardware:
        """Speeds for the mixture of weights that `graph` has; a dtype that was not measured counts as the slowest."""
        nbytes: dict[str, float] = defaultdict(float)
        numbers: dict[str, float] = defaultdict(float)
        for v in graph.weights:
            nbytes[str(v.dtype)] += v.spec.nbytes
            numbers[str(v.dtype)] += v.spec.size
        return replace(
            self.machine,
            flops=_mixed(self.flops, numbers),
            bandwidth=_mixed(self.bandwidth, nbytes),
            unpack_bandwidth=_mixed(self.unpacking, nbytes) if self.unpacking else 0.0,
        )

    @property
    def machine(self) -> Hardware:
        """What does not depend on weights."""
        return Hardware(
            launch=self.launch,
            link_bandwidth=self.link_bandwidth,
            link_latency=self.link_latency,
            plain_flops=self.plain_flops,
            alone_flops=self.alone_flops,
            alone_bandwidth=self.alone_bandwidth,
            value_bandwidth=self.value_bandwidth,
            recurrent_flops=self.recurrent_flops,
        )


def _mixed(speeds: Mapping[str, float], amounts: Mapping[str, float]) -> float:
    """The speed at which all amounts, each at its own, take as long."""
    slowest = min(speeds.values())
    seconds = sum(amount / speeds.get(name, slowest) for name, amount in amounts.items())
    return sum(amounts.values()) / seconds if seconds else slowest
