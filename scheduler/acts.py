"""What devices do when runs of plans over one store follow each other through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias


class Act(NamedTuple):
    """A device does something of run number `run`: it puts the inputs where its program reads them, runs the program,
    or keeps what has to outlive the next run, which are outputs and what would undo this one."""

    what: Literal["put", "run", "keep"]
    run: int


Order: TypeAlias = Sequence[Sequence[Act]]
"""For each device what it does, one act after the other; devices wait for each other's letters alone."""
