"""Programs of a few collectives on several devices at once, without a plan."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from hocket.backends.base import BufferSpec, Instruction, Program, Tensor, contiguous_strides
from hocket.backends.cupy.collectives import program_collectives as meetings
from hocket.backends.cupy.collectives.transport import HOST_TRANSPORT
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.kernels.collective import SIGNAL_WORD_COUNT, read_progress_mark
from hocket.backends.host.progress_board import view_run_numbers
from hocket.distributed.thread_group import ThreadGroup
from hocket.graph.dtypes import DType

from ..waits import WAIT_SECONDS, wait_until

DTYPES = {np.dtype(d.storage): d for d in (DType.F32, DType.I8, DType.I16, DType.I32, DType.I64)}


@dataclass(frozen=True)
class DeviceStep:
    """One device's side of a collective: its operand (None if absent) and the shape of its result.

    `inplace`: the result is at the address of the operand. `over`: it is at the address of the previous result.
    `strides` of the operand in elements, dense if None.
    """

    op: str
    source: np.ndarray | None
    shape: tuple[int, ...]
    attrs: dict = field(default_factory=dict)
    inplace: bool = False
    over: bool = False
    strides: tuple[int, ...] | None = None
    shift: int = 0


TICKETS, APART = (16, 272, 273), 16
"""The arrival words that devices write for others: the first word of each kind, and the distance of two words."""


class CollectiveRig:
    """A group of device threads that run collectives; `parts[rank]` are the steps of a device in order.

    Each step starts from its own source. `devices` are the first device numbers by default. With more devices,
    `group_size`, they are one group of several, and their runs may follow each other. A run that takes longer than
    `limit` seconds is ended: where a fault was planted, that may be less than an hour.
    """

    def __init__(self, backend, parts, limit=WAIT_SECONDS, *, wire=DType.F32, devices=None, group_size=0):
        self.backend, self.parts, self.limit = backend, parts, limit
        devices = devices or [backend.device(rank) for rank in range(len(parts))]
        self.group = ThreadGroup(len(parts), limit, devices=devices, wire=wire)
        self.buffers, self.replays, self.tensors = [], [], []
        for rank, own in enumerate(parts):
            program, tensors = _program(own)
            buffers = [backend.alloc(program.buffers[0].nbytes, devices[rank])]
            self.buffers.append(buffers)
            self.tensors.append(tensors)
            member = self.group.member(rank)
            member.plan_device_count = group_size or member.plan_device_count
            self.replays.append(backend.compile(program, buffers, devices[rank], member))

    def run(self, ahead=lambda rank: None, *, times=1):
        """Return the results of all devices, or raise the first error.

        `ahead` runs before a device begins. Each device runs `times` times without waiting for others to end.
        """
        return self._run(range(len(self.parts)), ahead, times)

    def run_without(self, *absent, reporting_rank=0, patience=0.3, begin=False, ahead=lambda rank: None):
        """Run as `run` does, while the `absent` devices take part in no collective.

        Args:
            absent: Ranks that do not come.
            reporting_rank: The device that stops waiting after `patience` seconds. It comes when all other present
                devices wait, so that it misses none of them, however late they are.
            patience: Seconds.
            begin: Whether absent devices run, and `ahead` keeps them from the collective.
            ahead: Called with the rank of an absent device.
        """
        present = [rank for rank in range(len(self.parts)) if rank not in absent]
        seen = {rank: self._ticket(rank, reporting_rank) for rank in present}
        last = view_run_numbers(self.group.board).max()

        def in_turn(rank):
            ahead(rank)
            if rank == reporting_rank:
                others = [other for other in present if other != reporting_rank]
                wait_until(
                    lambda: self.group.failure or all(self._has_come(d, reporting_rank, seen[d], last) for d in others)
                )

        self._be_patient(reporting_rank, patience)
        try:
            return self._run(range(len(self.parts)) if begin else present, in_turn)
        finally:
            self._be_patient(reporting_rank, self.limit)

    def _be_patient(self, rank, seconds):
        """Launches that are recorded know how long they wait."""
        replay = self.replays[rank]
        self.group.timeout = replay._comm.timeout = seconds
        group = replay._collectives._group
        if group is not None and replay._calls:
            replay._collectives._group = replace(group, timeout=seconds)
            replay._record_launches()

    def _has_come(self, rank, reporting_rank, seen, last):
        mark = read_progress_mark(self.group.board, rank)
        return self._ticket(rank, reporting_rank) != seen or (mark is not None and mark.run > last)

    def _ticket(self, rank, reporting_rank):
        """Return the words that the device wrote last into memory of `reporting_rank`, or zeros."""
        address = getattr(self.replays[reporting_rank]._collectives, "_signals", None)
        words = (ctypes.c_int64 * SIGNAL_WORD_COUNT).from_address(address) if address else [0] * SIGNAL_WORD_COUNT
        return [words[first + APART * rank] for first in TICKETS]

    def _run(self, present, ahead, times=1):
        failures = []

        def one(rank):
            for part, (source, _) in zip(self.parts[rank], self.tensors[rank], strict=True):
                if part.source is not None:
                    self.backend.view(self.buffers[rank][0], source)[...] = part.source
            try:
                ahead(rank)
                for _ in range(times):
                    self.replays[rank]()
            except Exception as why:  # kept for the test to judge; the others must not wait for this device
                failures.append((rank, why))
                self.group.abort(str(why))

        end = threading.Timer(self.limit, self.group.abort, ["this run takes too long"])
        end.start()
        with ThreadPoolExecutor(len(self.parts)) as pool:
            list(pool.map(one, present))
        end.cancel()
        self.group.clear_messages_and_failures()
        self.failures = failures
        if failures:
            raise failures[0][1]
        return [
            [np.array(self.backend.view(self.buffers[r][0], target)) for _, target in self.tensors[r]]
            for r in range(len(self.parts))
        ]


def _program(parts):
    """The program, and for each part where its operand and its result lie."""
    top, tensors, instructions = 0, [], []

    def place(shape, dtype, strides=None, shift=0):
        nonlocal top
        strides = contiguous_strides(shape) if strides is None else strides
        tensor = Tensor(0, top + shift, tuple(shape), tuple(strides), dtype)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        top += -(-(reach * dtype.storage.itemsize + shift) // 64) * 64
        return tensor

    for number, part in enumerate(parts):
        dtype = DTYPES[part.source.dtype] if part.source is not None else part.attrs["dtype"]
        source = None if part.source is None else place(part.source.shape, dtype, part.strides, part.shift)
        target = source if part.inplace else tensors[-1][0] if part.over else place(part.shape, dtype)
        attrs = {"sequence": 10 + number, **part.attrs}
        instructions.append(Instruction(part.op, (source,) if source else (), (target,), attrs, None, f"n{number}"))
        tensors.append((source, target))
    arena = BufferSpec("arena", "arena", top)
    return Program((arena,), tuple(instructions), {}, {}), tensors


def make_partial_sums(n, shape, dtype=np.float32, seed=0):
    """One array a device; sums of floats depend on their order."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype) for _ in range(n)]
    return [rng.integers(-100, 100, shape).astype(dtype) for _ in range(n)]


