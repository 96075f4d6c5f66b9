"""``hocket check``: the conformance kit, which has its own flags."""

from ...conformance.command import fill as flags
from ...conformance.command import run as run

__all__ = ["flags", "run"]
