"""What outlives plans: the weights and states of a group of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...backends.abilities import Divides, Packs, Shares
from ...backends.base import Array, Backend, BufferSpec, Device, Tensor, contiguous_strides
from ...distributed import SINGLE_PROCESS, World
from ...distributed.rank_group import DevicePlacement
from ...graph.array_checks import as_array_for_spec, as_block_bytes, as_number_array
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.node import constant_array
from ...graph.spec import Spec
from ...graph.validation import MAX_MESSAGE_CHARACTERS, TEXT, format_value, instance_of, validate_arguments
from ...ops.quantisation import decode_array, encode_array
from ..layout import REPLICATE, Layout, Local, Replicate, Shard, local_shape
from ..lowering.lane import DEVICES, Lane
from ..plan import Plan
from ..units import nbytes_text
from .copies import Arena, WeightCopies
from .digests import LoadedBytes, digest_of
from .packed import Origin, PackedWeights
from .turns import Turn


class Store:
    """Weights and states of a group of devices, shared by all plans that run over them; states begin as zeros.

    Of devices in several processes it has those of this one, number ``world.rank``; all do the same in the same order.
    `nread` is how many bytes of weights these have been given.  Weights that a backend packs are kept in `packed`, if
    that is given, and come from there the next time.  Raises `BackendError` when a device has no memory left, and
    `PlanError` for a device of a process that is not there.
    """

    @validate_arguments(PlanError, group=DEVICES)
    def __init__(
        self,
        group: Sequence[tuple[Backend, Device]],
        world: World = SINGLE_PROCESS,
        packed: PackedWeights | None = None,
    ) -> None:
        self.group: tuple[tuple[Backend, Device], ...] = tuple(group)
        self.backends: tuple[Backend, ...] = tuple(backend for backend, _ in self.group)
        self.turn: Turn = Turn(self.backends)
        self.between: DevicePlacement = DevicePlacement(world, [_rank(device, world) for _, device in group])
        self.nread: int = 0
        self.loaded_bytes: LoadedBytes = LoadedBytes(world, self.between.ranks)
        self._packed = packed
        self._devices = {number: _DeviceStore(*self.group[number]) for number in self.between.local_devices}
        self._layouts: dict[str, tuple[Spec, Layout]] = {}
        self._states: dict[str, None] = {}

    def __repr__(self) -> str:
        held = sum(sum(device.values()) for device in self.nbytes())
        return f"Store({', '.join(str(device) for _, device in self.group)}, {nbytes_text(held)})"

    @validate_arguments(
        PlanError,
        name=TEXT,
        spec=instance_of(Spec),
        layout=instance_of(Replicate, Shard, Local, description="a layout of a leaf"),
    )
    def bind(
        self,
        name: str,
        data: npt.ArrayLike,
        spec: Spec,
        layout: Layout = REPLICATE,
        origin: Origin | None = None,
        release: Callable[[], object] = lambda: None,
        copies: WeightCopies | None = None,
    ) -> None:
        """Load a weight, each device its share; `data` is as a file holds it: numbers, or bytes ``[..., row bytes]`` if
        quantised; `origin` is where it comes from, without which it is not kept, and `release` is called whenever a
        piece of it was read, which may be forgotten.  With `copies` devices read the memory of `data` itself where they
        can, and share the copies that they need with other stores.  Raises `PlanError` unless it fits `spec`."""
        stored = _stored(f"weight %{quote_node_name(name):.{MAX_MESSAGE_CHARACTERS}}", data, spec)
        if why := _find_layout_error(spec, layout, len(self.group)):
            raise PlanError(
                f"weight %{quote_node_name(name):.{MAX_MESSAGE_CHARACTERS}}: {spec}: {why}; "
                "plan for the devices of this store"
            )
        with self.turn:
            self._layouts[name] = (spec, layout)
            for number, device in self._devices.items():
                if isinstance(layout, Local) and number not in layout.devices:
                    continue
                shape = local_shape(spec.shape, layout, number)
                wanted = BufferSpec("weight", name, 0, Spec(shape, spec.dtype))

                def share(number: int = number) -> Array:
                    part = _share(stored, spec, layout, number)
                    self.nread += part.nbytes
                    return part

                place = None
                if self._packed is not None and origin is not None:
                    which = f"{layout.axis} {layout.runs[number]}" if isinstance(layout, Shard) else "whole"
                    place = Place(self._packed, origin, f"{spec} {which}")
                if copies is not None:
                    runs = (layout.axis, layout.runs[number]) if isinstance(layout, Shard) else None
                    digest = device.share(wanted, share, runs, copies)
                else:
                    digest = device.load(wanted, share, release, place)
                if self.loaded_bytes.is_checked:
                    self.loaded_bytes.add(name, layout, number, digest)
            for number in self.loaded_bytes.others(layout):
                other = partial(_share, stored, spec, layout, number)
                self.loaded_bytes.add(name, layout, number, lambda other=other: digest_of(other(), release))  # type: ignore[misc]

    def beside(self) -> Store:
        """A store over the same weights, with states of its own."""
        other = Store(self.group, self.between.world, self._packed)
        for number, mine in self._devices.items():
            theirs = other._devices[number]
            theirs.held.update({key: kept for key, kept in mine.held.items() if key[0] == "weight"})
        weights = {name for name in self._layouts if name not in self._states}
        other._layouts.update({name: layout for name, layout in self._layouts.items() if name in weights})
        return other

    def in_turn(self) -> Store:
        """A store `beside` this one that shares the memory of values, too: plans over these stores must never run at
        the same time, as an `Executor` of each ensures."""
        other = self.beside()
        for number, mine in self._devices.items():
            other._devices[number].arena = mine.arena
        return other

    @validate_arguments(PlanError, name=TEXT)
    def state(self, name: str) -> StateView:
        """A state over all devices: index and assign it as one array to reset, save or restore it."""
        if name not in self.states:
            raise PlanError(
                f"there is no state %{quote_node_name(name):.60} yet; states appear with the first plan that has them"
            )
        spec, layout = self._layouts[name]
        parts = {n: d.part("state", name) for n, d in self._devices.items() if ("state", name) in d.held}
        return StateView(name, spec, layout, parts, self.turn, self.between)

    @property
    def states(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._states)

    def nbytes(self) -> list[dict[str, int]]:
        """Bytes held on each device of this process, by kind."""
        return [d.nbytes() for d in self._devices.values()]

    @validate_arguments(PlanError, plan=instance_of(Plan))
    def require_devices(self, plan: Plan) -> None:
        """Raises `PlanError` unless `plan` is for the devices of this store."""
        theirs, own = (", ".join(str(d) for _, d in group) for group in (plan.group, self.group))
        if theirs != own:
            raise PlanError(
                f"the plan is for {theirs:.{2 * MAX_MESSAGE_CHARACTERS}}, "
                f"and the store for {own:.{2 * MAX_MESSAGE_CHARACTERS}}; make a store for it"
            )

    @validate_arguments(PlanError, plan=instance_of(Plan))
    def buffers(self, plan: Plan) -> dict[int, list[Any]]:
        """For each device of this process the buffers of its program, made where they do not exist.

        Raises `PlanError` if a weight was never bound, or if a leaf lies otherwise than for an earlier plan.
        """
        self.require_devices(plan)
        for leaf in (*plan.graph.weights, *plan.graph.states):
            name, wanted = leaf.node.name, (leaf.spec, plan.leaves[leaf.node.name])
            if leaf.node.op == "state":
                self._layouts.setdefault(name, wanted)
                self._states.setdefault(name)
            if self._layouts.get(name, wanted) != wanted:
                held = self._layouts[name]
                raise PlanError(f"%{name} is {held[0]} {held[1]} in the store but {wanted[0]} {wanted[1]} in the plan")
        return {number: device.buffers(plan.lanes[number]) for number, device in self._devices.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has of a state or an output: its view of the memory, and the dtype in which numbers lie there."""

    array: Any
    dtype: DType

    def numbers(self) -> Array:
        """They themselves, where memory holds them as they are."""
        return decode_array(self.array, self.dtype)

    def copied(self) -> Array:
        """A host array of its own."""
        return decode_array(np.array(self.array), self.dtype)


