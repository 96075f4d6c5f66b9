"""``hocket check``: the conformance kit, which has its own flags."""

from ...conformance.command import add_arguments as flags
from ...conformance.command import run as check
from ..terminal.progress import compiling_shown

run = compiling_shown()(check)

__all__ = ["flags", "run"]
