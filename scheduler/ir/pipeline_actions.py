"""The actions of devices in pipelined runs, where a device begins a run before other devices end the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias


class PipelineAction(NamedTuple):
    """One action of a device while several runs pass through a pipeline of devices.

    - `action` is ``put``, ``run`` or ``keep``. ``put`` writes the inputs where the program reads them, and ``run``
      executes the program. ``keep`` saves the outputs and the bytes for a rollback, before the next run overwrites
      them.
    - `run` is the number of the run.
    """

    action: Literal["put", "run", "keep"]
    run: int


PipelineOrder: TypeAlias = Sequence[Sequence[PipelineAction]]
"""The actions of each device in order. A device waits for another device only at messages."""
