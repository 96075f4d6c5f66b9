"""Compile kernels at installation: ``python -m hocket.frontends.precompile_kernels``.

The kernels are stored in the package, for the processor of this machine. They serve the embedded model and decoders
with the most common dtypes of weights. With ``--all`` they cover every dtype and each processor of
`PRECOMPILED_TARGETS`, in one process each, with ``HOCKET_TARGET``. Planning and binding list the kernels; nothing is
run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.sharedctypes import Synchronized

from ..backends.base import find_devices
from ..backends.cpu.compilation.compiler import Kernel, compile_kernels_into_package
from ..backends.cpu.execution.program_binding import find_program_kernels
from ..backends.cpu.kernels.packed.format_table import FORMATS
from ..backends.cpu.kernels.packed.weight_packing import make_dequantise_rows_by_id_kernel, make_pack_weight_rows_kernel
from ..backends.cpu.kernels.rows.reductions import find_top_k_indices
from ..backends.cpu.steps.step_loop import run_step_table
from ..backends.cpu.steps.thread_sync import (
    run_thread_zero_after_waking,
    run_unless_threads_sleep,
    run_worker_thread_until_sleep,
)
from ..backends.cpu.target_cpu import PRECOMPILED_TARGETS, find_host_or_requested_target
from ..graph.dtypes import DType
from ..graph.graph import Graph
from ..graph.node import input, weight
from ..ops import get_rows, mul_mat, rope, swiglu
from ..scheduler import plan_for_group
from ..scheduler.planning.gc_pause import pause_garbage_collection
from .inference.device_group import ONE_DEVICE
from .models import Step
from .open_model import open_model

STEP_TOKEN_COUNTS = (1, 2, 16, 128)
"""Token counts of a step for which kernels differ: one, few, and many."""
FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)
"""Dtypes that are not quantised."""
COMMON_WEIGHT_DTYPES = (DType.Q8_0, DType.Q4_0, DType.Q4_1, DType.Q4_K, DType.Q5_K, DType.Q6_K, DType.F16, DType.BF16)
"""Weight dtypes of most model files."""


def list_kernels_to_precompile(*, of_all_types: bool) -> Iterator[Kernel]:
    """Yield the kernels to compile ahead of time.

    They are the kernels for the embedded model, and for decoders with common weight dtypes.

    Args:
        of_all_types: Include all weight dtypes and all float dtypes of the KV cache.
    """
    yield from (
        run_step_table,
        run_unless_threads_sleep,
        run_thread_zero_after_waking,
        run_worker_thread_until_sleep,
        find_top_k_indices,
    )
    caches = [(dtype, dtype) for dtype in FLOAT_DTYPES] if of_all_types else [ONE_DEVICE.cache_dtypes]
    model = open_model(None)
    graphs = [
        model.graph(Step(1, tokens, 256, 256, 1, keys=k, values=v)) for tokens in STEP_TOKEN_COUNTS for k, v in caches
    ]
    for dtype in (*FORMATS, *FLOAT_DTYPES) if of_all_types else COMMON_WEIGHT_DTYPES:
        if dtype in FORMATS:
            yield from (
                make_pack_weight_rows_kernel(FORMATS[dtype]),
                *([make_dequantise_rows_by_id_kernel(FORMATS[dtype])] if of_all_types else ()),
            )
        graphs += [_build_embedding_ffn_output_graph(dtype, tokens) for tokens in STEP_TOKEN_COUNTS]
    graphs += [_build_rope_graph(mode) for mode in ("normal", "neox")]
    group = find_devices(["cpu:0"], 2)
    for graph in graphs:
        (device_plan,) = plan_for_group(graph, group).device_plans
        for threads in (1, 2):  # the program is the same
            yield from find_program_kernels(device_plan.program, threads)


def _build_embedding_ffn_output_graph(dtype: DType, tokens: int) -> Graph:
    """Build the graph of an embedding, a gated feed-forward network and an output matrix, with weights of `dtype`."""
    words, up, gate, down = (weight(n, (512, 512), dtype) for n in ("words", "up", "gate", "down"))
    x = get_rows(words, input("ids", (tokens,), "i32"))
    x = x + mul_mat(down, swiglu(mul_mat(gate, x), mul_mat(up, x)))
    return Graph({"y": mul_mat(words, x)})


def _build_rope_graph(mode: str) -> Graph:
    """Build the graph of a rotary embedding in one of the modes that model files have."""
    return Graph({"y": rope(input("x", (2, 4, 64)), input("pos", (2,), "i32"), n_dims=64, mode=mode)})


def main(words: Sequence[str]) -> int:
    if "--all" in words and "HOCKET_TARGET" not in os.environ:
        command = [sys.executable, "-m", "hocket.frontends.precompile_kernels", "--all"]
        each = [
            subprocess.run(command, env={**os.environ, "HOCKET_TARGET": t.name}).returncode for t in PRECOMPILED_TARGETS
        ]
        return max(each)
    kernels = [*dict.fromkeys(list_kernels_to_precompile(of_all_types="--all" in words))]
    status = compile_in_parallel_and_return_worst_status(kernels)
    print(
        f"{find_host_or_requested_target().name}: {len(kernels)} kernels are ready"
        if not status
        else "kernels were not compiled"
    )
    return status


def compile_in_parallel_and_return_worst_status(kernels: Sequence[Kernel]) -> int:
    """Compile kernels in parallel, in one process per processor, and return the worst exit status.

    Each process takes the next kernel when it has compiled one, because some take a hundred times as long as others.
    A kernel holds closures, which only a fork can pass to another process. Without fork this process compiles all of
    them.
    """
    if "fork" not in get_all_start_methods():
        compile_kernels_into_package(kernels)
        return 0
    count, fork = os.cpu_count() or 1, get_context("fork")
    taken = fork.Value("i", 0)
    each = [fork.Process(target=_compile_kernels_in_turn, args=(kernels, taken)) for _ in range(count)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    return max(abs(process.exitcode or 0) for process in each)


def _compile_kernels_in_turn(kernels: Sequence[Kernel], taken: Synchronized[int]) -> None:
    """Compile kernels that no other process compiles; `taken` counts the kernels that some process has taken."""
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(kernels):
            return
        with pause_garbage_collection():  # Numba makes many objects that stay
            compile_kernels_into_package(kernels[number : number + 1])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
