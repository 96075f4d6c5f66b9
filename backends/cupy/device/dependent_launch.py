"""Launches that begin while the previous launch runs: programmatic dependent launch.

CuPy has no call for it. The driver call here also launches clusters of blocks, early or not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ....graph.errors import BackendError
from ...thread_safe_cache import thread_safe_cache
from .driver import SINGLE_BLOCK_CLUSTER, DriverStep, KernelLaunch

MIN_EARLY_CAPABILITY, MIN_EARLY_DRIVER_VERSION = 90, 12030
"""The first compute capability with early launches, and the first driver version that captures them into graphs."""
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Values of CUlaunchAttributeID."""
DRIVER_LIBRARY_NAME = "libcuda.so.1"


class LaunchAttribute(ctypes.Structure):
    """The C struct CUlaunchAttribute: one attribute of a launch, with a value of 64 bytes.

    The value is the shape of a cluster, or 1 for the permission to begin early.
    """

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_uint * 3), ("unused", ctypes.c_char * 52))


class LaunchConfig(ctypes.Structure):
    """The C struct CUlaunchConfig: grid, block, shared memory, stream and attributes of a launch."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def find_early_launch_library(capability: int, driver_version: int) -> ctypes.CDLL | None:
    """Return the driver library if launches can begin early, else `None`.

    CUDA calls this programmatic dependent launch. Old devices and old drivers do not support it.

    Args:
        capability: Compute capability of the device, such as 90.
        driver_version: Version of the driver, such as 12030.
    """
    return (
        open_driver_library()
        if capability >= MIN_EARLY_CAPABILITY and driver_version >= MIN_EARLY_DRIVER_VERSION
        else None
    )


@thread_safe_cache
def open_driver_library() -> ctypes.CDLL | None:
    """Open the CUDA driver library; return `None` if it is not installed."""
    try:
        return ctypes.CDLL(DRIVER_LIBRARY_NAME)
    except OSError:
        return None


def compute_early_launch_flags(steps: Sequence[DriverStep]) -> list[bool]:
    """Return for each step whether it may begin before the previous step ends (programmatic dependent launch).

    Both steps must be launches. Every kernel waits for the end of the previous launch, so the end of a launch implies
    the end of all launches before it. A kernel without this wait would break the rule: the next kernel would not wait
    for earlier launches that still run.
    """
    are_launches = [isinstance(step, KernelLaunch) for step in steps]
    return [mine and before for mine, before in zip(are_launches, [False, *are_launches], strict=False)]


def find_attribute_launch_library(launch: KernelLaunch, is_early: bool) -> ctypes.CDLL | None:
    """Return the CUDA driver library if a launch needs launch attributes, else `None`.

    A launch needs attributes if it may begin early, before the previous launch ends, or if it has clusters.

    Raises:
        BackendError: The library is needed and missing.
    """
    if not is_early and launch.cluster == SINGLE_BLOCK_CLUSTER:
        return None
    if (library := open_driver_library()) is None:
        raise BackendError(
            f"{launch.kernel} cannot be launched in clusters without {DRIVER_LIBRARY_NAME}; install NVIDIA's driver"
        )
    return library


def launch_with_attributes(
    library: ctypes.CDLL, function: int, launch: KernelLaunch, stream: int, parameters: int, is_early: bool
) -> int:
    """Launch a kernel that has clusters or may begin early, and return the status of the CUDA driver.

    Args:
        library: The driver library.
        function: Handle of the kernel.
        launch: Grid, block, cluster and shared memory.
        stream: Handle of the stream.
        parameters: Address of the kernel parameters.
        is_early: Whether the launch may begin while the previous launch runs.
    """
    attributes = [LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, (1,))] if is_early else []
    if launch.cluster != SINGLE_BLOCK_CLUSTER:
        attributes.append(LaunchAttribute(CLUSTER_DIMENSION, launch.cluster))
    attribute_array = (LaunchAttribute * len(attributes))(*attributes)
    config = LaunchConfig(launch.grid, launch.block, launch.shared_bytes, stream, attribute_array, len(attribute_array))
    kernel = ctypes.c_void_p(function), ctypes.c_void_p(parameters)
    return int(library.cuLaunchKernelEx(ctypes.byref(config), *kernel, None))
