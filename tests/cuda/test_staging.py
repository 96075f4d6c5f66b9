"""Copies between host and device go through pinned memory, in order, and stay intact."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hocket.backends.base import Device, Tensor, contiguous_strides
from hocket.backends.capabilities import require_no_lost_device
from hocket.backends.cupy import cuda_driver
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device import host_transfers
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError, DeviceLostError

from ..given.fakes.fake_cupy import Event, Stream, fake_cupy

HALF = 256
ON = Device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """Return a driver of devices with slow streams."""
    fake = fake_cupy(())
    monkeypatch.setattr(cuda_driver, "_cupy", lambda: fake)
    monkeypatch.setattr(host_transfers, "STAGING_HALF_BYTES", HALF)
    monkeypatch.setattr(Stream, "lag", 0.002)
    return cuda_driver.CudaDriver()


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
def paused_event(driver):
    """The event that lets the device go on."""
    event = threading.Event()
    driver.stream(ON).put(event.wait)
    yield event
    event.set()


def test_pinned_memory_that_is_taken_again_too_early_is_found(driver, paused_event, monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    assert not _many(driver, paused_event.set)


def test_assigning_does_not_wait_for_the_device(driver, paused_event):
    target = view_of(driver, (4,))
    target[...] = np.arange(4, dtype=np.int32)
    assert target.array.host_array.tolist() != [0, 1, 2, 3]
    paused_event.set()
    assert np.asarray(target).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [..., 1, slice(1, 3), (slice(None), 2), (..., slice(0, 4, 2))])
@pytest.mark.parametrize("strides", [None, (1, 7), (9, 2)])
def test_parts_and_arrays_with_strides_are_as_of_numpy(index, strides, driver):
    target, expected = view_of(driver, (5, 4), strides), np.arange(20, dtype=np.int32).reshape(5, 4)
    target[...] = expected
    values = -expected[index] - 1
    target[index] = values
    expected[index] = values
    assert (np.asarray(target) == expected).all()
    assert (target[index] == expected[index]).all()
    target[index] = 7
    expected[index] = 7
    assert (np.asarray(target) == expected).all()


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
    assert targets[0].transfers is not targets[1].transfers


# ------------------------------------------------------------------------------------------- many in a few copies


def tensors_of(*places):
    """Of int32, each from its offset, shape and strides."""
    return [Tensor(0, at, shape, strides or contiguous_strides(shape), DType.I32) for at, shape, strides in places]


@pytest.fixture
def copies(driver, monkeypatch):
    """Return a list that collects the bytes of each copy that begins."""
    begun, runtime = [], driver.cupy.cuda.runtime
    copy = runtime.memcpyAsync
    monkeypatch.setattr(runtime, "memcpyAsync", lambda *args: (begun.append(args[2]), copy(*args)))
    return begun


def words_after_write(driver, tensors, arrays):
    """Return the memory words of the tensors after a write; all words were -1 before."""
    buffer = driver.alloc(1024, ON)
    whole = driver.view(buffer, Tensor(0, 0, (256,), (1,), DType.I32))
    whole[...] = np.full(256, -1, np.int32)
    driver.view(driver.alloc(1024, ON), Tensor(0, 0, (256,), (1,), DType.I32))[...] = np.full(256, 3, np.int32)
    write = driver.make_writer([buffer], tensors)
    assert write(arrays) is None
    assert all((np.array(driver.view(buffer, t)) == a).all() for t, a in zip(tensors, arrays, strict=True))
    return np.asarray(whole)


def test_arrays_side_by_side_go_in_one_copy(driver, copies):
    tensors = tensors_of((64, (3,), None), (0, (2, 4), None), (128, (), None))
    arrays = [np.arange(n, dtype=np.int32).reshape(t.shape) for n, t in zip((3, 8, 1), tensors, strict=True)]
    words_after_write(driver, tensors, arrays)
    assert copies.count(132) == 1


def test_bytes_between_separate_arrays_stay(driver):
    tensors = tensors_of((0, (16,), None), (128, (2,), None), (192, (2,), None), (512, (0, 3), None))
    words = words_after_write(driver, tensors, [np.full(t.shape, 7, np.int32) for t in tensors])
    assert (words[16:32] == -1).all(), "another value may be there"
    assert (words[50:] == -1).all(), "as behind the last"


def test_an_array_with_strides_beside_dense_ones_changes_nothing_between_its_entries(driver):
    tensors = tensors_of((0, (4,), None), (64, (4,), (3,)), (128, (4,), None))
    words = words_after_write(driver, tensors, [np.full(t.shape, 7, np.int32) for t in tensors])
    assert words[16:28].tolist() == [7, -1, -1] * 3 + [7, -1, -1]


def test_arrays_larger_than_the_pinned_memory_in_all_go_in_several_copies(driver):
    tensors = tensors_of(*((64 * n, (16,), None) for n in range(6)), (384, (100,), None))
    arrays = [np.full(t.shape, n, np.int32) for n, t in enumerate(tensors)]
    words_after_write(driver, tensors, arrays)


def test_what_was_written_may_change_at_once_and_comes_in_order_with_launches(driver, paused_event):
    tensors = tensors_of((0, (4,), None), (64, (4,), None))
    buffer, arrays = driver.alloc(1024, ON), [np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)]
    seen = []
    write, view = driver.make_writer([buffer], tensors), driver.view(buffer, tensors[1])
    driver.stream(ON).put(lambda: seen.append(view.array.host_array.tolist()))
    write(arrays)
    driver.stream(ON).put(lambda: seen.append(view.array.host_array.tolist()))
    arrays[1][...] = 9
    assert seen == []
    paused_event.set()
    assert np.asarray(view).tolist() == [0, 1, 2, 3]
    assert [s == [0, 1, 2, 3] for s in seen] == [False, True]


def results(driver, limit=3):
    """Reads two arrays that hold a number, once it has been put there."""
    tensors, buffer = tensors_of((0, (limit, 2), None), (64, (4,), (3,))), driver.alloc(1024, ON)
    views = [driver.view(buffer, t) for t in tensors]
    read = driver.make_reader([buffer], tensors)

    def of(number):
        for view in views:
            view[...] = np.full(view.shape, number, np.int32)
        return read()()

    return of


def test_results_are_read_after_one_wait_for_those_that_are_dense(driver, monkeypatch):
    tensors, buffer = tensors_of((0, (3, 2), None), (64, (4,), None)), driver.alloc(1024, ON)
    read, waits, wait = driver.make_reader([buffer], tensors), [], Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda event: (waits.append(event), wait(event)))
    monkeypatch.delattr(Stream, "synchronize")
    assert [array.shape for array in read()()] == [(3, 2), (4,)]
    assert len(waits) == 1


def test_results_that_are_read_late_are_those_of_the_start(driver, paused_event):
    """A later run overwrites them on the device; the host waits for the first run only."""
    tensor, buffer = Tensor(0, 0, (4,), (1,), DType.I32), driver.alloc(1024, ON)
    view, read, later = driver.view(buffer, tensor), driver.make_reader([buffer], [tensor]), threading.Event()
    view[...] = np.full(4, 1, np.int32)
    first = read()
    view[...] = np.full(4, 2, np.int32)
    second = read()
    driver.stream(ON).put(later.wait)
    paused_event.set()
    assert first()[0].tolist() == [1, 1, 1, 1]
    assert second()[0].tolist() == [2, 2, 2, 2]
    assert driver.stream(ON).query() == 600, "the stream goes on"
    later.set()


def test_results_stay_what_they_are_while_anybody_has_them_or_a_view_of_them(driver):
    of = results(driver)
    results_so_far = [[array[-1:] for array in of(n)] for n in range(9)]
    assert all((array == n).all() for n, arrays in enumerate(results_so_far) for array in arrays)


def test_memory_of_released_results_is_reused(driver):
    of = results(driver)
    addresses = {of(n)[0].ctypes.data for n in range(9)}
    assert len(addresses) == 1
    first, second = of(1)[0], of(2)[0]
    assert first.ctypes.data != second.ctypes.data
    first[...] = 5
    assert (second == 2).all(), "each is an array of its own"


def test_results_larger_than_the_pinned_memory_arrive_whole(driver):
    tensor, values = Tensor(0, 0, (200,), (1,), DType.I32), np.arange(200, dtype=np.int32)
    buffer = driver.alloc(1024, ON)
    driver.view(buffer, tensor)[...] = values
    assert (driver.make_reader([buffer], [tensor])()()[0] == values).all()


def test_a_stream_with_an_error_that_stays_is_a_lost_device(driver):
    view_of(driver, (4,))
    assert driver.find_device_loss(ON) == ""
    driver.stream(ON).put(lambda: 1 / 0)
    with pytest.raises(BackendError, match="start the process anew"):
        driver.synchronise(ON)
    assert driver.find_device_loss(ON) == "700"  # the real error has a name
    backend = DriverBackend(driver)
    with pytest.raises(
        DeviceLostError, match=r"^cuda:0 refuses all calls of this process: 700; start the process anew$"
    ):
        require_no_lost_device([(backend, ON)])


@pytest.mark.parametrize("statuses", [(700, 0), (700, 600)])
def test_an_error_that_comes_once_is_no_loss(driver, monkeypatch, statuses):
    found = iter(statuses)
    monkeypatch.setattr(Stream, "query", lambda self: next(found))
    assert driver.find_device_loss(ON) == ""
