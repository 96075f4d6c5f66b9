"""Stores: the memory of weights and states on a group of devices, which outlives single plans."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...backends.base import Array, Backend, BufferSpec, Device, Tensor, contiguous_strides
from ...backends.capabilities import PacksWeights, SupportsPiecewiseLoading, SupportsZeroCopyWeights
from ...distributed import SINGLE_PROCESS, World
from ...distributed.rank_group import DevicePlacement
from ...graph.array_checks import as_array_for_spec, as_block_bytes
from ...graph.attrs import quote_node_name
from ...graph.errors import PlanError, StatesLostError
from ...graph.graph import Graph
from ...graph.node import view_constant_array
from ...graph.old_names import RenamedAttribute, warn_of_old_name
from ...graph.spec import Spec
from ...graph.validation import MAX_MESSAGE_CHARACTERS, TEXT, instance_of, integer_between, validate_arguments
from ...ops.quantisation import encode_array
from ..ir.execution_plan import PLAN_KIND, Plan
from ..ir.formatting import format_bytes
from ..ir.layout import REPLICATE, Layout, Local, Replicate, Shard, compute_local_shape, find_layout_error
from ..lowering.device_plan import DEVICES_KIND, DevicePlan, Devices
from ..records.field_types import record_kind
from .communicators import find_device_rank
from .device_locks import DeviceLock
from .packed_weight_files import PackedFileKey, PackedWeightFiles, WeightOrigin
from .shared_buffers import SharedIntermediateValueArena, WeightCopies
from .state_view import LocalShard, LostStates, StateView, slice_for_device
from .weight_digests import LoadedWeightDigests, compute_digest

NATURAL, POSITIVE = integer_between(0), integer_between(1)
PART_ALIGNMENT = 16
"""The alignment of the parts of a state in bytes, so that kernels can read a part like a buffer."""


class Store:
    """The memory of weights and states on a group of devices, which all plans on these devices share.

    States begin as zeros. With several processes, a store has the devices of its own process ``world.rank``; all
    processes make the same calls in the same order. `loaded_byte_count` counts the weight bytes that these devices have
    received. Packed weights are written to the files `packed`, if given, and are mapped from there the next time.
    Raises `BackendError` if device memory is full, and `PlanError` for a device of a missing process.
    """

    in_turn = RenamedAttribute("share_weights_and_arena")
    nbytes = RenamedAttribute("count_bytes_by_kind")
    nread = RenamedAttribute("loaded_byte_count")

    @validate_arguments(PlanError, group=DEVICES_KIND)
    def __init__(self, group: Devices, world: World = SINGLE_PROCESS, packed: PackedWeightFiles | None = None) -> None:
        self.group: tuple[tuple[Backend, Device], ...] = tuple(group)
        self.backends: tuple[Backend, ...] = tuple(backend for backend, _ in self.group)
        self.device_lock: DeviceLock = DeviceLock(self.backends)
        ranks = [find_device_rank(device, world) for _, device in group]
        self.between: DevicePlacement = DevicePlacement(world, ranks)
        self.loaded_byte_count: int = 0
        self.loaded_bytes: LoadedWeightDigests = LoadedWeightDigests(world, self.between.ranks)
        self._packed_files = packed
        self._device_buffers = {number: _DeviceBuffers(*self.group[number]) for number in self.between.local_devices}
        self._layouts: dict[str, tuple[Spec, Layout]] = {}
        self._states: dict[str, None] = {}
        self.lost_states: LostStates = LostStates()
        self._has_whole_states = True

    def __repr__(self) -> str:
        stored_bytes = sum(sum(device.values()) for device in self.count_bytes_by_kind())
        return f"Store({', '.join(str(device) for _, device in self.group)}, {format_bytes(stored_bytes)})"

    @validate_arguments(
        PlanError,
        name=TEXT,
        spec=instance_of(Spec),
        layout=record_kind(Replicate, Shard, Local, description="a layout of a leaf"),
    )
    def bind(
        self,
        name: str,
        data: npt.ArrayLike,
        spec: Spec,
        layout: Layout = REPLICATE,
        origin: WeightOrigin | None = None,
        release: Callable[[], object] = lambda: None,
        copies: WeightCopies | None = None,
    ) -> None:
        """Load a weight: each device receives its part of the data.

        Args:
            name: Name of the weight.
            data: The weight as a file has it: numbers, or bytes ``[..., row bytes]`` if quantised.
            spec: Shape and dtype of the weight. Raises `PlanError` unless the data fit.
            layout: Layout of the weight on the devices.
            origin: The source of the weight; without it, packed bytes are not kept.
            release: Called after each piece that was read, so that its pages may be dropped.
            copies: Copies that stores share; with them, devices read the memory of `data` itself if they can.
        """
        what = f"weight %{quote_node_name(name):.{MAX_MESSAGE_CHARACTERS}}"
        stored = _as_file_format_array(what, data, spec)
        if why := find_layout_error(spec.shape, layout, len(self.group)):
            raise PlanError(f"{what}: {spec}: {why}; plan for the devices of this store")
        with self.device_lock:
            self._layouts[name] = (spec, layout)
            for number, device in self._device_buffers.items():
                if isinstance(layout, Local) and number not in layout.devices:
                    continue
                shape = compute_local_shape(spec.shape, layout, number)
                declared_buffer = BufferSpec("weight", name, 0, Spec(shape, spec.dtype))

                def share(number: int = number) -> Array:
                    part = slice_for_device(stored, spec, layout, number)
                    self.loaded_byte_count += part.nbytes
                    return part

                place = None
                if self._packed_files is not None and origin is not None:
                    which = f"{layout.axis} {layout.index_ranges[number]}" if isinstance(layout, Shard) else "whole"
                    place = PackedFileKey(self._packed_files, origin, f"{spec} {which}")
                if copies is not None:
                    runs = (layout.axis, layout.index_ranges[number]) if isinstance(layout, Shard) else None
                    digest = device.bind_store_shared_weight(declared_buffer, share, data, runs, copies)
                else:
                    digest = device.load_or_map_weight(declared_buffer, share, release, place)
                if self.loaded_bytes.has_to_digest_for_rank_0:
                    self.loaded_bytes.add_digest(name, layout, number, digest)
            for number in self.loaded_bytes.list_remote_devices_rank_0_checks(layout):
                other = partial(slice_for_device, stored, spec, layout, number)
                self.loaded_bytes.add_digest(name, layout, number, lambda other=other: compute_digest(other(), release))  # type: ignore[misc]

    def share_weights(self) -> Store:
        """Return a second store for the same devices, with the same weights but its own states and arena."""
        other = Store(self.group, self.between.world, self._packed_files)
        for number, mine in self._device_buffers.items():
            theirs = other._device_buffers[number]
            theirs.buffer_by_leaf |= {key: one for key, one in mine.buffer_by_leaf.items() if key[0] == "weight"}
        weights = {name for name in self._layouts if name not in self._states}
        other._layouts.update({name: layout for name, layout in self._layouts.items() if name in weights})
        return other

    def beside(self) -> Store:
        """Return `share_weights()`; the old name goes in 0.3."""
        warn_of_old_name("Store", "beside", "share_weights")
        return self.share_weights()

    def share_weights_and_arena(self) -> Store:
        """Return a second store with its own states, which shares the weights and the arena with this one.

        Because they share the arena, plans on the two stores must not run at the same time.
        """
        other = self.share_weights()
        for number, mine in self._device_buffers.items():
            arena = other._device_buffers[number].arena = mine.arena
            arena.users |= {self.lost_states, other.lost_states}
        return other

    @validate_arguments(PlanError, first=NATURAL, count=POSITIVE, total=POSITIVE)
    def view_sequences(self, first: int, count: int, total: int, pools: Collection[str] = ()) -> Store:
        """Return a store for some sequences of a batch, with views of their parts of the states of this store.

        It has `count` of `total` sequences, from number `first` on. Every present state must have `total` equal parts
        along its first axis, except `pools`, which all sequences share. Plans of both must not run at the same time.

        Raises:
            PlanError: A state has no such parts, is sharded along its first axis, or a part begins at an address that
                kernels cannot use.
        """
        if first + count > total:
            raise PlanError(f"view_sequences: sequences {first} to {first + count - 1} are not all among {total}")
        other, sequences = self.share_weights_and_arena(), (first, count, total)
        other.lost_states, other._has_whole_states = self.lost_states, False
        for name in self._states:
            first, count, total = (0, 1, 1) if name in pools else sequences
            spec, layout = self._layouts[name]
            if spec.shape[0] % total or (isinstance(layout, Shard) and layout.axis == 0):
                raise PlanError(f"state %{name}: {spec} {layout} has no equal parts for {total} sequences")
            part = _make_spec_of_parts(spec, count, total)
            other._layouts[name], other._states[name] = (part, layout), None
            for number, device in self._device_buffers.items():
                if ("state", name) in device.buffer_by_leaf:
                    theirs = device.view_first_axis_parts("state", name, first, count, total)
                    other._device_buffers[number].buffer_by_leaf["state", name] = theirs
        return other

    @validate_arguments(PlanError, name=TEXT, source=NATURAL, target=NATURAL, count=NATURAL)
    def copy_state_rows(self, name: str, source: int, target: int, count: int) -> None:
        """Copy rows of a state to other rows of it, within the memory of each device.

        Args:
            name: The name of the state.
            source: The first row to copy.
            target: The first row to overwrite.
            count: The number of rows.

        Raises:
            PlanError: The rows overlap or are not in the state, or the state is sharded along its first axis.
        """
        state = self.state(name)
        rows = state.shape[0]
        if abs(source - target) < count or max(source, target) + count > rows:
            raise PlanError(f"copy_state_rows: count {count} from {source} and {target}; need two parts of {rows} rows")
        if isinstance(state.layout, Shard) and state.layout.axis == 0:
            raise PlanError(f"copy_state_rows: %{quote_node_name(name):.60} is sharded along its rows")
        with self.device_lock:
            self.lost_states.require_none()
            for part in state.parts.values():
                part.memory_view[target : target + count] = part.memory_view[source : source + count]

    @validate_arguments(PlanError, name=TEXT)
    def state(self, name: str) -> StateView:
        """Return a state over all devices as one array, which can be read, indexed and assigned."""
        if name not in self.states:
            raise PlanError(
                f"there is no state %{quote_node_name(name):.60} yet; states appear with the first plan that has them"
            )
        spec, layout = self._layouts[name]
        parts = {
            n: d.view_shard("state", name)
            for n, d in self._device_buffers.items()
            if ("state", name) in d.buffer_by_leaf
        }
        return StateView(name, spec, layout, parts, self.device_lock, self.between, self.lost_states)

    def zero_states(self) -> None:
        """Zero all states. Lost states are good again, but not in a view of another store (`view_sequences`).

        Raises:
            StatesLostError: A device that has not stopped may still write to the states.
        """
        with self.device_lock:
            self.lost_states.require_reusable_memory()
            for name in self._states:
                self.state(name)[...] = 0
            if self._has_whole_states:
                self.lost_states.reason = ""

    def _record_lost_states(self, error: StatesLostError) -> None:
        """Record that a run has lost the states. While a device may still write, the arena is not used either."""
        self.lost_states.record(error)
        if not error.can_begin_anew and not error.is_of_earlier_run:
            for device in self._device_buffers.values():
                device.arena.abandon_buffer(error)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all states that plans over this store have had so far."""
        return tuple(self._states)

    def count_bytes_by_kind(self) -> list[dict[str, int]]:
        """Return the bytes in use on each device of this process, by kind: weight, state and arena."""
        return [d.compute_bytes_by_kind() for d in self._device_buffers.values()]

    @validate_arguments(PlanError, plan=PLAN_KIND)
    def require_devices(self, plan: Plan) -> None:
        """Raise `PlanError` unless `plan` is for the devices of this store."""
        theirs, own = (", ".join(str(d) for _, d in group) for group in (plan.group, self.group))
        if theirs != own:
            raise PlanError(
                f"the plan is for {theirs:.{2 * MAX_MESSAGE_CHARACTERS}}, "
                f"and the store for {own:.{2 * MAX_MESSAGE_CHARACTERS}}; make a store for it"
            )

    @validate_arguments(PlanError, plan=PLAN_KIND)
    def buffers(self, plan: Plan) -> dict[int, list[Any]]:
        """Return the buffers of a plan's program on each device of this process; allocate missing ones.

        Raises `PlanError` if a weight was never bound, or if a leaf has another layout than in an earlier plan.
        """
        self.require_devices(plan)
        for leaf in (*plan.graph.weights, *plan.graph.states):
            name, planned_entry = leaf.node.name, (leaf.spec, plan.leaves[leaf.node.name])
            if leaf.node.op == "state":
                self._layouts.setdefault(name, planned_entry)
                self._states.setdefault(name)
            if self._layouts.get(name, planned_entry) != planned_entry:
                stored_entry = self._layouts[name]
                raise PlanError(
                    f"%{name} is {stored_entry[0]} {stored_entry[1]} in the store "
                    f"but {planned_entry[0]} {planned_entry[1]} in the plan"
                )
        return {
            number: device.list_program_buffers(plan.device_plans[number])
            for number, device in self._device_buffers.items()
        }


