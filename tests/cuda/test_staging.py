"""What host and device give each other goes through pinned memory, in order, and stays whole."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hocket.backends.base import Device, Tensor, contiguous_strides
from hocket.backends.cupy import cuda
from hocket.backends.cupy.device import staging
from hocket.graph.dtypes import DType

from ..given.devices.fake_cupy import Event, Stream, fake_cupy

HALF = 256
ON = Device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """Of devices whose every step takes a while."""
    made = fake_cupy(())
    monkeypatch.setattr(cuda, "_cupy", lambda: made)
    monkeypatch.setattr(staging, "HALF", HALF)
    monkeypatch.setattr(Stream, "lag", 0.002)
    return cuda.CudaDriver()


def view_of(driver, shape, strides=None, on=ON):
    tensor = Tensor(0, 0, shape, strides or contiguous_strides(shape), DType.I32)
    return driver.view(driver.alloc(4096, on), tensor)


def test_new_memory_is_zeros_though_the_host_does_not_wait_for_it(driver):
    assert not np.asarray(view_of(driver, (1024,))).any()


def test_an_array_larger_than_the_pinned_memory_arrives_whole(driver):
    target, values = view_of(driver, (900,)), np.arange(900, dtype=np.int32)
    target[...] = values
    assert (np.asarray(target) == values).all()


def _many(driver, assigned=lambda: None):
    """Each is overwritten by the host at once, while the device still has all of them to copy, until they are all
    `assigned`."""
    targets = [view_of(driver, (20,)) for _ in range(40)]
    for n, target in enumerate(targets):
        values = np.full(20, n, np.int32)
        target[...] = values
        values[...] = -1
    assigned()
    return all((np.asarray(target) == n).all() for n, target in enumerate(targets))


def test_what_was_assigned_may_change_at_once(driver):
    assert _many(driver)


@pytest.fixture
def held(driver):
    """The event that lets the device go on."""
    event = threading.Event()
    driver.stream(ON).put(event.wait)
    yield event
    event.set()


def test_pinned_memory_that_is_taken_again_too_early_is_found(driver, held, monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    assert not _many(driver, held.set)


def test_assigning_does_not_wait_for_the_device(driver, held):
    target = view_of(driver, (4,))
    target[...] = np.arange(4, dtype=np.int32)
    assert target.array.held.tolist() != [0, 1, 2, 3]
    held.set()
    assert np.asarray(target).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [..., 1, slice(1, 3), (slice(None), 2), (..., slice(0, 4, 2))])
@pytest.mark.parametrize("strides", [None, (1, 7), (9, 2)])
def test_parts_and_arrays_with_strides_are_as_of_numpy(index, strides, driver):
    target, wanted = view_of(driver, (5, 4), strides), np.arange(20, dtype=np.int32).reshape(5, 4)
    target[...] = wanted
    values = -wanted[index] - 1
    target[index] = values
    wanted[index] = values
    assert (np.asarray(target) == wanted).all()
    assert (target[index] == wanted[index]).all()
    target[index] = 7
    wanted[index] = 7
    assert (np.asarray(target) == wanted).all()


def test_an_array_of_nothing_and_one_of_no_axes_pass(driver):
    empty, scalar = view_of(driver, (0, 3)), view_of(driver, ())
    empty[...] = np.zeros((0, 3), np.int32)
    assert np.asarray(empty).shape == (0, 3)
    scalar[...] = 5
    assert np.asarray(scalar).shape == ()
    assert np.asarray(scalar) == 5


def test_each_part_of_a_device_has_a_stream_and_pinned_memory_of_its_own(driver):
    parts = [Device("cuda", 0, part=n) for n in range(2)]
    assert driver.stream(parts[0]) is not driver.stream(parts[1])
    assert driver.stream(parts[0]) is driver.stream(Device("cuda", 0, part=0))
    targets = [view_of(driver, (4,), on=part) for part in parts]
    assert targets[0].staging is not targets[1].staging
