"""A talk on a terminal: messages in, answers out, and a few commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from ...backends.cache import cache_folder
from ..errors import ModelError
from ..generation.conversation import Conversation
from .arguments import as_flags
from .output import log, write

AGAIN = "(Ctrl-C again or /exit ends the talk)"
Command = Callable[[Conversation, str], bool]
"""What a command does with its argument; whether the talk goes on."""


def talk(conversation: Conversation) -> None:
    """Answer what is typed until /exit, the end of input, or Ctrl-C twice in a row.

    Ctrl-C during an answer ends the answer, and is the first of the two; what was said of it stays a part of the talk.
    """
    ask = _editor() if sys.stdin is not None and sys.stdin.isatty() else input
    interrupted = False
    while True:
        try:
            said = ask("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            if interrupted:
                write("\n")
                return
            interrupted = True
            log(f"\n{AGAIN}")
            continue
        interrupted = False
        name, _, argument = said.partition(" ")
        if name in COMMANDS or (name.startswith("/") and "\n" not in said):
            if name not in COMMANDS:
                log(f"there is no command {name}; /help lists them")
            elif not COMMANDS[name](conversation, argument.strip()):
                return
        elif said:
            interrupted = _answer(conversation, said)
            if interrupted:
                log(AGAIN)


def _editor() -> Callable[[str], str]:
    """Return a function that reads one message, with editing and with the messages of earlier talks.

    Pasted lines are one message. Alt+Enter begins a new line.
    """
    from prompt_toolkit import PromptSession  # 0.1 s that only a talk on a terminal needs
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys, file = KeyBindings(), cache_folder() / "messages"

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with suppress(OSError):  # a folder that cannot be written remembers nothing
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.open("ab").close()
        history = FileHistory(file)
    log("(/help lists commands; Alt+Enter begins a new line)")
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return session.prompt


def _answer(conversation: Conversation, said: str) -> bool:
    """Write the answer; whether Ctrl-C ended it."""
    interrupted = False
    try:
        for piece in conversation.answer(said):
            write(piece)
    except KeyboardInterrupt:
        interrupted = True
    except ModelError as error:
        log(f"{as_flags(str(error))}; /reset forgets what was said, /shift its older half only, from now on")
        return False
    write("\n")
    session = conversation.session
    if session.lengths[0] >= session.context and conversation.drawing.kept is None:
        log(
            f"(the context of {session.context} tokens is full, so the answer ends here; /reset forgets what was said, "
            "/shift its older half only, from now on)"
        )
    return interrupted


def _help(conversation: Conversation, argument: str) -> bool:
    """this list"""
    write("".join(f"{name:9} {command.__doc__}\n" for name, command in COMMANDS.items()))
    write("Alt+Enter begins a new line; pasted lines are one message\n")
    return True


def _reset(conversation: Conversation, argument: str) -> bool:
    """forget what was said"""
    conversation.restart()
    return True


def _system(conversation: Conversation, argument: str) -> bool:
    """TEXT: begin anew with this system prompt, or with none"""
    conversation.system = argument or None
    conversation.restart()
    return True


def _save(conversation: Conversation, argument: str) -> bool:
    """FILE: keep the talk, to go on later on any devices"""
    return _with_file("/save", argument, conversation, conversation.save, "are kept")


def _load(conversation: Conversation, argument: str) -> bool:
    """FILE: go on with a talk that was kept"""
    return _with_file("/load", argument, conversation, conversation.load, "were said")


def _with_file(command: str, path: str, conversation: Conversation, act: Callable[[str], None], messages: str) -> bool:
    """Save or load a talk and say what became of its messages; a talk goes on whatever is wrong with a file."""
    if not path:
        log(f"{command}: there is no name of a file; give one")
        return True
    try:
        act(path)
        log(f"{path}: {len(conversation.messages)} messages {messages}")
    except OSError as why:
        log(f"{path}: {why.strerror or why}")
    except ModelError as why:
        log(as_flags(str(why)))
    return True


def _shift(conversation: Conversation, argument: str) -> bool:
    """forget the older half of the context whenever it is full, as --context-shift does"""
    kept = int(conversation.tokenizer.add_bos)
    conversation.drawing = replace(conversation.drawing, kept=kept)
    return True


def _stats(conversation: Conversation, argument: str) -> bool:
    """tokens and rates so far"""
    session = conversation.session
    write(f"{conversation.timing}; {session.lengths[0]} of {session.context} tokens of context in use\n")
    return True


def _exit(conversation: Conversation, argument: str) -> bool:
    """end the talk"""
    return False


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "/help": _help,
        "/reset": _reset,
        "/system": _system,
        "/save": _save,
        "/load": _load,
        "/shift": _shift,
        "/stats": _stats,
        "/exit": _exit,
    }
)
