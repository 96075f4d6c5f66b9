"""The hardware model: speeds of devices and links, and the estimated seconds of ops and collectives.

`WorkCounter` counts the FLOPs and bytes of a node. `Hardware` estimates the seconds of this work:

1. The arithmetic takes FLOPs / speed. The first cost class of the op with a known speed gives the speed.
2. Without a measured `value_bandwidth`, memory accesses and arithmetic overlap. The longer one counts.
3. With a measured `value_bandwidth`, the time is a sum: weights and states, then activations, then arithmetic.
   Exception: matrix products load activations during arithmetic, and the longer one counts.
4. The launches are added.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from ...backends.capabilities import OTHER_OPS
from ...graph import Graph
from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.node import Node, Value
from ...graph.validation import REAL, TEXT, integer_between, mapping_of, validate_constructor
from ...ops import op_of

STORED_LEAF_OPS = ("weight", "state")
"""Ops of the leaves that a run reads from memory, because other reads have filled the caches since the last run."""
RECURRENT_OPS = "recurrent"
"""Cost class of ops without weights that process one token after another through a state.

`OTHER_OPS` is the cost class of all ops without weights.
"""
PRODUCTS = "products"
"""Cost class of ops with a weight of two or more dimensions, such as matrix products."""
MANY_ROWS = "many rows"
"""Cost class of matrix products of more than `MAX_FEW_ROWS` activation rows."""
MAX_FEW_ROWS = 8
"""The largest number of activation rows that a product reads its weights once for, as for a single row."""
FULL_UNPACK_ROWS = 64
"""Activation rows from which the full time to unpack weights counts. One row is multiplied with packed weights."""


BUILT_IN_SOURCE = "built in"
"""The `Hardware.source` of speeds that are a guess."""


class WorkEstimate(NamedTuple):
    """The amount of work in one execution of a node: FLOPs and bytes, with the classes that select a speed.

    Attributes:
        flops: Floating-point operations.
        nbytes: Bytes read and written.
        stored_bytes: Bytes of weights and states among `nbytes`.
        cost_classes: Keys of the speed, most specific first: the op, then classes of ops, then the dtype of the
            weights. The first key with a known speed counts.
        activation_rows: Activation rows that each weight is multiplied with; 0 without weights.
    """

    flops: float
    nbytes: float
    stored_bytes: float = 0.0
    cost_classes: tuple[str, ...] = ()
    activation_rows: float = 0.0


SPEEDS_OF_CLASSES = mapping_of(TEXT, REAL, "a mapping from cost classes to numbers")
"""The argument kind of `Hardware.op_flops`, `Hardware.op_bandwidth` and `Hardware.op_launch`."""


@validate_constructor(
    PlanError,
    **dict.fromkeys(("flops", "bandwidth", "launch", "link_bandwidth", "link_latency"), REAL),
    **dict.fromkeys(("across_bandwidth", "across_latency", "plain_flops", "alone_flops", "alone_bandwidth"), REAL),
    **dict.fromkeys(("value_bandwidth", "recurrent_flops", "unpack_bandwidth"), REAL),
    **dict.fromkeys(("op_flops", "op_bandwidth", "op_launch"), SPEEDS_OF_CLASSES),
    machine=integer_between(0),
    source=TEXT,
)
@dataclass(frozen=True, slots=True)
class Hardware:
    """The speeds of one kind of device and of the links between devices.

    Attributes:
        flops: FLOP/s of ops with weights.
        bandwidth: Bytes/s at which weights and states are read from memory.
        launch: Seconds to launch one kernel.
        link_bandwidth, link_latency: Bytes/s and seconds of the link between two devices of one machine.
        machine: The number of devices of each machine; they are numbered machine by machine. 0 for a single machine.
        across_bandwidth, across_latency: Bytes/s and seconds of the link between two machines.
        plain_flops: FLOP/s of ops without weights, such as attention; 0 if it equals `flops`.
        alone_flops, alone_bandwidth: Factors of speed while the other devices are idle. Devices may share processors
            and memory.
        value_bandwidth: Bytes/s of activations between ops, which are mostly in caches; known from calibration only. 0
            if unknown: then arithmetic and memory accesses overlap at the peak speeds, as in data sheets.
        recurrent_flops: FLOP/s for tokens that depend on each other through a state; 0 if it equals `plain_flops`.
        unpack_bandwidth: Bytes/s at which weights are unpacked in matrix products of `FULL_UNPACK_ROWS` rows or more,
            if unpacking is slower than reading; 0 if it is not slower.
        op_flops, op_bandwidth: Known speeds by cost class, such as an op.
        op_launch: Known seconds of a kernel launch, by cost class.
        source: The origin of the speeds: ``built in`` (a guess), ``data sheet``, or ``calibrated`` with the date.
    """

    flops: float = 100e9
    bandwidth: float = 20e9
    launch: float = 2e-6
    link_bandwidth: float = 10e9
    link_latency: float = 5e-6
    machine: int = 0
    across_bandwidth: float = 1.25e9
    across_latency: float = 50e-6
    plain_flops: float = 0.0
    alone_flops: float = 1.0
    alone_bandwidth: float = 1.0
    value_bandwidth: float = 0.0
    recurrent_flops: float = 0.0
    unpack_bandwidth: float = 0.0
    op_flops: Mapping[str, float] = field(default_factory=dict)
    op_bandwidth: Mapping[str, float] = field(default_factory=dict)
    op_launch: Mapping[str, float] = field(default_factory=dict)
    source: str = BUILT_IN_SOURCE

    def __post_init__(self) -> None:
        for name in self.__slots__:  # plans are written as JSON, which has no numbers of NumPy
            value = getattr(self, name)
            if hasattr(value, "item"):
                object.__setattr__(self, name, value.item())
            elif isinstance(value, Mapping) and any(hasattr(speed, "item") for speed in value.values()):
                plain = {op: speed.item() if hasattr(speed, "item") else speed for op, speed in value.items()}
                object.__setattr__(self, name, plain)

    @property
    def solo_hardware(self) -> Hardware:
        """The speeds of one device while all others are idle, so that shared processors and memory serve it alone."""
        if self.alone_flops == self.alone_bandwidth == 1.0:
            return self
        return replace(
            self,
            flops=self.flops * self.alone_flops,
            bandwidth=self.bandwidth * self.alone_bandwidth,
            plain_flops=self.plain_flops * self.alone_flops,
            value_bandwidth=self.value_bandwidth * self.alone_flops,
            recurrent_flops=self.recurrent_flops * self.alone_flops,
            unpack_bandwidth=self.unpack_bandwidth * self.alone_flops,
            alone_flops=1.0,
            alone_bandwidth=1.0,
            op_flops={op: speed * self.alone_flops for op, speed in self.op_flops.items()},
            op_bandwidth={op: speed * self.alone_bandwidth for op, speed in self.op_bandwidth.items()},
        )

    @property
    def is_valid(self) -> bool:
        """Whether every figure is finite and in its range.

        Speeds are positive. Latencies, launch seconds and optional speeds are at least 0. `alone_flops` and
        `alone_bandwidth` are at least 1, because a device is never slower while the others are idle.
        """
        speeds = (self.flops, self.bandwidth, self.link_bandwidth, self.across_bandwidth)
        of_ops = (*self.op_flops.values(), *self.op_bandwidth.values())
        others = (
            self.launch,
            self.link_latency,
            self.across_latency,
            self.plain_flops,
            self.value_bandwidth,
            self.recurrent_flops,
            self.unpack_bandwidth,
            *self.op_launch.values(),
        )
        known = all(1 <= times < math.inf for times in (self.alone_flops, self.alone_bandwidth))
        return known and all(0 < s < math.inf for s in (*speeds, *of_ops)) and all(0 <= t < math.inf for t in others)

    def count_devices_per_machine(self, devices: Iterable[int]) -> list[int]:
        """Return how many of the given devices each machine has. Machines without any of them are left out."""
        return list(Counter(device // self.machine if self.machine else 0 for device in devices).values())

    def count_machines(self, devices: Iterable[int]) -> int:
        """Return the number of machines that have at least one of the given devices."""
        return len(self.count_devices_per_machine(devices))

    def compute_seconds(
        self,
        flops: float,
        nbytes: float,
        stored_bytes: float = 0.0,
        cost_classes: Sequence[str] = (),
        activation_rows: float = 0.0,
        *,
        launches: float = 1.0,
    ) -> float:
        """Estimate the seconds of one execution of a node, kernel launches included.

        All parameters except `launches` are the fields of `WorkEstimate`.

        Args:
            flops: Floating-point operations.
            nbytes: Bytes read and written.
            stored_bytes: Bytes of weights and states among `nbytes`.
            cost_classes: The op and its classes, most specific first. The first class with a known speed counts.
            activation_rows: Activation rows that each weight is multiplied with. From 1 to `FULL_UNPACK_ROWS` rows, a
                linearly rising share of the unpack time counts.
            launches: Kernel launches; below 1 if several nodes share a launch.
        """
        speed, bandwidth, launch = self.flops, self.bandwidth, self.launch
        if OTHER_OPS in cost_classes:
            speed = self.plain_flops or speed
        if RECURRENT_OPS in cost_classes:
            speed = self.recurrent_flops or speed
        for op in reversed(cost_classes):
            speed, bandwidth = self.op_flops.get(op, speed), self.op_bandwidth.get(op, bandwidth)
            launch = self.op_launch.get(op, launch)
        if self.value_bandwidth:
            values, weights = (nbytes - stored_bytes) / self.value_bandwidth, stored_bytes / bandwidth
            if self.unpack_bandwidth and activation_rows > 1:
                longer = max(0.0, stored_bytes / self.unpack_bandwidth - weights)
                weights += min(1.0, (activation_rows - 1) / (FULL_UNPACK_ROWS - 1)) * longer
            arithmetic = flops / speed
            rest = max(arithmetic, values) if activation_rows else arithmetic + values
            return weights + rest + launches * launch
        return max(flops / speed, nbytes / bandwidth) + launches * launch

    def collective_seconds(self, nbytes: float, machine_count: int = 1) -> float:
        """Estimate the seconds of a collective in which each device sends `nbytes` bytes.

        Over several machines the latency counts ceil(log2(machine count)) times: each round of messages doubles the
        number of machines that have a value.
        """
        if machine_count > 1:
            return math.ceil(math.log2(machine_count)) * self.across_latency + nbytes / self.across_bandwidth
        return self.link_latency + nbytes / self.link_bandwidth

    def estimate_fastest_collective_cost(self, op: str, nbytes: float, devices: Sequence[int]) -> CollectiveCost:
        """Estimate bytes and seconds of a collective over a value, with the fastest algorithm for its devices.

        An all-reduce over several machines with equal device counts has two algorithms. The first one is a single
        all-reduce over all devices. The second one has three steps:

        1. Reduce-scatter within each machine, so that each device has one slice of the sum.
        2. All-reduce each slice across machines. Each device has its own link to the other machines.
        3. All-gather the slices within each machine.

        For 8 MB on two machines of four devices, steps 1 and 3 send 6 MB each; step 2 sends 2 MB. Other collectives,
        and machines with different device counts or with one device, have the first algorithm only.

        Args:
            op: The op of the collective.
            nbytes: Bytes of the whole value.
            devices: Numbers of the devices that take part.
        """
        each = self.count_devices_per_machine(devices)
        machines, count = len(each), len(devices)
        moved = compute_collective_bytes_sent(op, nbytes, count)
        if machines == 1:
            return CollectiveCost(moved, self.collective_seconds(moved) if count > 1 else 0.0, 0.0, machines)
        flat = CollectiveCost(moved, 0.0, self.collective_seconds(moved, machines), machines)
        if op != "all_reduce" or len(set(each)) > 1 or each[0] == 1:
            return flat
        within = compute_collective_bytes_sent("all_gather", nbytes, each[0])
        slice_bytes = compute_collective_bytes_sent(op, nbytes / each[0], machines)
        inside, across = 2 * self.collective_seconds(within), self.collective_seconds(slice_bytes, machines)
        return min(
            flat, CollectiveCost(2 * within + slice_bytes, inside, across, machines), key=lambda cost: cost.seconds
        )


DEFAULT_HARDWARE = Hardware()
"""The guessed speeds of virtual CPU devices on one machine. ``hocket calibrate`` replaces them by measured speeds."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The predicted bytes and seconds of one collective.

    Attributes:
        bytes_sent: Bytes that each device sends.
        inside_machine_seconds: Seconds of the steps within machines.
        across_machines_seconds: Seconds of the steps between machines.
        machine_count: The number of machines with at least one device of the collective.
    """

    bytes_sent: float
    inside_machine_seconds: float
    across_machines_seconds: float
    machine_count: int

    @property
    def seconds(self) -> float:
        """The seconds of the whole collective, within machines and between machines."""
        return self.inside_machine_seconds + self.across_machines_seconds


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted seconds of one run of a plan, split into compute and communication.

    Attributes:
        compute: Seconds in kernels, on the slowest device.
        collectives: Seconds in collectives.
        collective_count: The number of collectives.
        overlapped_seconds: Seconds in which kernels and collectives overlap.
    """

    compute: float
    collectives: float
    collective_count: int
    overlapped_seconds: float = 0.0

    @property
    def total(self) -> float:
        """The predicted seconds of the run; time in which kernels and collectives overlap counts once."""
        return self.compute + self.collectives - self.overlapped_seconds


