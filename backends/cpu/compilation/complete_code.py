"""Kernels have all of their code: LLVM takes none of it for undefined behaviour, which it would remove."""

from __future__ import annotations

import re
from functools import cache

from ....graph.errors import BackendError

REMOVED_CODE = re.compile(r"^ +unreachable$|^(\S+):(?: +;.*)?\n +br label %\1$", re.MULTILINE)
"""The remains of undefined behaviour: a block without an end, or a block that only jumps to itself."""


@cache
def write_addresses_as_integers() -> None:
    """Set an option of LLVM: an address that moves to its use becomes an integer sum, not relative to a pointer.

    LLVM does so when Numba makes machine code of a subroutine. Numba then inlines the changed assembly, and LLVM
    optimises it again. There, an index of 0 makes the pointer null, and an address relative to null is undefined.
    """
    import llvmlite.binding as llvm

    llvm.set_option("", "-addr-sink-using-gep=false")


def require_complete_code(name: str, assembly: str) -> None:
    """Check the optimised LLVM assembly of the kernel `name`.

    Raises:
        BackendError: The kernel may raise, or LLVM has removed code.
    """
    if "call void @numba_do_raise" in assembly:
        raise BackendError(
            f"kernel {name} may raise, and nothing would catch it; give range() a step that is a constant, and leave "
            "out raise and assert"
        )
    if REMOVED_CODE.search(assembly):
        raise BackendError(f"kernel {name} would not end: LLVM removed code that it takes for undefined behaviour")
