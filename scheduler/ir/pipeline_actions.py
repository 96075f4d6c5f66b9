"""The actions of devices during pipelined runs of plans over one store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias


class PipelineAction(NamedTuple):
    """One action of a device for run number `run`.

    ``put`` writes the inputs where the program reads them. ``run`` runs the program. ``keep`` retains the outputs and
    the bytes for a rollback of this run, before the next run overwrites them.
    """

    action: Literal["put", "run", "keep"]
    run: int


PipelineOrder: TypeAlias = Sequence[Sequence[PipelineAction]]
"""The actions of each device in order. A device waits for another device only at messages."""
