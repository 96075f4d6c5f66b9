"""Check that LLVM has removed no code of a kernel as undefined behaviour, and avoid the known cause of it."""

from __future__ import annotations

import re
from functools import cache

from ....graph.errors import BackendError

REMOVED_CODE = re.compile(r"^ +unreachable$|^(\S+):(?: +;.*)?\n +br label %\1$", re.MULTILINE)
"""The remains of undefined behaviour: a block without an end, or a block that only jumps to itself."""


@cache
def make_llvm_sink_addresses_as_integers() -> None:
    """Make LLVM compute sunk addresses with integer sums instead of pointer arithmetic, so that it removes no code.

    LLVM sinks address computations (moves them to their uses) when Numba makes machine code of a subroutine. Numba then
    inlines the changed assembly, and LLVM optimises it again. With pointer arithmetic, an index of 0 would make the
    base pointer null. LLVM treats an address relative to null as undefined behaviour, and removes the code.
    """
    import llvmlite.binding as llvm

    llvm.set_option("", "-addr-sink-using-gep=false")


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
