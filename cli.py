"""The command ``hocket``: which subcommand is asked for, and the one place where errors become a line.

Data go to stdout, everything else to stderr.  Exit codes: 0 done, 1 a check failed, 2 wrong usage or bad input.
Nothing is coloured, so ``NO_COLOR`` has nothing to turn off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module

from . import __version__
from .distributed import SINGLE_PROCESS, World
from .distributed.launcher import detect_launch
from .frontends.commands import COMMANDS
from .frontends.terminal.arguments import Parser, as_flags, of_file, one_line
from .frontends.terminal.output import log, write
from .frontends.terminal.rank import run_rank
from .graph.errors import HocketError
from .graph.validation import did_you_mean

OWN = ("-h", "--help", "--version")
"""Flags that may stand before a command."""
SHARING = (
    "Commands that run or plan a model take --devices, --split-mode, --tensor-split and --place REGEX=DEVICE (what has "
    "such a name, or reads a weight or state of such a name, runs on that device); see hocket COMMAND --help."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit."""
    words = sys.argv[1:] if argv is None else list(argv)
    if launch := detect_launch():
        return run_rank(launch, partial(_run, words), _said, version=__version__, debug="--debug" in words)
    try:
        return _guarded(words)
    except BrokenPipeError:
        # Whoever read our output has enough of it; what is left must not fail again when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        log("")
        return 130


def _guarded(words: Sequence[str]) -> int:
    """Run the command; the errors that bad input causes become one line."""
    encoding = getattr(sys.stdout, "encoding", None)  # none if a test or an embedding program collects the text
    if encoding and encoding.lower().replace("-", "") != "utf8":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # typeshed has TextIO, which lacks it
    debug = "--debug" in words
    try:
        return _run(words)
    except BrokenPipeError:
        raise
    except (HocketError, OSError, MemoryError) as error:
        if debug:
            raise
        log(f"hocket: {one_line(_said(error))}")
        return 2


def _run(words: Sequence[str], world: World = SINGLE_PROCESS) -> int:
    parser = build_parser(words)
    asked = _asked(words)
    if asked is not None and words[0] != asked and words[0] not in OWN:
        parser.error(
            f"got {words[0]!r:.80} before a command; need the command first, as in: hocket run {words[0]!s:.80}"
        )
    if asked is not None and asked not in COMMANDS:
        from .frontends.terminal.llama_cpp import find_command  # a table that only mistakes pay for

        other = find_command(asked)
        hint = f"; {other}" if other else did_you_mean(asked, COMMANDS) or f"; commands: {', '.join(COMMANDS)}"
        parser.error(f"there is no command {asked!r:.80}{hint}")
    args, left = parser.parse_known_args(words)
    if left:
        getattr(args, "parser", parser).refuse(left)
    if args.version:
        write(f"hocket {__version__}\n")
        return 0
    if "run" not in args:
        parser.error("no command given")
    if world.rank and not args.in_ranks:
        return 0
    args.world = world
    return int(args.run(args))


def build_parser(words: Sequence[str]) -> Parser:
    """All subcommands; only the one that the words name has its flags, and only its module is imported."""
    parser = Parser(
        "hocket", description="Run GGUF language models as compiled graphs.", epilog=SHARING, allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser, prog=parser.prog)
    asked = _asked(words)
    for name, purpose in COMMANDS.items():
        sub = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if name == asked:
            command = import_module(f".frontends.commands.{name}", __package__)
            command.flags(sub)
            sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
            sub.set_defaults(run=command.run, parser=sub, in_ranks=sub.get_default("in_ranks") or False)
    return parser


def _asked(words: Sequence[str]) -> str | None:
    """The word that names the command."""
    return next((word for word in words if not word.startswith("-")), None)


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "memory is out; use a smaller context, batch or model"
    return of_file(error) if isinstance(error, OSError) else as_flags(str(error))
