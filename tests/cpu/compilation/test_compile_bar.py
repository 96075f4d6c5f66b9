"""The progress bar of compilation, which programs in Python show after a second."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hocket.backends import compile_log
from hocket.backends.compile_log import log_compilation, log_number_of_kernels_to_compile
from hocket.backends.progress_bar import is_progress_visible, open_progress_bar

BAR_TEXT = "compile kernels, first run only"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Return a function that makes a terminal of stderr; pytest sets stderr anew after fixtures."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(compile_log, "BAR_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(compile_log, "_compile_bar", compile_log._CompileProgressBar())

    def open_stream() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return open_stream


def compile_until_visible(terminal: Terminal, *names: str) -> None:
    for name in names:
        with log_compilation(name):
            while name not in terminal.getvalue():
                time.sleep(0.005)


def compile_slowly(*names: str) -> None:
    for name in names:
        with log_compilation(name):
            time.sleep(0.1)


def test_a_terminal_shows_the_kernels_that_compile_for_long(open_terminal):
    terminal = open_terminal()
    with log_number_of_kernels_to_compile(3):
        compile_until_visible(terminal, "first", "second", "third")
    lines = [line.strip() for line in terminal.getvalue().split("\r")]
    assert any(BAR_TEXT in line and "first" in line and "0/3" in line for line in lines)
    assert any("third" in line and "2/3" in line for line in lines)
    assert lines[-1] == ""


def test_the_name_of_one_source_is_visible_while_it_compiles(open_terminal):
    terminal = open_terminal()
    compile_until_visible(terminal, "source.cu")
    assert terminal.getvalue().split("\r")[-1].strip() == ""


def test_short_compilation_shows_nothing(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(compile_log, "BAR_DELAY_SECONDS", 3600.0)
    with log_number_of_kernels_to_compile(2):
        compile_slowly("first", "second")
    assert not terminal.getvalue()


def test_other_streams_and_logs_have_no_bar(open_terminal, monkeypatch, caplog):
    terminal = open_terminal()
    with caplog.at_level(logging.INFO, "hocket.kernels"):
        compile_slowly("logged")
    assert caplog.messages == ["compiling logged", "compiled logged"]
    monkeypatch.setenv("TQDM_DISABLE", "1")
    compile_slowly("disabled")
    monkeypatch.delenv("TQDM_DISABLE")
    assert not terminal.getvalue()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    compile_slowly("file")
    assert not file.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    compile_slowly("nowhere")


def test_the_variable_of_tqdm_switches_off_all_bars(open_terminal, monkeypatch):
    terminal = open_terminal()
    assert list(open_progress_bar(range(3), desc="numbers")) == [0, 1, 2]
    assert "numbers" in terminal.getvalue()
    terminal.truncate(0)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert list(open_progress_bar(range(3), desc="numbers")) == [0, 1, 2]
    assert not terminal.getvalue().strip("\0")


def test_a_notebook_has_bars_although_its_stderr_is_no_terminal(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for config, visible in ({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False):
        shell = SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert is_progress_visible() == visible
        assert open_progress_bar(range(2)).disable != visible
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not is_progress_visible()
