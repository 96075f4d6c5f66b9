"""``python script.py MOMENT FAULT``: a script of the Python API, in which rank 1 goes wrong at a moment."""

from __future__ import annotations

import os
import signal
import sys
import time

from mpi4py import MPI

RANK = MPI.COMM_WORLD.Get_rank()


def raises() -> None:
    raise RuntimeError("rank 1 is unwell")


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


FAULTS = {
    "raises": raises,
    "exits": lambda: sys.exit(0),
    "leaves": lambda: os._exit(0),
    "killed": lambda: send_signal(signal.SIGKILL),
    "stopped": lambda: send_signal(signal.SIGSTOP),
}


def main(moment: str, fault: str) -> None:
    def at(name: str) -> None:
        if RANK == 1 and name == moment:
            FAULTS[fault]()

    at("before the import")
    import numpy as np

    import hocket

    at("before load")
    x = hocket.input("x", (2, 6))
    graph = hocket.Graph({"y": hocket.ops.mul_mat(hocket.weight("w", (2, 6)), x)})
    weights = {"w": np.ones((2, 6), np.float32)}
    if RANK == 1 and moment == "during load":
        from hocket.scheduler.running.store import Store

        Store.bind = lambda *arguments: FAULTS[fault]()
    devices = ",".join(f"cpu:0@{rank}" for rank in range(MPI.COMM_WORLD.Get_size()))
    plan = hocket.plan(graph, devices, split_mode="tensor")
    run = hocket.load(plan, weights, comm=MPI.COMM_WORLD)
    inputs = {"x": np.ones((2, 6), np.float32)}
    run.run(inputs)
    if RANK == 1 and moment == "during a run":
        run._devices.work = lambda works: FAULTS[fault]()
    at("between runs")
    if moment != "after":
        for _ in range(3):
            run.run(inputs)
            time.sleep(0.01)
    at("after")


if __name__ == "__main__":
    main(*sys.argv[1:])
