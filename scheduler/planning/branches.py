"""The placement of independent branches of a graph on different devices, such as towers, ensembles or experts.

Nodes that gain nothing from separate devices form clusters. List scheduling places the clusters on devices (HEFT:
Topcuoglu et al., 2002). The cluster with the longest path to the end comes first. It goes to the device that finishes
it first, messages included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops.registry import find_view_base
from ..costs.hardware import STORED_LEAF_OPS, Hardware
from ..sharding.layer_split import Placement, order_nodes_by_preceding_message_count
from .clusters import Cluster, find_clusters, link_clusters_and_merge_short_ones, split_cluster

MIN_BRANCH_SAVING = 0.03
"""The least share of the time that branches on several devices must save; predictions are not more exact."""
MAX_PARTS_PER_DEVICE = 4
"""The most parts into which the share of a device may be divided; a part takes at least as many latencies."""
MAX_PREDICTED_NODES = 100_000
"""The largest number of nodes that the search for a better placement predicts."""


@dataclass(frozen=True)
class BranchSchedule:
    """The decision which device computes each node, and in which order, with the predicted seconds of a run.

    - `placement` maps each node to its device.
    - `order` has the nodes in the order of execution.
    - `seconds` is the predicted time of a run.
    - `leaf_bytes` has the bytes of weights and states on each device.
    """

    placement: Placement
    order: Sequence[Node]
    seconds: float
    leaf_bytes: Sequence[float]


class BranchScheduler:
    """Places independent branches of a graph, such as encoder and decoder parts, on different devices to save time.

    Args:
        graph: The graph to schedule.
        device_count: The number of devices.
        hardware: The speeds of devices and links.
        node_seconds: The seconds of each node on one device.
        device_memory_bytes: The memory of the smallest device in bytes.
    """

    def __init__(
        self,
        graph: Graph,
        device_count: int,
        hardware: Hardware,
        node_seconds: Mapping[Node, float],
        device_memory_bytes: float,
    ) -> None:
        self.graph, self.device_count, self.hardware, self.node_seconds, self.device_memory_bytes = (
            graph,
            device_count,
            hardware,
            node_seconds,
            device_memory_bytes,
        )
        self.compute_nodes = [node for node in graph.nodes if not node.is_leaf]
        self.total_seconds = sum(node_seconds.values())
        self._message_seconds: dict[tuple[int, bool], float] = {}

    def compute_time_lower_bound(self, device_count: int) -> float:
        """Compute a lower bound of the seconds of a run on `device_count` devices, for any placement of the nodes.

        The bound is the maximum of two times: the critical path, and the work of all nodes divided by `device_count`.
        """
        return max(self._critical_path_seconds, self.total_seconds / device_count)

    @cached_property
    def _critical_path_seconds(self) -> float:
        """The seconds of the critical path, which is the longest path through the graph."""
        ends: dict[Node, float] = {}
        for node in self.compute_nodes:
            start = max((ends.get(source.node, 0.0) for source in node.inputs), default=0.0)
            ends[node] = start + self.node_seconds.get(node, 0.0)
        return max(ends.values(), default=0.0)

    def compute_lower_bound_with_unsplit_clusters(self, device_count: int) -> float | None:
        """Compute a lower bound of the seconds of a run on `device_count` devices if each cluster stays on one device.

        The result is None if the bound does not save the share `MIN_BRANCH_SAVING` of the time of one device.
        """
        ends: dict[Node, float] = {}
        for cluster in self._clusters:
            start = max((ends[source] for source in cluster.operand_reader_counts), default=0.0)
            ends[cluster.nodes[-1]] = start + cluster.seconds
        bound = max(self.total_seconds / device_count, *ends.values())
        return bound if bound <= self.total_seconds * (1 - MIN_BRANCH_SAVING) else None

    @cached_property
    def can_save_time_by_stage_overlap(self) -> bool:
        """Whether pipeline stages on different branches save at least the share `MIN_BRANCH_SAVING` by overlap in time.

        One stage on each device is assumed. With fewer stages the saving is smaller.
        """
        return self.estimate_time_share_with_overlap(self.device_count) <= 1 - MIN_BRANCH_SAVING

    def estimate_time_share_with_overlap(self, stage_count: int) -> float:
        """Estimate the time of a run with overlapping pipeline stages, as a share of the time without overlap.

        A stage waits only for its operands and for its device. Messages take no time.

        Args:
            stage_count: The number of stages; each has consecutive nodes of about equal total time.
        """
        stage: dict[Node, int] = {}
        spent = 0.0
        for node in self.compute_nodes:
            stage[node] = (
                min(int(spent / self.total_seconds * stage_count), stage_count - 1) if self.total_seconds else 0
            )
            spent += self.node_seconds.get(node, 0.0)
        ends: dict[Node, float] = {}
        free = [0.0] * stage_count
        for node in order_nodes_by_preceding_message_count(self.graph, stage):
            start = max((ends.get(source.node, 0.0) for source in node.inputs), default=0.0)
            free[stage[node]] = ends[node] = max(start, free[stage[node]]) + self.node_seconds.get(node, 0.0)
        return max(free) / self.total_seconds if self.total_seconds else 1.0

    def find_time_saving_schedules(self, device_count: int) -> list[BranchSchedule]:
        """Find schedules on `device_count` devices that save at least the share `MIN_BRANCH_SAVING` of the time.

        Whole clusters are scheduled, and also clusters that are split into parts.
        """
        grain = max(
            self.total_seconds / device_count / MAX_PARTS_PER_DEVICE,
            MAX_PARTS_PER_DEVICE * self.hardware.collective_seconds(0.0),
        )
        whole = [Cluster([*cluster.nodes], cluster.seconds, {}) for cluster in self._clusters]
        parts = [part for cluster in self._clusters for part in split_cluster(cluster, self.node_seconds, grain)]
        schedules = (
            schedule
            for division in (whole, parts)
            for schedule in self._yield_improving_cluster_schedules(division, device_count)
        )
        return [schedule for schedule in schedules if schedule.seconds <= self.total_seconds * (1 - MIN_BRANCH_SAVING)]

    @cached_property
    def _clusters(self) -> Sequence[Cluster]:
        """The clusters of the graph (nodes that stay on one device), each after the clusters that it reads."""
        return find_clusters(
            self.compute_nodes,
            self.node_seconds,
            self.estimate_result_message_seconds,
            self.hardware.collective_seconds(0.0),
        )

    def _yield_improving_cluster_schedules(
        self, division: Sequence[Cluster], device_count: int
    ) -> Iterator[BranchSchedule]:
        """Yield ever faster schedules: first list scheduling of the clusters, then moves of single clusters.

        A cluster is a set of nodes that gain nothing from separate devices.

        Args:
            division: The clusters to schedule.
            device_count: The number of devices.
        """
        clusters, owner = link_clusters_and_merge_short_ones(division, self.hardware.collective_seconds(0.0))
        until_end: dict[Cluster, float] = defaultdict(float)
        for cluster in reversed(clusters):
            until_end[cluster] += cluster.seconds
            for source in cluster.operand_reader_counts:
                read = owner[source]
                until_end[read] = max(
                    until_end[read], until_end[cluster] + self.estimate_result_message_seconds(source)
                )
        scheduler = _ClusterListScheduler(self, device_count)
        for cluster in sorted(clusters, key=until_end.__getitem__, reverse=True):
            scheduler.place_cluster_where_it_starts_first(cluster)
        order = [
            node for cluster in sorted(clusters, key=scheduler.start_by_cluster.__getitem__) for node in cluster.nodes
        ]
        yield from self._build_schedules_by_time_and_messages(scheduler.placement, order)
        if (better := self._improve_placement(clusters, scheduler.placement, order, device_count)) is not None:
            yield from self._build_schedules_by_time_and_messages(better, order)

    def _build_schedules_by_time_and_messages(
        self, placement: Placement, order: Sequence[Node]
    ) -> Iterator[BranchSchedule]:
        """Build two schedules of a placement, which differ in the order of the nodes.

        1. Order the nodes by their predicted end times.
        2. Order the nodes by the number of messages on a path that leads to them.

        Programs send and receive messages in this order, so either order may be faster.
        """
        ends = self._predict_end_times(placement, order)
        leaf_bytes = [*self._count_leaf_bytes_by_device(placement).values()]
        for each in (
            sorted(order, key=ends.__getitem__),
            order_nodes_by_preceding_message_count(self.graph, placement),
        ):
            yield BranchSchedule(placement, each, max(ends.values()), leaf_bytes)

    def _improve_placement(
        self, clusters: Sequence[Cluster], placement: Placement, order: Sequence[Node], device_count: int
    ) -> Placement | None:
        """Improve a placement by moves of single clusters while they make a run faster; None without improvement.

        Clusters that use a state are not moved. The number of predicted node times is limited by `MAX_PREDICTED_NODES`.
        """
        first = best = max(self._predict_end_times(placement, order).values())
        better, left = dict(placement), MAX_PREDICTED_NODES // len(order)
        movable = [cluster for cluster in clusters if self.states_used_by_node.keys().isdisjoint(cluster.nodes)]
        before = math.inf
        while best < before and left > 0:
            before = best
            for cluster, device in product(movable, range(device_count)):
                if device != better[cluster.nodes[0]] and left > 0:
                    moved, left = {**better, **dict.fromkeys(cluster.nodes, device)}, left - 1
                    seconds = max(self._predict_end_times(moved, order).values())
                    if seconds < best and self._count_leaf_bytes_by_device(moved)[device] <= self.device_memory_bytes:
                        best, better = seconds, moved
        return better if best < first else None

    def _count_leaf_bytes_by_device(self, placement: Placement) -> dict[int, int]:
        """Count the bytes of weights and states on each device that has work."""
        leaves: dict[int, set[Value]] = defaultdict(set)
        for node, device in placement.items():
            leaves[device] |= find_weights_and_states_read_by(node)
        return {device: sum_leaf_bytes(own) for device, own in leaves.items()}

    def _predict_end_times(self, placement: Placement, order: Sequence[Node]) -> dict[Node, float]:
        """Predict the end time of each node in a run of all devices, including waits for messages.

        Each device executes its nodes in the given order. A device waits for each value that another device computes. A
        sender does not wait.

        Args:
            placement: The device of each node.
            order: The nodes in the order of execution.
        """
        ends: dict[Node, float] = {}
        free: dict[int, float] = defaultdict(float)
        arrivals: dict[tuple[Value, int], float] = {}
        for node in order:
            device = placement[node]
            start = free[device]
            for value, at in self._operands_with_device_deciding_nodes[node]:
                if (sender := placement[at]) != device:
                    if (value, device) not in arrivals:
                        sent = self.estimate_message_seconds(value.spec.nbytes, sender, device)
                        arrivals[value, device] = ends.get(value.node, 0.0) + sent
                    start = max(start, arrivals[value, device])
            free[device] = ends[node] = start + self.node_seconds.get(node, 0.0)
        return ends

    @cached_property
    def states_used_by_node(self) -> dict[Node, set[Value]]:
        """The states that each node reads or replaces."""
        states: dict[Node, set[Value]] = defaultdict(set)
        for node in self.compute_nodes:
            if found := {leaf for leaf in find_weights_and_states_read_by(node) if leaf.node.op == "state"}:
                states[node] |= found
        for state, new in self.graph.updates.items():
            states[new.node].add(state)
        return states

    @cached_property
    def _operands_with_device_deciding_nodes(self) -> dict[Node, list[tuple[Value, Node]]]:
        """For each node its operands except weights, each with the node that decides on which device the operand is.

        This is the node that computes a value or updates a state. For a state without an update, it is its first
        reader.
        """
        users, at = self.graph.users(), {node: node for node in self.compute_nodes}
        for state in self.graph.states:
            new = self.graph.updates.get(state)
            readers = [new.node] if new is not None and not new.node.is_leaf else users[state]
            at.update((state.node, reader) for reader in readers[:1])
        return {node: [(s, at[s.node]) for s in node.inputs if s.node in at] for node in self.compute_nodes}

    def estimate_result_message_seconds(self, node: Node, sender: int = 0, receiver: int = 1) -> float:
        """Estimate the seconds of a message with all results of a node, between two devices."""
        return self.estimate_message_seconds(sum(spec.nbytes for spec in node.specs), sender, receiver)

    def estimate_message_seconds(self, nbytes: int, sender: int, receiver: int) -> float:
        """Estimate the seconds of a message of `nbytes` bytes between two devices."""
        machine = self.hardware.machine
        key = nbytes, machine > 0 and sender // machine != receiver // machine
        if key not in self._message_seconds:
            self._message_seconds[key] = self.hardware.estimate_fastest_collective_cost(
                "send", nbytes, (sender, receiver)
            ).seconds
        return self._message_seconds[key]


class _ClusterListScheduler:
    """A list scheduler: it places clusters on devices one by one, each after the clusters that it reads.

    A cluster is a set of nodes that gain nothing from separate devices.
    """

    def __init__(self, branches: BranchScheduler, device_count: int) -> None:
        self.branches = branches
        self.placement: dict[Node, int] = {}
        self.start_by_cluster: dict[Cluster, float] = {}
        self.end_by_node: dict[Node, float] = {}
        self.device_free_times = [0.0] * device_count
        self.leaves_by_device: list[set[Value]] = [set() for _ in range(device_count)]
        self.leaf_bytes_by_device = [0] * device_count
        self.device_by_state: dict[Value, int] = {}

    def place_cluster_where_it_starts_first(self, cluster: Cluster) -> None:
        """Place a cluster on the device that can start it first.

        Only devices with enough memory are considered, if there are any. If an earlier cluster uses the same state, the
        cluster goes to the device of this state.
        """
        leaves = {leaf for node in cluster.nodes for leaf in find_weights_and_states_read_by(node)}
        states = {state for node in cluster.nodes for state in self.branches.states_used_by_node.get(node, ())}
        fixed = sorted({self.device_by_state[state] for state in states if state in self.device_by_state})[:1]
        fresh = {d: sum_leaf_bytes(leaves - self.leaves_by_device[d]) for d in fixed or self._list_candidate_devices()}
        fitting = [d for d in fresh if self.leaf_bytes_by_device[d] + fresh[d] <= self.branches.device_memory_bytes]
        starts = {d: self._compute_start_time(cluster, d) for d in (fitting or fresh)}
        device = min(starts, key=lambda d: (starts[d], d))
        self.start_by_cluster[cluster] = starts[device]
        self.device_free_times[device] = end = starts[device] + cluster.seconds
        self.placement.update(dict.fromkeys(cluster.nodes, device))
        self.end_by_node.update(dict.fromkeys(cluster.nodes, end))
        self.leaves_by_device[device] |= leaves
        self.leaf_bytes_by_device[device] += fresh[device]
        for state in states:
            self.device_by_state.setdefault(state, device)

    def _list_candidate_devices(self) -> list[int]:
        """List the devices that may get the next cluster: devices in use, and the first idle device of each machine.

        Other idle devices of a machine would be equal to its first one.
        """
        machine, seen = self.branches.hardware.machine or len(self.device_free_times), set[int]()
        devices = []
        for device, free in enumerate(self.device_free_times):
            if free or self.leaves_by_device[device] or device // machine not in seen:
                devices.append(device)
            if not free and not self.leaves_by_device[device]:
                seen.add(device // machine)
        return devices

    def _compute_start_time(self, cluster: Cluster, device: int) -> float:
        """Compute the time at which a device can start a cluster: it is idle and has received all operands."""
        start = self.device_free_times[device]
        for source in cluster.operand_reader_counts:
            arrival, sender = self.end_by_node[source], self.placement[source]
            if sender != device:
                arrival += self.branches.estimate_result_message_seconds(source, sender, device)
            start = max(start, arrival)
        return start


def find_weights_and_states_read_by(node: Node) -> set[Value]:
    """Find the weights and states that a node reads, directly or through views."""
    leaves = (find_view_base(source).node for source in node.inputs)
    return {leaf.results[0] for leaf in leaves if leaf.op in STORED_LEAF_OPS}


def sum_leaf_bytes(leaves: Iterable[Value]) -> int:
    """Sum the bytes of weights and states."""
    return sum(leaf.spec.nbytes for leaf in leaves)
