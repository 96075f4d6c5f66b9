"""Weights that stores share with their caller: devices read the caller's memory, or a copy that is refreshed."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.backends.base import find_devices
from hocket.backends.host.host_backend import HostBackend
from hocket.graph import DType
from hocket.graph.spec import Spec
from hocket.scheduler import Store
from hocket.scheduler.ir.layout import Shard
from hocket.scheduler.runtime.shared_buffers import WeightCopies

ROWS, COLUMNS = 32, 16
SHARD_LAYOUTS = {
    "a range of rows": Shard(0, (((0, 16),), ((16, 16),))),
    "ranges of rows": Shard(0, (((0, 8), (16, 8)), ((8, 8), (24, 8)))),
    "ranges of columns": Shard(1, (((0, 4), (8, 4)), ((4, 4), (12, 4)))),
}


@pytest.mark.parametrize("layout", SHARD_LAYOUTS.values(), ids=SHARD_LAYOUTS)
def test_a_shard_that_is_no_view_of_the_weight_is_a_copy_that_is_refreshed(layout, monkeypatch):
    """A shard of several ranges is joined in new memory, which a device must not take for the memory of the weight."""
    spec = Spec((ROWS, COLUMNS), DType.F32)
    monkeypatch.setattr("hocket.backends.host.host_backend.ALIGNMENT", 1)
    raw = np.arange(ROWS * COLUMNS, dtype=np.float32)
    weight, copies = raw.reshape(ROWS, COLUMNS), WeightCopies(is_source_lasting=True)
    source_arrays = []
    as_buffer = HostBackend.as_buffer
    monkeypatch.setattr(HostBackend, "as_buffer", lambda *args: source_arrays.append(args[1]) or as_buffer(*args))
    store = Store(find_devices(["cpu:0", "cpu:1"], 1))
    store.bind("w", weight, spec, layout, copies=copies)
    first = read_parts(store)
    weight *= 2
    copies.version = 1
    store.bind("w", weight, spec, layout, copies=copies)
    for before, now in zip(first, read_parts(store), strict=True):
        assert np.shares_memory(before, now), "a bound program reads the memory of the first call"
        assert np.array_equal(now, before)
    assert [part.sum() for part in read_parts(store)] == [
        sum(weight.take(range(start, start + count), layout.axis).sum() for start, count in ranges)
        for ranges in layout.index_ranges
    ]
    assert all(np.may_share_memory(part, weight) for part in source_arrays)


def read_parts(store):
    """The numbers in the memory that each device reads for the weight."""
    return [device.view_shard("weight", "w").memory_view for device in store._device_buffers.values()]
