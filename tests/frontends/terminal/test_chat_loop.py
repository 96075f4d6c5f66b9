"""Ctrl-C in an interactive chat: the first one ends an answer, two in a row end the chat, wherever they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hocket.frontends.generation.options import Options
from hocket.frontends.terminal import chat_loop


class Conversation:
    """A conversation that answers "yes", and where Ctrl-C may arrive: in an answer, after it, or in a command."""

    params = Options()

    def __init__(self, interrupted_at: str = "") -> None:
        self.interrupted_at = interrupted_at
        self.messages: list[str] = []

    def reply(self, text: str) -> Iterator[str]:
        self.messages.append(text)
        yield "yes"
        if self.interrupted_at == "answer":
            raise KeyboardInterrupt

    @property
    def session(self) -> Conversation:
        if self.interrupted_at == "after the answer":
            raise KeyboardInterrupt
        return self

    def restart_with_system_prompt(self) -> None:
        if self.interrupted_at == "command":
            raise KeyboardInterrupt

    lengths, context = (3,), 8


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a chat in which the user types these lines, and return stderr; None is Ctrl-C."""

    def run(conversation: Any, *lines: str | None) -> str:
        typed = iter(lines)

        def ask(_: str) -> str:
            line = next(typed)
            if line is None:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("sys.stdin", None)
        monkeypatch.setattr(chat_loop, "input", ask, raising=False)
        chat_loop.run_chat_loop(conversation)
        assert not list(typed)
        return capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("place", "line"), [("answer", "one"), ("after the answer", "one"), ("command", "/reset")], ids=str
)
def test_the_first_ctrl_c_is_answered_with_a_hint_wherever_it_arrives(place, line, talk):
    conversation = Conversation(place)
    assert talk(conversation, line, "two", "/exit").count(chat_loop.EXIT_HINT) == 1 + (place != "command")
    assert conversation.messages[-1] == "two"


def test_the_second_ctrl_c_in_a_row_ends_the_chat(talk):
    assert talk(Conversation("after the answer"), "one", None).count(chat_loop.EXIT_HINT) == 1
    assert talk(Conversation(), None, "one", None, None).count(chat_loop.EXIT_HINT) == 2
