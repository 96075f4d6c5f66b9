"""Views of states: a state on several devices as one NumPy-like array, which can be read, indexed and assigned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...backends.base import Array
from ...distributed.rank_group import DevicePlacement
from ...graph.array_checks import as_array_for_spec, as_real_number_array
from ...graph.attrs import quote_node_name
from ...graph.dtypes import DType
from ...graph.errors import PlanError, StatesLostError
from ...graph.lazy_dataclass import dataclass
from ...graph.spec import Spec
from ...graph.validation import MAX_MESSAGE_CHARACTERS, format_value
from ...ops.quantisation import decode_array, encode_array
from ..ir.layout import Layout, Local, Shard
from .device_locks import DeviceLock


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a state or an output on one local device: a view of its memory, and the stored dtype."""

    memory_view: Any
    dtype: DType

    def decode(self) -> Array:
        """Return the stored content as plain numbers. Without a conversion, the result is a view of the memory."""
        return decode_array(self.memory_view, self.dtype)

    def copy_to_host(self) -> Array:
        """Return the content as plain numbers in a new host array."""
        return decode_array(np.array(self.memory_view), self.dtype)


class LostStates:
    """Records whether the states of a store are lost, because a run over them could not be undone.

    Lost states are not read any more. `reason` is an empty text while they are good. `can_begin_anew` is as in
    `StatesLostError`.
    """

    def __init__(self) -> None:
        self.reason, self.can_begin_anew = "", True

    def record(self, error: StatesLostError) -> None:
        """Record that a run has lost the states. The first loss stays, unless the memory cannot be used after this."""
        if not error.is_of_earlier_run and not (self.reason and error.can_begin_anew):
            self.reason, self.can_begin_anew = str(error), error.can_begin_anew

    def require_none(self) -> None:
        """Raise `StatesLostError` if the states are lost."""
        if self.reason:
            remedy = "; begin anew with zeros" if self.can_begin_anew else ""  # else the reason has one
            raise StatesLostError(
                f"an earlier run has lost the states ({self.reason}){remedy}",
                is_of_earlier_run=True,
                can_begin_anew=self.can_begin_anew,
            )

    def require_reusable_memory(self) -> None:
        """Raise `StatesLostError` if a device that has not stopped may still write to the states."""
        if not self.can_begin_anew:
            self.require_none()


