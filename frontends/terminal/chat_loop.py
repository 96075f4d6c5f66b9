"""An interactive chat on a terminal: messages, answers, and commands that begin with a slash.

The docstring of a command is its text in ``/help``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from ...graph.errors import format_count
from ...graph.storage.disk_cache import cache_folder
from ..errors import ModelError
from ..generation.conversation import Conversation
from .arguments import replace_arguments_by_flag_names
from .output import write_line_to_stderr, write_to_stdout_unless_closed
from .word_wrap import write_wrapped_to_stdout

EXIT_HINT = "(Ctrl-C again or /exit ends the talk)"
ChatCommand = Callable[[Conversation, str], bool]
"""A function of a chat command: it takes the conversation and an argument, and returns whether the chat continues."""


def run_chat_loop(conversation: Conversation) -> None:
    """Run an interactive chat until the user ends it.

    The user ends it by /exit, the end of input, or Ctrl-C twice in a row. Ctrl-C during an answer ends the answer and
    counts as the first one. The written part stays in the conversation.
    """
    ask = _make_message_reader_with_history() if sys.stdin is not None and sys.stdin.isatty() else input
    interrupted = False
    while True:
        try:
            text = ask("> ").strip()
            interrupted = False
            if not _answer_message_or_command(conversation, text):
                return
        except EOFError:
            write_to_stdout_unless_closed("\n")
            return
        except KeyboardInterrupt:  # it may arrive at any point, as between an answer and the next prompt
            if interrupted:
                write_to_stdout_unless_closed("\n")
                return
            interrupted = True
            write_line_to_stderr(f"\n{EXIT_HINT}")


def _answer_message_or_command(conversation: Conversation, text: str) -> bool:
    """Write the reply to a message or run a chat command, and return whether the chat continues."""
    name, _, argument = text.partition(" ")
    if name in CHAT_COMMANDS:
        return CHAT_COMMANDS[name](conversation, argument.strip())
    if name.startswith("/") and "\n" not in text:
        write_line_to_stderr(f"there is no command {name}; /help lists them")
    elif text:
        _write_reply(conversation, text)
    return True


def _make_message_reader_with_history() -> Callable[[str], str]:
    """Make the function that reads one message from the terminal, with line editing and the messages of earlier chats.

    Pasted lines are one message. Alt+Enter begins a new line.
    """
    from prompt_toolkit import PromptSession  # takes 0.1 s to import
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys, file = KeyBindings(), cache_folder() / "messages"

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with suppress(OSError):  # without a writable folder there is no history
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.open("ab").close()
        history = FileHistory(file)
    write_line_to_stderr("(/help lists commands; Alt+Enter begins a new line)")
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return session.prompt


def _write_reply(conversation: Conversation, text: str) -> None:
    """Generate and write the reply to a message, and say if the context is full."""
    try:
        write_wrapped_to_stdout(conversation.reply(text))
    except ModelError as error:
        write_line_to_stderr(
            f"{replace_arguments_by_flag_names(str(error))}; /reset forgets what was said, "
            "/shift its older half only, from now on"
        )
        return
    write_to_stdout_unless_closed("\n")
    session = conversation.session
    if session.lengths[0] >= session.context and conversation.params.pinned_tokens is None:
        write_line_to_stderr(
            f"(the context of {format_count(session.context, 'token')} is full, so the answer ends here; /reset "
            "forgets what was said, "
            "/shift its older half only, from now on)"
        )


def _show_help(conversation: Conversation, argument: str) -> bool:
    """show this list of commands"""
    write_to_stdout_unless_closed("".join(f"{name:9} {command.__doc__}\n" for name, command in CHAT_COMMANDS.items()))
    write_to_stdout_unless_closed("Alt+Enter begins a new line; pasted lines are one message\n")
    return True


def _reset_conversation(conversation: Conversation, argument: str) -> bool:
    """forget the conversation and start again"""
    conversation.restart_with_system_prompt()
    return True


def _restart_with_system_prompt(conversation: Conversation, argument: str) -> bool:
    """TEXT: start again with this system prompt, or without one"""
    conversation.system = argument or None
    conversation.restart_with_system_prompt()
    return True


def _save_conversation(conversation: Conversation, argument: str) -> bool:
    """FILE: save the conversation, to continue later on any devices"""
    return _save_or_load_conversation("/save", argument, conversation, conversation.save, "are kept")


def _load_conversation(conversation: Conversation, argument: str) -> bool:
    """FILE: continue a saved conversation"""
    return _save_or_load_conversation("/load", argument, conversation, conversation.load, "were said")


def _save_or_load_conversation(
    command: str, path: str, conversation: Conversation, transfer: Callable[[str], None], messages: str
) -> bool:
    """Save or load a conversation by `transfer`, report the number of messages or the error, and return True.

    Args:
        command: The chat command, for messages.
        path: The file.
        conversation: The conversation.
        transfer: Saves or loads the file.
        messages: The words that follow the number of messages in the report.
    """
    if not path:
        write_line_to_stderr(f"{command}: the file name is missing; give one")
        return True
    try:
        transfer(path)
        write_line_to_stderr(f"{path}: {format_count(len(conversation.messages), 'message')} {messages}")
    except OSError as why:
        write_line_to_stderr(f"{path}: {why.strerror or why}")
    except ModelError as why:
        write_line_to_stderr(replace_arguments_by_flag_names(str(why)))
    return True


def _enable_context_shift(conversation: Conversation, argument: str) -> bool:
    """drop the older half of the context whenever it is full, as --context-shift does"""
    pinned_tokens = int(conversation.tokenizer.add_bos)
    conversation.params = replace(conversation.params, pinned_tokens=pinned_tokens)
    return True


def _show_stats(conversation: Conversation, argument: str) -> bool:
    """show the token counts and the rates so far"""
    session = conversation.session
    write_to_stdout_unless_closed(
        f"{conversation.timing}; {session.lengths[0]} of {format_count(session.context, 'token')} of context in use\n"
    )
    return True


def _end_chat(conversation: Conversation, argument: str) -> bool:
    """end the chat"""
    return False


CHAT_COMMANDS: Mapping[str, ChatCommand] = MappingProxyType(
    {
        "/help": _show_help,
        "/reset": _reset_conversation,
        "/system": _restart_with_system_prompt,
        "/save": _save_conversation,
        "/load": _load_conversation,
        "/shift": _enable_context_shift,
        "/stats": _show_stats,
        "/exit": _end_chat,
    }
)
