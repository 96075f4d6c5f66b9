"""Write docs/cli.md: every command with its flags, as `hocket COMMAND --help` prints them."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cli.md"
HEAD = """# Commands

`python docs/write_cli.py` writes this page from the parsers; its texts are the texts of `hocket COMMAND --help`.

- The default of a flag stands in brackets.
- Data go to stdout, and everything else goes to stderr.
- Exit codes: 0 done, 1 a check failed, 2 wrong usage or bad input, 130 interrupted.
- Every command has `--debug`, which shows the traceback of an error.
"""


def format_commands() -> Iterator[str]:
    """Yield a section for each command."""
    from hocket.cli import build_parser_for_command
    from hocket.frontends.commands import COMMAND_HELP

    for name, purpose in COMMAND_HELP.items():
        parser = build_parser_for_command([name])
        (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        yield f"\n## hocket {name}\n\n{purpose}\n"
        if (more := subparsers.choices[name].epilog) is not None:
            yield "\n" + textwrap.fill(more, 120) + "\n"
        for group in subparsers.choices[name]._action_groups:
            actions = [a for a in group._group_actions if not {"--help", "--debug"} & {*a.option_strings}]
            if actions:
                yield f"\n{str(group.title).capitalize()}:\n\n" + "".join(map(format_flag, actions))


def format_flag(action: argparse.Action) -> str:
    """Return a list item with a flag, its argument and its help."""
    choices = "{" + ",".join(map(str, action.choices or ())) + "}"
    takes = action.metavar or (choices if action.choices else action.dest.upper())
    words = takes if isinstance(takes, str) else " ".join(takes)
    flag = " ".join(filter(None, (", ".join(action.option_strings), words if action.nargs != 0 else "")))
    help_text = (action.help or "").replace("%%", "%")
    item = textwrap.wrap(f"- `{flag}`: {help_text}", 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(item) + "\n"


def page() -> str:
    """Return the expected text of the page."""
    return HEAD + "".join(format_commands())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
