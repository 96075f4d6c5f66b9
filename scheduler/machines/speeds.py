"""How fast devices are with weights of each dtype, measured or predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np

from ...backends.abilities import OTHER_OPS
from ...graph import Graph
from ...graph.lazy_dataclass import dataclass
from .hardware import CPU, Hardware, read_by

RUNS = 64
"""What is read within so many runs stays in caches or goes: of a table it is some rows, of experts all."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a group of devices at work together, in bytes/s, FLOP/s and seconds; what is 0 or empty is not known.

    By dtype of weights: `bandwidth`, in which a vector is multiplied with those that come from memory, and `cached`
    with those that caches hold; `flops` of many vectors, and `unpacking`, in which weights are unpacked for these.
    `held` is the share of what runs read again and again that they find in caches, by the bytes that all devices read.

    By what reads no weights: `plain_flops`; `recurrent_flops` of tokens that follow each other through a state;
    `state_bandwidth`, in which states are read; `value_bandwidth` of values that ops hand on.

    Of devices: `launch`; `link_bandwidth` of a message between two, and `link_latency`, in which they meet;
    `alone_flops` and `alone_bandwidth`, how many times as fast one of them computes, and reads memory, while the others
    wait.
    """

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
    cached: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float] = field(default_factory=dict)
    state_bandwidth: float = 0.0

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
            bandwidth=self._reading(graph),
            unpack_bandwidth=_mixed(self.unpacking, nbytes) if self.unpacking else 0.0,
        )

    def _reading(self, graph: Graph) -> float:
        """Bytes/s of the weights of `graph` in runs one after the other, which find some of them in caches."""
        read = read_by(graph)
        share = self.held_share(sum(min(leaf.specs[0].nbytes, RUNS * nbytes) for leaf, nbytes in read.items()))
        speeds = {
            kind: 1 / (share / max(far, self.cached.get(kind, far)) + (1 - share) / far)
            for kind, far in self.bandwidth.items()
        }
        amounts = defaultdict[str, float](float)
        for leaf, nbytes in read.items():
            if leaf.op == "weight":
                amounts[str(leaf.specs[0].dtype)] += nbytes
        return _mixed(speeds, amounts)

    def held_share(self, nbytes: float) -> float:
        """The share that caches hold of so many bytes that runs read again; of more than were measured they hold no
        more bytes."""
        if not self.held:
            return 0.0
        sizes, shares = [0.0, *map(float, self.held)], [1.0, *self.held.values()]
        return float(np.interp(nbytes, sizes, shares)) * min(1.0, sizes[-1] / max(nbytes, 1.0))

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
            op_bandwidth={OTHER_OPS: self.state_bandwidth} if self.state_bandwidth else {},
        )


def _mixed(speeds: Mapping[str, float], amounts: Mapping[str, float]) -> float:
    """The speed at which all amounts, each at its own, take as long."""
    slowest = min(speeds.values())
    seconds = sum(amount / speeds.get(name, slowest) for name, amount in amounts.items())
    return sum(amounts.values()) / seconds if seconds else slowest
