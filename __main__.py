"""The command ``hocket``, also ``python -m hocket``: process settings that must precede the import of NumPy.

A program that imports hocket, or calls `hocket.cli.main`, keeps its own settings.
"""

import gc
import os
import signal

GC_THRESHOLD_OBJECTS = 1_000_000
"""The number of new objects after which Python searches for garbage cycles."""
BLAS_IDLE_CYCLES_LOG2 = "20"
"""Idle threads of OpenBLAS poll 2**20 cycles (half a millisecond) for the next matrix product before they sleep.

The default of OpenBLAS is 2**26 cycles. Threads are idle at first, so that takes a tenth of the start time.
"""


def main() -> int:
    """Run the command ``hocket`` with the words of this process, and return its exit code.

    An interrupt ends the process at once while no command runs: while modules are imported and while Python exits.
    Python would print a traceback then.
    """
    gc.set_threshold(GC_THRESHOLD_OBJECTS)  # objects of a command stay; searching them took a tenth of the start time
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", BLAS_IDLE_CYCLES_LOG2)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell ignores interrupts of commands in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command

    signal.signal(signal.SIGINT, handler)
    code = command()
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # no search at the end either
    return code


if __name__ == "__main__":
    raise SystemExit(main())
