"""Kernels that are ready when installation ends: ``python -m hocket.frontends.shipping`` compiles them.

They lie in the package: those of the embedded model for the processor at hand; with ``--all`` those of every type of
weights, too, for each of `SHIPPED`, one process after the other with ``HOCKET_TARGET``.  Which kernels these are is
found by planning and binding, so nothing has to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from ..backends.base import group_of
from ..backends.cpu.binding import kernels_of
from ..backends.cpu.compiler import Kernel, ship
from ..backends.cpu.kernels.formats import FORMATS
from ..backends.cpu.kernels.loop import run
from ..backends.cpu.kernels.packing import pack, unpack
from ..backends.cpu.kernels.reductions import top_k
from ..backends.cpu.processor import SHIPPED, target
from ..graph.dtypes import DType
from ..graph.graph import Graph
from ..graph.node import input, weight
from ..ops import get_rows, mul_mat
from ..scheduler import plan_for
from .devices import ONE_DEVICE
from .models import Step
from .open import open_model

TOKENS = (1, 2, 16, 128)
"""Tokens of the steps that a first run takes, as the kernels see them: one, few, and many."""
PLAIN = (DType.F32, DType.F16, DType.BF16)


def kernels(*, of_all_types: bool) -> Iterator[Kernel]:
    """Those that the embedded model calls, and with `of_all_types` those that read weights of each type."""
    yield from (run, top_k)
    model = open_model(None)
    caches = [(dtype, dtype) for dtype in PLAIN] if of_all_types else [ONE_DEVICE.caches]
    steps = [Step(1, tokens, 256, 256, 1, keys=k, values=v) for tokens in TOKENS for k, v in caches]
    graphs = [*map(model.graph, steps)]
    types = [*FORMATS] if of_all_types else [t.dtype for t in model.tensors.values() if t.dtype in FORMATS]
    for dtype in dict.fromkeys(types):
        yield from (pack(FORMATS[dtype]), unpack(FORMATS[dtype]))
    for dtype in (*FORMATS, *PLAIN) if of_all_types else ():
        w = weight("w", (64, 512), dtype)
        graphs += [Graph({"y": mul_mat(w, input("x", (tokens, 512)))}) for tokens in TOKENS]
        graphs.append(Graph({"y": get_rows(w, input("ids", (3,), "i32"))}))
    for threads in (1, 2):
        group = group_of(["cpu:0"], threads)
        for graph in graphs:
            (lane,) = plan_for(graph, group).lanes
            yield from kernels_of(lane.program, threads)


def main(words: Sequence[str]) -> int:
    if "--all" in words and "HOCKET_TARGET" not in os.environ:
        command = [sys.executable, "-m", "hocket.frontends.shipping", "--all"]
        each = [subprocess.run(command, env={**os.environ, "HOCKET_TARGET": t.name}).returncode for t in SHIPPED]
        return max(each)
    count = ship(kernels(of_all_types="--all" in words))
    print(f"{target().name}: {count} kernels are ready")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
