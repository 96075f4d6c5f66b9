"""Threads that plan, load and run at once, in processes of a few seconds each: no crash, and right numbers.

Run ``python tests/given/threads.py --threads 8 --seconds 60``. A process loads shared code in its first second, hence
the short processes; with ``--cold`` the first of them finds no compiled kernel.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hocket
from hocket import ops
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model

GROUPS = ("cpu:0", "numpy:0", "reference:0", "cpu:0,cpu:1", "numpy:0,numpy:1", "cpu:0,numpy:0")
MODEL = Path(__file__).parents[1] / "fixtures" / "llama" / "model.gguf"
TOKENS = ([5, 9, 2], [7])
RARE = "own_session"
"""The task that takes a second where others take a hundredth."""
ROUND = 6.0
"""Seconds of a process."""
Work = Callable[[random.Random], None]


def layer(width: int) -> tuple[hocket.Graph, Mapping[str, np.ndarray]]:
    """A gated unit behind a norm, and its weights."""
    rng = np.random.default_rng(width)
    x = hocket.input("x", (3, 64))
    up, gate, down = (
        hocket.weight(n, s) for n, s in (("up", (width, 64)), ("gate", (width, 64)), ("down", (64, width)))
    )
    h = ops.rms_norm(x, eps=1e-6)
    y = ops.mul_mat(down, ops.swiglu(ops.mul_mat(gate, h), ops.mul_mat(up, h)))
    graph = hocket.Graph({"y": ops.add(x, y)})
    return graph, {v.node.name: rng.standard_normal(v.shape).astype(np.float32) / 8 for v in graph.weights}


def check(run: hocket.Executor, weights: Mapping[str, np.ndarray], draw: random.Random) -> None:
    """One run of a layer, against NumPy in float64."""
    x = np.full((3, 64), draw.uniform(-2, 2)) + np.arange(64) / 64
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    gate, up = h @ weights["gate"].T, h @ weights["up"].T
    want = x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T
    np.testing.assert_allclose(run.run({"x": x})["y"], want, rtol=1e-3, atol=1e-3)


def works() -> dict[str, Work]:
    """Return the tasks of a thread; plans, executors, a model and a session are shared by all."""
    graph, weights = layer(96)
    plans = [hocket.plan(graph, devices, split_mode="tensor") for devices in GROUPS]
    shared = [hocket.load(plan, weights) for plan in plans[:1] + plans[3:]]
    model, on = open_model(MODEL), DeviceGroup(devices=("cpu:0",), threads=2)
    alone = Session(model, on=on, context=64)
    logits = [alone.evaluate([new])[0] for new in TOKENS]
    state = hocket.state("s", (4,))
    counter = hocket.load(
        hocket.plan(hocket.Graph({"s": state}, {state: ops.scale(state, scale=1.0, bias=1.0)}), "cpu:0"), {}
    )

    def anew(draw: random.Random) -> None:
        mine, numbers = layer(draw.randrange(16, 200))
        mode = draw.choice(("tensor", "layer", "auto"))
        run = hocket.load(hocket.plan(mine, draw.choice(GROUPS), split_mode=mode), numbers)
        for _ in range(3):
            check(run, numbers, draw)

    def from_one_plan(draw: random.Random) -> None:
        check(hocket.load(draw.choice(plans), weights), weights, draw)

    def one_executor(draw: random.Random) -> None:
        check(draw.choice(shared), weights, draw)

    def one_state(draw: random.Random) -> None:
        before, after = (counter.run({})["s"] for _ in range(2))
        assert (after > before).all()
        assert len({*before.tolist(), *np.asarray(counter.store.state("s"))[:1].tolist()}) <= 2

    def own_session(draw: random.Random) -> None:
        session = Session(model, on=on, context=64)
        for new, want in zip(TOKENS, logits, strict=True):
            np.testing.assert_array_equal(session.evaluate([new])[0], want)

    def one_session(draw: random.Random) -> None:
        with alone.store.device_lock:  # two calls that belong together
            alone.reset(0)
            np.testing.assert_array_equal(alone.evaluate([TOKENS[0]])[0], logits[0])

    return {f.__name__: f for f in (anew, from_one_plan, one_executor, one_state, own_session, one_session)}


def go(number: int, start: threading.Barrier, until: float, tasks: Mapping[str, Work], reports: list[Any]) -> None:
    draw, done = random.Random(number), Counter[str]()
    start.wait()
    try:
        while time.monotonic() < until:
            (name,) = draw.choices(list(tasks), [1 if name == RARE else 20 for name in tasks])
            tasks[name](draw)
            done[name] += 1
    except BaseException as why:  # told to the main thread
        reports.append(why)
    reports.append(done)


def first(draw: random.Random) -> None:
    """Make the very first calls of a process: several threads load everything at once."""
    graph, weights = layer(draw.randrange(16, 200))
    for devices in ("cpu:0", "cpu:0,cpu:1"):
        check(hocket.load(hocket.plan(graph, devices, split_mode="tensor"), weights), weights, draw)


def one_process(threads: int, seconds: float) -> None:
    """Run the threads of one process, and raise the first error of a thread; a crash ends the process."""
    done: Counter[str] = Counter()
    for tasks in ({"first": first}, None):
        reports: list[Any] = []
        ready, until = tasks or works(), time.monotonic() + (seconds if tasks is None else 0.2)
        start = threading.Barrier(threads)
        threads_started = [
            threading.Thread(target=go, args=(i, start, until, ready, reports), daemon=True) for i in range(threads)
        ]
        for thread in threads_started:
            thread.start()
        for thread in threads_started:
            thread.join()
        for why in reports:
            if isinstance(why, BaseException):
                raise why
            done += why
    print(*(f"{name} {count}" for name, count in done.items()), sep=", ", flush=True)


def processes(threads: int, seconds: float, cold: bool) -> int:
    """Processes one after the other until the time is up; the worst exit status."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as empty:
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return 0
            command = [sys.executable, __file__, "--threads", str(threads), "--child", str(min(ROUND, left))]
            environment = {**os.environ, **({"HOCKET_CACHE_DIR": empty} if cold else {})}
            status = subprocess.run(command, env=environment).returncode
            if status:
                print(f"{threads} threads: exit status {status}", flush=True)
                return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cold", action="store_true", help="compile kernels anew")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is None:
        return processes(args.threads, args.seconds, args.cold)
    faulthandler.enable()
    faulthandler.dump_traceback_later(3600, exit=True)
    one_process(args.threads, args.child)
    return 0


if __name__ == "__main__":
    sys.exit(main())