def compute_collective_bytes_sent(op: str, nbytes: float, device_count: int) -> float:
    """Return the bytes that each device sends in a collective over a value of `nbytes` bytes.

    In a ring of N devices, each device sends (N-1)/N of the bytes for an all-gather or a reduce-scatter. An all-reduce
    consists of both, and sends twice the bytes. A message sends all bytes.
    """
    if op in ("send", "receive"):
        return nbytes
    return (2 if op == "all_reduce" else 1) * (device_count - 1) / device_count * nbytes


class WorkCounter:
    """Computes the FLOPs and the bytes of nodes; the results for equal nodes of repeated layers are cached."""

    def __init__(self) -> None:
        self._work_by_key: dict[object, WorkEstimate] = {}

    def count_work(self, node: Node) -> WorkEstimate:
        """Return the FLOPs and the bytes of one execution of a node."""
        homes = tuple(find_memory_owner_node(source).op for source in node.inputs)
        read = tuple(None if s is None else s.spec for s in node.src)
        declared = op_of(node)
        key = (homes, node.op, read, node.specs, tuple(node.attrs.items()), declared.active_fraction(node))
        if (work := self._work_by_key.get(key)) is None:
            nbytes = float(declared.count_bytes(node))
            stored_bytes = sum(
                s.spec.nbytes for s, home in zip(node.inputs, homes, strict=True) if home in STORED_LEAF_OPS
            )
            weights = [s.spec for s, home in zip(node.inputs, homes, strict=True) if home == "weight"]
            flops = float(declared.count_flops(node))
            rows = flops / 2 / max(1, sum(spec.size for spec in weights)) if weights else 0.0
            matrices = [str(spec.dtype) for spec in weights if len(spec.shape) > 1]
            if matrices:
                cost_classes = (node.op, *[MANY_ROWS] * (rows > MAX_FEW_ROWS), matrices[0], PRODUCTS)
            else:
                plain = not weights
                cost_classes = (node.op, *[RECURRENT_OPS] * (plain and bool(declared.sequential)), *[OTHER_OPS] * plain)
            work = self._work_by_key[key] = WorkEstimate(flops, nbytes, min(nbytes, stored_bytes), cost_classes, rows)
        return work


