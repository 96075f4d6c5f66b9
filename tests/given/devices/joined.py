"""Communicators of CUDA devices: each call is a program of one collective, which the last device to come runs on all of
them."""

from __future__ import annotations

import threading
from dataclasses import replace

from .devices_meet import DTYPES, CollectiveRig, DeviceStep


class JoinedDevices:
    """A group of the devices with these numbers; `group_size` counts all devices of a larger group."""

    def __init__(self, backend, numbers, group_size=0):
        self.backend, self.group_size = backend, group_size
        self.devices = [backend.device(number) for number in numbers]
        self._lock, self._begun = threading.Lock(), {}

    def member(self, rank):
        return JoinedDevice(self, rank)

    def result(self, members, me, part, runs=()):
        """Return the result of the member `me`; `runs` are its own ranges of a sharded value."""
        with self._lock:
            collective = self._begun.setdefault(members, _Collective(self, members))
        collective.submissions[me] = part, runs
        collective.barrier.wait()
        return collective.results[members.index(me)][0]

    def run(self, collective):
        """The collective for which all have come."""
        del self._begun[collective.members]
        operands = [collective.submissions[member] for member in collective.members]
        all_runs = tuple(runs for _, runs in operands)
        parts = [[replace(p, attrs={**p.attrs, "runs": all_runs}) if "axis" in p.attrs else p] for p, _ in operands]
        devices = [self.devices[member] for member in collective.members]
        rig = CollectiveRig(self.backend, parts, devices=devices, group_size=self.group_size)
        collective.results = rig.run()
        are_dense = all(p.source is None or p.source.flags.c_contiguous for p, _ in operands)
        is_launched = all(len(replay._calls) == 1 for replay in rig.replays)
        assert is_launched or not are_dense, "dense operands need no memory of the host"


class _Collective:
    def __init__(self, place, members):
        self.members, self.submissions, self.results = members, {}, []
        self.barrier = threading.Barrier(len(members), lambda: place.run(self))


class JoinedDevice:
    """One of them; letters go between two that are a group of their own.  A library sums in an order of its own."""

    def __init__(self, place, rank):
        self.keeps_order = isinstance(place.backend.driver.find_collective_library(place.devices), str)
        self.place, self.rank, self.devices, self.size = place, rank, place.devices, len(place.devices)

    def _run_collective(self, into, part, runs=()):
        into[...] = self.place.result(tuple(range(self.size)), self.rank, part, runs)

    def all_reduce(self, source, into, scratch, sequence):
        self._run_collective(into, _part("all_reduce", source, into, {"sequence": sequence}, inplace=source is into))

    def all_gather(self, source, into, parts, sequence):
        axis, runs = _find_axis_and_runs([target for target, _ in parts[self.rank]])
        self._run_collective(into, _part("all_gather", source, into, {"sequence": sequence, "axis": axis}), runs)

    def reduce_scatter(self, source, into, parts, sequence):
        axis, runs = _find_axis_and_runs([origin for _, origin in parts])
        attrs = {"sequence": sequence, "axis": axis, "rank": self.rank}
        self._run_collective(into, _part("reduce_scatter", source, into, attrs), runs)

    def send(self, source, to, sequence):
        pair = tuple(sorted((self.rank, to)))
        self.place.result(pair, self.rank, _part("send", source, source, {"sequence": sequence, "to": pair.index(to)}))

    def receive(self, into, source, sequence):
        pair = tuple(sorted((self.rank, source)))
        attrs = {"source": pair.index(source), "shape": into.shape, "dtype": DTYPES[into.dtype]}
        into[...] = self.place.result(pair, self.rank, _part("receive", None, into, {"sequence": sequence, **attrs}))


def _part(op, source, into, attrs, *, inplace=False):
    strides = None if source is None else tuple(stride // source.itemsize for stride in source.strides)
    return DeviceStep(op, source, into.shape, attrs, inplace, strides=strides)


def _find_axis_and_runs(indices):
    """Return the last axis that is indexed by runs."""
    ranges = [index[-1] for index in indices]
    return len(indices[0]) - 1, tuple((r.start, r.stop - r.start) for r in ranges if r.start < r.stop)
