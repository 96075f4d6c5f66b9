"""The command ``hocket``, which is ``python -m hocket`` as well: what its process has to be told before NumPy is there.

Whoever imports hocket, or calls `hocket.cli.main`, keeps a process of their own settings.
"""

import gc
import os

OBJECTS = 1_000_000
"""So many more have to be there before Python looks for those that only each other hold."""
IDLE = "20"
"""Threads of a matrix product look 2**20 cycles, half a millisecond, for the next one before they sleep.  They begin
idle, and OpenBLAS has them look for 2**26: a tenth of the start."""


def main() -> int:
    """Run the command that the process was started for, and return its exit code."""
    gc.set_threshold(OBJECTS)  # what a command makes stays: to look through that took a tenth of the start
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", IDLE)
    from .cli import main as command

    code = command()
    gc.freeze()  # nor is it looked through at the end
    return code


if __name__ == "__main__":
    raise SystemExit(main())