def all_reduce_case(n, shape, dtype=np.float32, **options):
    return [[DeviceStep("all_reduce", x, shape, **options)] for x in make_partial_sums(n, shape, dtype)]


def all_gather_case(n):
    """Device 1 has nothing."""
    runs = (((0, 2), (5, 1)), (), ((2, 3),), ((6, 2),))[:n]
    own = [sum(length for _, length in device) for device in runs]
    attrs = {"axis": 1, "runs": runs}
    whole = max(o + length for device in runs for o, length in device)
    return [[DeviceStep("all_gather", make_partial_sums(1, (3, k), seed=k)[0], (3, whole), attrs)] for k in own]


def reduce_scatter_case(n, dtype=np.float32):
    runs = (((0, 2), (5, 1)), (), ((2, 3),), ((6, 2),))[:n]
    whole = max(o + length for device in runs for o, length in device)
    return [
        [
            DeviceStep(
                "reduce_scatter",
                x,
                (3, sum(length for _, length in runs[d])),
                {"axis": 1, "runs": runs, "rank": d},
                strides=(1, 4),
            )
        ]
        for d, x in enumerate(make_partial_sums(n, (3, whole), dtype))
    ]


def all_to_all_case(n):
    old = (((0, 2), (4, 1)), (), ((2, 2),), ((5, 3),))[:n]
    new = (((0, 1),), ((1, 3),), ((4, 1),), ((5, 0),))[:n]
    attrs = {"old_axis": 1, "old_runs": old, "axis": 0, "runs": new}
    width = max(o + k for device in old for o, k in device)
    own = [make_partial_sums(1, (5, sum(k for _, k in old[d])), seed=d)[0] for d in range(n)]
    return [[DeviceStep("all_to_all", own[d], (new[d][0][1], width), {**attrs, "rank": d})] for d in range(n)]


def send_receive_case(n):
    """Each sends to the next, which is not in step with it."""
    x = make_partial_sums(n, (4, 3), np.int32)
    parts = []
    for d in range(n):
        own = []
        if d + 1 < n:
            own.append(DeviceStep("send", x[d], (4, 3), {"to": d + 1, "sequence": 2 * d}))
        if d > 0:
            attrs = {"shape": (4, 3), "dtype": DType.I32, "source": d - 1, "sequence": 2 * d - 2}
            own.append(DeviceStep("receive", None, (4, 3), attrs))
        parts.append(sorted(own, key=lambda p: p.attrs["sequence"]))
    return parts


CASES = {
    "a few": lambda n: all_reduce_case(n, (3, 5)),
    "one": lambda n: all_reduce_case(n, (1,)),
    "none": lambda n: all_reduce_case(n, (0,)),
    "in place": lambda n: all_reduce_case(n, (2, 1027), inplace=True),
    "many": lambda n: all_reduce_case(n, (129, 257)),
    "many in place": lambda n: all_reduce_case(n, (64, 513), inplace=True),
    "bytes": lambda n: all_reduce_case(n, (1001,), np.int8),
    "long": lambda n: all_reduce_case(n, (77,), np.int64),
    "all_gather": all_gather_case,
    "reduce_scatter": reduce_scatter_case,
    "all_to_all": all_to_all_case,
    "send": send_receive_case,
}


def through_the_host(monkeypatch, parts):
    with monkeypatch.context() as patched:
        patched.setattr(meetings, "choose_group_transport", lambda comm, driver: HOST_TRANSPORT)
        rig = CollectiveRig(EmulatedBackend(), parts)
    return rig.run()


def same(first, second):
    assert [[x.tobytes() for x in own] for own in first] == [[x.tobytes() for x in own] for own in second]
