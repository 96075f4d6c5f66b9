"""The backend for CUDA devices, real or emulated: it binds programs to launches once and replays them."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import StepError
from ...graph.node import Node, Value
from ...graph.spec import Spec
from ...ops.collectives import COLLECTIVES
from ...ops.quantisation import dequantise, encode_array
from ...ops.registry import find_graph_role, find_view_base
from ..base import Array, Comm, Device, Instruction, Program, Support, Tensor, contiguous_strides, run_calls
from ..capabilities import KernelCall, TimedKernel
from ..fusion.dataflow import Dataflow
from ..fusion.liveness import build_reader_table
from ..fusion.operands import NoKernelError, Operand
from ..fusion.overlap import find_instructions_beside_collectives
from ..host.bindings import HostInstruction
from ..host.collectives import KERNELS as HOST_COLLECTIVES
from .binding.launch_builder import LaunchBuilder
from .binding.weight_packing import pack_quantised_weight_for_kernels
from .collectives.hang_watchdog import CollectiveLibraryMemberships, DeviceMissedCollectiveError
from .collectives.program_collectives import ProgramCollectives
from .collectives.transport import choose_transport
from .device.device_limits import LARGEST_LIMITS, KernelLimits
from .device.driver import (
    CollectiveOverlap,
    Driver,
    DriverStep,
    KernelLaunch,
    LaunchError,
    SingleStep,
    StartRead,
    as_host_array,
    flatten_steps,
    format_step_name,
)
from .kernels.attention import kinds
from .kernels.elementwise import as_float
from .kernels.products import tiled
from .program_binding import CollectiveStep, bind_program, list_kernel_calls, list_launch_groups
from .trial_binding import (
    HALF_TYPES,
    UnboundOperand,
    compute_scratch_bytes_at_placeholders,
    infer_spec_in_device_memory,
    make_unbound_operand,
)

MATMUL_OPS = frozenset(("mul_mat", "mul_mat_id"))
"""Ops that round activations: with packed weights to int8 per 32 columns, else for many tokens to bfloat16 terms."""
FAULT_RECORD = Tensor(0, 0, (2,), (1,), DType.I64)
"""The device record of a fault: the 1-based number of the fault message (0: no fault), and the illegal number."""
NumberedCall = tuple[int, Callable[[], object]]
"""A function that runs one or more instructions, and the number of the first of them."""


class DriverBackend:
    """A backend that runs programs on the devices of a driver.

    Values are float32 or integers. These keep other dtypes if kernels read them: weight matrices, and states that are
    rows of 16-bit numbers. An exact backend (`is_exact`) stores weights as float32, too.
    """

    name: str
    is_exact = False
    has_separate_memory = True

    def __init__(self, driver: Driver) -> None:
        self.driver, self.name = driver, driver.kind
        self.require_multiprocessors = driver.require_multiprocessors
        self._memberships = CollectiveLibraryMemberships()
        self._limits: frozenset[KernelLimits] = frozenset()

    def with_threads(self, threads: int) -> Self:
        return self

    def with_float32_matmuls(self) -> Self:
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
            self._compute_scratch_bytes(node, self.driver.limits(on))
        except NoKernelError as why:
            return Support(False, str(why))
        return Support(True)

    def scratch(self, node: Node) -> int:
        """Return the scratch bytes of a node: the maximum over the present devices, as their kernels may differ."""
        if node.op in COLLECTIVES:
            return 0
        if not self._limits:
            self._limits = frozenset(map(self.driver.limits, self.driver.devices()))
        sizes = []
        for limits in self._limits:
            with suppress(NoKernelError):  # the node may run on other devices
                sizes.append(self._compute_scratch_bytes(node, limits))
        return max(sizes) if sizes else self._compute_scratch_bytes(node, LARGEST_LIMITS)

    def reads_strided(self, node: Node, operand: int) -> bool:
        if node.op in COLLECTIVES:
            return True
        try:
            self._compute_scratch_bytes(node, LARGEST_LIMITS, operand)
        except NoKernelError:
            return False
        return True

    def _compute_scratch_bytes(self, node: Node, limits: KernelLimits, strided_operand: int | None = None) -> int:
        """Compute the scratch bytes of a node for a device with `limits`. Raises `NoKernelError` if no kernel fits."""
        src, attrs = tuple(map(self._to_unbound_operand, node.src)), tuple(node.attrs.items())
        results = tuple(self.storage_spec(value.spec, find_graph_role(value)) for value in node.results)
        return compute_scratch_bytes_at_placeholders(node.op, src, results, attrs, limits, strided_operand)

    def _to_unbound_operand(self, value: Value | None) -> UnboundOperand | None:
        """Convert a value to an operand without an address, from which kernels are chosen; `None` stays `None`."""
        if value is None:
            return None
        base = find_view_base(value)
        return make_unbound_operand(value.shape, base.spec, find_graph_role(base), value is base, self.is_exact)

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return infer_spec_in_device_memory(spec, kind, self.is_exact)

    def tolerance(self, node: Node) -> float | None:
        """Return the relative error of a node that rounds intermediate values, or `None` if it computes in float32."""
        is_exact = node.attrs.get("exact") is not False
        if node.op in MATMUL_OPS:
            return None if self.is_exact else tiled.find_activation_rounding_error(node.inputs[0].dtype, is_exact)
        if not is_exact:
            return 2.0**-8
        if node.op == "attention":
            operands = map(self._to_unbound_operand, node.inputs[:3])
            q, k, v = (operand.spec for operand in operands if operand is not None)
            return kinds.find_attention_rounding_error(q.shape, k, v)
        return None

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        return self.driver.alloc(nbytes, on)

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        return self.driver.view(buffer, tensor)

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        stored = self.storage_spec(declared, "weight")
        if stored.dtype.is_quantised:
            packed = pack_quantised_weight_for_kernels(np.ascontiguousarray(data).view(np.uint8).reshape(-1), declared)
            self.view(buffer, Tensor(0, 0, packed.shape, (1,), DType.I8))[...] = packed.view(np.int8)
            return
        target = self.view(buffer, Tensor(0, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype))
        if stored.dtype in HALF_TYPES:
            target[...] = np.atleast_1d(data).view(stored.dtype.storage).reshape(stored.shape)
            return
        plain = data if declared.dtype.is_integer else dequantise(np.atleast_1d(data), declared.dtype)
        target[...] = encode_array(plain.reshape(stored.shape), stored.dtype)

    def make_writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        return self.driver.make_writer(buffers, tensors)

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> RecordedProgram:
        return RecordedProgram(program, buffers, on, comm, self.driver, self._memberships)

    def find_device_loss(self, on: Device) -> str:
        return self.driver.find_device_loss(on)

    def list_kernels(self, program: Program, on: Device) -> Sequence[KernelCall]:
        return [*list_kernel_calls(program, self.driver.limits(on))]

    def list_fused_groups(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        return list_launch_groups(program, self.driver.limits(on))

    def can_overlap_collectives(self, devices: Sequence[Device]) -> bool:
        """Return whether kernels can run during collectives of these devices; no if they go through the host."""
        return self.driver.can_overlap_collectives and (
            len(devices) == 1 or choose_transport(devices, self.driver).has_device_collectives
        )

    def describe_transport(self, devices: Sequence[Device]) -> str:
        """Describe the transport between `devices` of this backend, and the reason for its choice."""
        return choose_transport(devices, self.driver).description


class RecordedProgram:
    """A compiled program of one device: recorded kernel launches, which a run replays, and collectives, in order.

    With peer access or a collective library, collectives are launches, too. Otherwise they use host memory, between
    recordings. A kernel that reads an illegal number, or waits too long, records a fault and continues. The run then
    fails after its last instruction, so that the rollback can undo all of it.
    """

    def __init__(
        self,
        program: Program,
        buffers: Sequence[Any],
        on: Device,
        comm: Comm,
        driver: Driver,
        memberships: CollectiveLibraryMemberships,
    ) -> None:
        self.program, self.on, self.driver = program, on, driver
        self._buffers, self._comm = buffers, comm
        self._owned_buffers: list[Any] = list(buffers)  # launches hold addresses, no references
        self._constants: dict[tuple[str, bytes], int] = {}
        self._fault_buffer = self._upload_array_for_program_lifetime(np.zeros(FAULT_RECORD.shape, np.int64))
        self._read_fault = driver.make_reader([self._fault_buffer], [FAULT_RECORD])
        self._builder = LaunchBuilder(
            self._upload_deduplicated_constant,
            fault_address=driver.address(self._fault_buffer),
            limits=driver.limits(on),
            multiprocessor_count=driver.count_multiprocessors(on),
        )
        self._readers = build_reader_table(program, self._make_operand)
        self._dataflow = Dataflow(program, self._readers)
        self._parts = [*bind_program(self._dataflow, self._builder, self._make_operand)]
        self._groups = self._dataflow.groups_by_instruction()
        free = find_instructions_beside_collectives(program, self._dataflow.list_groups())
        self._collective_of = {number: at for at, numbers in free.items() for number in numbers}
        self._pending_steps: list[DriverStep] = []
        self._bound_fault_count = len(self._builder.faults)
        for kernel in {part.kernel for part in self._parts if isinstance(part, KernelLaunch)}:
            driver.prepare_kernel(kernel, on)
        self._calls: list[NumberedCall] = []
        self._recorded_steps: dict[object, Sequence[SingleStep]] = {}
        self._step_runs: dict[object, Sequence[Callable[[], None]]] = {}
        self._wrap_call: Callable[[NumberedCall], NumberedCall] = lambda call: call
        self._collectives = ProgramCollectives(comm, driver, on, self._upload_array_for_program_lifetime, memberships)
        if self._collectives.is_ready:
            self._record_launches()
        else:
            self._collectives.allocate_signals_and_compile_kernels()

    def _exchange_addresses(self) -> None:
        self._collectives.exchange_addresses_and_record(
            [part.bound_instruction for part in self._parts if isinstance(part, CollectiveStep)], self._record_launches
        )

    def _record_launches(self) -> None:
        """Record all launches for replay; launches between two collectives through the host are one recording."""
        self._calls, self._recorded_steps, self._step_runs = [], {}, {}
        del self._builder.faults[self._bound_fault_count :]
        self._collectives.add_run_begin_launches(self._builder)
        self._pending_steps += self._builder.take_launches()
        overlapped: dict[int, list[SingleStep]] = defaultdict(list)
        for part in self._parts:
            if not isinstance(part, CollectiveStep) and part.number in self._collective_of:
                overlapped[self._collective_of[part.number]].append(part)
        for part in self._parts:
            if isinstance(part, CollectiveStep):
                self._add_or_bind_collective(part, overlapped[part.number])
            elif part.number not in self._collective_of:
                self._pending_steps.append(part)
        self._record_pending_steps()

    def _add_or_bind_collective(self, collective: CollectiveStep, overlapped: Sequence[SingleStep]) -> None:
        """Add a collective and the launches that overlap with it to the pending steps, or bind it in host memory."""
        self._builder.number = collective.number
        if not self._collectives.add_collective_if_possible(self._builder, collective.bound_instruction):
            self._record_pending_steps()
            self._calls += [(collective.number, call) for call in self._bind_host_collective(collective.instruction)]
        launches = self._builder.take_launches()
        self._pending_steps += (
            [CollectiveOverlap(launches, tuple(overlapped))] if launches and overlapped else [*launches, *overlapped]
        )

    def __call__(self) -> None:
        self._start_run_and_output_read(self._read_fault)()

    def make_runner_with_outputs(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        """Return a function that runs the program and returns `tensors` as host arrays; the host waits only once."""
        start = self.make_starter_with_outputs(tensors)
        return lambda: start()()

    def make_starter_with_outputs(self, tensors: Sequence[Tensor]) -> Callable[[], Callable[[], Sequence[Array]]]:
        """Return a function that starts a run, and that returns a function which waits for `tensors`."""
        fault = replace(FAULT_RECORD, buffer=len(self._buffers))
        start_read = self.driver.make_reader([*self._buffers, self._fault_buffer], [fault, *tensors])

        def start() -> Callable[[], Sequence[Array]]:
            finish = self._start_run_and_output_read(start_read)
            return lambda: finish()[1:]

        return start

    def _start_run_and_output_read(self, start_read: StartRead) -> Callable[[], Sequence[Array]]:
        """Start a run and a read of the fault record and outputs; the result waits for them. Both raise `StepError`."""
        try:
            before = [self._collectives.require_live_communicator, self._collectives.increment_run_number]
            before += [] if self._collectives.is_ready else [self._exchange_addresses]
            run_calls(self.program, self.on, [(0, call) for call in before])
            run_calls(self.program, self.on, map(self._wrap_call, self._calls))
            if self._calls and self._collectives.has_exchanges_without_timeout:
                self._collectives.wait_for_stream()
        except DeviceMissedCollectiveError as error:
            raise self._make_missed_collective_error(error) from error
        except StepError as error:
            self._await_launches_and_clear_faults()
            if (why := error.__cause__) is not None and not isinstance(why, Exception):
                raise why from None  # an interrupt: the number of finished launches is unknown
            if isinstance(why, DeviceMissedCollectiveError):
                raise self._make_missed_collective_error(why) from why
            if not isinstance(why, LaunchError):
                raise
            node = self.program.instructions[why.number].node
            finished = self._dataflow.find_instructions_finished_before(why.number)
            raise StepError(node, str(self.on), finished, str(why)) from why
        wait = start_read()

        def finish() -> Sequence[Array]:
            arrays = wait()
            if arrays[0][0]:
                number, message = self._read_and_clear_fault(arrays[0])
                raise StepError(
                    self.program.instructions[number].node, str(self.on), len(self.program.instructions), message
                )
            return arrays

        return finish

    def _make_missed_collective_error(self, why: DeviceMissedCollectiveError) -> StepError:
        """Make the `StepError` of a run if a device missed a collective. It reports all instructions as ended."""
        self._calls, self._recorded_steps, self._step_runs = [], {}, {}  # delete graphs before their communicator
        self._await_launches_and_clear_faults()
        (node,) = (
            p.instruction.node for p in self._parts if isinstance(p, CollectiveStep) and p.sequence == why.sequence
        )
        return StepError(node, str(self.on), len(self.program.instructions), str(why))

    def kernels(self) -> list[str]:
        """Return the names of the kernels that a run launches, in order.

        A collective is listed by the name of its op.
        """
        return [
            part.instruction.op if isinstance(part, CollectiveStep) else format_step_name(part) for part in self._parts
        ]

    def run_timed(self) -> list[TimedKernel]:
        """Run launch by launch, and return the times of the launches and of the collectives through the host."""
        times: list[TimedKernel] = []
        plain, self._wrap_call = self._wrap_call, partial(self._make_timed_call, times)
        try:
            self()
        finally:
            self._wrap_call = plain
        return times

    def _make_timed_call(self, times: list[TimedKernel], call: NumberedCall) -> NumberedCall:
        """Return a call that runs one launch or collective, and appends its start and end time to `times`."""
        number, run = call

        def time_call() -> None:
            start = time.monotonic()
            run()
            times.append(TimedKernel(self.program.instructions[number].op, (number,), start, time.monotonic()))

        def time_steps(of: Sequence[SingleStep]) -> None:
            if run not in self._step_runs:
                self._step_runs[run] = [self.driver.record([step], self.on) for step in of]
            start = time.monotonic()
            for step, seconds in zip(of, self.driver.run_timed(self._step_runs[run], self.on), strict=True):
                times.append(TimedKernel(format_step_name(step), self._groups[step.number], start, start + seconds))
                start += seconds

        return number, partial(time_steps, self._recorded_steps[run]) if run in self._recorded_steps else time_call

    def _await_launches_and_clear_faults(self) -> None:
        """Wait until all launches have run, and clear the record of the faults that kernels have reported."""
        self._read_fault()()
        self.driver.view(self._fault_buffer, FAULT_RECORD)[...] = np.zeros(FAULT_RECORD.shape, np.int64)

    def _read_and_clear_fault(self, fault_record: Array) -> tuple[int, str]:
        """Return the fault that a kernel has reported, as instruction index and message, and clear the fault record."""
        self._await_launches_and_clear_faults()
        which, value = fault_record.tolist()
        number, text = self._builder.faults[which - 1]
        return number, text.format(value=value)

    def _upload_array_for_program_lifetime(self, array: Array) -> Any:
        """Upload an array to device memory and return the buffer, which is kept as long as this program exists."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.int8)
        buffer = self.driver.alloc(data.nbytes, self.on)
        self.driver.view(buffer, Tensor(-1, 0, data.shape, (1,), DType.I8))[...] = data
        self._owned_buffers.append(buffer)
        return buffer

    def _upload_deduplicated_constant(self, array: Array) -> int:
        """Upload a constant and return its device address. Equal constants of one dtype share one address."""
        key = array.dtype.str, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.driver.address(self._upload_array_for_program_lifetime(array))
        return self._constants[key]

    def _record_pending_steps(self) -> None:
        """Record all steps since the last collective through the host as one replayable call."""
        if steps := [*self._pending_steps, *self._builder.take_launches()]:
            self._calls.append((steps[0].number, run := self.driver.record(steps, self.on)))
            self._recorded_steps[run] = flatten_steps(steps)
        self._pending_steps = []

    def _make_operand(self, t: Tensor) -> Operand:
        spec = self.program.buffers[t.buffer]
        address = self.driver.address(self._buffers[t.buffer]) + t.offset
        return Operand(address, t, spec.declared_spec, spec.stored_spec, spec.kind)

    def _view_or_dequantise_for_host_copy(self, t: Tensor) -> Any:
        """Return the array from which `t` is copied to the host: its buffer, or a float32 copy if `t` is quantised."""
        if not t.dtype.is_quantised:
            return self.driver.view(self._buffers[t.buffer], t)
        quantised = self._make_operand(t)
        count = (quantised.declared_spec or t.spec).size
        buffer = self._upload_array_for_program_lifetime(np.zeros(count, np.float32))
        self._builder.scratch_address, self._builder.scratch_bytes = self.driver.address(buffer), 0
        x = as_float(self._builder, quantised)
        return self.driver.view(buffer, replace(x.tensor, offset=x.address - self._builder.scratch_address))

    def _bind_host_collective(self, i: Instruction) -> list[Callable[[], object]]:
        """Bind a collective in host memory: copy operands to the host, run it there, and copy results back."""
        src: list[Any] = [None if t is None else self._view_or_dequantise_for_host_copy(t) for t in i.src]
        self._record_pending_steps()
        dst = [self.driver.view(self._buffers[t.buffer], t) for t in i.dst]
        there, here = [None if x is None else as_host_array(x) for x in src], [as_host_array(x) for x in dst]
        scratch = np.empty(sum(t.spec.size for t in i.dst), np.float32)
        outgoing = [partial(np.copyto, h, d) for d, h in zip(src, there, strict=True) if h is not d and h is not None]
        incoming = [partial(d.__setitem__, ..., h) for d, h in zip(dst, here, strict=True) if h is not d]
        exchange = HOST_COLLECTIVES[i.op].bind(HostInstruction(there, here, i.attrs, scratch, self._comm))
        return [self._collectives.wait_for_stream, *outgoing, *exchange, *incoming]
