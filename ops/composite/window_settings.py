"""The settings of sliding windows for each axis, and constants that several graphs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ...graph.errors import GraphError, format_count
from ...graph.node import Node, Value, constant
from ...graph.validation import instance_of, integer_between, list_of
from ..declaration.signature import SignatureMismatch
from ..movement.sliding_windows import count_windows, windows

MAX_SETTING = 2**31 - 1
ANY_VALUE = instance_of(Value)
AXIS_SIZES = list_of(integer_between(0, MAX_SETTING), "integers from 0 on")
STEPS = list_of(integer_between(1, MAX_SETTING), "integers from 1 on")
CROPS = list_of(integer_between(-MAX_SETTING, MAX_SETTING), "integers")
CHANNEL_GROUPS = integer_between(1, MAX_SETTING)
_shared_constants: WeakValueDictionary[str, Node] = WeakValueDictionary()
_shared_constants_lock = Lock()
"""The shared constants that are in use, by digest."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """The attributes of `windows`: sizes, strides, dilations and paddings of windows, one for each axis."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    @classmethod
    def with_defaults(
        cls,
        size: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        left: Sequence[int],
        right: Sequence[int],
    ) -> WindowSettings:
        """Return settings in which an empty stride or dilation is 1 for each axis, and an empty padding 0.

        Raises:
            GraphError: another number of settings than axes.
        """
        for name, entries in (("stride", stride), ("dilation", dilation), ("left", left), ("right", right)):
            if len(entries) not in (0, len(size)):
                raise GraphError(
                    f"windows: {name} has {format_count(len(entries), 'entry', 'entries')}; need one for each "
                    f"of {format_count(len(size), 'axis', 'axes')}"
                )
        ones, zeros = (1,) * len(size), (0,) * len(size)
        return cls(
            tuple(size),
            tuple(stride) or ones,
            tuple(dilation) or ones,
            tuple(left) or zeros,
            tuple(right) or zeros,
        )

    @property
    def spans(self) -> tuple[int, ...]:
        """The entries from the first to the last entry of a window, for each axis."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.size, self.dilation, strict=True))

    def has_only_window_of(self, axes: tuple[int, ...]) -> bool:
        """Return whether an image with these axes, without padding, is one window with all of its entries."""
        return self.size == self.spans == axes and not any((*self.left, *self.right))

    def count(self, op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of windows along each axis of images with this shape, [images, channels, axes ...].

        Args:
            op: name of the composite op, for the message.
            shape: shape of the images.

        Raises:
            GraphError: the settings do not fit the shape.
        """
        try:
            return count_windows(shape, asdict(self))
        except SignatureMismatch as why:
            raise GraphError(f"{op}: {why}") from None

    def collect_windows_of(self, x: Value, value: float = 0.0) -> Value:
        """Return the `windows` of images with padding of this value: [images, windows, channels, entries]."""
        return windows(x, **asdict(self), value=value)

    def sum_each_window(self, image: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum of each window of one image without channels, in the shape of the window counts."""
        settings: Mapping[str, tuple[int, ...]] = asdict(self)
        sums = windows.reference(image[None, None], **settings).sum(-1)
        return np.asarray(sums.reshape(count_windows((1, 1, *image.shape), settings)))


def make_shared_constant(array: npt.NDArray[np.generic]) -> Value:
    """Make a constant of an array; equal arrays share one leaf, and float64 numbers become f32."""
    data = array.astype(np.float32) if array.dtype == np.float64 else array
    digest = sha256(repr((data.dtype.str, data.shape)).encode() + data.tobytes()).hexdigest()
    with _shared_constants_lock:
        node = _shared_constants.get(digest)
        if node is None:
            node = constant(f"shared.{digest[:16]}", data).node
            _shared_constants[digest] = node
        return node.results[0]
