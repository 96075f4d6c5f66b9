"""Weights that are loaded in slices: they have the bytes of the whole, and the memory of read slices is released."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.backends.cpu import backend as cpu
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.gguf.mapped_file import MappedFile
from hocket.graph.dtypes import DType
from hocket.graph.spec import Spec
from hocket.scheduler import Store
from hocket.scheduler.ir.layout import REPLICATE, Layout, Shard
from hocket.scheduler.runtime.packed_weight_files import PackedWeightFiles, WeightOrigin

COLUMNS = 512
SHAPES = ((16,), (37,), (160,), (3, 21), (5, 1))
"""Of all but the last axis: groups of rows that are whole and one that is not, and matrices of experts."""
SLICE_LAYOUTS: tuple[Layout, ...] = (
    REPLICATE,
    Shard(0, (((0, 32), (48, 5)), ((32, 16),))),
    Shard(1, (((0, 256),), ((256, 256),))),
)
"""Rows in two runs and in one; columns."""


def random_file_bytes(spec: Spec) -> np.ndarray:
    """Any bytes, as a file holds them."""
    data = np.random.default_rng(4).integers(0, 256, spec.nbytes, np.uint8)
    if spec.dtype.is_quantised:
        return data.reshape(*spec.shape[:-1], -1)
    return (data.view(np.uint8) & 63).view(spec.dtype.storage).reshape(spec.shape)  # no NaN


def stored_bytes(store: Store, name: str = "w") -> list[bytes]:
    """Return the stored bytes of a weight on each device."""
    return [bytes(device.buffer_by_leaf["weight", name][1]) for device in store._device_buffers.values()]


def store_of(devices: int = 1, packed: PackedWeightFiles | None = None) -> Store:
    backend = CpuBackend()
    return Store([(backend, backend.device(i)) for i in range(devices)], packed=packed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*cpu.FORMATS, DType.F32, DType.F16, DType.BF16, DType.I32], ids=str)
def test_a_sliced_weight_has_the_bytes_of_the_whole(
    dtype: DType, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    spec, backend = Spec((*shape, COLUMNS), dtype), CpuBackend()
    data, size = random_file_bytes(spec), backend.storage_spec(spec, "weight").nbytes
    whole, pieced = (backend.alloc(size, backend.device(0)) for _ in range(2))
    assert len([*backend.split_weight(data, spec, whole)]) == 1, "a small weight is no work for several"
    backend.load(data, spec, whole)
    monkeypatch.setattr(cpu, "LOAD_CHUNK_BYTES", 1)
    slices = [*backend.split_weight(data, spec, pieced)]
    assert len(slices) == (-(-shape[0] // 16) if len(shape) == 1 else shape[0])
    assert sum(part.nbytes for _, _, part in slices) == size
    for part in slices:
        backend.load(*part)
    assert whole.any()
    assert bytes(pieced) == bytes(whole)


def test_slices_are_of_the_requested_or_the_smallest_possible_size(monkeypatch: pytest.MonkeyPatch):
    spec, backend = Spec((1000, COLUMNS), DType.Q8_0), CpuBackend()
    row = spec.nbytes // 1000
    data, buffer = (
        random_file_bytes(spec),
        backend.alloc(backend.storage_spec(spec, "weight").nbytes, backend.device(0)),
    )
    for nbytes, rows in (1, 16), (16 * row, 16), (100 * row, 96), (2000 * row, 1000):
        monkeypatch.setattr(cpu, "LOAD_CHUNK_BYTES", nbytes)
        assert len(next(iter(backend.split_weight(data, spec, buffer)))[0]) == rows


@pytest.mark.parametrize("layout", SLICE_LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.Q8_0, DType.F16], ids=str)
def test_shares_of_devices_are_loaded_in_slices_that_are_all_released(
    dtype: DType, layout: Layout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As they are, and kept on disk."""
    spec = Spec((53, COLUMNS), dtype)
    data, origin = random_file_bytes(spec), WeightOrigin("model", "1", 0)
    whole = store_of(2)
    whole.bind("w", data, spec, layout)
    monkeypatch.setattr(cpu, "LOAD_CHUNK_BYTES", 1)
    rows = [53, 53] if not isinstance(layout, Shard) or layout.axis else [37, 16]
    released: list[None] = []
    for packed, is_read in (
        (None, True),
        (packed_folder := PackedWeightFiles(tmp_path), True),
        (packed_folder, not dtype.is_quantised),
    ):
        released.clear()
        store = store_of(2, packed)
        store.bind("w", data, spec, layout, origin, lambda: released.append(None))
        assert stored_bytes(store) == stored_bytes(whole)
        assert bool(released) is is_read, "what was kept is not read"
        if packed is None:
            assert store.loaded_byte_count == whole.loaded_byte_count
            assert len(released) == sum(-(-n // 16) for n in rows)


def test_a_value_without_axes_and_one_without_elements_are_one_slice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "LOAD_CHUNK_BYTES", 0)
    for shape in (), (7,), (0, 32):
        store = store_of()
        store.bind("w", np.ones(shape, np.float32), Spec(shape))
        assert stored_bytes(store) == [np.ones(shape, np.float32).tobytes()]


def resident(file: Path) -> int:
    """Bytes of a file that are mapped in memory of this process."""
    lines, nbytes = iter(Path("/proc/self/smaps").read_text().splitlines()), 0
    for line in lines:
        if line.endswith(str(file)):
            nbytes += next(int(size.split()[1]) << 10 for size in lines if size.startswith("Rss:"))
    return nbytes


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps, which only Linux has")
def test_little_of_a_file_is_in_memory_while_a_large_weight_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec, path = Spec((1 << 15, 1024), DType.Q8_0), tmp_path / "weights"
    path.write_bytes(bytes(spec.nbytes))
    with open(path, "rb") as weight_file:
        data = mmap.mmap(weight_file.fileno(), 0, access=mmap.ACCESS_READ)
    file, sizes = MappedFile(path, data, len(data), 0), list[int]()
    raw = np.frombuffer(data, np.uint8).reshape(1 << 15, -1)

    def release() -> None:
        sizes.append(resident(path))
        file.release_memory(0, file.size)
        assert not resident(path)

    monkeypatch.setattr(cpu, "LOAD_CHUNK_BYTES", spec.nbytes // 8)
    store_of().bind("w", raw, spec, release=release)
    assert len(sizes) == 8
    assert spec.nbytes // 8 <= max(sizes) <= spec.nbytes // 2, "a piece, and what the system brings beside it"
