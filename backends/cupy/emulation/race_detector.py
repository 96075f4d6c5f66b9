"""What a run leaves to chance: two accesses of the same bytes, one of them a store, that nothing puts in an order.

The processor that emulates devices keeps nearly all stores in order, so that a signal without a fence gives the right
sums here, and wrong ones on a device.  What is looked for is therefore not a wrong sum but an order that is missing.
One thread's accesses are in order.  So are, before and behind it,

* what the threads of a block did, at a barrier; what the lanes of a warp did, at theirs (no shuffle or vote is one);
* launches of one stream, which follow each other, and those of the other stream of the device that an event puts before
  them, for a thread that has waited for the earlier ones: any launch may begin while the one before it runs;
* what a thread stored to shared memory and then showed to products, for a product that begins behind a barrier: of
  other stores a product knows nothing, and it loads until it is waited for;
* what a thread did or knew that arrives at an mbarrier or at the barrier of a cluster, and the copies in bulk that the
  mbarrier counts, for the thread that has waited for it; a copy loads and stores at any time from its issue to that;
* what a thread that releases a word did or knew, for the thread that acquires what was written;
* what the host writes before a run into the buffers of a device, and reads behind it.

An example, of two devices that each run one block.  Thread 5 of device 0 stores x and comes to a barrier, thread 0
releases the word w behind it; on device 1, thread 3 acquires w, comes to a barrier, and thread 7 loads x.  The first
barrier ends phase 0 of its block: everybody there knows all of it, which is written ``(0, 0): (1, 0)`` (queue 0, block
0: launch 1 up to phase 0).  Thread 0 releases this, thread 3 learns it, the second barrier tells thread 7, and so the
store of x (launch 1, phase 0, thread 5) is before the load.  Without the first barrier thread 0 releases only what it
did itself, ``(0, 0, 0): (1, 0, 0)`` (queue 0, block 0, thread 0: launch 1, phase 0, up to its first release); without
release or acquire thread 3 learns nothing.  Either way, thread 7 does not know of the store, in whatever order the two
came in this run.

disorder.cpp does so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .access_log import LoggedLaunch, MemorySpan
from .compile_host import load_race_detector
from .source_lines import find_lines

HOST_LAUNCH = -1
MAX_PAIRS = 4096
"""Pairs that are reported of one run."""
ACCESS_DTYPE = np.dtype([(name, np.int64) for name in ("ran", "code", "is_store", "device")])
"""As disorder.cpp has it."""


def list_races(log: Sequence[LoggedLaunch], memory: Sequence[MemorySpan]) -> list[str]:
    """Pairs of accesses of one run that are in no order, a line for each two places of the code.

    `memory` is that of the devices.  What is in order here is in order in every run that takes the same branches.
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
    many = find(
        *(_pointer_to(events), _pointer_to(numbers), ctypes.c_int64(len(events))),
        *(_pointer_to(launches), ctypes.c_int64(len(launches)), _pointer_to(spans), ctypes.c_int64(len(spans))),
        *(
            ctypes.c_int64(_compute_unit_bytes(events)),
            _pointer_to(pairs),
            ctypes.c_int64(MAX_PAIRS),
            _pointer_to(waited),
        ),
    )
    lines = _describe_accesses(log, pairs[: min(many, MAX_PAIRS)].ravel())
    found = {f"{a}, in no order with {b}" for a, b in zip(lines[::2], lines[1::2], strict=True)}
    return sorted(
        found
        | {f"{ran.kernel} never waits for the launches before" for ran, has in zip(log, waited, strict=True) if not has}
    )


def _pointer_to(values: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def _compute_unit_bytes(events: npt.NDArray[np.void]) -> int:
    """Bytes; all accesses begin and end with one."""
    accesses = events[events["bytes"] > 0]
    reach = int(np.bitwise_or.reduce(accesses["at"] | accesses["bytes"], initial=np.uint64(16)))
    return reach & -reach


def _describe_accesses(log: Sequence[LoggedLaunch], accesses: npt.NDArray[np.void]) -> list[str]:
    """What each access is, and where in the sources."""
    places: dict[tuple[int, int], str] = {}
    for number in {int(ran) for ran in accesses["ran"]} - {HOST_LAUNCH}:
        codes = sorted({int(code) for code in accesses["code"][accesses["ran"] == number]})
        places |= {(number, c): line for c, line in zip(codes, find_lines(log[number].code, codes), strict=True)}
    wheres = (
        f"the host in the memory of device {device}"
        if ran == HOST_LAUNCH
        else f"device {device} at {places[ran, code]}"
        for ran, code, _, device in accesses.tolist()
    )
    kinds = ("store" if is_store else "load" for is_store in accesses["is_store"])
    return [f"a {kind} of {where}" for kind, where in zip(kinds, wheres, strict=True)]
