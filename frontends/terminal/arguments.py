"""Parsing of command-line arguments, with one-line messages for wrong ones."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ...graph.storage.files import is_same_file
from ...graph.validation import did_you_mean

OS_ERROR_REMEDIES: Mapping[int | None, str] = MappingProxyType(
    {
        errno.ENOENT: "; check its name and its folder",
        errno.EISDIR: "; name a file in it",
        errno.EACCES: "; choose a place that you may use",
        errno.EROFS: "; choose a place that can be written",
        errno.ENOSPC: "; free some space",
        errno.EDQUOT: "; free some space",
        errno.EFBIG: "; raise the limit of file sizes (ulimit -f)",
        errno.ELOOP: "; correct the links, which lead to each other",
        errno.ENAMETOOLONG: "; give a shorter one",
        errno.ENOTDIR: "; correct its folder, which is a file",
        errno.EPERM: "; choose a place that you may use",
    }
)


def escape_as_one_line(text: str) -> str:
    """Return a message as one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_os_error_with_remedy(error: OSError) -> str:
    """Return the system's message about a file error, with a remedy."""
    message = error.strerror or str(error)
    return message if error.filename is None else f"{error.filename}: {message}{OS_ERROR_REMEDIES.get(error.errno, '')}"


OUTPUT_ARGUMENTS = ("out", "save_state", "trace", "log_requests")
"""Arguments that name a file to write; but `hocket view` reads its trace."""
FILE_METAVARS = ("FILE", "FOLDER", "DIR")
"""Metavariables of flags that name a file or a folder."""
REPLACED_INPUTS = frozenset({"load_state", "diff"})
"""Arguments with a file that an output may replace after it has been read."""


def require_outputs_are_distinct_files(args: argparse.Namespace, command: str) -> None:
    """Require that no output file of a command is one of its other files.

    Raises:
        FileExistsError: An output is also an input, or two outputs are one file.
    """
    values = {name: value for name, value in vars(args).items() if name not in REPLACED_INPUTS}
    for name in OUTPUT_ARGUMENTS:
        path = values.pop(name, None)
        if not isinstance(path, str) or (name, command) == ("trace", "view"):
            continue
        outputs = [str(values[other]) for other in OUTPUT_ARGUMENTS if values.get(other)]
        is_new = not os.path.exists(path) and os.path.realpath(path) in map(os.path.realpath, outputs)
        if is_new or any(is_same_file(path, other) for value in values.values() for other in _list_texts(value)):
            raise FileExistsError(errno.EEXIST, "is also another file of the command; give another file", path)


def _list_texts(value: object) -> Iterator[str]:
    """Yield the texts of an argument: itself, or the entries of a sequence, such as pairs of a file and its scale."""
    if isinstance(value, (str, Path)):
        yield str(value)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _list_texts(entry)


OTHER_FLAGS_BY_ARGUMENT: Mapping[str, str] = MappingProxyType(
    {
        "context_shift": "--context-shift",
        "max_tokens": "-n",
        "slots": "--parallel",
        "pool_tokens": "--pool-tokens",
        "schema_lenient": "--schema-lenient",
        "chat_template": "--chat-template",
        "watch": "--watch",
    }
)
"""Command-line flags by argument of methods of `hocket.Model` and of `EngineOptions`."""
FLAGS_BY_METHOD: Mapping[str, str] = MappingProxyType(
    {"Model.save": "--save-state", "Model.load": "--load-state", "Model.tokens": "hocket logits --tokens"}
)
"""Command-line flags by method of `hocket.Model`."""


def list_flags_by_argument() -> Mapping[str, str]:
    """Return the flags of all arguments of a model run; messages write arguments as ``argument=value``."""
    from ..run_config import RUN_OPTIONS  # only messages about mistakes need it

    return {**OTHER_FLAGS_BY_ARGUMENT, **{name: row.flags[-1] for name, row in RUN_OPTIONS.items()}}


def list_flags_by_first_name_in_message() -> Mapping[str, str]:
    """Return the flag of each argument name with which an error message may begin.

    Example: ``--top-p`` for ``top_p``, in the message ``Sampling: top_p is 2; it must be at most 1``.
    """
    from ..config_options import list_options
    from ..generation.sampling import Sampling

    sampling = {name: row.flags[-1] for name, row in list_options(Sampling).items()}
    return {
        **list_flags_by_argument(),
        **sampling,
        "path": "the model",
        "sequences": "--parallel",
        "grammar": "--grammar",
        "json_schema": "--json-schema",
    }


