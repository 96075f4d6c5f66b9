"""An emulated device that works as late as it may: nothing runs before the host waits for it.

A host that reads or writes memory out of the order of the stream then gets other results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hocket.backends.base import Array
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver


class LateStream:
    """The stream of an emulated device, and the log of the calls of the host.

    The log has ``launch``, ``read`` (the start of a read of outputs) and ``wait`` (for such a read), each with the
    number of the run, from 0.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.runs = 0
        self.faulty_run = -1
        """The run that records a fault."""
        self.reads_at_wait = False
        """Plants a fault: outputs are copied when the host waits, behind all that was launched until then."""
        self._calls: deque[Callable[[], object]] = deque()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while self._calls and not is_done():
            self._calls.popleft()()

    def drain(self) -> None:
        self.run_until(lambda: False)


class LateArray:
    """A view of device memory for the host, which reads it after all earlier work and writes it in order."""

    def __init__(self, array: npt.NDArray[Any], stream: LateStream) -> None:
        self._array, self._stream = array, stream
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        self._stream.drain()
        return np.array(self._array, dtype)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        self._stream.drain()
        return np.array(self._array[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        data = np.array(value)
        self._stream.put(lambda: self._array.__setitem__(index, data))


def make_emulation_late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """Let emulated devices run as late as they may, and return their stream."""
    stream, record, view = LateStream(), EmulatedDriver.record, EmulatedDriver.view

    def record_late(self: EmulatedDriver, *operands: Any) -> Callable[[], None]:
        run = record(self, *operands)

        def launch() -> None:
            stream.log.append(("launch", stream.runs))
            stream.put(run)

        return launch

    def view_late(self: EmulatedDriver, *operands: Any) -> LateArray:
        return LateArray(view(self, *operands), stream)

    def make_late_writer(
        self: EmulatedDriver, buffers: Sequence[Any], tensors: Sequence[Any]
    ) -> Callable[[Sequence[Array]], None]:
        views = [view(self, buffers[t.buffer], t) for t in tensors]

        def write(arrays: Sequence[Array]) -> None:
            copies = [np.array(array) for array in arrays]

            def copy() -> None:
                for target, array in zip(views, copies, strict=True):
                    target[...] = array

            stream.put(copy)

        return write

    def make_late_reader(
        self: EmulatedDriver, buffers: Sequence[Any], tensors: Sequence[Any]
    ) -> Callable[[], Callable[[], Sequence[Array]]]:
        views = [view(self, buffers[t.buffer], t) for t in tensors]

        def start() -> Callable[[], Sequence[Array]]:
            number, arrays = stream.runs, list[Array]()
            if len(views) > 1:  # not only a fault record
                stream.log.append(("read", number))
                stream.runs += 1

            def copy() -> None:
                arrays.extend(map(np.array, views))
                if number == stream.faulty_run and len(views) > 1:
                    arrays[0][0] = 1

            if not stream.reads_at_wait:
                stream.put(copy)

            def wait() -> Sequence[Array]:
                if stream.reads_at_wait:
                    stream.put(copy)
                if len(views) > 1:
                    stream.log.append(("wait", number))
                stream.run_until(lambda: bool(arrays))
                return arrays

            return wait

        return start

    monkeypatch.setattr(EmulatedDriver, "record", record_late)
    monkeypatch.setattr(EmulatedDriver, "view", view_late)
    monkeypatch.setattr(EmulatedDriver, "make_writer", make_late_writer)
    monkeypatch.setattr(EmulatedDriver, "make_reader", make_late_reader)
    monkeypatch.setattr(EmulatedDriver, "synchronise", lambda self, on: stream.drain())
    return stream