def compute_read_bytes_by_leaf(graph: Graph) -> dict[Node, float]:
    """Return the bytes that one run of `graph` reads from each weight and each state.

    A lookup table counts only with the rows that are looked up. A mixture of experts counts only with the experts
    that tokens use.
    """
    counts, read = WorkCounter(), defaultdict[Node, float](float)
    for node in graph.nodes:
        sizes = [
            (home, source.spec.nbytes)
            for source in node.inputs
            if (home := find_memory_owner_node(source)).op in STORED_LEAF_OPS
        ]
        if sizes and (stored_bytes := counts.count_work(node).stored_bytes):
            whole = sum(size for _, size in sizes)
            for home, size in sizes:
                read[home] += stored_bytes * size / whole
    return read


def find_memory_owner_node(value: Value) -> Node:
    """Return the node that owns the memory of `value`, found through views and in-place updates.

    Example: new rows are written into a KV cache in place. The state of the cache owns the updated cache. A value in
    memory of its own is owned by the node that computes it.
    """
    while not value.node.is_leaf:
        declared, node = op_of(value.node), value.node
        places = declared.inplace_pairs(node.attrs) if declared.overwritten_entries(node.attrs) else ()
        names = [name for at, name in places if at == value.index]
        named = dict(zip(declared.operand_names, node.src, strict=False)) if names else {}
        before = node.src[0] if declared.is_view else next(map(named.get, names), None)
        if before is None:
            break
        value = before
    return value.node