def replace_arguments_by_flag_names(message: str) -> str:
    """Replace Python arguments in an error message of the library by the command-line flags of the same meaning.

    Examples: ``context=64`` becomes ``--ctx-size 64``, ``control_layers=(1, 3)`` becomes
    ``--control-vector-layer-range 1 3``, and ``Sampling: top_p is 2`` becomes ``--top-p is 2``.
    """
    flags, subjects = list_flags_by_argument(), list_flags_by_first_name_in_message()

    def as_flag(match: re.Match[str]) -> str:
        name, is_switch, quoted, several, plain = match.groups()
        value = next((v for v in (quoted, several and several.replace(",", ""), plain) if v is not None), "")
        return flags[name] + ("" if is_switch else f" {shlex.quote(value) if name == 'place' else value}")

    for method, flag in FLAGS_BY_METHOD.items():
        message = message.replace(method, flag)
    message = re.sub(rf"^(?:[\w.]+: )?({'|'.join(subjects)}) is (?=.*; )", lambda m: f"{subjects[m[1]]} is ", message)
    return re.sub(rf"\b({'|'.join(flags)})=(?:(True)\b|'([^']*)'|\(([^()]*)\)|(\w+))", as_flag, message)


class PositionalAliasAction(argparse._StoreAction):
    """An argparse action for a flag that gives a positional argument, such as ``-m FILE`` for the model file."""


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, and does not read ``-nX`` as the flag ``-n`` with a value."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers:
            return super().parse_known_args(words, namespace)
        words, optional = self._move_alias_flags_to_positions(words)
        parsed, left = super().parse_known_args(words, namespace)
        for dest, value in optional.items():
            if (other := getattr(parsed, dest)) is not None:
                self.error(f"argument {dest}: got {other!r:.80} and {value!r:.80}; give one")
            setattr(parsed, dest, value)
        return parsed, left

    def _move_alias_flags_to_positions(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Move the values of `PositionalAliasAction` flags to the places of positional arguments in the words.

        The value of the first positional argument comes first, other values come last. Flags that only llama.cpp has
        are refused here; otherwise their values would be taken for other arguments.

        Returns:
            The words for argparse, and the values of optional positional arguments after the first one. These values
            are kept apart, because argparse takes no optional argument that is behind a flag.
        """
        positionals = self._get_positional_actions()
        first, *_ = [action.dest for action in positionals] or [""]
        optional_names = {action.dest for action in positionals[1:] if action.nargs == argparse.OPTIONAL}
        before, rest, behind, optional = list[str](), list[str](), list[str](), dict[str, str]()
        stream = iter(words)
        for word in stream:
            flag, is_joined, value = word.partition("=")
            action = self._option_string_actions.get(word) or self._option_string_actions.get(flag)
            if word == "--":
                rest += [word, *stream]
            elif action is None and word.startswith("-"):
                self._refuse_llama_cpp_flag(flag)
                rest.append(word)
            elif isinstance(action, PositionalAliasAction):
                value = value if is_joined else next(stream, "")
                if not value or (value.startswith("-") and value != "-"):
                    self.error(f"argument {flag}: expected one argument")
                place = before if action.dest == first else behind
                if other := optional.get(action.dest) or next(iter(place), ""):
                    self.error(f"argument {flag}: got {other!r:.80} and {value!r:.80}; give one")
                if action.dest in optional_names:
                    optional[action.dest] = value
                else:
                    place.append(value)
            else:
                rest.append(word)
        return [*before, *rest, *behind], optional

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return an empty list, so that argparse accepts no abbreviated flags and reads no ``-ngl`` as ``-n gl``."""
        return []

    def _refuse_llama_cpp_flag(self, flag: str) -> None:
        from .llama_cpp import find_unsupported_flag  # a table that is needed after mistakes only

        if found := find_unsupported_flag(flag, self.prog.split()[-1]):
            self.error(f"{flag} is a flag of llama.cpp; {found.remedy}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {escape_as_one_line(message)}; see {self.prog} --help\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the value of an action; the name of a file is never empty."""
        values = super()._get_values(action, arg_strings)
        if values == "" and action.option_strings and action.metavar in FILE_METAVARS:
            raise argparse.ArgumentError(action, "got ''; need the name of a file")
        return values

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            message = f"got {str(value)[:80]!r}; need one of {', '.join(known)}{did_you_mean(value, known)}"
            raise argparse.ArgumentError(action, message)

    def exit_with_flag_suggestion(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error message about unknown words, which suggests the nearest flag."""
        word = next((w for w in words if w.startswith("-")), words[0])
        flag = word.partition("=")[0]
        is_flag = flag.startswith("-")
        kind = "flag" if is_flag else "place for the argument"
        hint = did_you_mean(flag, self._option_string_actions, min_ratio=0.7) if is_flag else ""
        self.error(f"there is no {kind} {flag!r:.80}{hint}")
