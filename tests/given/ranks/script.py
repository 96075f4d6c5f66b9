"""``python script.py MOMENT FAULT``: a script of the Python API, in which rank 1 goes wrong at a moment.

However busy the machine is, no rank but this one is called late or gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time

HOUR, SOON = 3600.0, 2.0


def raises() -> None:
    raise RuntimeError("rank 1 is unwell")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


FAULTS = {
    "raises": raises,
    "exits": lambda: sys.exit(0),
    "leaves": lambda: os._exit(0),
    "killed": lambda: send(signal.SIGKILL),
    "stopped": lambda: send(signal.SIGSTOP),
    "hangs": lambda: time.sleep(1000),
}


def be_patient(moment: str, fault: str) -> None:
    """Patience may end with rank 1 alone, `SOON`, where that is how its fault shows."""
    from hocket.distributed import presence, world
    from hocket.scheduler.runtime import bound_plan

    listen, take, why = (
        world.World._read_heartbeat,
        world.World.receive_packet,
        presence.AbsentRankDetector._find_reason,
    )

    def listen_patiently(self, rank, now):
        world.SILENCE_TIMEOUT_SECONDS = SOON if rank == 1 and fault == "stopped" else HOUR
        listen(self, rank, now)

    def take_patiently(self, source, channel, timeout=None):
        return take(self, source, channel, timeout and (SOON if source == 1 and fault == "hangs" else HOUR))

    def why_absent(self, rank, pid, now):
        presence.IMPORT_SECONDS = SOON if rank == 1 and moment == "before the import" else HOUR
        return why(self, rank, pid, now)

    world.World._read_heartbeat, world.World.receive_packet, presence.AbsentRankDetector._find_reason = (
        listen_patiently,
        take_patiently,
        why_absent,
    )
    bound_plan.MAX_RANK_WAIT_SECONDS = HOUR


def main(moment: str, fault: str) -> None:
    from mpi4py import MPI

    goes_wrong, size = MPI.COMM_WORLD.Get_rank() == 1, MPI.COMM_WORLD.Get_size()

    def at(name: str) -> None:
        if goes_wrong and name == moment:
            FAULTS[fault]()

    at("before the import")
    import numpy as np

    import hocket

    be_patient(moment, fault)
    at("before load")
    x = hocket.input("x", (2, 6))
    graph = hocket.Graph({"y": hocket.ops.mul_mat(hocket.weight("w", (2, 6)), x)})
    weights = {"w": np.ones((2, 6), np.float32)}
    if goes_wrong and moment == "during load":
        from hocket.scheduler.runtime.store import Store

        Store.bind = lambda *arguments: FAULTS[fault]()
    devices = ",".join(f"cpu:0@{rank}" for rank in range(size))
    plan = hocket.plan(graph, devices, split_mode="tensor")
    run = hocket.load(plan, weights, comm=MPI.COMM_WORLD)
    inputs = {"x": np.ones((2, 6), np.float32)}
    run.run(inputs)
    if goes_wrong and moment == "during a run":
        run._device_threads.run_devices = lambda works: FAULTS[fault]()
    at("between runs")
    if moment != "after":
        for _ in range(3):
            run.run(inputs)
            time.sleep(0.01)
    at("after")


if __name__ == "__main__":
    main(*sys.argv[1:])
