"""A plan bound to its memory: input slots, compiled programs of the local devices, and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ...backends.base import Array, Comm, Program
from ...backends.capabilities import GeneratesFusedKernels, SupportsBatchedWrites, SupportsReturnedOutputs
from ...distributed.rank_group import RankGroup
from ...distributed.thread_group import ThreadGroup
from ...graph.array_checks import as_array_for_spec
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import ANY, TEXT, mapping_of, require
from ...ops.quantisation import decode_array, encode_array
from ..ir.execution_plan import Plan
from ..ir.layout import Local, Shard
from ..lowering.device_plan import DevicePlan, find_collective_group_of_each_device
from .communicators import CollectiveGroups, SingleDeviceComm, make_local_communicator_group
from .state_view import LocalShard, assemble_value
from .store import Store

MAX_RANK_WAIT_SECONDS, MAX_RANK_SLOWDOWN = 6.0, 20.0
"""The longest wait for another process: the first number in seconds, plus the second one times the predicted run."""
INPUTS_KIND = mapping_of(TEXT, ANY, "a mapping from names of inputs to arrays")


@dataclass(frozen=True, slots=True)
class InputSlots:
    """The memory from which a device's program reads its inputs, and the function that fills it before a run.

    - `stored_inputs`: the name and the stored dtype of each input.
    - `write_arrays`: writes one array for each input to its place.
    """

    stored_inputs: tuple[tuple[str, DType], ...]
    write_arrays: Callable[[Sequence[Array]], None]


class BoundPlan:
    """A plan with its memory: the buffers of a store, views of inputs and outputs, and methods to compile and run it.

    - `local_devices`: the numbers of the devices of this process.
    - `output_shards`: for each output the view of its part on each local device.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.device_placement = plan, store.between
        self.input_specs = {v.node.name: v.spec for v in plan.graph.inputs}
        self.output_shapes = {name: v.shape for name, v in plan.graph.outputs.items()}
        self._buffers, self._loaded_bytes = store.buffers(plan), store.loaded_bytes
        self.local_devices = tuple(self._buffers)
        self.output_shards: dict[str, dict[int, LocalShard]] = {name: {} for name in self.output_shapes}
        for number in self.local_devices:
            for name in (
                plan.device_plans[number].program.outputs.keys() & self.output_shards.keys()
            ):  # others are messages
                t = plan.device_plans[number].program.outputs[name]
                self.output_shards[name][number] = LocalShard(self.view_tensor(number, t), t.dtype)

    def view_tensor(self, number: int, tensor: Any) -> Any:
        """Return an array over the memory of a tensor in the program of device `number`."""
        return self.plan.device_plans[number].backend.view(self._buffers[number][tensor.buffer], tensor)

    # ------------------------------------------------------------------------------------------------- inputs

    def locate_input_memory(self, number: int) -> InputSlots:
        """Return the places in memory from which the program of device `number` reads its inputs."""
        device_plan, buffers = self.plan.device_plans[number], self._buffers[number]
        tensors = [*device_plan.program.inputs.values()]
        stored_inputs = tuple((name, t.dtype) for name, t in device_plan.program.inputs.items())
        if isinstance(device_plan.backend, SupportsBatchedWrites):
            return InputSlots(stored_inputs, device_plan.backend.make_writer(buffers, tensors))
        views = [self.view_tensor(number, t) for t in tensors]

        def write(arrays: Sequence[Array]) -> None:
            for view, array in zip(views, arrays, strict=True):
                view[...] = array

        return InputSlots(stored_inputs, write)

    def as_input_arrays(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Check the inputs of a run, and return them as arrays by name.

        Raises:
            PlanError: An input is missing, unknown or does not fit.
        """
        if type(inputs) is not dict or not inputs.keys() <= self.input_specs.keys():
            require(PlanError, "run", "inputs", inputs, INPUTS_KIND)
            for name in inputs.keys() - self.input_specs.keys():
                raise PlanError(
                    f"there is no input %{quote_node_name(name):.60}; inputs: {', '.join(self.input_specs) or 'none'}"
                )
        arrays = {}
        for name, spec in self.input_specs.items():
            if name not in inputs:
                raise PlanError(f"input %{name}: {spec} is missing")
            arrays[name] = as_array_for_spec(f"input %{name}", inputs[name], spec)
        return arrays

    def require_equal_inputs_on_ranks(self, inputs_by_run: Iterable[Mapping[str, Array]]) -> None:
        """Raise `RanksError` unless all ranks (processes) have equal inputs, which a checksum decides."""
        if self.device_placement.spans_ranks:
            check = 0
            for array in (array for arrays in inputs_by_run for array in arrays.values()):
                check = crc32(np.ascontiguousarray(array).data, check)
            self.device_placement.world.require_agreement(
                "run", f"inputs {check:08x}", "run the same inputs on all ranks", MAX_RANK_WAIT_SECONDS
            )

    def write_inputs(self, arrays: Mapping[str, Array], input_slots: Iterable[InputSlots]) -> None:
        """Write the inputs of a run to where the programs read them. Inputs are converted to their stored dtypes."""
        for slots in input_slots:
            slots.write_arrays(
                [self._as_stored_dtype(name, arrays[name], dtype) for name, dtype in slots.stored_inputs]
            )

    def _as_stored_dtype(self, name: str, array: Array, dtype: DType) -> Array:
        """Return an input array converted to the dtype in which the program reads it."""
        ready = array.dtype is dtype.storage and dtype is not DType.BF16
        return array if ready else encode_array(decode_array(array, self.input_specs[name].dtype), dtype)

    # ------------------------------------------------------------------------------------------------ outputs

    def find_output_device(self, name: str) -> int | None:
        """Return a device that has the whole output; None if it must be assembled from shards of devices or ranks."""
        layout = self.plan.outputs[name]
        if self.device_placement.spans_ranks or isinstance(layout, Shard):
            return None
        return layout.devices[0] if isinstance(layout, Local) else 0

    def make_runner_of_locally_whole_outputs(
        self, number: int, replay: Callable[[], Any]
    ) -> Callable[[], Mapping[str, Array]]:
        """Make a function that runs the program of one device and returns the outputs that are complete on this device.

        Outputs that must be assembled from several devices are left out. The outputs are chosen once and not in each
        run, because a run for one token may take less than 1 ms.

        Args:
            number: The number of the device.
            replay: Runs the compiled program.
        """
        parts = {
            name: self.output_shards[name][number]
            for name in self.output_shapes
            if self.find_output_device(name) == number
        }
        if isinstance(replay, SupportsReturnedOutputs) and not any(
            part.dtype is DType.BF16 or part.dtype.is_quantised for part in parts.values()
        ):
            give = replay.make_runner_with_outputs(
                [self.plan.device_plans[number].program.outputs[name] for name in parts]
            )
            return lambda: dict(zip(parts, give(), strict=True))

        def run() -> Mapping[str, Array]:
            replay()
            return {name: part.copy_to_host() for name, part in parts.items()}

        return run

    def decode_output_shards(self, name: str) -> dict[int, Array]:
        """Return the part of an output on each local device as plain numbers, by device number."""
        return {number: part.decode() for number, part in self.output_shards[name].items()}

    def assemble_output_across_processes(self, name: str, parts: Mapping[int, Array]) -> Array:
        """Return a whole output, assembled from the parts of the local devices and of other processes.

        Args:
            name: The name of the output.
            parts: The parts of the local devices, by device number.
        """
        return assemble_value(self.output_shapes[name], self.plan.outputs[name], parts, self.device_placement)

    # ----------------------------------------------------------------------------------------------- programs

    def make_communicator_group(
        self, timeout: float, wire: DType, *, follow: bool = False
    ) -> ThreadGroup | CollectiveGroups | RankGroup:
        """Make the communicators of all devices, within this process or between several processes.

        A wait for another process ends soon after the predicted end of the whole run. In pipelined runs, messages go
        through host memory, because a device may send a message before the previous one is received. Only collective
        groups share a signal pad there.

        Args:
            timeout: Maximum seconds of a wait.
            wire: The dtype of transferred numbers.
            follow: Whether runs are pipelined.
        """
        device_plans, world = self.plan.device_plans, self.device_placement.world
        devices, groups = (
            [device_plan.device for device_plan in device_plans],
            find_collective_group_of_each_device([device_plan.program for device_plan in device_plans]),
        )
        shares = not follow or len(set(groups)) > 1
        same_backend_devices = (
            devices if shares and len({type(device_plan.backend) for device_plan in device_plans}) == 1 else []
        )
        if world.size == 1:
            return make_local_communicator_group(groups, timeout, devices=same_backend_devices, wire=wire)
        patience = min(timeout, MAX_RANK_WAIT_SECONDS + MAX_RANK_SLOWDOWN * self.plan.cost.total)
        world.require_agreement("plan", self.plan.digest(), "give all ranks the same model and flags")
        self._loaded_bytes.require_equal_digests()
        rank_group = RankGroup(self.device_placement, devices, patience, wire, groups, shares=shares)
        if rank_group.is_apart:
            return rank_group
        local_groups = CollectiveGroups(
            groups, patience, devices=same_backend_devices, wire=wire, message_group=rank_group
        )
        world.register_failure_callback(local_groups.abort)
        return local_groups

    def compile_programs(
        self, communicator_group: ThreadGroup | CollectiveGroups | RankGroup
    ) -> dict[int, Callable[[], Any]]:
        """Compile the program of each local device, and return functions that run them, by device number."""
        device_plans = self.plan.device_plans
        for n in self.local_devices:
            _verify_fused_kernels_of_unrolled_program(device_plans[n])
        replays = {
            n: self.compile_program(
                n,
                device_plans[n].program,
                communicator_group.member(n) if len(device_plans) > 1 else SingleDeviceComm(),
            )
            for n in self.local_devices
        }
        self.device_placement.world.all_gather_bytes(
            b""
        )  # a barrier: compilation takes longer than a rank waits for a run
        return replays

    def compile_program(self, number: int, program: Program, comm: Comm) -> Callable[[], None]:
        """Compile a program for device `number`, and return a function that runs it."""
        device_plan = self.plan.device_plans[number]
        return device_plan.backend.compile(program, self._buffers[number], device_plan.device, comm)

    def run_program_without_collectives_once(self, number: int, program: Program) -> None:
        """Compile and run a program without collectives once on device `number`, for example to undo a run."""
        self.compile_program(number, program, SingleDeviceComm())()


def _verify_fused_kernels_of_unrolled_program(device_plan: DevicePlan) -> None:
    """Verify the fused kernels of a program that was unrolled from a short one; raise `PlanError` with a fault.

    Other programs were verified with their plan. A program with a cached binding was verified when it was bound.
    """
    backend, program = device_plan.backend, device_plan.program
    if device_plan.short is None or not isinstance(backend, GeneratesFusedKernels):
        return
    if not backend.has_cached_binding(program):
        from ..verifier.fused_kernels import verify_fused_kernels  # only for a new binding

        verify_fused_kernels(program, backend)
