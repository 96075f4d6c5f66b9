"""A stand-in for CuPy: the calls of `hocket.backends.cupy`, over host memory and emulated launches.

It follows the order of calls that CUDA requires. Calls in a stream run later, on a thread of the stream; launches
within a capture wait for the graph; asynchronous copies need pinned memory. It does not model speed.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.device.device_limits import HIP_LIMITS as LIMITS
from hocket.backends.cupy.device.driver import SINGLE_BLOCK_CLUSTER, KernelInstance, KernelLaunch
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver, EmulatedHipDriver
from hocket.backends.cupy.kernel_table import SOURCES

from ..waits import WAIT_SECONDS
from .fake_cuda_graph import Graph

GARBAGE = 0xA5


class Block:
    """Memory of the pool, which is reused only after its stream has reached the point of its release."""

    def __init__(self, nbytes):
        self.memory, self.stream = EmulatedDriver().alloc(max(16, nbytes), None), Stream.current()
        self.memory[...] = GARBAGE

    def __del__(self):
        self.stream.hold(self.memory)


class Pointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, block, offset=0):
        self.block, self.offset = block, offset
        self.ptr = block.memory.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.block, self.offset + offset)


class FakeArray:
    """``cupy.ndarray``: NumPy may not touch it unasked."""

    device = nullcontext()

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        dtype = np.dtype(dtype)
        if memptr is None:
            memptr = Pointer(Block(int(np.prod(shape)) * dtype.itemsize))
        self.data = memptr
        self.host_array = np.ndarray(shape, dtype, memptr.block.memory.data, memptr.offset, strides)
        self.shape, self.dtype, self.flags, self.nbytes = (
            self.host_array.shape,
            dtype,
            self.host_array.flags,
            self.host_array.nbytes,
        )

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, index):
        items = self.host_array[index]
        offset = items.__array_interface__["data"][0] - self.data.block.memory.ctypes.data
        return FakeArray(items.shape, items.dtype, Pointer(self.data.block, offset), items.strides)

    def __setitem__(self, index, value):
        assert isinstance(value, FakeArray)
        Stream.current().put(lambda: self.host_array.__setitem__(index, value.host_array))


def zeros(shape, dtype):
    result = FakeArray(shape, dtype)
    Stream.current().put(lambda: result.host_array.fill(0))
    return result


def dense(array):
    if array.flags.c_contiguous:
        return array
    result = FakeArray(array.shape, array.dtype)
    Stream.current().put(lambda: np.copyto(result.host_array, array.host_array))
    return result


class StreamError(Exception):
    """``cupy.cuda.runtime.CUDARuntimeError``."""

    def __init__(self, why, status=700):
        super().__init__(why)
        self.status = status


class Stream:
    """A stream that runs its calls in order, each at least `lag` seconds late."""

    lag: ClassVar[float] = 0.0
    linger: ClassVar[float] = 0.2
    """How long its thread waits for more: a new thread makes fibers of its own for the emulation."""
    numbers: ClassVar[count] = count(7)
    known: ClassVar[weakref.WeakValueDictionary] = weakref.WeakValueDictionary()
    of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self, non_blocking=False, priority=0):
        assert non_blocking, "it would wait for the default stream, and that for all devices' parts"
        assert priority in (0, -1), "all devices have these"
        self.ptr = next(self.numbers)
        self.known[self.ptr] = self
        self.capture, self.behind, self.priority = None, frozenset(), priority
        self.queue, self.changed, self.is_busy, self.error = deque(), threading.Condition(), False, None
        self.worker = None

    @classmethod
    def current(cls):
        stack = getattr(cls.of_thread, "stack", [])
        assert stack, "this goes through the default stream"
        return stack[-1]

    def __enter__(self):
        Stream.of_thread.stack = [*getattr(Stream.of_thread, "stack", []), self]
        return self

    def __exit__(self, *_):
        Stream.of_thread.stack.pop()

    @property
    def is_capturing(self):
        return self.capture is not None

    def put(self, run):
        if self.is_capturing:
            self.behind = self.capture.add(run, self.behind)
            return
        with self.changed:
            self.queue.append(run)
            self.is_busy = True
            self.changed.notify_all()
            if self.worker is None:
                self.worker = threading.Thread(target=self._work, daemon=True)
                self.worker.start()

    def hold(self, memory):
        """As long as anything runs that may use it."""
        with self.changed:
            if self.is_busy:
                self.queue.append(partial(id, memory))

    def _work(self):
        while True:
            with self.changed:
                if not self.queue:
                    self.is_busy = False
                    self.changed.notify_all()
                    if not self.changed.wait_for(lambda: self.queue, self.linger):
                        self.worker = None
                        return
                run = self.queue.popleft()
            if self.lag:
                time.sleep(self.lag)
            try:
                if self.error is None:  # nothing runs after a failure
                    run()
            except Exception as why:  # of a kernel or of an assertion here: unkept, this thread ends and all wait
                self.error = why

    def begin_capture(self):
        assert not self.is_capturing
        self.capture, self.behind = Graph(), frozenset()
        self.capture.streams.append(self)

    def end_capture(self):
        graph, behind = self.capture, self.behind
        for stream in graph.streams:
            stream.capture = None
        if graph.seen_from(behind) != {*range(len(graph.nodes))}:
            raise StreamError("capturing stream has unjoined work", 904)
        return graph

    def wait_event(self, event):
        """Wait for an event; within a capture, add it to the graph, and order all later calls behind it."""
        if event.capture is None:
            assert not self.is_capturing, "a capture depends on what is outside of it"
            passed = event.passed
            self.put(lambda: passed.wait(WAIT_SECONDS))
            return
        assert self.capture in (None, event.capture), "an event of another capture"
        if self.capture is None:
            self.capture, self.behind = event.capture, frozenset()
            self.capture.streams.append(self)
        self.behind |= event.behind

    def query(self):
        """0 where all is done, 600 where it is not, or the error."""
        with self.changed:
            return 600 if self.is_busy else 0 if self.error is None else 700

    def synchronize(self):
        assert not self.is_capturing
        with self.changed:
            assert self.changed.wait_for(lambda: not self.is_busy, WAIT_SECONDS), "the stream does not end"
            self._check()

    def _check(self):
        if self.error is not None:
            raise StreamError(str(self.error))


def _not_on_hip(*_):
    raise StreamError("hipErrorUnknown: unknown error")


class HipStream(Stream):
    """Nothing is captured."""

    begin_capture = _not_on_hip


class EarlyLibrary:
    """``libcuda`` with the one call that CuPy lacks; keeps which kernels it launched early, in order, and their
    clusters, or says `status`."""

    def __init__(self, cupy, status=0):
        self.cupy, self.status, self.launched, self.clusters = cupy, status, [], {}

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        config = config._obj
        attributes = {a.id: tuple(a.value) for a in config.attributes[: config.count]}
        assert attributes.keys() <= {4, 6}, "clusters, programmatic stream serialization"
        assert attributes
        assert extra is None
        if not self.status:
            name = self.cupy.functions[function.value].name
            if 6 in attributes:
                assert attributes[6] == (1, 0, 0)
                self.launched.append(name)
            self.clusters[name] = attributes.get(4, SINGLE_BLOCK_CLUSTER)
            sizes = *config.grid, *config.block, config.shared_bytes
            driver = self.cupy.cuda.driver
            driver.launchKernel(function.value, *sizes, config.stream, parameters.value, 0, self.clusters[name])
        return self.status


class Event:
    """``cupy.cuda.Event``: when the stream came to it."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.has_time, self.at, self.passed = not disable_timing, None, threading.Event()
        self.capture, self.behind, self.stream = None, frozenset(), None
        self.passed.set()  # nothing to wait for before it is recorded

    def record(self, stream=None):
        assert isinstance(stream, Stream)
        self.stream = stream
        self.capture, self.behind = stream.capture, stream.behind
        if stream.is_capturing:
            if self.has_time:
                raise StreamError("an event within a capture has no time")
            return
        passed = self.passed = threading.Event()

        def pass_it():
            self.at = time.perf_counter()
            passed.set()

        stream.put(pass_it)

    def synchronize(self):
        end = time.monotonic() + WAIT_SECONDS
        while not self.passed.wait(0.005) and self.stream.error is None:  # nothing passes after a failure
            if time.monotonic() > end:
                raise StreamError("the event does not come")
        if self.stream is not None:
            self.stream._check()


