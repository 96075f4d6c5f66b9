"""Launches that may begin while the one before them runs: programmatic dependent launch, which CuPy has no call for.

The call that makes them also launches clusters of blocks, early or not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ....graph.errors import BackendError
from ...once import once
from .driver import ALONE, Launch, Step

FIRST_CAPABILITY, FIRST_DRIVER = 90, 12030
"""The first devices that begin launches early, and the first drivers that capture such launches into graphs."""
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Numbers of these CUlaunchAttributeID."""
LIBRARY = "libcuda.so.1"


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, of which 64 bytes are the value: the blocks of a cluster, or 1 for what is allowed."""

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_uint * 3), ("unused", ctypes.c_char * 52))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def library_for(capability: int, release: int) -> ctypes.CDLL | None:
    """What launches begin early with on a device of a compute capability, as 90, with a driver of a release, as 12030;
    None where they cannot."""
    return opened() if capability >= FIRST_CAPABILITY and release >= FIRST_DRIVER else None


@once
def opened() -> ctypes.CDLL | None:
    """The library of the driver, if it is there."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def early(steps: Sequence[Step]) -> list[bool]:
    """Which of these may begin while the step before still runs: launches behind launches.

    All kernels wait for the launches before theirs, so that where one is over, all before it are.  Behind a kernel that
    did not wait no launch could begin early: to wait for a launch is not to wait for what that one left running.
    """
    are_launches = [isinstance(step, Launch) for step in steps]
    return [mine and before for mine, before in zip(are_launches, [False, *are_launches], strict=False)]


def library_of(launch: Launch, is_early: bool) -> ctypes.CDLL | None:
    """What `launch_with` needs for a launch; None if any other call does.  Raises `BackendError` if it is not there."""
    if not is_early and launch.cluster == ALONE:
        return None
    if (library := opened()) is None:
        raise BackendError(f"{launch.kernel} cannot be launched in clusters without {LIBRARY}; install NVIDIA's driver")
    return library


def launch_with(
    library: ctypes.CDLL, function: int, launch: Launch, stream: int, parameters: int, is_early: bool
) -> int:
    """Put a launch into a stream; the status that the driver gives.  `parameters` is the address of the kernel's."""
    attributes = [Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, (1,))] if is_early else []
    if launch.cluster != ALONE:
        attributes.append(Attribute(CLUSTER_DIMENSION, launch.cluster))
    given = (Attribute * len(attributes))(*attributes)
    config = Config(launch.grid, launch.block, launch.shared_bytes, stream, given, len(given))
    kernel = ctypes.c_void_p(function), ctypes.c_void_p(parameters)
    return int(library.cuLaunchKernelEx(ctypes.byref(config), *kernel, None))
