"""A stand-in for ``cupy.cuda.nccl``: communicators of threads, which wait for each other for ever, as NCCL does.

Within a group no call waits for another. Calls run in their stream, or in a graph. Calls that do not match (another
size, another type, an absent device) never end until the communicator is aborted.

The sum of all devices has an order that differs between ranges of elements, as around a ring, and is the same on all
devices.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from itertools import count

import numpy as np

from hocket.backends.cupy import cuda_driver

from ..waits import wait_until
from .fake_cupy import Stream, install_fake_cupy

TYPES = {0: np.int8, 2: np.int32, 4: np.int64, 7: np.float32, 9: np.uint16}
BFLOAT16 = 9


class NcclError(RuntimeError):
    pass


class World:
    """The shared state of the communicators with one identity."""

    def __init__(self, size):
        self.size, self.changed = size, threading.Condition()
        self.devices = []
        self.messages = defaultdict(deque)
        self.sums = {}


class FakeNccl:
    """The module; `device` tells which one is current."""

    available = True
    NCCL_SUM, NCCL_INT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_BFLOAT16 = 0, 0, 2, 4, 7, BFLOAT16
    NcclError = NcclError

    def __init__(self, device):
        self.device, self.worlds, self.numbers, self.group = device, {}, count(1), threading.local()
        self.lock, self.early, self.communicators, self.calls = threading.Lock(), [], [], []

    def get_version(self):
        return 22703

    def get_unique_id(self):
        with self.lock:
            number = next(self.numbers)
        return (-1, number, *([7] * 126))

    def NcclCommunicator(self, size, identity, rank):
        assert len(identity) == 128
        with self.lock:
            world = self.worlds.setdefault(identity, World(size))
        with world.changed:
            if self.device() in world.devices:
                raise NcclError("invalid usage: duplicate GPU")
            world.devices.append(self.device())
            world.changed.notify_all()
            world.changed.wait_for(lambda: len(world.devices) == size)
        return Communicator(self, world, rank)

    def groupStart(self):
        assert not getattr(self.group, "calls", None)
        self.group.calls = []

    def groupEnd(self):
        calls, self.group.calls = self.group.calls, None
        if calls:
            self.launch(calls)

    def launch(self, calls):
        """One kernel for a group of calls of one communicator."""
        ((communicator, pointer),) = {(c, s) for c, s, *_ in calls}
        stream = Stream.known[pointer]
        if stream.is_capturing:
            stream.capture.use(communicator)
        with self.lock:
            self.calls += [what[0] for _, _, *what in calls]
        stream.put(lambda: communicator.run([what for _, _, *what in calls]))


class Communicator:
    """One device's end."""

    def __init__(self, nccl, world, rank):
        self.nccl, self.world, self.rank = nccl, world, rank
        self.graphs, self.is_over, self.number = 0, False, 0
        nccl.communicators.append(self)

    def _call(self, stream, *what):
        assert not self.is_over
        if getattr(self.nccl.group, "calls", None) is None:
            self.nccl.launch([(self, stream, *what)])
        else:
            self.nccl.group.calls.append((self, stream, *what))

    def allReduce(self, source, target, n, dtype, op, stream):
        assert op == self.nccl.NCCL_SUM
        self._call(stream, "sum", source, target, n, dtype)

    def send(self, source, n, dtype, peer, stream):
        self._call(stream, "send", source, n, dtype, peer)

    def recv(self, target, n, dtype, peer, stream):
        self._call(stream, "receive", target, n, dtype, peer)

    def check_async_error(self):
        assert not self.is_over

    def abort(self):
        """Everything ends at once; this call only when no graph has the communicator."""
        with self.world.changed:
            self.is_over = True
            for (source, _), offers in self.world.messages.items():  # its memory is freed soon
                if source == self.rank:
                    offers.clear()
            for came in self.world.sums.values():
                if "done" not in came:
                    came.pop(self.rank, None)
            self.world.changed.notify_all()
        wait_until(lambda: not self.graphs)

    def __del__(self):
        if self.graphs:
            self.nccl.early.append(self.rank)

    # --------------------------------------------------------------------------------------------- in the stream

    def run(self, calls):
        """All sends are offered before anything waits."""
        offers = []
        for kind, at, n, dtype, *peer in calls:
            if kind == "send":
                offers.append((at, n, dtype, threading.Event()))
                with self.world.changed:
                    self.world.messages[self.rank, peer[0]].append(offers[-1])
                    self.world.changed.notify_all()
        for kind, *what in calls:
            if kind == "receive":
                self._receive(*what)
            elif kind == "sum":
                self._sum(*what)
        for *_, taken in offers:
            self._await(taken.is_set)

    def _await(self, condition):
        """Whether it came to be; not once the communicator is aborted."""
        with self.world.changed:
            self.world.changed.wait_for(lambda: self.is_over or condition())
        return condition()

    def _receive(self, at, n, dtype, peer):
        with self.world.changed:
            box = self.world.messages[peer, self.rank]
            if not self._await(lambda: box and box[0][1:3] == (n, dtype)):
                return
            source, *_, taken = box.popleft()
            ctypes.memmove(at, source, n * np.dtype(TYPES[dtype]).itemsize)
            taken.set()
            self.world.changed.notify_all()

    def _sum(self, source, target, n, dtype):
        world, self.number = self.world, self.number + 1
        with world.changed:
            came = world.sums.setdefault(self.number, {})
            came[self.rank] = (source, target, n, dtype)
            complete = len(came) == world.size and len({what[2:] for what in came.values()}) == 1
            if complete:
                _add_up([came[rank] for rank in range(world.size)])
                came["done"] = True
                world.changed.notify_all()
        self._await(lambda: "done" in came)


def _add_up(parts):
    """Around the ring, each part of the sum from another device on."""
    n, dtype = parts[0][2:]
    arrays = [[_at(address, n, dtype) for address in part[:2]] for part in parts]
    total = np.empty(n, TYPES[dtype])
    for first, block in enumerate(np.array_split(np.arange(n), len(parts))):
        order = [arrays[(first + k) % len(parts)][0][block] for k in range(len(parts))]
        total[block] = order[0]
        for x in order[1:]:
            total[block] = _plus(total[block], x, dtype)
    for _, target in arrays:
        target[...] = total


def _plus(x, y, dtype):
    if dtype != BFLOAT16:
        return x + y
    wide = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (x, y)]
    bits = (wide[0] + wide[1]).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _at(address, n, dtype):
    kind = np.dtype(TYPES[dtype])
    return np.frombuffer((ctypes.c_char * max(n * kind.itemsize, 1)).from_address(address), kind, n)


def backend_of(monkeypatch, are_peers, nccl=FakeNccl):
    cupy = install_fake_cupy(monkeypatch, nccl=nccl, are_peers=are_peers)
    return cuda_driver.CudaBackend(), cupy.cuda.nccl