def compute_milliseconds(start, end):
    """Milliseconds."""
    assert start.has_time
    assert end.has_time
    return (end.at - start.at) * 1e3


HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
PROPERTIES = {"totalGlobalMem": 1 << 30, "multiProcessorCount": 1, "l2CacheSize": 1 << 20}
OF_HIP = {"gcnArchName": b"gfx90a:sramecc+:xnack-", "sharedMemPerBlock": LIMITS.shared_bytes_per_block}


class FakeModule(SimpleNamespace):
    """Modules are equal only to themselves, and may be keys."""

    __hash__ = object.__hash__


def fake_cupy(sources, are_peers=True, nccl=None, is_hip=False):
    """Return the module, or with `is_hip` the one for ROCm; kernels may be launched from `sources`."""
    emulated = (EmulatedHipDriver if is_hip else EmulatedDriver)(0)
    enabled, pinned, current = set(), set(), threading.local()
    staged: list[np.ndarray] = []
    functions: dict[int, KernelInstance] = {}

    class Module:
        def load(self, image):
            self.source = sources[int(image)]

        def get_function(self, name):
            functions[len(functions) + 1] = self.source[name]
            return SimpleNamespace(ptr=len(functions))

    def launch_kernel(
        function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, cluster=SINGLE_BLOCK_CLUSTER
    ):
        at = ctypes.c_void_p.from_address(parameters).value
        assert extra == 0
        sizes = (gx, gy, gz), (bx, by, bz), shared
        Stream.known[stream].put(_make_emulated_launch(emulated, functions[function], sizes, at, cluster))

    def copy(into, source, nbytes, kind, stream):
        ends = {HOST_TO_DEVICE: [source], DEVICE_TO_HOST: [into], DEVICE_TO_DEVICE: []}[kind]
        for host in ends:
            at = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in staged]
            assert any(low <= host and host + nbytes <= high for low, high in at), "this memory is not pinned"
        Stream.known[stream].put(lambda: ctypes.memmove(into, source, nbytes))

    def alloc_pinned(nbytes):
        staged.append(np.zeros(nbytes, np.uint8))
        return staged[-1]

    @contextmanager
    def enter_device(index):
        before, current.index = getattr(current, "index", 0), index
        try:
            yield device
        finally:
            current.index = before

    def enable_peer(other):
        pair = (current.index, other)
        if pair in enabled:
            raise StreamError("peer access is already enabled", 704)
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
        is_hip=is_hip,
        enabled=enabled,
        pinned=pinned,
        deviceCanAccessPeer=lambda own, other: are_peers and own != other,
        deviceEnablePeerAccess=enable_peer,
        hostRegister=register,
        hostUnregister=pinned.remove,
        pointerGetAttributes=attributes,
        getDeviceCount=lambda: 4,
        getDeviceProperties=lambda index: {**PROPERTIES, **(OF_HIP if is_hip else {}), "name": b"no GPU"},
        driverGetVersion=lambda: 12000,  # none of its launches begins early
        runtimeGetVersion=lambda: 13000,
        memcpyAsync=copy,
        streamQuery=lambda pointer: Stream.known[pointer].query(),
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        CUDARuntimeError=StreamError,
    )
    driver = SimpleNamespace(launchKernel=launch_kernel, funcSetAttribute=lambda *_: None, CUDADriverError=StreamError)
    device = SimpleNamespace(compute_capability="90")
    if is_hip:
        driver.funcSetAttribute = runtime.deviceEnablePeerAccess = device.compute_capability = _not_on_hip
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=driver,
        Device=enter_device,
        Stream=HipStream if is_hip else Stream,
        Event=Event,
        get_elapsed_time=compute_milliseconds,
        alloc_pinned_memory=alloc_pinned,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        function=SimpleNamespace(Module=Module),
        nccl=nccl(lambda: current.index) if nccl else SimpleNamespace(available=False),
    )
    return FakeModule(
        __version__="none",
        functions=functions,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=cuda,
        ndarray=FakeArray,
        zeros=zeros,
        empty=FakeArray,
        ascontiguousarray=dense,
    )