class _DeviceBuffers:
    """The memory of one device in a store: its weights and states by (kind, name), and its arena."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self.backend, self.device = backend, device
        self.splitting_backend: SupportsPiecewiseLoading | None = (
            backend if isinstance(backend, SupportsPiecewiseLoading) else None
        )
        self.buffer_by_leaf: dict[tuple[str, str], tuple[BufferSpec, Any]] = {}
        self.arena = SharedIntermediateValueArena()

    def load_or_map_weight(
        self,
        declared_buffer: BufferSpec,
        data: Callable[[], Array],
        release: Callable[[], object],
        packed_file_key: PackedFileKey | None = None,
    ) -> Callable[[], bytes]:
        """Load a weight into a buffer of the device, or map it from a packed file.

        Args:
            declared_buffer: The name and the declared spec of the weight.
            data: Reads the weight, unless a packed file has it.
            release: Called after each loaded piece.
            packed_file_key: The packed file, if any.

        Returns:
            A function that computes the digest of the weight's bytes.
        """
        assert declared_buffer.declared_spec is not None
        stored = self.backend.storage_spec(declared_buffer.declared_spec, declared_buffer.kind)
        spec = BufferSpec(
            declared_buffer.kind, declared_buffer.name, stored.nbytes, declared_buffer.declared_spec, stored
        )
        packing = (
            self.backend.compute_packing_id()
            if stored.dtype.is_quantised and isinstance(self.backend, PacksWeights)
            else None
        )
        if packed_file_key is None or packing is None:
            buffer, part = self.backend.alloc(spec.nbytes, self.device, lasting=True), data()
            self._load_in_slices(buffer, declared_buffer.declared_spec, part, release)
            self.buffer_by_leaf[spec.kind, spec.name] = (spec, buffer)
            return lambda: compute_digest(part, release)
        mapped_weight = packed_file_key.packed_files.map_file_of_right_size(
            packed_file_key.origin, packing, packed_file_key.share_text, spec.nbytes
        )
        if mapped_weight is None:
            packed, part = self.backend.alloc(spec.nbytes, self.device), data()
            self._load_in_slices(packed, declared_buffer.declared_spec, part, release)
            mapped_weight = packed_file_key.packed_files.write_and_map(
                packed_file_key.origin, packing, packed_file_key.share_text, packed, compute_digest(part, release)
            )
        buffer, digest = mapped_weight
        self.buffer_by_leaf[spec.kind, spec.name] = (spec, buffer)
        return lambda: digest

    def bind_store_shared_weight(
        self,
        declared_buffer: BufferSpec,
        data: Callable[[], Array],
        source: npt.ArrayLike,
        part_key: object,
        copies: WeightCopies,
    ) -> Callable[[], bytes]:
        """Bind a weight to memory that several stores share; return a function that computes the digest of its bytes.

        `data` reads the part of this device, which `part_key` names in `copies`. If this part is a view of the array
        `source` of the caller, the device reads `source` itself if the backend can. Several ranges are always a copy.
        """
        assert declared_buffer.declared_spec is not None
        declared = declared_buffer.declared_spec
        stored = self.backend.storage_spec(declared, declared_buffer.kind)
        spec = BufferSpec(declared_buffer.kind, declared_buffer.name, stored.nbytes, declared, stored)
        buffer, zero_copy = None, self.backend if isinstance(self.backend, SupportsZeroCopyWeights) else None
        if copies.is_source_lasting and zero_copy is not None:
            part = data()
            if isinstance(source, np.ndarray) and np.may_share_memory(part, source):
                buffer = zero_copy.as_buffer(part, declared)
        if buffer is None:
            copies.has_host_copies |= zero_copy is not None
            buffer = copies.load_or_refresh_copy(
                (type(self.backend), self.device, declared, stored, part_key),
                lambda: self.backend.alloc(spec.nbytes, self.device),
                lambda copy: self._load_in_slices(copy, declared, data(), lambda: None),
            )
        self.buffer_by_leaf[spec.kind, spec.name] = (spec, buffer)
        return lambda: compute_digest(data())

    def _load_in_slices(self, buffer: Any, declared: Spec, data: Array, release: Callable[[], object]) -> None:
        whole = (data, declared, buffer)
        for weight_slice in self.splitting_backend.split_weight(*whole) if self.splitting_backend else (whole,):
            self.backend.load(*weight_slice)
            release()

    def view_shard(self, kind: str, name: str) -> LocalShard:
        spec, buffer = self.buffer_by_leaf[kind, name]
        assert spec.stored_spec is not None
        shape, dtype = spec.stored_spec.shape, spec.stored_spec.dtype
        return LocalShard(self.backend.view(buffer, Tensor(0, 0, shape, contiguous_strides(shape), dtype)), dtype)

    def view_first_axis_parts(self, kind: str, name: str, first: int, count: int, total: int) -> tuple[BufferSpec, Any]:
        """View `count` of `total` equal parts of a buffer along the first axis, from part number `first` on.

        Returns the specification and the memory of these parts.
        """
        spec, buffer = self.buffer_by_leaf[kind, name]
        assert spec.declared_spec is not None
        assert spec.stored_spec is not None
        part_bytes = spec.nbytes // total
        if spec.nbytes % total or first * part_bytes % PART_ALIGNMENT:
            raise PlanError(f"{kind} %{name}: a part of {part_bytes} bytes is no multiple of {PART_ALIGNMENT} bytes")
        declared, stored = (_make_spec_of_parts(one, count, total) for one in (spec.declared_spec, spec.stored_spec))
        view = buffer[first * part_bytes : (first + count) * part_bytes]
        return BufferSpec(kind, name, count * part_bytes, declared, stored), view

    def compute_bytes_by_kind(self) -> dict[str, int]:
        total = {"weight": 0, "state": 0, "arena": self.arena.nbytes}
        for (kind, _), (spec, _) in self.buffer_by_leaf.items():
            total[kind] += spec.nbytes
        return total

    def list_program_buffers(self, device_plan: DevicePlan) -> list[Any]:
        return [self._find_or_allocate_buffer(spec, device_plan.graph) for spec in device_plan.program.buffers]

    def _find_or_allocate_buffer(self, spec: BufferSpec, graph: Graph) -> Any:
        if spec.kind == "arena":
            return self.arena.grow_buffer(spec.nbytes, lambda: self.backend.alloc(spec.nbytes, self.device))
        if spec.kind == "constant":
            assert spec.declared_spec is not None
            (node,) = (n for n in graph.nodes if n.op == "constant" and n.name == spec.name)
            buffer = self.backend.alloc(spec.nbytes, self.device)
            self.backend.load(view_constant_array(node), spec.declared_spec, buffer)
            return buffer
        key = (spec.kind, spec.name)
        if key not in self.buffer_by_leaf:
            if spec.kind == "weight":
                raise PlanError(
                    f"weight %{spec.name}: {spec.declared_spec} is not bound; pass it when loading the plan"
                )
            self.buffer_by_leaf[key] = (spec, self.backend.alloc(spec.nbytes, self.device, lasting=True))
        known_spec, buffer = self.buffer_by_leaf[key]
        if known_spec != spec:
            raise PlanError(
                f"{spec.kind} %{spec.name} is {known_spec.declared_spec} in the store "
                f"but {spec.declared_spec} in the plan"
            )
        return buffer


def _make_spec_of_parts(spec: Spec, count: int, total: int) -> Spec:
    """Return the shape and dtype of `count` of `total` equal parts of a value along the first axis."""
    return Spec((spec.shape[0] // total * count, *spec.shape[1:]), spec.dtype)


def _as_file_format_array(subject: str, data: npt.ArrayLike, spec: Spec) -> Array:
    """Check the data of a weight, and return it in the file format: numbers, or block bytes if quantised."""
    if spec.dtype.is_quantised:
        return as_block_bytes(subject, data, spec)
    array = as_array_for_spec(subject, data, spec)
    return array if array.dtype == spec.dtype.storage else encode_array(array, spec.dtype)
