"""What outlives plans: the weights and states of a group of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...backends.base import Array, Backend, BufferSpec, Device, Tensor, contiguous_strides
from ...graph.arguments import TEXT, a, needs
from ...graph.arrays import fitted, fitted_blocks, numbers
from ...graph.attrs import quote
from ...graph.dtypes import DType
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.node import constant_array
from ...graph.spec import Spec
from ...ops.quants import decoded, encoded
from ..layout import REPLICATE, Layout, Local, Replicate, Shard, local_shape
from ..lowering.lane import DEVICES, Lane
from ..plan import Plan
from ..units import nbytes_text
from .turns import Turn


class Store:
    """Weights and states of a group of devices, shared by all plans that run over them; states begin as zeros.

    Raises `BackendError` when a device has no memory left.
    """

    @needs(PlanError, group=DEVICES)
    def __init__(self, group: Sequence[tuple[Backend, Device]]) -> None:
        self.group = tuple(group)
        self.backends = tuple(backend for backend, _ in self.group)
        self.turn = Turn(self.backends)
        self._devices = [_DeviceStore(backend, device) for backend, device in group]
        self._layouts: dict[str, tuple[Spec, Layout]] = {}

    def __repr__(self) -> str:
        held = sum(sum(device.values()) for device in self.nbytes())
        return f"Store({', '.join(str(device) for _, device in self.group)}, {nbytes_text(held)})"

    @needs(PlanError, name=TEXT, spec=a(Spec), layout=a(Replicate, Shard, Local, words="a layout of a leaf"))
    def bind(self, name: str, data: npt.ArrayLike, spec: Spec, layout: Layout = REPLICATE) -> None:
        """Load a weight, each device its share; `data` is as a file holds it: numbers, or bytes ``[..., row bytes]`` if
        quantised.  Raises `PlanError` unless it fits `spec`."""
        stored = _stored(f"weight %{name}", data, spec)
        with self.turn:
            self._layouts[name] = (spec, layout)
            for number, device in enumerate(self._devices):
                if isinstance(layout, Local) and number not in layout.devices:
                    continue
                shape = local_shape(spec.shape, layout, number)
                part = _share(stored, spec, layout, number)
                device.load(BufferSpec("weight", name, 0, Spec(shape, spec.dtype)), part)

    def beside(self) -> Store:
        """A store over the same weights, with states of its own."""
        other = Store(self.group)
        for mine, theirs in zip(self._devices, other._devices, strict=True):
            theirs.held.update({key: kept for key, kept in mine.held.items() if key[0] == "weight"})
        weights = {name for device in self._devices for kind, name in device.held if kind == "weight"}
        other._layouts.update({name: layout for name, layout in self._layouts.items() if name in weights})
        return other

    @needs(PlanError, name=TEXT)
    def state(self, name: str) -> StateView:
        """A state over all devices: index and assign it as one array to reset, save or restore it."""
        if name not in self.states:
            raise PlanError(
                f"there is no state %{quote(name):.60} yet; states appear with the first plan that has them"
            )
        spec, layout = self._layouts[name]
        parts = [d.part("state", name) if ("state", name) in d.held else None for d in self._devices]
        return StateView(name, spec, layout, parts, self.turn)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for d in self._devices for kind, name in d.held if kind == "state"))

    def nbytes(self) -> list[dict[str, int]]:
        """Bytes held on each device, by kind."""
        return [d.nbytes() for d in self._devices]

    @needs(PlanError, plan=a(Plan))
    def buffers(self, plan: Plan) -> list[list[Any]]:
        """For each device the buffers of its program, made where they do not exist.

        Raises `PlanError` if a weight was never bound, or if a leaf lies otherwise than for an earlier plan.
        """
        if len(plan.lanes) != len(self.group):
            raise PlanError(
                f"the plan is for {len(plan.lanes)} devices, the store for {len(self.group)}; make one for it"
            )
        for leaf in (*plan.graph.weights, *plan.graph.states):
            name, wanted = leaf.node.name, (leaf.spec, plan.leaves[leaf.node.name])
            if leaf.node.op == "state":
                self._layouts.setdefault(name, wanted)
            if self._layouts.get(name, wanted) != wanted:
                held = self._layouts[name]
                raise PlanError(f"%{name} is {held[0]} {held[1]} in the store but {wanted[0]} {wanted[1]} in the plan")
        return [device.buffers(lane) for device, lane in zip(self._devices, plan.lanes, strict=True)]


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has of a state: its view of the memory, and the dtype in which numbers lie there."""

    array: Any
    dtype: DType


