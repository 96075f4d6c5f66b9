"""Step tables: the steps of a program, the work of each thread, and the barriers of the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....graph.old_names import make_package_getattr

if not TYPE_CHECKING:
    __getattr__ = make_package_getattr(
        __name__,
        **dict.fromkeys(
            ("StepTableBuilder", "FusedBinding", "ThreadWork", "InstructionBinder"),
            "hocket.backends.cpu.steps.step_table",
        ),
    )
