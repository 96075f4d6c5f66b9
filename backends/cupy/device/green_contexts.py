"""Green contexts: streams that run on multiprocessors of their own, so that parts of one device never block each other.

The driver divides the multiprocessors of a device into groups. A green context has one group; all green contexts of a
device share its primary context, so memory, modules and events are common. CuPy has no calls for them.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from ....graph.errors import BackendError
from ...base import Device
from ...thread_safe_cache import thread_safe_cache
from .dependent_launch import open_driver_library

MIN_GREEN_DRIVER_VERSION = 12050
"""The first driver version with `cuGreenCtxStreamCreate`; green contexts without it are of version 12.4."""
MULTIPROCESSOR_RESOURCE, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1
"""CU_DEV_RESOURCE_TYPE_SM, CU_GREEN_CTX_DEFAULT_STREAM and CU_STREAM_NON_BLOCKING; the driver requires both flags."""


class DeviceResource(ctypes.Structure):
    """The C struct CUdevResource: a set of multiprocessors. Only the driver writes it.

    `count` is the number of multiprocessors, `smallest` their number in the smallest group, and groups are multiples of
    `alignment`.
    """

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("reserved", ctypes.c_ubyte * 92),
        *((name, ctypes.c_uint) for name in ("count", "smallest", "alignment")),
        ("unused", ctypes.c_ubyte * 36),
    )


def require_divided_multiprocessors(cupy: Any, on: Device) -> DeviceResource:
    """Return the multiprocessors of the part `on`, which has `Device.multiprocessors` of them for itself.

    The part may not exist: then the message says how the device can be divided. No context is created.

    Raises:
        BackendError: The driver is too old or missing, or the device has no such part.
    """
    assert on.part is not None
    assert on.multiprocessors is not None
    count = on.multiprocessors
    library, version = open_driver_library(), int(cupy.cuda.runtime.driverGetVersion())
    if library is None:
        raise BackendError(f"{on}: the library of the CUDA driver is missing, so no device can be divided")
    if version < MIN_GREEN_DRIVER_VERSION:
        raise BackendError(
            f"{on}: parts with multiprocessors of their own need a driver for CUDA 12.5 or later, and this one is for "
            f"{version // 1000}.{version % 1000 // 10}; name the part as {on.kind}:{on.index}.{on.part}"
        )
    whole, remaining, device = DeviceResource(), DeviceResource(), ctypes.c_int()
    _raise_unless_success(cupy, library.cuDeviceGet(ctypes.byref(device), on.index))
    _raise_unless_success(cupy, library.cuDeviceGetDevResource(device, ctypes.byref(whole), MULTIPROCESSOR_RESOURCE))
    group_count = ctypes.c_uint(whole.count // count)  # the driver may make fewer groups, of more multiprocessors
    groups = (DeviceResource * max(1, group_count.value))()
    if group_count.value:
        split = ctypes.byref(group_count), ctypes.byref(whole), ctypes.byref(remaining)
        _raise_unless_success(cupy, library.cuDevSmResourceSplitByCount(groups, *split, 0, count))
    if group_count.value and groups[0].count != count:
        raise BackendError(
            f"there is no device {on}: the driver makes parts of {groups[0].count} multiprocessors for {count}; name "
            f"parts as {on.kind}:{on.index}/{groups[0].count}.0"
        )
    if on.part >= group_count.value:
        raise BackendError(
            f"there is no device {on}: {whole.count} multiprocessors make {group_count.value} parts of {count}"
        )
    return groups[on.part]


@thread_safe_cache
def make_green_context(cupy: Any, on: Device) -> int:
    """Make the green context of a part of a device, once per process; return its handle. It stays until the end.

    The caller has made the device current, so that its primary context exists.

    Raises:
        BackendError: The device has no such part.
        CUDADriverError: The driver refuses a call.
    """
    resource = require_divided_multiprocessors(cupy, on)
    library = open_driver_library()
    assert library is not None
    descriptor, context, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _raise_unless_success(cupy, library.cuDeviceGet(ctypes.byref(device), on.index))
    _raise_unless_success(cupy, library.cuDevResourceGenerateDesc(ctypes.byref(descriptor), ctypes.byref(resource), 1))
    _raise_unless_success(cupy, library.cuGreenCtxCreate(ctypes.byref(context), descriptor, device, DEFAULT_STREAM))
    assert context.value is not None
    return context.value


def make_green_stream(cupy: Any, on: Device, priority: int) -> Any:
    """Make a stream for launches that run only on the multiprocessors of the part `on`.

    The driver's stream is destroyed with the returned CuPy stream.

    Args:
        cupy: The module CuPy.
        on: The part of a device, which the caller has made current.
        priority: Priority of the stream; lower numbers begin earlier.

    Raises:
        BackendError: The device has no such part.
        CUDADriverError: The driver refuses a call.
    """
    context, library, handle = make_green_context(cupy, on), open_driver_library(), ctypes.c_void_p()
    assert library is not None
    _raise_unless_success(
        cupy,
        library.cuGreenCtxStreamCreate(ctypes.byref(handle), ctypes.c_void_p(context), NON_BLOCKING, priority),
    )
    stream = cupy.cuda.ExternalStream(handle.value, on.index)
    weakref.finalize(stream, library.cuStreamDestroy_v2, handle).atexit = False
    return stream


def _raise_unless_success(cupy: Any, status: int) -> None:
    """Raise CuPy's error of the CUDA driver for a status other than success."""
    if status:
        raise cupy.cuda.driver.CUDADriverError(status)
