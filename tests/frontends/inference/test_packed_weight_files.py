"""Weights that are kept as the CPU backend packs them, and mapped the next time."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

from ...given.models.goldens import path_of, tokens_of

NAME = "qwen3-q4_k_m"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything is kept."""
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(path_of(NAME), tmp_path / "model.gguf"))


def session(file: Path, keep: bool = True, devices: str = "cpu:0", mode: str = "auto") -> Session:
    return Session(
        open_model(file),
        on=DeviceGroup(devices=tuple(devices.split(",")), split_mode=mode, threads=1, keep_packed=keep),
        context=64,
    )


def logits(of: Session) -> np.ndarray:
    return of.evaluate([tokens_of(NAME)[:8]], every_position=True)[0]


def find_packed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


@pytest.mark.long
@pytest.mark.parametrize(("devices", "mode"), [("cpu:0", "auto"), ("cpu:0,cpu:1", "tensor"), ("cpu:0,cpu:1", "layer")])
def test_stored_packed_weights_are_mapped_and_compute_the_same_bits(file: Path, folder: Path, devices: str, mode: str):
    plain = session(file, keep=False, devices=devices, mode=mode)
    assert not find_packed_files(folder)
    first, again = (session(file, devices=devices, mode=mode) for _ in range(2))
    assert find_packed_files(folder)
    packed = [t.nbytes for t in plain.model.tensors.values() if t.dtype.is_quantised]
    assert plain.store.loaded_byte_count >= first.store.loaded_byte_count >= sum(packed)
    assert again.store.loaded_byte_count <= plain.store.loaded_byte_count - sum(packed), (
        "only what is not packed is read"
    )
    expected = logits(plain)
    for other in first, again:
        assert np.array_equal(logits(other), expected)


def test_a_file_that_has_changed_is_packed_anew_and_the_old_weights_are_removed(file: Path, folder: Path):
    session(file)
    before = find_packed_files(folder)
    data = bytearray(file.read_bytes())
    tensor = max(open_model(file).tensors.values(), key=lambda t: t.nbytes)
    data[tensor.offset : tensor.offset + tensor.nbytes // 2] = bytes(tensor.nbytes // 2)
    file.unlink()  # its mapped bytes stay
    file.write_bytes(data)
    changed = session(file)
    assert np.array_equal(logits(changed), logits(session(file, keep=False)))
    assert len(find_packed_files(folder)) == len(before)
    assert not set(find_packed_files(folder)) & set(before)


def test_a_stored_weight_that_is_too_short_is_written_again(file: Path, folder: Path):
    expected = logits(session(file))
    sizes = {path: path.stat().st_size for path in find_packed_files(folder)}
    for path in list(sizes)[::2]:
        os.truncate(path, sizes[path] // 2)
    assert np.array_equal(logits(session(file)), expected)
    assert {path: path.stat().st_size for path in find_packed_files(folder)} == sizes


def test_weights_that_cannot_be_stored_are_reported_once_and_packed_in_memory(
    file: Path, folder: Path, caplog: pytest.LogCaptureFixture
):
    folder.parent.mkdir()
    folder.write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        got = logits(session(file))
    messages = [r.message for r in caplog.records if "packed weights cannot be kept" in r.message]
    assert len(messages) == 1
    assert str(folder) in messages[0]
    assert np.array_equal(got, logits(session(file, keep=False)))


def test_a_weight_is_stored_whole_or_not_at_all(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        got = logits(session(file))
    assert not list(folder.glob("*/*/*")), "nothing is left of what was begun"
    assert np.array_equal(got, logits(session(file)))
    assert find_packed_files(folder)
