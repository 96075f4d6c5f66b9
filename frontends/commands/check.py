"""``hocket check``: the conformance kit, with its own flags."""

from ...conformance.command import add_arguments as add_flags
from ...conformance.command import run_parsed_command as check
from ..terminal.compile_progress import show_compile_progress

run = show_compile_progress()(check)

__all__ = ["add_flags", "run"]
