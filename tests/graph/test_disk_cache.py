"""The disk cache: keys, damaged files, its size and the eviction of files, while other processes read and write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.graph.storage.disk_cache import (
    REUSE_MARK_SECONDS,
    UNWRITABLE_FOLDER_MESSAGE,
    evict_longest_unused_files,
    make_cache_path,
    map_cached_file,
    read_cached,
    read_cached_or_make,
    write_cached,
    write_mappable_file,
)

HOUR_SECONDS = 3600


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    evict_longest_unused_files.cache_clear()
    yield tmp_path
    evict_longest_unused_files.cache_clear()


def write_with_age(file: Path, hours: float, nbytes: int = 1000) -> Path:
    write_cached(file, bytes(nbytes - 32))
    then = time.time() - hours * HOUR_SECONDS
    os.utime(file, (then, then))
    return file


def test_data_is_computed_once_for_each_key_and_again_for_a_damaged_file(folder: Path):
    paths = [make_cache_path("plans", *key) for key in ((1, "a"), (1, "b"), ("1", "a"), (1, b"a"), ("\udc80",))]
    assert len({*paths}) == 5
    assert {path.parent for path in paths} == {folder / "plans"}
    calls: list[int] = []

    def make() -> bytes:
        calls.append(0)
        return b"data"

    def load() -> int:
        assert [read_cached_or_make(file, make) for file in (paths[0], paths[0], paths[1])] == [b"data"] * 3
        return len(calls)

    assert load() == load() == 2
    whole = paths[0].read_bytes()
    for count, wrong in enumerate((b"", whole[:-1], whole + b"?", b"?" + whole[1:], paths[1].read_bytes()), 3):
        paths[0].write_bytes(wrong)
        assert load() == count
    assert read_cached_or_make(None, make) == b"data"


def test_a_mapped_file_has_its_data_and_a_note_or_counts_as_missing(folder: Path):
    file, other = folder / "packed" / "one", folder / "packed" / "other"
    assert map_cached_file(file, 4) is None
    for name, data in ((file, b"data"), (other, b"")):
        write_mappable_file(name, memoryview(data), b"note", "test data", folder)
        mapped = map_cached_file(name, len(data))
        assert mapped is not None
        assert (mapped[0][: len(data)], mapped[1]) == (data, b"note")
        assert map_cached_file(name, len(data) + 1) is None
    whole = file.read_bytes()
    for wrong in (b"", whole[:-1], whole[1:], whole + b"?", whole[:-1] + b"?", whole):
        other.write_bytes(wrong)  # the mapped file must not change
        assert map_cached_file(other, 4) is None


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_folder_that_cannot_be_written_is_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    for name in ("one", "two"):
        write_cached(folder / "plans" / name, b"data")
        write_mappable_file(folder / "packed" / name, memoryview(b"data"), b"note", "test data", folder / "packed")
    assert caplog.messages == [
        UNWRITABLE_FOLDER_MESSAGE % (content, where, error.strerror)
        for content, where in (("kernels and plans", folder), ("test data", folder / "packed"))
    ]
    assert not [*folder.glob("*/*")], "nothing is left of what was begun"


def test_the_oldest_entry_makes_room(folder: Path):
    folders = ("kernels", "plans", "bindings", "merges", "cubins")
    files = [write_with_age(folder / folders[i % 5] / f"{i}.o", 10 - i) for i in range(10)]
    others = [write_with_age(folder / name, 99) for name in ("emulated/one.so", "history", "models/mine.gguf")]
    evict_longest_unused_files(folder, 4500)
    assert [file.exists() for file in files] == [False] * 6 + [True] * 4
    assert all(file.exists() for file in others)
    evict_longest_unused_files.cache_clear()
    evict_longest_unused_files(folder, 0)
    assert not any(file.exists() for file in files)


def test_the_first_write_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = (write_with_age(folder / "plans" / name, hours) for name, hours in (("old", 9), ("new", 2)))
    monkeypatch.setattr("hocket.graph.storage.disk_cache.MAX_CACHE_BYTES", 2500)
    evict_longest_unused_files.cache_clear()
    write_cached(folder / "plans" / "newest", bytes(968))
    assert [file.exists() for file in (old, new, folder / "plans" / "newest")] == [False, True, True]


def test_what_is_read_counts_as_used(folder: Path):
    often, never = (
        write_with_age(folder / "kernels" / name, 3 * REUSE_MARK_SECONDS / HOUR_SECONDS) for name in ("often", "never")
    )
    assert read_cached(often) == bytes(968)
    evict_longest_unused_files(folder, 1000)
    assert (often.exists(), never.exists()) == (True, False)


def test_others_may_keep_read_and_make_room_at_once(folder: Path):
    data, failed = {f"{i}.o": bytes([i]) * 500 for i in range(20)}, []

    def work(shift: int) -> None:
        try:
            for i in range(60):
                name = f"{(i + shift) % 20}.o"
                write_cached(folder / "kernels" / name, data[name])
                evict_longest_unused_files.cache_clear()
                evict_longest_unused_files(folder, 4000)
                assert read_cached(folder / "kernels" / name) in (None, data[name])
        except BaseException as why:
            failed.append(why)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in (0, 7, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    evict_longest_unused_files.cache_clear()
    evict_longest_unused_files(folder, 4000)
    assert sum(file.stat().st_size for file in (folder / "kernels").iterdir()) <= 4000
