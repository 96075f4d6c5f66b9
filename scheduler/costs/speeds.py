"""Speeds of a device group by the dtype of the weights, and the hardware model of a graph with several dtypes.

The bandwidth of a graph is the total bytes divided by the total seconds of all dtypes, and likewise the arithmetic
speed. Caches hold a share of the weights that consecutive runs read again. This share depends on the bytes of all
weights and states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np

from ...backends.capabilities import OTHER_OPS
from ...graph import Graph
from ...graph.lazy_dataclass import dataclass
from .hardware import DEFAULT_HARDWARE, Hardware, compute_read_bytes_by_leaf

CACHE_WINDOW_RUNS = 64
"""The number of consecutive runs that share the caches. Together they read some rows of a table, and all experts."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured or predicted speeds of a device group while all of its devices work.

    Bandwidths are in bytes/s, arithmetic in FLOP/s. A value of 0 or an empty mapping means unknown.

    Attributes:
        bandwidth: Reads of weights from memory in products with one vector, by dtype of the weights.
        flops: Arithmetic of products with many vectors, by dtype of the weights.
        launch: Seconds to launch one kernel.
        link_bandwidth: Messages between two devices.
        link_latency: Latency of a collective of two devices, in seconds.
        plain_flops: Arithmetic of ops without weights.
        alone_flops, alone_bandwidth: Factors of the arithmetic speed and the memory bandwidth of one device while the
            other devices are idle.
        value_bandwidth: Reads and writes of activations between ops.
        recurrent_flops: Arithmetic of tokens that depend on each other through a state.
        unpacking: Unpacking of weights for products with many vectors, by dtype of the weights.
        cached: Reads of weights from caches in products with one vector, by dtype of the weights.
        held: The cached share of bytes that each run reads again, by the bytes that all devices read. Keys ascend.
        state_bandwidth: Reads of states.
    """

    bandwidth: Mapping[str, float]
    flops: Mapping[str, float]
    launch: float
    link_bandwidth: float = DEFAULT_HARDWARE.link_bandwidth
    link_latency: float = DEFAULT_HARDWARE.link_latency
    plain_flops: float = 0.0
    alone_flops: float = 1.0
    alone_bandwidth: float = 1.0
    value_bandwidth: float = 0.0
    recurrent_flops: float = 0.0
    unpacking: Mapping[str, float] = field(default_factory=dict)
    cached: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float] = field(default_factory=dict)
    state_bandwidth: float = 0.0

    def hardware_for(self, graph: Graph) -> Hardware:
        """Return the hardware model for a graph.

        It depends on the dtypes of the weights of the graph. A dtype without a measurement has the speeds of the
        slowest measured dtype.
        """
        nbytes: dict[str, float] = defaultdict(float)
        numbers: dict[str, float] = defaultdict(float)
        for v in graph.weights:
            nbytes[str(v.dtype)] += v.spec.nbytes
            numbers[str(v.dtype)] += v.spec.size
        return replace(
            self.hardware_without_weight_speeds,
            flops=_compute_harmonic_mean_speed(self.flops, numbers),
            bandwidth=self._estimate_weight_bandwidth_with_caches(graph),
            unpack_bandwidth=_compute_harmonic_mean_speed(self.unpacking, nbytes) if self.unpacking else 0.0,
        )

    def _estimate_weight_bandwidth_with_caches(self, graph: Graph) -> float:
        """Estimate the bytes/s at which `graph` reads its weights when it runs repeatedly.

        Some weights are then still in caches. For each dtype the bandwidth is
        1 / (share / cache speed + (1 - share) / memory speed). `share` is the cached share of all weights.
        """
        read = compute_read_bytes_by_leaf(graph)
        share = self.estimate_cached_share(
            sum(min(leaf.specs[0].nbytes, CACHE_WINDOW_RUNS * nbytes) for leaf, nbytes in read.items())
        )
        speeds = {
            kind: 1 / (share / max(far, self.cached.get(kind, far)) + (1 - share) / far)
            for kind, far in self.bandwidth.items()
        }
        amounts = defaultdict[str, float](float)
        for leaf, nbytes in read.items():
            if leaf.op == "weight":
                amounts[str(leaf.specs[0].dtype)] += nbytes
        return _compute_harmonic_mean_speed(speeds, amounts)

    def estimate_cached_share(self, nbytes: float) -> float:
        """Estimate which fraction of `nbytes` bytes is still in caches if each run reads the same bytes again.

        The fraction is interpolated linearly between the measured sizes. Above the largest size, the number of cached
        bytes is constant. Without a measurement the fraction is 0.
        """
        if not self.held:
            return 0.0
        sizes, shares = [0.0, *map(float, self.held)], [1.0, *self.held.values()]
        return float(np.interp(nbytes, sizes, shares)) * min(1.0, sizes[-1] / max(nbytes, 1.0))

    @property
    def hardware_without_weight_speeds(self) -> Hardware:
        """The hardware model with the speeds that do not depend on weights; all other speeds have their defaults."""
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


def _compute_harmonic_mean_speed(speeds: Mapping[str, float], amounts: Mapping[str, float]) -> float:
    """Return the mean speed for several kinds of work: the total amount divided by the total seconds.

    This is the harmonic mean of `speeds`, weighted by `amounts`. Without any amounts the slowest speed is returned.

    Args:
        speeds: The speed for each kind of work.
        amounts: The amount of each kind of work. A kind without a speed has the slowest speed.
    """
    slowest = min(speeds.values())
    seconds = sum(amount / speeds.get(name, slowest) for name, amount in amounts.items())
    return sum(amounts.values()) / seconds if seconds else slowest
