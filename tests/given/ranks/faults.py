"""``python faults.py FAULT WORDS...``: the command hocket, in which rank 1 goes wrong as told; ``none`` of them does.

However busy the machine is, no rank but one that goes wrong is called late or gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count

import hocket
from hocket import cli
from hocket.distributed import launcher, world
from hocket.frontends.generation import generate
from hocket.frontends.terminal import rank_command
from hocket.graph.errors import BackendError
from hocket.scheduler.runtime import bound_plan

MINE = os.environ.get("PMI_RANK") == "1"
MOMENT = 4
HOUR = 3600.0
SOON = 2.0
GONE, LATE = ("killed", "stopped", "leaves"), ("hangs",)
"""Faults that show in that nothing is heard of rank 1, and in that it does not come."""


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def raises() -> None:
    raise BackendError("the disk is full")


def breaks() -> None:
    raise ZeroDivisionError("a mistake")


AT_A_TOKEN = {
    "killed": send(signal.SIGKILL),
    "stopped": send(signal.SIGSTOP),
    "terminated": send(signal.SIGTERM),
    "interrupted": send(signal.SIGINT),
    "raises": raises,
    "breaks": breaks,
    "hangs": lambda: time.sleep(1000),
    "leaves": lambda: os._exit(0),
    "keeper": lambda: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(1000)),
}


def be_patient(fault: str) -> None:
    """Let the failed rank wait until all others have reported; only the patience with rank 1 may end, `SOON`."""
    launcher.START_TIMEOUT_SECONDS = launcher.FAILED_RANK_LINGER_SECONDS = world.FAILED_RANK_LINGER_SECONDS = (
        rank_command.SILENCE_TIMEOUT_SECONDS
    ) = HOUR
    bound_plan.MAX_RANK_WAIT_SECONDS = SOON if fault in LATE else HOUR
    if fault == "none":  # nothing hangs: the slower rank of a busy machine ends by itself
        world.SHUTDOWN_GRACE_SECONDS = launcher.FINALIZE_SECONDS = HOUR
    listen, take = world.World._read_heartbeat, world.World.receive_packet

    def listen_slowly(self, rank, now):
        world.SILENCE_TIMEOUT_SECONDS = SOON if rank == 1 and fault in GONE else HOUR
        listen(self, rank, now)

    def take_late(self, source, channel, timeout=None):
        return take(self, source, channel, timeout if source == 1 and fault in LATE else timeout and HOUR)

    world.World._read_heartbeat, world.World.receive_packet = listen_slowly, take_late


def main(fault: str, words: list[str]) -> int:
    be_patient(fault)
    if fault in AT_A_TOKEN and MINE:
        plain, numbers = generate.broadcast_sampled_token, count()

        def agree_or_fail(session, token):
            if next(numbers) == MOMENT:
                AT_A_TOKEN[fault]()
            return plain(session, token)

        generate.broadcast_sampled_token = agree_or_fail
    if fault == "another hocket" and MINE:
        cli.__version__ = hocket.__version__ + ".1"
    if fault == "another numpy" and MINE:
        rank_command.np = type("numpy", (), {"__version__": "1.0"})
    if fault == "late" and MINE:
        time.sleep(3)
    if fault == "elsewhere" and MINE:
        words = [word + ".absent" if word.endswith(".gguf") else word for word in words]
    return cli.main(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