class StateView:
    """One state that may be cut over devices, as one NumPy-like array; a run of another thread is waited for."""

    def __init__(self, name: str, spec: Spec, layout: Layout, parts: list[Part | None], turn: Turn) -> None:
        self.name, self.spec, self.layout, self.parts, self._turn = name, spec, layout, parts, turn
        self.shape = spec.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        with self._turn:
            parts = [None if p is None else decoded(p.array, p.dtype) for p in self.parts]
            whole = assembled(self.spec.shape, self.layout, parts)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        return np.asarray(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to `index`, an index that NumPy understands; every device gets its share.  Raises `PlanError` for what
        does not fit there."""
        values = decoded(self._fitted(index, value), self.spec.dtype)
        cut = isinstance(self.layout, Shard)
        with self._turn:
            if cut:
                whole = np.array(self)
                whole[index] = values
                values, index = whole, ...
            for number, part in enumerate(self.parts):
                if part is not None:
                    mine = _share(values, self.spec, self.layout, number) if cut else values
                    part.array[index] = encoded(mine, part.dtype)

    def _fitted(self, index: Any, value: Any) -> Array:
        """`value` as numbers for the entries at `index`."""
        there = np.broadcast_to(np.int8(0), self.shape)[index].shape
        given = numbers(f"state %{self.name}", value)
        try:
            spread = np.broadcast_to(given, there)
        except ValueError:
            got = f"got shape {list(given.shape)} for entries of shape {list(there)}"
            raise PlanError(f"state %{self.name}: {self.spec}: {got}") from None
        return fitted(f"state %{self.name}", spread, Spec(there, self.spec.dtype))

    def any(self) -> bool:
        return bool(np.asarray(self).any())

    def tolist(self) -> Any:
        return np.asarray(self).tolist()


class _DeviceStore:
    """The buffers of one device by (kind, name), and its arena."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self.backend, self.device = backend, device
        self.held: dict[tuple[str, str], tuple[BufferSpec, Any]] = {}
        self.arena: tuple[int, Any] = (0, None)

    def load(self, wanted: BufferSpec, data: Array) -> Any:
        assert wanted.declared is not None
        stored = self.backend.stored(wanted.declared, wanted.kind)
        spec = BufferSpec(wanted.kind, wanted.name, stored.nbytes, wanted.declared, stored)
        buffer = self.backend.alloc(spec.nbytes, self.device, lasting=True)
        self.backend.load(data, wanted.declared, buffer)
        self.held[spec.kind, spec.name] = (spec, buffer)
        return buffer

    def part(self, kind: str, name: str) -> Part:
        spec, buffer = self.held[kind, name]
        assert spec.stored is not None
        shape, dtype = spec.stored.shape, spec.stored.dtype
        return Part(self.backend.view(buffer, Tensor(0, 0, shape, contiguous_strides(shape), dtype)), dtype)

    def nbytes(self) -> dict[str, int]:
        total = {"weight": 0, "state": 0, "arena": self.arena[0]}
        for (kind, _), (spec, _) in self.held.items():
            total[kind] += spec.nbytes
        return total

    def buffers(self, lane: Lane) -> list[Any]:
        return [self._buffer(spec, lane.graph) for spec in lane.program.buffers]

    def _buffer(self, spec: BufferSpec, graph: Graph) -> Any:
        if spec.kind == "arena":  # one serves all plans, since they run one at a time; it grows to the largest
            if spec.nbytes > self.arena[0] or self.arena[1] is None:
                self.arena = (spec.nbytes, self.backend.alloc(spec.nbytes, self.device))
            return self.arena[1]
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
            self.held[key] = (spec, self.backend.alloc(spec.nbytes, self.device))
        held, buffer = self.held[key]
        if held != spec:
            raise PlanError(f"{spec.kind} %{spec.name} is {held.declared} in the store but {spec.declared} in the plan")
        return buffer


def _stored(what: str, data: npt.ArrayLike, spec: Spec) -> Array:
    """What a caller gives for a weight, as a file holds it."""
    if spec.dtype.is_quantised:
        return fitted_blocks(what, data, spec)
    array = fitted(what, data, spec)
    return array if array.dtype == spec.dtype.storage else encoded(array, spec.dtype)


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


def assembled(shape: tuple[int, ...], layout: Layout, parts: Sequence[Any]) -> Array:
    """The whole value from what the devices have, as a host array of its own."""
    if isinstance(layout, Local):
        return np.array(parts[layout.devices[0]])
    if not isinstance(layout, Shard):
        return np.array(parts[0])
    whole = np.empty(shape, np.asarray(parts[0]).dtype)
    for part, runs in zip(parts, layout.runs, strict=True):
        start = 0
        for offset, n in runs:
            ahead = (slice(None),) * layout.axis
            whole[(*ahead, slice(offset, offset + n))] = part[(*ahead, slice(start, start + n))]
            start += n
    return whole
