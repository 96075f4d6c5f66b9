"""Programs of a few collectives on several devices at once, without a plan."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from hocket.backends.base import BufferSpec, Instruction, Program, Tensor, contiguous_strides
from hocket.graph.dtypes import DType
from hocket.scheduler.running.comm import Meeting

DTYPES = {np.dtype(d.storage): d for d in (DType.F32, DType.I8, DType.I16, DType.I32, DType.I64)}


@dataclass(frozen=True)
class Part:
    """One device's side of a collective: its operand (None for none), the shape of its result.

    `inplace`: the result lies where the operand does; `strides` of the operand in elements, dense if None.
    """

    op: str
    source: np.ndarray | None
    shape: tuple[int, ...]
    attrs: dict = field(default_factory=dict)
    inplace: bool = False
    strides: tuple[int, ...] | None = None
    shift: int = 0


class Rig:
    """`parts[rank]` are what a device does in order; each starts from its own source.  `devices` are those of these
    numbers, unless given."""

    def __init__(self, backend, parts, timeout=5.0, *, wire=DType.F32, devices=None):
        self.backend, self.parts = backend, parts
        devices = devices or [backend.device(rank) for rank in range(len(parts))]
        self.meeting = Meeting(len(parts), timeout, devices=devices, wire=wire)
        self.buffers, self.replays, self.tensors = [], [], []
        for rank, own in enumerate(parts):
            program, tensors = _program(str(devices[rank]), own)
            buffers = [backend.alloc(program.buffers[0].nbytes, devices[rank])]
            self.buffers.append(buffers)
            self.tensors.append(tensors)
            self.replays.append(backend.compile(program, buffers, devices[rank], self.meeting.member(rank)))

    def run(self, ahead=lambda rank: None, absent=()):
        """Results of all devices; `ahead` runs before a device begins, which `absent` ones never do.

        Raises what went wrong first.
        """
        failures = []

        def one(rank):
            if rank in absent:
                return
            for part, (source, _) in zip(self.parts[rank], self.tensors[rank], strict=True):
                if part.source is not None:
                    self.backend.view(self.buffers[rank][0], source)[...] = part.source
            try:
                ahead(rank)
                self.replays[rank]()
            except Exception as why:  # kept for the test to judge; the others must not wait for this device
                failures.append((rank, why))
                self.meeting.abort(str(why))

        with ThreadPoolExecutor(len(self.parts)) as pool:
            list(pool.map(one, range(len(self.parts))))
        self.meeting.clear()
        self.failures = failures
        if failures:
            raise failures[0][1]
        return [
            [np.array(self.backend.view(self.buffers[r][0], target)) for _, target in self.tensors[r]]
            for r in range(len(self.parts))
        ]


def _program(device, parts):
    """The program, and for each part where its operand and its result lie."""
    top, tensors, instructions = 0, [], []

    def place(shape, dtype, strides=None, shift=0):
        nonlocal top
        strides = contiguous_strides(shape) if strides is None else strides
        made = Tensor(0, top + shift, tuple(shape), tuple(strides), dtype)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        top += -(-(reach * dtype.storage.itemsize + shift) // 64) * 64
        return made

    for number, part in enumerate(parts):
        dtype = DTYPES[part.source.dtype] if part.source is not None else part.attrs["dtype"]
        source = None if part.source is None else place(part.source.shape, dtype, part.strides, part.shift)
        target = source if part.inplace else place(part.shape, dtype)
        attrs = {"sequence": 10 + number, **part.attrs}
        instructions.append(Instruction(part.op, (source,) if source else (), (target,), attrs, None, f"n{number}"))
        tensors.append((source, target))
    arena = BufferSpec("arena", "arena", top)
    return Program(device, (arena,), tuple(instructions), {}, {}), tensors


def summands(n, shape, dtype=np.float32, seed=0):
    """One array a device; sums of floats depend on their order."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype) for _ in range(n)]
    return [rng.integers(-100, 100, shape).astype(dtype) for _ in range(n)]
