"""A plan bound to its memory: inputs are copied in, programs compiled for the local devices, and outputs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ...backends.abilities import Carries, Gives
from ...backends.base import Array, Comm, Program
from ...distributed.rank_group import RankGroup
from ...distributed.thread_group import ThreadGroup
from ...graph.array_checks import as_array_for_spec
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import BackendError, PlanError, StepError
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import ANY, TEXT, mapping_of, require
from ...ops.quantisation import decode_array, encode_array
from ..layout import Local, Shard
from ..lowering.lane import teams_of
from ..plan import Plan
from .comm import Alone, Teams, meeting_of
from .store import Part, Store, assembled

PATIENCE, SLOWER = 6.0, 20.0
"""Maximum seconds of a wait for another process, plus this factor times the predicted seconds of a run."""
INPUTS = mapping_of(TEXT, ANY, "a mapping from names of inputs to arrays")


@dataclass(frozen=True, slots=True)
class Inlet:
    """The input places of a device's program: the names and stored dtypes, and a function that writes arrays there."""

    lying: tuple[tuple[str, DType], ...]
    write: Callable[[Sequence[Array]], None]


class Bound:
    """A plan over the weights and states of a store; `local_devices` are the numbers of the devices of this process."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.between = plan, store.between
        self.specs = {v.node.name: v.spec for v in plan.graph.inputs}
        self.shapes = {name: v.shape for name, v in plan.graph.outputs.items()}
        self._buffers, self._loaded_bytes = store.buffers(plan), store.loaded_bytes
        self.own = tuple(self._buffers)
        self.outputs: dict[str, dict[int, Part]] = {name: {} for name in self.shapes}
        for number in self.own:
            for name in plan.lanes[number].program.outputs.keys() & self.outputs.keys():  # others are messages
                t = plan.lanes[number].program.outputs[name]
                self.outputs[name][number] = Part(self.view(number, t), t.dtype)

    def view(self, number: int, tensor: Any) -> Any:
        """Return the array of a tensor of a device's program, in place."""
        return self.plan.lanes[number].backend.view(self._buffers[number][tensor.buffer], tensor)

    # ------------------------------------------------------------------------------------------------- inputs

    def inlet(self, number: int) -> Inlet:
        """Return the input slots of a device's program."""
        lane, buffers = self.plan.lanes[number], self._buffers[number]
        tensors = [*lane.program.inputs.values()]
        lying = tuple((name, t.dtype) for name, t in lane.program.inputs.items())
        if isinstance(lane.backend, Carries):
            return Inlet(lying, lane.backend.writer(buffers, tensors))
        views = [self.view(number, t) for t in tensors]

        def write(arrays: Sequence[Array]) -> None:
            for view, array in zip(views, arrays, strict=True):
                view[...] = array

        return Inlet(lying, write)

    def given(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Return the inputs of a run as arrays.

        Raises `PlanError` for an input that is missing, unknown or does not fit.
        """
        if type(inputs) is not dict or not inputs.keys() <= self.specs.keys():
            require(PlanError, "run", "inputs", inputs, INPUTS)
            for name in inputs.keys() - self.specs.keys():
                raise PlanError(
                    f"there is no input %{quote_node_name(name):.60}; inputs: {', '.join(self.specs) or 'none'}"
                )
        arrays = {}
        for name, spec in self.specs.items():
            if name not in inputs:
                raise PlanError(f"input %{name}: {spec} is missing")
            arrays[name] = as_array_for_spec(f"input %{name}", inputs[name], spec)
        return arrays

    def agree(self, given: Iterable[Mapping[str, Array]]) -> None:
        """Raise `RanksError` unless all processes have the same inputs."""
        if self.between.spans_ranks:
            check = 0
            for array in (array for arrays in given for array in arrays.values()):
                check = crc32(np.ascontiguousarray(array).data, check)
            self.between.world.require_agreement(
                "run", f"inputs {check:08x}", "run the same inputs on all ranks", PATIENCE
            )

    def put(self, arrays: Mapping[str, Array], inlets: Iterable[Inlet]) -> None:
        """Copy the inputs to the input slots of the programs."""
        for inlet in inlets:
            inlet.write([self._lying(name, arrays[name], dtype) for name, dtype in inlet.lying])

    def _lying(self, name: str, array: Array, dtype: DType) -> Array:
        """Return an input in the dtype in which it is stored."""
        ready = array.dtype is dtype.storage and dtype is not DType.BF16
        return array if ready else encode_array(decode_array(array, self.specs[name].dtype), dtype)

    # ------------------------------------------------------------------------------------------------ outputs

    def holder(self, name: str) -> int | None:
        """Return the device that has all of an output; None if the output must be assembled."""
        layout = self.plan.outputs[name]
        if self.between.spans_ranks or isinstance(layout, Shard):
            return None
        return layout.devices[0] if isinstance(layout, Local) else 0

    def giving(self, number: int, replay: Callable[[], Any]) -> Callable[[], Mapping[str, Array]]:
        """Return a function that runs a device's program and returns the outputs that only this device returns.

        These outputs are chosen once, because a token may take less than 1 ms.
        """
        parts = {name: self.outputs[name][number] for name in self.shapes if self.holder(name) == number}
        if isinstance(replay, Gives) and not any(part.dtype is DType.BF16 for part in parts.values()):
            give = replay.giving([self.plan.lanes[number].program.outputs[name] for name in parts])
            return lambda: dict(zip(parts, give(), strict=True))

        def run() -> Mapping[str, Array]:
            replay()
            return {name: part.copied() for name, part in parts.items()}

        return run

    def parts(self, name: str) -> dict[int, Array]:
        """Return each local device's shard of an output, as numbers."""
        return {number: part.numbers() for number, part in self.outputs[name].items()}

    def whole(self, name: str, parts: Mapping[int, Array]) -> Array:
        """Assemble an output from the shards of the local devices and of other processes."""
        return assembled(self.shapes[name], self.plan.outputs[name], parts, self.between)

    # ----------------------------------------------------------------------------------------------- programs

    def meeting(self, timeout: float, wire: DType, *, follow: bool = False) -> ThreadGroup | Teams | RankGroup:
        """Make the communicator group of the devices, in this process or between several.

        Another process is waited for little longer than the whole run should take. In pipelined runs only collective
        groups share a signal pad. Messages go through host memory there, because a device may send one before its
        last one is received.

        Args:
            timeout: Maximum seconds of a wait.
            wire: The dtype of a transfer.
            follow: Whether runs are pipelined.
        """
        lanes, world = self.plan.lanes, self.between.world
        devices, teams = [lane.device for lane in lanes], teams_of([lane.program for lane in lanes])
        shares = not follow or len(set(teams)) > 1
        alike = devices if shares and len({type(lane.backend) for lane in lanes}) == 1 else []
        if world.size == 1:
            return meeting_of(teams, timeout, devices=alike, wire=wire)
        patience = min(timeout, PATIENCE + SLOWER * self.plan.cost.total)
        world.require_agreement("plan", self.plan.digest(), "give all ranks the same model and flags")
        self._loaded_bytes.agree()
        wide = RankGroup(self.between, devices, patience, wire, teams, shares=shares)
        if wide.is_apart:
            return wide
        near = Teams(teams, patience, devices=alike, wire=wire, letters=wide)
        world.register_wake(near.abort)
        return near

    def compiled_all(self, meeting: ThreadGroup | Teams | RankGroup) -> dict[int, Callable[[], Any]]:
        """Compile the programs of the local devices with their communicators, and return a runner for each."""
        lanes = self.plan.lanes
        replays = {
            n: self.compiled(n, lanes[n].program, meeting.member(n) if len(lanes) > 1 else Alone()) for n in self.own
        }
        self.between.world.all_gather_bytes(b"")  # a barrier: compilation takes longer than a rank waits for a run
        return replays

    def compiled(self, number: int, program: Program, comm: Comm) -> Callable[[], None]:
        """Compile a program for device `number` and return its runner."""
        lane = self.plan.lanes[number]
        return lane.backend.compile(program, self._buffers[number], lane.device, comm)

    def undo(self, number: int, finished: int | frozenset[int] | None) -> None:
        """Roll back a run of a device.

        `finished` is the number or the set of finished instructions; None if it is unknown.
        """
        program = self.plan.lanes[number].program
        if program.undo and finished is None:
            raise BackendError("it does not say how far it came")
        self.run(number, program.undoing(finished or 0))

    def run(self, number: int, program: Program) -> None:
        """Run a program without collectives on one device, once."""
        self.compiled(number, program, Alone())()


def finished_by(error: BaseException | None, whole: int) -> int | frozenset[int] | None:
    """Return the number or the set of instructions that a device has finished; None if it is unknown.

    Args:
        error: The error with which the run ended, if any.
        whole: Number of instructions of the program.
    """
    if error is None:
        return whole
    return error.finished_instructions if isinstance(error, StepError) else None
