"""A stand-in for the calls of ``libcuda`` that make green contexts: it checks their order and their arguments.

Streams of a green context are streams of the stand-in for CuPy. A capture may have streams of one context only.
"""

from __future__ import annotations

import ctypes
from itertools import count

from hocket.backends.cupy.device import dependent_launch, green_contexts

from .fake_cupy import Stream

NOT_SUPPORTED, INVALID_VALUE = 801, 1
MAX_GROUPS = 7
"""The most groups that this driver makes; the documentation of CUDA allows fewer than the quotient."""
METHODS = {
    "cuDeviceGet": "_get_device",
    "cuDeviceGetDevResource": "_get_resource",
    "cuDevSmResourceSplitByCount": "_split_multiprocessors",
    "cuDevResourceGenerateDesc": "_make_descriptor",
    "cuGreenCtxCreate": "_create_context",
    "cuGreenCtxStreamCreate": "_create_stream",
    "cuStreamDestroy_v2": "_destroy_stream",
}
"""The methods by the names of the driver's calls."""


class GreenLibrary:
    """A device of `multiprocessors`, which are divided into multiples of `alignment`.

    `calls` are the names of the calls in order. `contexts` are the multiprocessor numbers of each context by handle,
    `streams` the context of each living stream, `ran` the contexts in which streams were used. A call named `refused`
    fails.
    """

    def __init__(self, cupy, multiprocessors=132, alignment=8, refused=""):
        self.multiprocessors, self.alignment, self.refused = multiprocessors, alignment, refused
        self.calls, self.contexts, self.streams, self.priorities = [], {}, {}, []
        self._descriptors, self._numbers, self._new = {}, count(1000), {}
        cupy.cuda.ExternalStream = self._take_stream
        cupy.cuda.runtime.driverGetVersion = lambda: 13000

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(name)
        return getattr(self, METHODS[name])

    def _call(self, name):
        self.calls.append(name)
        return NOT_SUPPORTED if name == self.refused else 0

    def _get_device(self, device, index):
        device._obj.value = 40 + index  # an ordinal is no handle
        return self._call("cuDeviceGet")

    def _get_resource(self, device, resource, kind):
        assert (device.value, kind) == (40, 1)
        assert ctypes.sizeof(resource._obj) == 144
        whole = resource._obj
        whole.kind, whole.count, whole.smallest, whole.alignment = 1, self.multiprocessors, 8, self.alignment
        return self._call("cuDeviceGetDevResource")

    def _split_multiprocessors(self, groups, group_count, whole, remaining, flags, minimum):
        assert (whole._obj.kind, whole._obj.count, flags) == (1, self.multiprocessors, 0)
        size = -(-minimum // self.alignment) * self.alignment
        group_total = min(group_count._obj.value, self.multiprocessors // size, MAX_GROUPS)
        assert group_count._obj.value <= len(groups)
        for number in range(group_total):
            groups[number].kind, groups[number].count = 1, size
            groups[number].unused[0] = number
        group_count._obj.value, remaining._obj.count = group_total, self.multiprocessors - group_total * size
        return self._call("cuDevSmResourceSplitByCount")

    def _make_descriptor(self, descriptor, resource, resource_count):
        assert resource_count == 1
        group = resource._obj
        assert group.kind == 1
        descriptor._obj.value = next(self._numbers)
        first = group.unused[0] * group.count
        self._descriptors[descriptor._obj.value] = range(first, first + group.count)
        return self._call("cuDevResourceGenerateDesc")

    def _create_context(self, context, descriptor, device, flags):
        assert (device.value, flags) == (40, 1), "the flag of the default stream is required"
        own = self._descriptors.pop(descriptor.value)
        assert not any(set(own) & set(other) for other in self.contexts.values()), "contexts share multiprocessors"
        context._obj.value = next(self._numbers)
        self.contexts[context._obj.value] = own
        return self._call("cuGreenCtxCreate")

    def _create_stream(self, handle, context, flags, priority):
        assert context.value in self.contexts
        assert (flags, priority in (0, -1)) == (1, True), "a stream that does not block is required"
        status = self._call("cuGreenCtxStreamCreate")
        if not status:
            stream = Stream(non_blocking=True, priority=priority)
            handle._obj.value = stream.ptr
            self._new[stream.ptr], self.streams[stream.ptr] = stream, context.value
        self.priorities.append(priority)
        return status

    def _destroy_stream(self, handle):
        del self.streams[handle.value]
        return self._call("cuStreamDestroy_v2")

    def _take_stream(self, handle, device_id):
        assert device_id == 0
        return self._new.pop(handle)

    def context_of(self, stream):
        """The context of a stream; a stream without one could run anywhere."""
        return self.streams[stream.ptr]


def give_green_contexts(monkeypatch, cupy, **options):
    """Install a library with green contexts for the stand-in of CuPy, and return it."""
    library = GreenLibrary(cupy, **options)
    monkeypatch.setattr(green_contexts, "open_driver_library", lambda: library)
    monkeypatch.setattr(dependent_launch, "open_driver_library", lambda: None)
    green_contexts.make_green_context.cache_clear()
    return library
