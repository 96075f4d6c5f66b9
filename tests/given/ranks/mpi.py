"""Commands in several processes of this machine, by the mpiexec of the environment that the tests run in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..waits import WAIT_SECONDS
from . import faults

MPIEXEC = Path(sys.executable).with_name("mpiexec")
needs_mpi = pytest.mark.skipif(
    not (MPIEXEC.exists() and find_spec("mpi4py")), reason="mpi4py and mpich are missing; pip install -e '.[mpi]'"
)


@dataclass(frozen=True)
class ProcessResult:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Return the lines of hocket on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("hocket: ")]


def mpiexec(ranks, *words):
    """Run ``python WORDS`` in `ranks` processes, which reach each other through this machine only."""
    command = [str(MPIEXEC), "-iface", "lo", "-n", str(ranks), sys.executable, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, stdin=subprocess.DEVNULL, check=False
    )
    return ProcessResult(done.returncode, done.stdout, done.stderr)


def hocket_in(ranks, *words, fault="none"):
    """Run the command hocket, as `faults` says."""
    return mpiexec(ranks, faults.__file__, fault, *words)


def left_behind(word):
    """Processes of this machine that have `word` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(path.parent.name)
    return found
