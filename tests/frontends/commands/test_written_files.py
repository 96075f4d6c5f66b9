"""Every file that a flag names: written whole, through links, and to devices and pipes as they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hocket.cli import main

from ...given.commands import Capture
from ...given.models.goldens import TINY, path_of

LLAMA = str(path_of("llama"))
RUN_COMMAND = ("run", "--temp", "0", "-p", "It is", "-n", "2", "-c", "64")
CHECK_COMMAND = ("check", "--jobs", "1", "--case", "neg(x=f32[1,7])")
WRITERS = {
    "state.npz": ((*RUN_COMMAND, "--save-state"), b"PK"),
    "trace.json": ((*RUN_COMMAND, "--trace"), b'{"displayTimeUnit"'),
    "trace.json.gz": ((*RUN_COMMAND, "--trace"), b"\x1f\x8b"),
    "logits.npy": (("logits", LLAMA, "--tokens", "1,2", "--out"), b"\x93NUMPY"),
    "plan.json": (("plan", LLAMA, "-o"), b"{"),
    "page.html": (("view", LLAMA, "--graph", "-o"), b"<!"),
    "report.json": ((*CHECK_COMMAND, "--json"), b'{"case"'),
    "report.xml": ((*CHECK_COMMAND, "--junit"), b"<"),
    "report.md": ((*CHECK_COMMAND, "--markdown"), b"#"),
    "report.html": ((*CHECK_COMMAND, "--html"), b"<!"),
}
"""By the name of a file: a command up to the flag that names it, and how the file begins."""
every_writer = pytest.mark.parametrize("name", WRITERS)


def run_writer(name: str, path: Path) -> int:
    """The exit code of the command that writes this file."""
    return main([*WRITERS[name][0], str(path)])


def check_refused(name: str, path: Path, problem: str, capsys: Capture) -> None:
    """The command must fail with one line about the file."""
    assert run_writer(name, path) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hocket")]
    assert len(lines) == 1, lines
    assert f": {path}: {problem}" in lines[0]


@every_writer
def test_a_link_stays_and_its_target_is_written(name: str, tmp_path: Path) -> None:
    link, target = tmp_path / name, tmp_path / "target"
    target.write_bytes(b"old")
    link.symlink_to("target")
    assert run_writer(name, link) == 0
    assert link.is_symlink()
    assert target.read_bytes().startswith(WRITERS[name][1])
    assert sorted(os.listdir(tmp_path)) == sorted([name, "target"])


@every_writer
def test_a_device_that_is_full_is_named_and_stays_a_device(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / name
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        path.open("wb").close()
    except PermissionError:
        pytest.skip("this process cannot make device nodes")
    check_refused(name, path, "No space left on device; free some space", capsys)
    assert stat.S_ISCHR(path.stat().st_mode)
    assert os.listdir(tmp_path) == [name]


@every_writer
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_link_to_a_full_device_is_named(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")
    check_refused(name, path, "No space left on device; free some space", capsys)
    assert path.is_symlink()
    assert not Path("/dev/full").is_file()


@every_writer
def test_a_pipe_gives_its_reader_the_whole_file(name: str, tmp_path: Path) -> None:
    path, read = tmp_path / name, list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    assert run_writer(name, path) == 0
    reader.join(60)
    assert read[0].startswith(WRITERS[name][1])
    assert path.is_fifo()


@every_writer
def test_a_missing_folder_is_named(name: str, tmp_path: Path, capsys: Capture) -> None:
    check_refused(name, tmp_path / "nowhere" / name, "No such file or directory", capsys)
    assert os.listdir(tmp_path) == []


@every_writer
def test_a_folder_is_no_file(name: str, tmp_path: Path, capsys: Capture) -> None:
    check_refused(name, tmp_path, "Is a directory", capsys)


@every_writer
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write any file")
def test_a_file_that_may_not_be_written_stays_as_it_is(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    path.chmod(0o444)
    check_refused(name, path, "Permission denied", capsys)
    assert path.read_bytes() == b"old"


def test_a_new_saved_state_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It holds a conversation."""
    assert run_writer("state.npz", tmp_path / "state.npz") == 0
    assert stat.S_IMODE((tmp_path / "state.npz").stat().st_mode) == 0o600


@pytest.mark.parametrize(("flag", "start"), [("--json", "{"), ("--junit", "<"), ("--markdown", "#"), ("--html", "<!")])
def test_a_report_at_the_path_of_stdout_is_printed_alone(
    flag: str, start: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = ("--markdown" if flag == "--json" else "--json", "other")
    assert main([*CHECK_COMMAND, flag, "-", *other]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(start)
    assert "neg" in printed
    assert os.listdir(tmp_path) == ["other"]


def test_only_one_report_is_printed(capsys: Capture) -> None:
    assert main([*CHECK_COMMAND, "--json", "-", "--junit", "-"]) == 2
    assert "--json and --junit are both -; give a file to one of them" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, (command, _) in WRITERS.items() if command[0] != "check"])
def test_the_model_that_a_command_reads_is_not_replaced(name: str, tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model.gguf"
    command = WRITERS[name][0]
    content = Path(TINY if command[0] == "run" else LLAMA).read_bytes()
    model.write_bytes(content)
    words = [str(model) if word == LLAMA else word for word in command]
    if command[0] == "run":
        words[1:1] = [str(model)]
    assert main([*words, str(model)]) == 2
    assert f": {model}: is also another file of the command" in capsys.readouterr().err
    assert model.read_bytes() == content


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-p", "It", "--save-state", "FILE", "--trace", "FILE"),
        ("run", "-f", "OLD", "--trace", "OLD"),
        ("run", "-p", "It", "-md", "OLD", "--save-state", "OLD"),
        ("run", "--lora", "OLD:0.5", "-p", "It", "--trace", "OLD"),
        ("plan", LLAMA, "--simulate", "OLD", "-o", "OLD"),
        ("view", LLAMA, "--trace", "OLD", "-o", "OLD"),
        ("serve", "OLD", "--log-requests", "OLD"),
        ("perplexity", TINY, "OLD", "--trace", "OLD"),
    ],
)
def test_an_output_is_no_other_file_of_the_command(words: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    replacements = {"OLD": str(old), "FILE": str(new), "OLD:0.5": f"{old}:0.5"}
    assert main([replacements.get(word, word) for word in words]) == 2
    assert "give another file" in capsys.readouterr().err
    assert (old.read_bytes(), new.exists()) == (b"old", False)
