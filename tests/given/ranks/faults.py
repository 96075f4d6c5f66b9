"""``python faults.py FAULT WORDS...``: the command hocket, in which rank 1 goes wrong as told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count

import hocket
from hocket import cli
from hocket.frontends.generation import generate
from hocket.frontends.terminal import rank
from hocket.graph.errors import BackendError

MINE = os.environ.get("PMI_RANK") == "1"
MOMENT = 4


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
}


def main(fault: str, words: list[str]) -> int:
    if fault in AT_A_TOKEN and MINE:
        plain, numbers = generate.agreed, count()

        def agreed(session, token):
            if next(numbers) == MOMENT:
                AT_A_TOKEN[fault]()
            return plain(session, token)

        generate.agreed = agreed
    if fault == "another hocket" and MINE:
        cli.__version__ = hocket.__version__ + ".1"
    if fault == "another numpy" and MINE:
        rank.np = type("numpy", (), {"__version__": "1.0"})
    if fault == "late" and MINE:
        time.sleep(3)
    if fault == "elsewhere" and MINE:
        words = [word + ".absent" if word.endswith(".gguf") else word for word in words]
    return cli.main(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
