"""The actions of devices in pipelined runs, where a device begins a run before other devices end the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias


class PipelineAction(NamedTuple):
    """One action of a device for run number `run` of a pipeline.

    - ``put`` writes the inputs where the program reads them.
    - ``run`` runs the program.
    - ``keep`` saves the outputs, and the bytes for a rollback of this run, before the next run overwrites them.
    """

    action: Literal["put", "run", "keep"]
    run: int


PipelineOrder: TypeAlias = Sequence[Sequence[PipelineAction]]
"""The actions of each device in order. A device waits for another device only at messages."""
