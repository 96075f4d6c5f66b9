"""The command ``hocket``: find the subcommand, run it, and turn errors into one line.

Data go to stdout, everything else to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong usage or bad input. The
output has no colours, so ``NO_COLOR`` has no effect.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module

from . import __version__
from .distributed import SINGLE_PROCESS, World
from .distributed.launcher import detect_launcher_and_rank
from .frontends.commands import COMMAND_HELP
from .frontends.terminal.arguments import (
    CommandParser,
    describe_os_error_with_remedy,
    escape_as_one_line,
    replace_arguments_by_flag_names,
    require_outputs_are_distinct_files,
)
from .frontends.terminal.output import write_line_to_stderr, write_to_stdout_unless_closed
from .frontends.terminal.rank_command import run_command_as_rank
from .graph.errors import HocketError
from .graph.validation import did_you_mean

TOP_LEVEL_FLAGS = ("-h", "--help", "--version")
"""Flags that may precede the command."""
SHARED_FLAGS_HELP = (
    "Commands that run or plan a model take --devices, --split-mode, --tensor-split and --place REGEX=DEVICE. A node "
    "with a matching name runs on that device, as does a node that reads a matching weight or state. See hocket "
    "COMMAND --help."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hocket``, and return its exit code.

    Args:
        argv: command-line words; by default the words of the process.

    Raises:
        SystemExit: The command line is wrong.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if launch := detect_launcher_and_rank():
        return run_command_as_rank(
            launch,
            partial(_run_command, words),
            _describe_error_with_flag_names,
            version=__version__,
            debug="--debug" in words,
        )
    try:
        return _run_with_reported_errors(words)
    except BrokenPipeError:
        # The reader of the output has closed it. The rest must not fail again when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        write_line_to_stderr("")
        return 130


def _run_with_reported_errors(words: Sequence[str]) -> int:
    """Run the command, and report an error that bad input causes as one line on stderr, with exit code 2.

    With ``--debug`` the traceback precedes the line.
    """
    encoding = getattr(sys.stdout, "encoding", None)  # none if a test or an embedding program collects the text
    if encoding and encoding.lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # typeshed has TextIO, which lacks it
    if isinstance(sys.stdin, io.TextIOWrapper):  # as in the C locale, so that commands name the wrong character
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    debug = "--debug" in words
    try:
        return _run_command(words)
    except BrokenPipeError:
        raise
    except (HocketError, OSError, MemoryError) as error:
        if debug:
            sys.excepthook(type(error), error, error.__traceback__)
        write_line_to_stderr(f"hocket: {escape_as_one_line(_describe_error_with_flag_names(error))}")
        return 2


def _run_command(words: Sequence[str], world: World = SINGLE_PROCESS) -> int:
    """Parse the command line, and run the command in this process, which may be one of several ranks."""
    parser = build_parser_for_command(words)
    asked = _find_command_name(words)
    if asked is not None and words[0] != asked and words[0] not in TOP_LEVEL_FLAGS:
        parser.error(
            f"got {words[0]!r:.80} before a command; need the command first, as in: hocket run {words[0]!s:.80}"
        )
    if asked is not None and asked not in COMMAND_HELP:
        from .frontends.terminal.llama_cpp import (
            find_llama_cpp_program_replacement,
        )  # a table that is loaded only for a mistake

        other = find_llama_cpp_program_replacement(asked)
        hint = f"; {other}" if other else did_you_mean(asked, COMMAND_HELP) or f"; commands: {', '.join(COMMAND_HELP)}"
        parser.error(f"there is no command {asked!r:.80}{hint}")
    args, left = parser.parse_known_args(words)
    if left:
        getattr(args, "parser", parser).exit_with_flag_suggestion(left)
    if args.version:
        write_to_stdout_unless_closed(f"hocket {__version__}\n")
        return 0
    if "run" not in args:
        parser.error("no command given")
    if world.rank and not args.in_ranks:
        return 0
    args.world = world
    require_outputs_are_distinct_files(args, asked or "")
    return int(args.run(args))


def build_parser_for_command(words: Sequence[str]) -> CommandParser:
    """Build the parser of ``hocket`` in which only the command in `words` has its flags.

    Only the module of that command is imported. If it is the first word, then the parser has no other subcommand, since
    each takes 0.3 ms; otherwise it has all of them.
    """
    parser = CommandParser(
        "hocket",
        description="Compile language models and other graphs for one or many devices, and run them.",
        epilog=SHARED_FLAGS_HELP,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=CommandParser, prog=parser.prog)
    asked = _find_command_name(words)
    is_first = asked in COMMAND_HELP and words[0] == asked
    for name, purpose in COMMAND_HELP.items():
        if is_first and name != asked:
            continue
        sub = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if name == asked:
            command = import_module(f".frontends.commands.{name}", __package__)
            command.add_flags(sub)
            sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
            sub.set_defaults(run=command.run, parser=sub, in_ranks=sub.get_default("in_ranks") or False)
    return parser


def _find_command_name(words: Sequence[str]) -> str | None:
    """Find the first word that is no flag, which names the command; None without such a word."""
    return next((word for word in words if not word.startswith("-")), None)


def _describe_error_with_flag_names(error: Exception) -> str:
    """Describe an error in one line that names flags instead of arguments. A lack of memory gets a remedy."""
    if isinstance(error, MemoryError):
        return "memory is out; use a smaller context, batch or model"
    return (
        describe_os_error_with_remedy(error)
        if isinstance(error, OSError)
        else replace_arguments_by_flag_names(str(error))
    )
