"""A fault of fused kernels: edits of a correct program, and the words with which the verifier refuses the result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .edits import Edit
from .programs import FusedProgram, build_fused_program


class FusionFault(NamedTuple):
    """A fault: its name, the name of its program, the rule and subject in the verifier's message, and the edits."""

    name: str
    program: str
    message: str
    edits: tuple[Edit, ...]

    def plant(self) -> FusedProgram:
        """Return the program with the fault, and its fusion."""
        program, fusion = build_fused_program(self.program)
        for edit in self.edits:
            program, fusion = edit(program, fusion)
        return program, fusion


def fault(name: str, program: str, message: str, *edits: Edit) -> FusionFault:
    return FusionFault(name, program, message, edits)


def next_float32(value: float) -> float:
    """Return the float32 number after the rounded `value`: another constant in the last bit."""
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))
