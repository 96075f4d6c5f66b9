"""Files are written whole or not at all, and only a plain file is ever replaced."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from hocket.graph.storage.files import PRIVATE, replacing, require_writable, write_text

NOT_AS_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write any file")


def mode_of(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def device(path: Path, minor: int) -> Path:
    """A device node of our own: 3 is like /dev/null, 7 like /dev/full. The test is skipped where none can be used."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        path.open("wb").close()
    except PermissionError:
        pytest.skip("this process cannot make device nodes")
    return path


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupt_writing() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_writing()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_no_unfinished_file(number: int, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        pytest.skip("the file system has no files without names")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with replacing(path), replacing(tmp_path / "other"):
            os.write(writer, b"w")
            time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, number)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert os.WTERMSIG(status) == number
    assert os.listdir(tmp_path) == ["file"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_new_file_has_its_mode_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, mode in (("public", 0o666), ("private", PRIVATE)):
            with replacing(tmp_path / name, mode=mode):
                pass
        (tmp_path / "old").touch()
        (tmp_path / "old").chmod(0o664)
        write_text(tmp_path / "old", "new")
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / name) for name in ("public", "private", "old")] == [0o640, 0o600, 0o664]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_chain_of_links_is_followed(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, first, second = tmp_path / "folder" / "file", tmp_path / "folder" / "first", tmp_path / "second"
    if is_there:
        target.write_bytes(b"old")
    first.symlink_to("file")
    second.symlink_to("folder/first")
    require_writable(second)
    assert target.exists() == is_there
    write_text(second, "new")
    assert (first.is_symlink(), second.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_text() == "new"


def test_a_circle_of_links_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for write in (require_writable, lambda path: write_text(path, "")):
        with pytest.raises(OSError, match="symbolic links") as caught:
            write(tmp_path / "one")
        assert caught.value.filename == str(tmp_path / "one")
    assert (tmp_path / "one").is_symlink()


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    for minor, problem in ((3, None), (7, "No space left")):
        path = device(tmp_path / f"device{minor}", minor)
        require_writable(path)
        if problem is None:
            write_text(path, "text")
        else:
            with pytest.raises(OSError, match=problem) as caught:
                write_text(path, "text")
            assert caught.value.filename == str(path)
        assert stat.S_ISCHR(path.stat().st_mode)
    assert len(os.listdir(tmp_path)) == 2


def test_a_pipe_is_checked_without_a_reader_and_written_to(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    require_writable(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    write_text(path, "text")
    reader.join(60)
    assert read == [b"text"]
    assert path.is_fifo()


def test_a_pipe_that_only_a_descriptor_names_is_written_to(tmp_path: Path) -> None:
    """Such as ``>(gzip >file)`` of a shell, or /dev/stdout."""
    if not Path("/dev/fd").exists():
        pytest.skip("this system has no /dev/fd")
    reading, writing = os.pipe()
    path = f"/dev/fd/{writing}"
    require_writable(path)
    write_text(path, "text")
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"text"


def test_an_error_names_the_path_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere/file")
    for path in (tmp_path / "nowhere" / "file", tmp_path / "link", tmp_path):
        for write in (require_writable, lambda path: write_text(path, "")):
            with pytest.raises(OSError) as caught:
                write(path)
            assert caught.value.filename == str(path)
            assert str(caught.value).endswith(f" {str(path)!r}")
    assert os.listdir(tmp_path) == ["link"]


def test_an_error_about_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, replacing(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    assert caught.value.filename == str(tmp_path / "other")


@NOT_AS_ROOT
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    for write in (require_writable, lambda path: write_text(path, "new")):
        with pytest.raises(PermissionError) as caught:
            write(path)
        assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = path.stat()
    require_writable(path)
    require_writable(tmp_path / "new")
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert os.listdir(tmp_path) == ["file"]


def test_durable_bytes_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = tmp_path / "file", list[tuple[int, bool]]()
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append((os.fstat(number).st_size, path.exists())))
    with replacing(path, durable=True) as file:
        file.write(b"new")
    assert sizes == [(3, False)]
    assert path.read_bytes() == b"new"
