"""Detects races in the access log of a run: conflicting accesses to the same bytes without a happens-before order.

Two accesses conflict if at least one is a store. The CPU of the emulator keeps nearly all stores in order, so a signal
without a fence gives right sums there and wrong sums on a device. The detector therefore looks for missing order, not
for wrong sums. The accesses of one thread are ordered. Other accesses are ordered by these synchronisations:

* A barrier orders all accesses of the threads of a block. A warp barrier orders the accesses of its lanes. Shuffles
  and votes are no barriers.
* Launches of one stream follow each other. An event orders launches of the two streams of a device.
  This holds for threads that have waited for the earlier launches, because a launch may start early.
* A proxy fence of the storing thread and then a barrier order stores to shared memory before a warpgroup product. The
  product loads its operands until a thread waits for it.
* An mbarrier and the barrier of a cluster order accesses before an arrival with accesses after the wait. An mbarrier
  also orders the bulk copies that it counts. A bulk copy may load and store until that wait.
* A release of a word orders the accesses before it with accesses after an acquire of the stored value.
* The host writes the buffers of a device before a run and reads them after it.

Example: two devices run one block each. On device 0, thread 5 stores x and reaches a barrier, then thread 0 releases
the word w. On device 1, thread 3 acquires w and reaches a barrier, then thread 7 loads x.

1. The first barrier ends phase 0 of its block. All threads there know the accesses up to it, which is written
   ``(0, 0): (1, 0)``: queue 0, block 0 has completed launch 1 up to phase 0.
2. Thread 0 releases this clock, thread 3 acquires it, and the second barrier passes it to thread 7.
3. So the store of x (launch 1, phase 0, thread 5) happens before the load.

Without the first barrier, thread 0 releases only its own accesses: ``(0, 0, 0): (1, 0, 0)`` is queue 0, block 0,
thread 0 in launch 1, phase 0, up to its first release. Without release or acquire, thread 3 receives no clock. In both
cases thread 7 does not know of the store, and the detector reports a race in any order of execution.

The algorithm is in disorder.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .access_log import DeviceMemorySpan, LoggedLaunch
from .compile_host import load_race_detector
from .source_lines import find_source_lines

HOST_LAUNCH = -1
"""The launch index of accesses by the host."""
MAX_PAIRS = 4096
"""The maximum number of access pairs that one run reports."""
ACCESS_DTYPE = np.dtype([(name, np.int64) for name in ("ran", "code", "is_store", "device")])
"""The layout of an access in disorder.cpp."""


def list_races_between_launches(log: Sequence[LoggedLaunch], memory: Sequence[DeviceMemorySpan]) -> list[str]:
    """List the data races between the launches of one run, and the kernels that omit the wait for earlier launches.

    A race is a pair of accesses to the same bytes that no synchronisation orders. The result has one line of text for
    each pair of source lines. Every kernel must wait for the launches before it, because it may begin before they end.
    The result holds for every run that takes the same branches.

    Args:
        log: The launches of all devices with their accesses.
        memory: The memory of all devices.
    """
    if not any(len(ran.events) for ran in log):
        return []
    turns = np.concatenate([ran.events["turn"] for ran in log])
    by_turn = np.argsort(turns, kind="stable")
    events = np.concatenate([ran.events for ran in log])[by_turn]
    numbers = np.repeat(np.arange(len(log), dtype=np.int64), [len(ran.events) for ran in log])[by_turn]
    launches = np.array([(ran.device, ran.stream, ran.position, ran.predecessors_end) for ran in log], np.int64)
    spans = np.array([(m.low, m.high, m.device, m.is_buffer) for m in memory], np.int64)
    pairs, waited = np.zeros((MAX_PAIRS, 2), ACCESS_DTYPE), np.zeros(len(log), np.int8)
    find = load_race_detector().find_disorder
    find.restype = ctypes.c_int64
    pair_count = find(
        *(_pointer_to(events), _pointer_to(numbers), ctypes.c_int64(len(events))),
        *(_pointer_to(launches), ctypes.c_int64(len(launches)), _pointer_to(spans), ctypes.c_int64(len(spans))),
        *(
            ctypes.c_int64(_compute_access_granularity(events)),
            _pointer_to(pairs),
            ctypes.c_int64(MAX_PAIRS),
            _pointer_to(waited),
        ),
    )
    lines = _describe_access_kinds_and_lines(log, pairs[: min(pair_count, MAX_PAIRS)].ravel())
    races = {f"{a}, in no order with {b}" for a, b in zip(lines[::2], lines[1::2], strict=True)}
    return sorted(
        races
        | {f"{ran.kernel} never waits for the launches before" for ran, has in zip(log, waited, strict=True) if not has}
    )


def _pointer_to(values: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    """Return a C pointer to the data of an array, which must outlive the pointer."""
    return ctypes.c_void_p(values.ctypes.data)


def _compute_access_granularity(events: npt.NDArray[np.void]) -> int:
    """Compute the bytes of the memory cells that the race detector tracks.

    The size is a power of two, at most 16. It is the largest size that divides the begin and the end of every access.
    """
    accesses = events[events["bytes"] > 0]
    reach = int(np.bitwise_or.reduce(accesses["at"] | accesses["bytes"], initial=np.uint64(16)))
    return reach & -reach


def _describe_access_kinds_and_lines(log: Sequence[LoggedLaunch], accesses: npt.NDArray[np.void]) -> list[str]:
    """Describe each access as a phrase with its kind and its source line."""
    lines: dict[tuple[int, int], str] = {}
    for number in {int(ran) for ran in accesses["ran"]} - {HOST_LAUNCH}:
        codes = sorted({int(code) for code in accesses["code"][accesses["ran"] == number]})
        lines |= {(number, c): line for c, line in zip(codes, find_source_lines(log[number].code, codes), strict=True)}
    descriptions = (
        f"the host in the memory of device {device}" if ran == HOST_LAUNCH else f"device {device} at {lines[ran, code]}"
        for ran, code, _, device in accesses.tolist()
    )
    kinds = ("store" if is_store else "load" for is_store in accesses["is_store"])
    return [f"a {kind} of {description}" for kind, description in zip(kinds, descriptions, strict=True)]