class StateView:
    """One state that may be cut over devices, as one NumPy-like array; a run of another thread is waited for.

    Of devices in several processes each has the `parts` of its own; to read the state, all have to.
    """

    name: str
    spec: Spec
    shape: tuple[int, ...]
    layout: Layout
    parts: Mapping[int, Part]

    def __init__(
        self, name: str, spec: Spec, layout: Layout, parts: Mapping[int, Part], turn: Turn, between: DevicePlacement
    ) -> None:
        self.name, self.spec, self.layout, self.parts, self._turn = name, spec, layout, parts, turn
        self.shape, self._between = spec.shape, between

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        with self._turn:
            parts = {number: part.numbers() for number, part in self.parts.items()}
            whole = assembled(self.spec.shape, self.layout, parts, self._between)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        """Entries at `index`, an index that NumPy understands.  Raises `PlanError` for any other."""
        return self._at(np.asarray(self), index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to `index`, an index that NumPy understands; every device gets its share.  Raises `PlanError` for what
        does not fit there."""
        values = self._fitted(index, value)
        if not self.spec.dtype.is_quantised:  # whose numbers come as such
            values = decode_array(values, self.spec.dtype)
        with self._turn:
            for number, part in self.parts.items():
                if not isinstance(self.layout, Shard) and not part.dtype.is_quantised:
                    part.array[index] = encode_array(values, part.dtype)
                    continue
                whole = np.empty(self.shape, values.dtype)  # what other devices have of it is not looked at
                put(whole, self.layout, number, part.numbers())
                whole[index] = values
                part.array[...] = encode_array(_share(whole, Spec(self.shape), self.layout, number), part.dtype)

    def _at(self, array: Array, index: Any) -> Any:
        try:
            return array[index]
        except Exception:  # an index of no known type may raise anything
            what = f"state %{quote_node_name(self.name):.{MAX_MESSAGE_CHARACTERS}}: {self.spec}"
            raise PlanError(f"{what} has no entries [{format_value(index)}]; give an index within its shape") from None

    def _fitted(self, index: Any, value: Any) -> Array:
        """`value` as numbers that can be assigned to the entries at `index`; one for all of them stays one."""
        there = np.shape(self._at(np.broadcast_to(np.int8(0), self.shape), index))
        given = as_number_array(f"state %{self.name}", value)
        try:
            np.broadcast_to(given, there)
        except ValueError:
            got = f"got shape {list(given.shape)} for entries of shape {list(there)}"
            raise PlanError(f"state %{self.name}: {self.spec}: {got}") from None
        return as_array_for_spec(f"state %{self.name}", given, Spec(given.shape, self.spec.dtype))

    def any(self) -> bool:
        return bool(np.asarray(self).any())

    def tolist(self) -> Any:
        return np.asarray(self).tolist()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one device's share of a weight is kept."""

    weights: PackedWeights
    origin: Origin
    share: str


class _DeviceStore:
    """The buffers of one device by (kind, name), and its arena."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self.backend, self.device = backend, device
        self.divides: Divides | None = backend if isinstance(backend, Divides) else None
        self.held: dict[tuple[str, str], tuple[BufferSpec, Any]] = {}
        self.arena = Arena()

    def load(
        self,
        wanted: BufferSpec,
        data: Callable[[], Array],
        release: Callable[[], object],
        place: Place | None = None,
    ) -> Callable[[], bytes]:
        """Load a weight, and return a function that gives the digest of its bytes.

        `data` reads the weight; it is not called where the weight is kept in its `place`. `release` follows each piece
        that was loaded.
        """
        assert wanted.declared is not None
        stored = self.backend.stored(wanted.declared, wanted.kind)
        spec = BufferSpec(wanted.kind, wanted.name, stored.nbytes, wanted.declared, stored)
        packing = self.backend.packing() if stored.dtype.is_quantised and isinstance(self.backend, Packs) else None
        if place is None or packing is None:
            buffer, part = self.backend.alloc(spec.nbytes, self.device, lasting=True), data()
            self._fill(buffer, wanted.declared, part, release)
            self.held[spec.kind, spec.name] = (spec, buffer)
            return lambda: digest_of(part, release)
        kept = place.weights.recalled(place.origin, packing, place.share, spec.nbytes)
        if kept is None:
            packed, part = self.backend.alloc(spec.nbytes, self.device), data()
            self._fill(packed, wanted.declared, part, release)
            kept = place.weights.kept(place.origin, packing, place.share, packed, digest_of(part, release))
        buffer, digest = kept
        self.held[spec.kind, spec.name] = (spec, buffer)
        return lambda: digest

    def share(
        self, wanted: BufferSpec, data: Callable[[], Array], share: object, copies: WeightCopies
    ) -> Callable[[], bytes]:
        """Bind a weight to its own memory, where the backend reads that, or else to a copy that stores share.

        Return a function that gives the digest of its bytes.
        """
        assert wanted.declared is not None
        declared = wanted.declared
        stored = self.backend.stored(declared, wanted.kind)
        spec = BufferSpec(wanted.kind, wanted.name, stored.nbytes, declared, stored)
        buffer = None
        if copies.is_source_lasting and isinstance(self.backend, Shares):
            buffer = self.backend.buffer_over(data(), declared)
        if buffer is None:
            buffer = copies.buffer(
                (type(self.backend), self.device, declared, stored, share),
                lambda: self.backend.alloc(spec.nbytes, self.device),
                lambda copy: self._fill(copy, declared, data(), lambda: None),
            )
        self.held[spec.kind, spec.name] = (spec, buffer)
        return lambda: digest_of(data())

    def _fill(self, buffer: Any, declared: Spec, data: Array, release: Callable[[], object]) -> None:
        whole = (data, declared, buffer)
        for piece in self.divides.pieces(*whole) if self.divides else (whole,):
            self.backend.load(*piece)
            release()

    def part(self, kind: str, name: str) -> Part:
        spec, buffer = self.held[kind, name]
        assert spec.stored is not None
        shape, dtype = spec.stored.shape, spec.stored.dtype
        return Part(self.backend.view(buffer, Tensor(0, 0, shape, contiguous_strides(shape), dtype)), dtype)

    def nbytes(self) -> dict[str, int]:
        total = {"weight": 0, "state": 0, "arena": self.arena.nbytes}
        for (kind, _), (spec, _) in self.held.items():
            total[kind] += spec.nbytes
        return total

    def buffers(self, lane: Lane) -> list[Any]:
        return [self._buffer(spec, lane.graph) for spec in lane.program.buffers]

    def _buffer(self, spec: BufferSpec, graph: Graph) -> Any:
        if spec.kind == "arena":
            return self.arena.buffer(spec.nbytes, lambda: self.backend.alloc(spec.nbytes, self.device))
        if spec.kind == "constant":
            assert spec.declared is not None
            (node,) = (n for n in graph.nodes if n.op == "constant" and n.name == spec.name)
            buffer = self.backend.alloc(spec.nbytes, self.device)
            self.backend.load(constant_array(node), spec.declared, buffer)
            return buffer
        key = (spec.kind, spec.name)
        if key not in self.held:
            if spec.kind == "weight":
                raise PlanError(f"weight %{spec.name}: {spec.declared} is not bound; pass it when loading the plan")
            self.held[key] = (spec, self.backend.alloc(spec.nbytes, self.device, lasting=True))
        held, buffer = self.held[key]
        if held != spec:
            raise PlanError(f"{spec.kind} %{spec.name} is {held.declared} in the store but {spec.declared} in the plan")
        return buffer


def _find_layout_error(spec: Spec, layout: Layout, count: int) -> str:
    """Why a value cannot lie so on `count` devices; nothing if it can."""
    if isinstance(layout, Local) and not all(0 <= number < count for number in layout.devices):
        return f"its layout names a device that is none of {count}"
    if isinstance(layout, Shard):
        if len(layout.runs) != count:
            return f"its layout is for {len(layout.runs)} devices, and {count} are there"
        size = spec.shape[layout.axis] if 0 <= layout.axis < len(spec.shape) else -1
        if any(start < 0 or n < 0 or start + n > size for runs in layout.runs for start, n in runs):
            return "its layout is a layout of another shape"
    return ""


def _stored(what: str, data: npt.ArrayLike, spec: Spec) -> Array:
    """What a caller gives for a weight, as a file holds it."""
    if spec.dtype.is_quantised:
        return as_block_bytes(what, data, spec)
    array = as_array_for_spec(what, data, spec)
    return array if array.dtype == spec.dtype.storage else encode_array(array, spec.dtype)


def _share(data: Array, spec: Spec, layout: Layout, device: int) -> Array:
    """What one device gets of an array; along the last axis of a quantised one, runs of blocks."""
    if not isinstance(layout, Shard):
        return data
    axis, runs = layout.axis, layout.runs[device]
    if spec.dtype.is_quantised and axis == len(spec.shape) - 1:
        block, nbytes = spec.dtype.block, spec.dtype.block_bytes
        runs = tuple((offset // block * nbytes, n // block * nbytes) for offset, n in runs)
    pieces = [data[(slice(None),) * axis + (slice(offset, offset + n),)] for offset, n in runs]
    if len(pieces) == 1:
        return pieces[0]
    empty = data[(slice(None),) * axis + (slice(0, 0),)]
    return np.concatenate([empty, *pieces], axis=axis)


def assembled(shape: tuple[int, ...], layout: Layout, parts: Mapping[int, Any], between: DevicePlacement) -> Array:
    """The whole value, as a host array of its own, from what the devices of this process have, by their numbers, and
    from what the others send."""
    if not isinstance(layout, Shard):
        return np.array(
            between.broadcast_one(parts, layout.devices if isinstance(layout, Local) else range(len(between.ranks)))
        )
    holders = [number for number, runs in enumerate(layout.runs) if runs] or range(len(layout.runs))
    everywhere = between.exchange(parts, holders)
    whole = np.empty(shape, np.asarray(everywhere[holders[0]]).dtype)
    for number, part in everywhere.items():
        put(whole, layout, number, part)
    return whole


def put(whole: Array, layout: Layout, number: int, part: Any) -> None:
    """Put what device `number` has of a value to where it belongs."""
    if not isinstance(layout, Shard):
        whole[...] = part
        return
    start, ahead = 0, (slice(None),) * layout.axis
    for offset, n in layout.runs[number]:
        whole[(*ahead, slice(offset, offset + n))] = part[(*ahead, slice(start, start + n))]
        start += n


def _rank(device: Device, world: World) -> int:
    """The process that a device belongs to."""
    if device.rank is None and world.size > 1:
        raise PlanError(f"device {device}: say of which of {world.size} processes, as {device}@0")
    if (device.rank or 0) >= world.size:
        raise PlanError(
            f"device {device} is one of process {device.rank}, but the last one is {world.size - 1}; "
            f"start more, as mpiexec -n {(device.rank or 0) + 1} hocket ..."
        )
    return device.rank or 0
