"""Clusters of nodes that gain nothing from separate devices.

Other clusters read only one node of a cluster, its exit. So no path leaves a cluster and returns to it, and a device
can execute one cluster after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...graph.node import Node

NodeSeconds = Callable[[Node], float]
"""Return the seconds of a node, or of a message with its results."""


@dataclass(eq=False, slots=True)
class Cluster:
    """A set of nodes that stay on one device, with the sum of their predicted run times in seconds.

    Separate devices would not compute these nodes faster.

    `operand_reader_counts` maps each operand node, which is in another cluster, to the number of its readers in this
    cluster.
    """

    nodes: list[Node]
    seconds: float
    operand_reader_counts: dict[Node, int]


def find_clusters(
    nodes: Sequence[Node], node_seconds: Mapping[Node, float], message_seconds: NodeSeconds, latency: float
) -> list[Cluster]:
    """Find the clusters of a graph: sets of nodes that gain nothing from separate devices.

    A cluster is merged with its reader if no other cluster reads it. The exception is a reader with another operand
    that could be computed at the same time, if this saves more than `latency`. In the result each cluster comes after
    the clusters that it reads.

    Args:
        nodes: Nodes that compute, in the order of a graph.
        node_seconds: The seconds of each node on one device.
        message_seconds: Returns the seconds of a message with the results of a node.
        latency: The seconds of the shortest message.
    """
    operands = {node: dict.fromkeys(s.node for s in node.inputs if not s.node.is_leaf) for node in nodes}
    readers = Counter(source for read in operands.values() for source in read)
    by_exit: dict[Node, Cluster] = {}

    def can_join(exit_node: Node, reads: Mapping[Node, int]) -> bool:
        """Whether the cluster of an exit joins its only reader; `reads` are the operands of this reader."""
        one = by_exit[exit_node]
        if one.seconds <= latency:
            return True
        for node in reads:
            other = by_exit[node]
            if node is exit_node or node in one.operand_reader_counts or other.seconds <= latency:
                continue
            saved = (
                min(one.seconds - message_seconds(node), other.seconds),
                min(other.seconds - message_seconds(exit_node), one.seconds),
            )
            if max(saved) > latency:
                return False
        return True

    for node, read in operands.items():
        own = Cluster([node], node_seconds.get(node, 0.0), dict.fromkeys(read, 1))
        while (
            found := next(
                (
                    n
                    for n, k in own.operand_reader_counts.items()
                    if k == readers[n] and can_join(n, own.operand_reader_counts)
                ),
                None,
            )
        ) is not None:
            one = by_exit.pop(found)
            del own.operand_reader_counts[found]
            for source, count in one.operand_reader_counts.items():
                own.operand_reader_counts[source] = own.operand_reader_counts.get(source, 0) + count
            own.seconds += one.seconds
            small, large = sorted((own.nodes, one.nodes), key=len)
            large += small
            own.nodes = large
        by_exit[node] = own
    place = {node: at for at, node in enumerate(operands)}
    for cluster in by_exit.values():
        cluster.nodes.sort(key=place.__getitem__)
    return [*by_exit.values()]


def split_cluster(cluster: Cluster, node_seconds: Mapping[Node, float], min_seconds: float) -> Iterator[Cluster]:
    """Split a cluster into consecutive parts of at least `min_seconds`; only the last part may be shorter.

    A part ends only where a single value passes to the next part. The operands of the parts are not set.
    """
    last_reader = {source.node: at for at, node in enumerate(cluster.nodes) for source in node.inputs}
    unread: set[Node] = set()
    nodes: list[Node] = []
    spent = 0.0
    for at, node in enumerate(cluster.nodes):
        unread.add(node)
        unread -= {source.node for source in node.inputs if last_reader[source.node] == at}
        nodes.append(node)
        spent += node_seconds.get(node, 0.0)
        if spent >= min_seconds and len(unread) == 1:
            yield Cluster(nodes, spent, {})
            nodes, spent = [], 0.0
    if nodes:
        yield Cluster(nodes, spent, {})


def link_clusters_and_merge_short_ones(
    clusters: Sequence[Cluster], latency: float
) -> tuple[list[Cluster], dict[Node, Cluster]]:
    """Record for each cluster which nodes of other clusters it reads, and merge very short clusters into others.

    A cluster is a set of nodes for one device. One that is shorter than `latency` seconds is merged into the cluster
    that it reads, if that is only one.

    Returns:
        The clusters, and a mapping of each node to its cluster.
    """
    owner: dict[Node, Cluster] = {}
    linked: list[Cluster] = []
    for cluster in clusters:
        owner.update(dict.fromkeys(cluster.nodes, cluster))
        sources = (s.node for node in cluster.nodes for s in node.inputs if not s.node.is_leaf)
        reads = Counter(source for source in sources if owner[source] is not cluster)
        read = {owner[source] for source in reads}
        if len(read) == 1 and cluster.seconds < latency:
            (base,) = read
            base.nodes += cluster.nodes
            base.seconds += cluster.seconds
            owner.update(dict.fromkeys(cluster.nodes, base))
        else:
            linked.append(Cluster(cluster.nodes, cluster.seconds, dict(reads)))
            owner.update(dict.fromkeys(cluster.nodes, linked[-1]))
    return linked, owner