class StateView:
    """One state of a model as one NumPy-like array to read and assign, although devices may have shards of it.

    Reads and writes wait for runs of other threads. Reads of lost states raise `StatesLostError`. Each process has
    the `parts` of its own devices. All processes must read the state together.
    """

    name: str
    spec: Spec
    shape: tuple[int, ...]
    layout: Layout
    parts: Mapping[int, LocalShard]

    def __init__(
        self,
        name: str,
        spec: Spec,
        layout: Layout,
        parts: Mapping[int, LocalShard],
        turn: DeviceLock,
        between: DevicePlacement,
        lost_states: LostStates,
    ) -> None:
        self.name, self.spec, self.layout, self.parts, self._device_lock = name, spec, layout, parts, turn
        self.shape, self._device_placement, self._lost_states = spec.shape, between, lost_states

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        with self._device_lock:
            self._lost_states.require_none()
            parts = {number: part.decode() for number, part in self.parts.items()}
            whole = assemble_value(self.spec.shape, self.layout, parts, self._device_placement)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> Array:
        """Return the entries at a NumPy index. Raises `PlanError` for an illegal index."""
        return self._index_array(np.asarray(self), index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign values to a NumPy index on all devices. Raises `PlanError` for values that do not fit."""
        values = self._as_assignable_numbers(index, value)
        if not self.spec.dtype.is_quantised:  # quantised values are numbers already
            values = decode_array(values, self.spec.dtype)
        with self._device_lock:
            for number, part in self.parts.items():
                if not isinstance(self.layout, Shard) and not part.dtype.is_quantised:
                    part.memory_view[index] = encode_array(values, part.dtype)
                    continue
                present = part.decode()
                whole = np.empty(self.shape, present.dtype)  # entries of other devices are not read
                write_shard_into_whole(whole, self.layout, number, present)
                whole[index] = values
                part.memory_view[...] = encode_array(
                    slice_for_device(whole, Spec(self.shape), self.layout, number), part.dtype
                )

    def _index_array(self, array: Array, index: Any) -> Any:
        try:
            return array[index]
        except Exception:  # an index of an unknown type may raise any error
            what = f"state %{quote_node_name(self.name):.{MAX_MESSAGE_CHARACTERS}}: {self.spec}"
            raise PlanError(f"{what} has no entries [{format_value(index)}]; give an index within its shape") from None

    def _as_assignable_numbers(self, index: Any, value: Any) -> Array:
        """Check that values fit the entries at an index, and return them as numbers. A scalar stays a scalar."""
        there = np.shape(self._index_array(np.broadcast_to(np.int8(0), self.shape), index))
        numbers = as_real_number_array(f"state %{self.name}", value)
        try:
            np.broadcast_to(numbers, there)
        except ValueError:
            got = f"got shape {list(numbers.shape)} for entries of shape {list(there)}"
            raise PlanError(f"state %{self.name}: {self.spec}: {got}") from None
        return as_array_for_spec(f"state %{self.name}", numbers, Spec(numbers.shape, self.spec.dtype))

    def any(self) -> bool:
        return bool(np.asarray(self).any())

    def tolist(self) -> Any:
        return np.asarray(self).tolist()


def slice_for_device(data: Array, spec: Spec, layout: Layout, device: int) -> Array:
    """Return the part of an array that one device has.

    The bytes of a quantised array are sliced in whole blocks along the last axis.

    Args:
        data: The array of the whole value.
        spec: The shape and dtype of the whole value.
        layout: The layout of the value.
        device: The number of the device.
    """
    if not isinstance(layout, Shard):
        return data
    axis, runs = layout.axis, layout.index_ranges[device]
    if spec.dtype.is_quantised and axis == len(spec.shape) - 1:
        block, nbytes = spec.dtype.block, spec.dtype.block_bytes
        runs = tuple((offset // block * nbytes, n // block * nbytes) for offset, n in runs)
    slices = [data[(slice(None),) * axis + (slice(offset, offset + n),)] for offset, n in runs]
    if len(slices) == 1:
        return slices[0]
    empty = data[(slice(None),) * axis + (slice(0, 0),)]
    return np.concatenate([empty, *slices], axis=axis)


def assemble_value(shape: tuple[int, ...], layout: Layout, parts: Mapping[int, Any], between: DevicePlacement) -> Array:
    """Return a whole value as a new host array, from the parts on local devices and on other processes.

    Args:
        shape: The shape of the whole value.
        layout: The layout of the value.
        parts: The parts of the local devices, by device number.
        between: The processes of the devices, with communication between them.
    """
    if not isinstance(layout, Shard):
        owners = layout.devices if isinstance(layout, Local) else range(len(between.ranks))
        return np.array(between.broadcast_part(parts, owners))
    holders = [number for number, runs in enumerate(layout.index_ranges) if runs] or range(len(layout.index_ranges))
    everywhere = between.exchange_parts(parts, holders)
    whole = np.empty(shape, np.asarray(everywhere[holders[0]]).dtype)
    for number, part in everywhere.items():
        write_shard_into_whole(whole, layout, number, part)
    return whole


def write_shard_into_whole(whole: Array, layout: Layout, number: int, part: Any) -> None:
    """Write the part of one device into the array of the whole value, at the index ranges of the layout.

    Args:
        whole: The array of the whole value.
        layout: The layout of the value.
        number: The number of the device.
        part: The part of the device.
    """
    if not isinstance(layout, Shard):
        whole[...] = part
        return
    start, ahead = 0, (slice(None),) * layout.axis
    for offset, n in layout.index_ranges[number]:
        whole[(*ahead, slice(offset, offset + n))] = part[(*ahead, slice(start, start + n))]
        start += n
