"""A CUDA graph of the stand-in for CuPy, with launches in any order that its edges permit."""

from __future__ import annotations

import random


class Graph:
    """A stand-in for ``cupy.cuda.Graph``, which runs in any order that its edges permit.

    A node is a pair: the call and its predecessors. `used` are the communicators of NCCL in it, `streams` are the
    streams of its capture.
    """

    def __init__(self):
        self.nodes, self.after, self.streams, self.used, self.launches = [], [], [], set(), 0

    def add(self, run, behind):
        for node in behind:
            self.after[node].append(len(self.nodes))
        self.nodes.append((run, behind))
        self.after.append([])
        return frozenset({len(self.nodes) - 1})

    def seen_from(self, behind):
        """All nodes that come before one behind these."""
        seen, stack = set(), [*behind]
        while stack:
            if (node := stack.pop()) not in seen:
                seen.add(node)
                stack += self.nodes[node][1]
        return seen

    def use(self, communicator):
        if communicator not in self.used:
            self.used.add(communicator)
            communicator.graphs += 1

    def launch(self, stream):
        assert not stream.is_capturing
        dice, waits = random.Random(self.launches), [len(behind) for _, behind in self.nodes]
        self.launches += 1
        ready = [node for node, many in enumerate(waits) if not many]
        while ready:
            node = ready.pop(dice.randrange(len(ready)))
            stream.put(self.nodes[node][0])
            for other in self.after[node]:
                waits[other] -= 1
                ready += [other] * (not waits[other])

    def __del__(self):
        for communicator in self.used:
            communicator.graphs -= 1