def _make_emulated_launch(driver, kernel, sizes, at, cluster):
    """Return a launch with argument words at an address; the words are copied now, as CUDA does."""
    size = _words(kernel)
    words = tuple(np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(at)).tolist())
    return driver.record([KernelLaunch(kernel, *sizes, words, (), 0, cluster)], None)


def _words(kernel):
    """How many words a kernel takes, which the emulation says when it is given too few."""
    from hocket.backends.cupy.device.driver import LaunchError

    try:
        EmulatedDriver(0).record([KernelLaunch(kernel, (1, 1, 1), (32, 1, 1), 0, (), (), 0)], None)()
    except LaunchError as why:
        return int(str(why).split("takes ")[1].split()[0])
    raise AssertionError


def install_fake_cupy(monkeypatch, **options):
    """Install a stand-in for CuPy, from which the driver of CUDA devices is built, and return it.

    Kernels may be launched from the sources of the package, and from sources that are generated for a program.
    """
    sources = [*SOURCES]

    def number_source(source, arch):
        if source not in sources:
            sources.append(source)
        return str(sources.index(source)), {name: name for name in source.names}

    cupy = fake_cupy(sources, **options)
    monkeypatch.setattr(cuda_driver, "_cupy", lambda: cupy)
    monkeypatch.setattr(cuda_driver, "_nccl", lambda: cupy.cuda.nccl)
    monkeypatch.setattr(cuda_driver, "load_or_compile_cubin", number_source)
    cuda_driver._compile_and_load_module.cache_clear()
    return cupy
