"""The backend for CUDA devices, real or emulated: it binds programs to launches once and replays them."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import StepError
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops import op_of
from ...ops.collectives import COLLECTIVES
from ...ops.quantisation import dequantise, encode_array
from ...ops.registry import find_storage_kind
from ..abilities import Called, Timed
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor, contiguous_strides, run_calls
from ..beside import beside
from ..calls import Call
from ..flow import Flow
from ..liveness import readers_of
from ..meeting import KERNELS as MEETINGS
from ..operands import NoKernelError, Operand
from .binding.launches import Launches
from .binding.packing import PACKINGS, pack, padded
from .binding.programs import Met, bound_parts, foretold, gathered
from .binding.trial import Known, tried
from .collectives.hang_watchdog import DeviceLostError, Memberships
from .collectives.program_collectives import ProgramCollectives
from .collectives.transport import choose_transport
from .device.driver import Beside, Driver, Launch, LaunchError, Single, Step, one_by_one
from .device.limits import MOST, Limits
from .kernels.attention import attention
from .kernels.products import tiled
from .kernels.products.packed import expanded

HALVES = (DType.F16, DType.BF16)
PRODUCTS = frozenset(("mul_mat", "mul_mat_id"))
"""Ops that round activations: with packed weights to int8 per 32 columns, else for many tokens to bfloat16 terms."""
FIXED = ("weight", "constant")
"""Kinds of leaves that `load` fills."""
FAULT = Tensor(0, 0, (2,), (1,), DType.I64)
"""The device record of a fault: the 1-based number of the fault message (0: no fault), and the illegal number."""
NumberedCall = tuple[int, Callable[[], object]]
"""A function that runs one or more instructions, and the number of the first of them."""


@lru_cache(maxsize=1 << 14)  # a plan repeats the question for every layer and device
def _stored(spec: Spec, kind: str, is_exact: bool) -> Spec:
    """Infer the spec in device memory. Weights are float32 in an exact backend, which rounds nothing."""
    matrix = kind in FIXED and len(spec.shape) >= 2 and not is_exact
    if matrix and spec.dtype in PACKINGS:
        return padded(spec)
    if spec.dtype.is_integer or (spec.dtype in HALVES and (matrix or (kind == "state" and len(spec.shape) == 2))):
        return spec
    return Spec(spec.shape, DType.F32)


@lru_cache(maxsize=1 << 14)
def _known(shape: tuple[int, ...], base: Spec, kind: str, is_base: bool, is_exact: bool) -> Known:
    """Return an operand without an address, with this shape, that is a view of a leaf or value of spec `base`."""
    stored = _stored(base, kind, is_exact)
    own = kind in ("weight", "state", "constant")
    return Known(Spec(shape, stored.dtype), base if own else None, stored if own else None, is_base)


class DriverBackend:
    """A backend that runs programs on the devices of a driver.

    Values are float32 or integers. Weight matrices, and states that are rows of 16-bit numbers, keep dtypes that
    kernels read. An exact backend (`is_exact`) stores weights as float32, too.
    """

    name: str
    is_exact = False

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.name = driver.kind
        self._memberships = Memberships()
        self._limits: frozenset[Limits] = frozenset()

    def with_threads(self, threads: int) -> Self:
        return self

    def exactly(self) -> Self:
        exact = copy.copy(self)
        exact.is_exact = True
        return exact

    def devices(self) -> Sequence[Device]:
        return self.driver.devices()

    def device(self, index: int) -> Device:
        return self.driver.device(index)

    def supports(self, node: Node, on: Device) -> Support:
        if node.op in COLLECTIVES:
            return Support(True)
        try:
            self._tried(node, self.driver.limits(on))
        except NoKernelError as why:
            return Support(False, str(why))
        return Support(True)

    def scratch(self, node: Node) -> int:
        """Return scratch bytes that are enough on each present device. Devices may choose different kernels."""
        if node.op in COLLECTIVES:
            return 0
        if not self._limits:
            self._limits = frozenset(map(self.driver.limits, self.driver.devices()))
        rooms = []
        for limits in self._limits:
            with suppress(NoKernelError):  # the node may run on other devices
                rooms.append(self._tried(node, limits))
        return max(rooms) if rooms else self._tried(node, MOST)

    def reads_strided(self, node: Node, operand: int) -> bool:
        if node.op in COLLECTIVES:
            return True
        try:
            self._tried(node, MOST, operand)
        except NoKernelError:
            return False
        return True

    def _tried(self, node: Node, limits: Limits, strided: int | None = None) -> int:
        """Bind a node at placeholder addresses and return its scratch bytes, or raise `NoKernelError`."""
        src, attrs = tuple(map(self._operand, node.src)), tuple(node.attrs.items())
        results = tuple(self.stored(value.spec, find_storage_kind(value)) for value in node.results)
        return tried(node.op, src, results, attrs, limits, strided)

    def _operand(self, value: Value | None) -> Known | None:
        """Return an operand that has no address yet."""
        if value is None:
            return None
        base = value
        while not base.node.is_leaf and op_of(base.node).is_view:
            base = base.node.inputs[0]
        return _known(value.shape, base.spec, find_storage_kind(base), value is base, self.is_exact)

    def stored(self, spec: Spec, kind: str = "value") -> Spec:
        return _stored(spec, kind, self.is_exact)

    def tolerance(self, node: Node) -> float | None:
        """Return the relative error of intermediate rounding, or `None` for float32 arithmetic."""
        is_exact = node.attrs.get("exact") is not False
        if node.op in PRODUCTS and self.is_exact:
            return None
        if node.op in PRODUCTS:
            return tiled.rounding(node.inputs[0].dtype, is_exact)
        if not is_exact:
            return 2.0**-8
        if node.op == "attention":
            q, k, v = (known.spec for value in node.inputs[:3] if (known := self._operand(value)) is not None)
            return attention.rounding(q.shape, k, v)
        return None

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        return self.driver.alloc(nbytes, on)

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        return self.driver.view(buffer, tensor)

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        stored = self.stored(declared, "weight")
        if stored.dtype.is_quantised:
            packed = pack(np.ascontiguousarray(data).view(np.uint8).reshape(-1), declared)
            self.view(buffer, Tensor(0, 0, packed.shape, (1,), DType.I8))[...] = packed.view(np.int8)
            return
        target = self.view(buffer, Tensor(0, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype))
        if stored.dtype in HALVES:
            target[...] = np.atleast_1d(data).view(stored.dtype.storage).reshape(stored.shape)
            return
        plain = data if declared.dtype.is_integer else dequantise(np.atleast_1d(data), declared.dtype)
        target[...] = encode_array(plain.reshape(stored.shape), stored.dtype)

    def writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        return self.driver.writer(buffers, tensors)

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Replay:
        return Replay(program, buffers, on, comm, self.driver, self._memberships)

    def foretold(self, program: Program, on: Device) -> Sequence[Called]:
        return [*foretold(program, self.driver.limits(on))]

    def gathered(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        return gathered(program, self.driver.limits(on))

    def overlaps(self, devices: Sequence[Device]) -> bool:
        """Return whether launches run during collectives. One device: if it can. Several: not through host memory."""
        return self.driver.overlaps and (
            len(devices) == 1 or choose_transport(devices, self.driver).launches_collectives
        )

    def meeting(self, devices: Sequence[Device]) -> str:
        """Describe the transport between `devices` of this backend, and the reason for its choice."""
        return choose_transport(devices, self.driver).description


class Replay:
    """A bound program: recorded launches and collectives with other devices, in order.

    With peer access or a collective library, collectives are launches. Otherwise they use host memory, and the launches
    between two of them are recorded together. A kernel that reads an illegal number, or waits too long, records a fault
    and continues. The run then fails after its last instruction, so that the rollback can undo all of it.
    """

    def __init__(
        self,
        program: Program,
        buffers: Sequence[Any],
        on: Device,
        comm: Comm,
        driver: Driver,
        memberships: Memberships,
    ) -> None:
        self.program, self.on, self.driver = program, on, driver
        self._buffers, self._comm = buffers, comm
        self._memory: list[Any] = list(buffers)  # launches hold addresses, no references
        self._constants: dict[bytes, int] = {}
        self._fault = self._keep(np.zeros(FAULT.shape, np.int64))
        self._read_fault = driver.reader([self._fault], [FAULT])
        self._bound = Launches(
            self._keep_at,
            fault_at=driver.address(self._fault),
            limits=driver.limits(on),
            processors=driver.processors(on),
        )
        self._readers = readers_of(program, self._operand)
        self._flow = Flow(program, self._readers)
        self._parts = [*bound_parts(self._flow, self._bound, self._operand)]
        self._together = self._flow.together()
        free = beside(program, self._flow.groups())
        self._meets_in = {number: at for at, numbers in free.items() for number in numbers}
        self._steps: list[Step] = []
        self._own_faults = len(self._bound.faults)
        for kernel in {part.kernel for part in self._parts if isinstance(part, Launch)}:
            driver.prepare(kernel, on)
        self._calls: list[NumberedCall] = []
        self._launched: dict[object, Sequence[Single]] = {}
        self._alone: dict[object, Sequence[Callable[[], None]]] = {}
        self._as_asked: Callable[[NumberedCall], NumberedCall] = lambda call: call
        self._meetings = ProgramCollectives(comm, driver, on, self._keep, memberships)
        if self._meetings.is_ready:
            self._record()
        else:
            self._meetings.prepare()

    def _meet_first(self) -> None:
        self._meetings.exchange_addresses([part.bound for part in self._parts if isinstance(part, Met)], self._record)

    def _record(self) -> None:
        """Record launches up to each collective in host memory as one unit."""
        self._calls, self._launched, self._alone = [], {}, {}
        del self._bound.faults[self._own_faults :]
        self._meetings.begin(self._bound)
        self._steps += self._bound.taken_out()
        meanwhile: dict[int, list[Single]] = defaultdict(list)
        for part in self._parts:
            if not isinstance(part, Met) and part.number in self._meets_in:
                meanwhile[self._meets_in[part.number]].append(part)
        for part in self._parts:
            if isinstance(part, Met):
                self._meet(part, meanwhile[part.number])
            elif part.number not in self._meets_in:
                self._steps.append(part)
        self._close()

    def _meet(self, met: Met, meanwhile: Sequence[Single]) -> None:
        """Add a collective and the launches that overlap with it, or follow it if it uses host memory."""
        self._bound.number = met.number
        if not self._meetings.launch(self._bound, met.bound):
            self._close()
            self._calls += [(met.number, call) for call in self._meeting(met.instruction)]
        meeting = self._bound.taken_out()
        self._steps += [Beside(meeting, tuple(meanwhile))] if meeting and meanwhile else [*meeting, *meanwhile]

    def __call__(self) -> None:
        self._run(self._read_fault)

    def giving(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        """Return a runner that reads outputs and the fault record together, so that the host waits once per run."""
        fault = replace(FAULT, buffer=len(self._buffers))
        read = self.driver.reader([*self._buffers, self._fault], [fault, *tensors])
        return lambda: self._run(read)[1:]

    def _run(self, read: Callable[[], Sequence[Array]]) -> Sequence[Array]:
        """Run once and return the result of `read`, which waits: the fault record, then outputs. Raises `StepError`."""
        try:
            self._meetings.check()
            self._meetings.count_run()
            if not self._meetings.is_ready and self.program.instructions:
                run_calls(self.program, self.on, [(0, self._meet_first)])
            elif not self._meetings.is_ready:  # other devices still need the addresses of this one
                self._meet_first()
            run_calls(self.program, self.on, map(self._as_asked, self._calls))
            if self._calls and self._meetings.may_hang:
                self._meetings.wait()
        except DeviceLostError as error:
            raise self._lost(error) from error
        except StepError as error:
            self._forget()
            if (why := error.__cause__) is not None and not isinstance(why, Exception):
                raise why from None  # an interrupt: the number of finished launches is unknown
            if isinstance(why, DeviceLostError):
                raise self._lost(why) from why
            if not isinstance(why, LaunchError):
                raise
            node, finished = self.program.instructions[why.number].node, self._flow.finished(why.number)
            raise StepError(node, str(self.on), finished, str(why)) from why
        given = read()
        if given[0][0]:
            number, said = self._fault_of(given[0])
            raise StepError(self.program.instructions[number].node, str(self.on), len(self.program.instructions), said)
        return given

    def _lost(self, why: DeviceLostError) -> StepError:
        """Return the error of a run that waited for a lost device. Its instructions ended, with undefined results."""
        self._calls, self._launched, self._alone = [], {}, {}  # delete graphs before their communicator
        self._forget()
        (node,) = (p.instruction.node for p in self._parts if isinstance(p, Met) and p.sequence == why.sequence)
        return StepError(node, str(self.on), len(self.program.instructions), str(why))

    def kernels(self) -> list[str]:
        """Return the kernels that a run launches, in order. A collective appears as its op name."""
        return [part.instruction.op if isinstance(part, Met) else _name(part) for part in self._parts]

    def measured(self) -> list[Timed]:
        """Run once, launch by launch, and return the times of launches and of collectives in host memory."""
        times: list[Timed] = []
        plain, self._as_asked = self._as_asked, partial(self._timed, times)
        try:
            self()
        finally:
            self._as_asked = plain
        return times

    def _timed(self, times: list[Timed], call: NumberedCall) -> NumberedCall:
        """Return the call with a timer that appends to `times`."""
        number, run = call

        def meeting() -> None:
            start = time.monotonic()
            run()
            times.append(Timed(self.program.instructions[number].op, (number,), start, time.monotonic()))

        def steps(of: Sequence[Single]) -> None:
            if run not in self._alone:
                self._alone[run] = [self.driver.record([step], self.on) for step in of]
            start = time.monotonic()
            for step, seconds in zip(of, self.driver.timed(self._alone[run], self.on), strict=True):
                times.append(Timed(_name(step), self._together[step.number], start, start + seconds))
                start += seconds

        return number, partial(steps, self._launched[run]) if run in self._launched else meeting

    def _forget(self) -> None:
        """Clear the fault record, after all launches have run."""
        self._read_fault()
        self.driver.view(self._fault, FAULT)[...] = np.zeros(FAULT.shape, np.int64)

    def _fault_of(self, noted: Array) -> tuple[int, str]:
        """Return the instruction number and the message of the first recorded fault, and clear the record."""
        self._forget()
        which, value = noted.tolist()
        number, text = self._bound.faults[which - 1]
        return number, text.format(value=value)

    def _keep(self, array: Array) -> Any:
        """Copy `array` to device memory that exists as long as this program."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.int8)
        buffer = self.driver.alloc(data.nbytes, self.on)
        self.driver.view(buffer, Tensor(-1, 0, data.shape, (1,), DType.I8))[...] = data
        self._memory.append(buffer)
        return buffer

    def _keep_at(self, array: Array) -> int:
        """Return the device address of a constant. Equal constants share one address."""
        key = array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.driver.address(self._keep(array))
        return self._constants[key]

    def _close(self) -> None:
        """Record the steps that were bound since the last collective in host memory."""
        if steps := [*self._steps, *self._bound.taken_out()]:
            self._calls.append((steps[0].number, run := self.driver.record(steps, self.on)))
            self._launched[run] = one_by_one(steps)
        self._steps = []

    def _operand(self, t: Tensor) -> Operand:
        spec = self.program.buffers[t.buffer]
        return Operand(self.driver.address(self._buffers[t.buffer]) + t.offset, t, spec.declared, spec.stored)

    def _plain(self, t: Tensor) -> Any:
        """Return the array of a tensor. Launches dequantise a packed weight to float32 on each run."""
        if not t.dtype.is_quantised:
            return self.driver.view(self._buffers[t.buffer], t)
        weight = self._operand(t)
        assert weight.declared is not None
        room = self._keep(np.zeros(weight.declared.size, np.float32))
        bound = self._bound
        bound.scratch_at, bound.taken = self.driver.address(room), 0
        made = expanded(bound, weight)
        return self.driver.view(room, replace(made.tensor, offset=made.address - bound.scratch_at))

    def _meeting(self, i: Instruction) -> list[Callable[[], object]]:
        """Bind a collective in host memory: copy operands to the host, run it there, and copy results back."""
        src: list[Any] = [None if t is None else self._plain(t) for t in i.src]
        self._close()
        dst = [self.driver.view(self._buffers[t.buffer], t) for t in i.dst]
        there, here = [None if x is None else _on_host(x) for x in src], [_on_host(x) for x in dst]
        scratch = np.empty(sum(t.spec.size for t in i.dst), np.float32)
        outgoing = [partial(np.copyto, h, d) for d, h in zip(src, there, strict=True) if h is not d and h is not None]
        incoming = [partial(d.__setitem__, ..., h) for d, h in zip(dst, here, strict=True) if h is not d]
        meet = MEETINGS[i.op].bind(Call(there, here, i.attrs, scratch, self._comm))
        return [self._meetings.wait, *outgoing, *meet, *incoming]


def _name(step: Single) -> str:
    return step.kernel.name if isinstance(step, Launch) else "exchange"


def _on_host(view: Any) -> Array:
    """Return host memory for a view: the view itself, or a copy."""
    return view if isinstance(view, np.ndarray) else np.array(view)
