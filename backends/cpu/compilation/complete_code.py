"""Check that LLVM has removed no code of a kernel as undefined behaviour, and that the rest cannot raise."""

from __future__ import annotations

import re

from ....graph.errors import BackendError

REMOVED_CODE = re.compile(r"^ +unreachable$|^(\S+):(?: +;.*)?\n +br label %\1$", re.MULTILINE)
"""The remains of undefined behaviour: a block without an end, or a block that only jumps to itself."""


def require_complete_code(name: str, assembly: str) -> None:
    """Raise if the optimised LLVM assembly of the kernel `name` lacks code, or may raise a Python exception.

    Raises:
        BackendError: The kernel may raise, which no caller would catch, or LLVM has removed code as undefined.
    """
    if "call void @numba_do_raise" in assembly:
        raise BackendError(
            f"kernel {name} may raise, and nothing would catch it; give range() a step that is a constant, and leave "
            "out raise and assert"
        )
    if REMOVED_CODE.search(assembly):
        raise BackendError(f"kernel {name} would not end: LLVM removed code that it takes for undefined behaviour")
