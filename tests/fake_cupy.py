"""A stand-in for CuPy: what `hocket.backends.cupy.cuda` calls of it, over host memory and emulated launches.

It knows the order of calls that CUDA asks for (launches within a capture wait for the graph), and nothing of speed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from hocket.backends.cupy.driver import Kernel, Launch
from hocket.backends.cupy.emulation.emulated import EmulatedDriver


class Pointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.ptr = memory.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


class FakeArray:
    """``cupy.ndarray``: NumPy may not touch it unasked."""

    device = nullcontext()

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        dtype = np.dtype(dtype)
        if memptr is None:
            size = max(16, int(np.prod(shape)) * dtype.itemsize)
            memptr = Pointer(EmulatedDriver().alloc(size, None))
        self.data = memptr
        self.held = np.ndarray(shape, dtype, memptr.memory.data, memptr.offset, strides)
        self.shape, self.dtype, self.flags = self.held.shape, dtype, self.held.flags

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def get(self):
        return self.held.copy()

    def set(self, host):
        assert isinstance(host, np.ndarray)
        assert host.shape == self.shape
        assert host.dtype == self.dtype
        self.held[...] = host

    def __getitem__(self, index):
        return SimpleNamespace(get=lambda: np.array(self.held[index]))

    def __setitem__(self, index, value):
        assert isinstance(value, FakeArray)
        self.held[index] = value.held


class Stream:
    ptr = 7
    of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self, non_blocking=False):
        self.recorded, self.is_capturing, self.calls = [], False, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def begin_capture(self):
        self.is_capturing, self.recorded = True, []
        Stream.of_thread.capturing = self

    def end_capture(self):
        self.is_capturing = False
        Stream.of_thread.capturing = None
        recorded = self.recorded
        return SimpleNamespace(launch=lambda stream: [run() for run in recorded])

    def synchronize(self):
        assert not self.is_capturing


class Event:
    """``cupy.cuda.Event``: when the stream came to it; emulated streams are always done."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        assert not disable_timing
        self.at = None

    def record(self, stream=None):
        assert isinstance(stream, Stream)
        assert getattr(Stream.of_thread, "capturing", None) is None, "an event within a capture has no time"
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at is not None


def elapsed(start, end):
    """Milliseconds."""
    assert start.at is not None
    return (end.at - start.at) * 1e3


def copy(into, source, nbytes, kind, stream):
    assert (kind, stream) == (DEVICE_TO_DEVICE, Stream.ptr)
    ctypes.memmove(into, source, nbytes)


DEVICE_TO_DEVICE = 3
PROPERTIES = {"totalGlobalMem": 1 << 30, "multiProcessorCount": 1, "l2CacheSize": 1 << 20}


def fake_cupy(sources, are_peers=True):
    """The module; `sources` is what kernels may be launched of."""
    enabled, pinned, current = set(), set(), threading.local()
    functions: dict[int, Kernel] = {}

    class Module:
        def load(self, image):
            self.source = sources[int(image)]

        def get_function(self, name):
            functions[len(functions) + 1] = self.source[name]
            return SimpleNamespace(ptr=len(functions))

    def launch_kernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        at = ctypes.c_void_p.from_address(parameters).value
        kernel = functions[function]
        assert (stream, extra) == (Stream.ptr, 0)
        run = _emulated(kernel, (gx, gy, gz), (bx, by, bz), shared, at)
        capturing = getattr(Stream.of_thread, "capturing", None)
        capturing.recorded.append(run) if capturing else run()

    class DriverError(Exception):
        status = 704

    @contextmanager
    def entered(index):
        before, current.index = getattr(current, "index", 0), index
        yield device
        current.index = before

    def enable_peer(other):
        pair = (current.index, other)
        if pair in enabled:
            raise DriverError("peer access is already enabled")
        enabled.add(pair)

    def register(address, nbytes, flags):
        assert address % 4096 == 0
        assert address not in pinned
        assert flags == 3
        pinned.add(address)

    def attributes(address):
        assert address in pinned
        return SimpleNamespace(devicePointer=address)

    runtime = SimpleNamespace(
        enabled=enabled,
        pinned=pinned,
        deviceCanAccessPeer=lambda own, other: are_peers,
        deviceEnablePeerAccess=enable_peer,
        hostRegister=register,
        hostUnregister=pinned.remove,
        pointerGetAttributes=attributes,
        getDeviceCount=lambda: 4,
        getDeviceProperties=lambda index: {**PROPERTIES, "name": b"no GPU"},
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        memcpyAsync=copy,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        CUDARuntimeError=DriverError,
    )
    driver = SimpleNamespace(launchKernel=launch_kernel, funcSetAttribute=lambda *_: None, CUDADriverError=DriverError)
    device = SimpleNamespace(compute_capability="90")
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=driver,
        Device=entered,
        Stream=Stream,
        Event=Event,
        get_elapsed_time=elapsed,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        function=SimpleNamespace(Module=Module),
    )
    return SimpleNamespace(
        __version__="none",
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=cuda,
        ndarray=FakeArray,
        zeros=lambda shape, dtype: FakeArray(shape, dtype),
        asarray=lambda host: _held(host),
    )


def _held(host):
    made = FakeArray(host.shape, host.dtype)
    made.held[...] = host
    return made


def _emulated(kernel, grid, block, shared, at):
    """A launch whose words lie at an address; they are copied now, as CUDA does."""
    size = _words(kernel)
    words = tuple(np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(at)).tolist())
    return EmulatedDriver(0).record([Launch(kernel, grid, block, shared, words, (), 0)], None)


def _words(kernel):
    """How many words a kernel takes, which the emulation says when it is given too few."""
    from hocket.backends.cupy.driver import LaunchError

    try:
        EmulatedDriver(0).record([Launch(kernel, (1, 1, 1), (32, 1, 1), 0, (), (), 0)], None)()
    except LaunchError as why:
        return int(str(why).split("takes ")[1].split()[0])
    raise AssertionError
