"""The disk cache: its size and the eviction of entries, while other processes read and write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.backends.cache import REUSE_MARK_SECONDS, evict_oldest_files, read_cached, write_cached

HOUR_SECONDS = 3600


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    evict_oldest_files.cache_clear()
    yield tmp_path
    evict_oldest_files.cache_clear()


def write_with_age(file: Path, hours: float, nbytes: int = 1000) -> Path:
    write_cached(file, bytes(nbytes - 32))
    then = time.time() - hours * HOUR_SECONDS
    os.utime(file, (then, then))
    return file


def test_the_oldest_entry_makes_room(folder: Path):
    folders = ("kernels", "plans", "bindings", "merges", "cubins")
    files = [write_with_age(folder / folders[i % 5] / f"{i}.o", 10 - i) for i in range(10)]
    others = [write_with_age(folder / name, 99) for name in ("emulated/one.so", "history", "models/mine.gguf")]
    evict_oldest_files(folder, 4500)
    assert [file.exists() for file in files] == [False] * 6 + [True] * 4
    assert all(file.exists() for file in others)
    evict_oldest_files.cache_clear()
    evict_oldest_files(folder, 0)
    assert not any(file.exists() for file in files)


def test_the_first_write_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch):
    old, new = (write_with_age(folder / "plans" / name, hours) for name, hours in (("old", 9), ("new", 2)))
    monkeypatch.setattr("hocket.backends.cache.MAX_CACHE_BYTES", 2500)
    evict_oldest_files.cache_clear()
    write_cached(folder / "plans" / "newest", bytes(968))
    assert [file.exists() for file in (old, new, folder / "plans" / "newest")] == [False, True, True]


def test_what_is_read_counts_as_used(folder: Path):
    often, never = (
        write_with_age(folder / "kernels" / name, 3 * REUSE_MARK_SECONDS / HOUR_SECONDS) for name in ("often", "never")
    )
    assert read_cached(often) == bytes(968)
    evict_oldest_files(folder, 1000)
    assert (often.exists(), never.exists()) == (True, False)


def test_others_may_keep_read_and_make_room_at_once(folder: Path):
    data, failed = {f"{i}.o": bytes([i]) * 500 for i in range(20)}, []

    def work(shift: int) -> None:
        try:
            for i in range(60):
                name = f"{(i + shift) % 20}.o"
                write_cached(folder / "kernels" / name, data[name])
                evict_oldest_files.cache_clear()
                evict_oldest_files(folder, 4000)
                assert read_cached(folder / "kernels" / name) in (None, data[name])
        except BaseException as why:
            failed.append(why)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in (0, 7, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    evict_oldest_files.cache_clear()
    evict_oldest_files(folder, 4000)
    assert sum(file.stat().st_size for file in (folder / "kernels").iterdir()) <= 4000
