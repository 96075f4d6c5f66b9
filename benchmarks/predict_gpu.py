"""What a model of time says of CUDA kernels on GPUs that are not here, and the speeds that plans for them use.

    python benchmarks/predict_gpu.py

writes ``benchmarks/kernels_cuda_times.md`` and ``.json`` and ``backends/cupy/predicted.json``; it takes some minutes,
and needs g++, NVRTC, nvdisasm and SciPy.  Of a small case the emulation counts accesses, machine code says how many
instructions that takes, and a shape is so many times the case.  Shapes have the titles of `benchmarks/gpu.py`, which
compares what it measures with what is said here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from tqdm import tqdm

from hocket.backends.cupy.binding.trial import tried
from hocket.backends.cupy.device.early import FIRST_CAPABILITY
from hocket.backends.cupy.device.limits import Limits
from hocket.backends.cupy.emulation import emulated
from hocket.backends.cupy.emulation.counted import Counted
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.kernels.products import packed, tiled
from hocket.backends.cupy.kernels.recurrent import gated_delta_net
from hocket.backends.cupy.predicted.speeds import FILE
from hocket.backends.cupy.predicted.times import GPUS, LATENCY, Time, time_of
from hocket.backends.cupy.predicted.works import work_of
from hocket.conformance.reports.emulated import counters
from hocket.graph import DType
from hocket.scheduler.machines.simulated import MACHINES

TABLE = Path(__file__).parent / "kernels_cuda_times.md"
TIMES = TABLE.with_suffix(".json")
SHOWN = ("h200", "a100", "rtx4090")
CACHED = 25e6
"""Bytes that the second cache still has when the next launch reads them."""
REACHED = ("bandwidth", "flops", "vector_limits", "prompt_limits")
"""What plans know of products with weights of a dtype."""
Part = tuple[object, str, int]


@dataclass(frozen=True)
class Shape:
    """So many times a case: of each kernel the blocks, and what each of them does; kernels without times are launched
    for the small case alone.  `nbytes` and `flops` are what any kernel has to do; `asked` is the share of the H200's
    bandwidth or of its 16-bit products that we want.

    What a `longer` case does beyond the case is added so many times, before `times`.  `chosen` are constants by which
    kernels are chosen, with values that choose for the case what the shape gets.  All blocks of a launch read `common`
    bytes.  A kernel that asks `ahead` loads its weights before it waits for the launch before its own.
    """

    name: str
    case: str
    times: Mapping[str, tuple[float, float]]
    nbytes: float
    flops: float
    asked: float | None = None
    chosen: Sequence[Part] = field(default=())
    common: float = 0.0
    ahead: bool = False
    longer: tuple[str, float] | None = None

    def counted(self, limits: Limits) -> list[tuple[Counted, ...]]:
        """Its launches: of the case and of the longer one."""
        cases = [self.case] if self.longer is None else [self.case, self.longer[0]]
        with ExitStack() as stack:
            for module, name, value in self.chosen:
                stack.enter_context(patch.object(module, name, value))
            tried.cache_clear()  # it knows how much scratch was taken where others were chosen
            return list(zip(*(counters([case], limits) for case in cases), strict=True))

    def predicted(self, counted: Sequence[tuple[Counted, ...]], kind: str) -> list[tuple[str, Time]]:
        """How long each of its launches takes."""
        gpu, times = GPUS[kind], []
        for launches in counted:
            name = launches[0].launch.kernel.name.partition("<")[0]
            if name not in self.times:
                continue
            work, *longer = (work_of(launch, gpu.arch) for launch in launches)
            if self.longer is not None:
                work = work.extended(longer[0], self.longer[1])
            work = work.times(*self.times[name])
            moved = work.moved - self.common * (work.blocks - 1)
            work = replace(work, moved=min(moved, 2 * self.nbytes))
            times.append((name, time_of(work, gpu, cached=bool(times) and work.moved < CACHED)))
        return times

    def share(self, seconds: float, kind: str) -> float:
        """Of what the data sheet allows."""
        return max(self.nbytes / MACHINES[kind].bandwidth, self.flops / MACHINES[kind].flops) / seconds


def vector(dtype: DType, rows: int, columns: int, processors: int, asked: float | None = None) -> Shape:
    """A product of weights and one vector on a GPU of so many multiprocessors; packed rows are dealt to them evenly."""
    least = 16 if dtype in packed.OWN_RECORDS else 8
    own = -(-rows // processors // least) * least if dtype in packed.BY_TYPE else 64
    nbytes = rows * columns // dtype.block * dtype.block_bytes + 4 * (rows + columns)
    case = f"mul_mat(w={dtype}[{own},{columns}], x=f32[1,{columns}])"
    name = f"{dtype} {rows}×{columns}, 1 token"
    chosen = ((emulated, "PROCESSORS", 1),)
    kernels = {"few": (rows / own, 1.0)}
    return Shape(name, case, kernels, nbytes, 2 * rows * columns, asked, chosen, 4 * columns, ahead=True)


def prompt(
    dtype: DType, rows: int, columns: int, tokens: int, asked: float | None = None, is_exact: bool = True
) -> Shape:
    """A product of weights and many tokens; two blocks share the columns of tiles of 256 rows, or of those of clusters,
    of which the case has one."""
    high, wide, full = (512, 256, 8) if dtype in tiled.FLOATS else (256, 128, 2)
    many, longer = rows / high * tokens / wide, columns / 4096
    by_blocks = ("clustered", "grouped", "grouped_packed", "tiled", "tiled_packed", "matmul")
    kernels = {
        **dict.fromkeys(by_blocks, (many, longer)),
        **dict.fromkeys(("split_tiles", "split_rows"), (tokens / wide, longer)),
        "add_shares": (many, 1.0),
    }
    chosen = ((tiled, "FULL", full), (tiled, "WORTH", 1))
    nbytes = rows * columns // dtype.block * dtype.block_bytes + 4 * tokens * (rows + columns)
    name = f"{dtype} {rows}×{columns}, {tokens} tokens" + ("" if is_exact else ", fast")
    case = f"mul_mat(w={dtype}[{high},4096], x=f32[{wide},4096], exact={str(is_exact).lower()})"
    return Shape(name, case, kernels, nbytes, 2 * rows * columns * tokens, asked, chosen)


STATE = 128 * 128 * 4
DECODE = (
    "gated_delta_net(q=f32[1,2,128], k=f32[1,2,128], v=f32[1,4,128], g=f32[1,4,1], beta=f32[1,4], state=f32[4,128,128])"
)


def delta_prompt(key_heads: int, is_exact: bool, asked: float | None = None) -> Shape:
    """32 heads over 8192 tokens, as two heads over so few that the state is much of what is moved, and over more."""
    short, long, tokens, keys = 128, 256, 8192, key_heads // 16
    case, longer = (
        f"gated_delta_net(q=f32[{t},{keys},128], k=f32[{t},{keys},128], v=f32[{t},2,128], g=f32[{t},2,1], "
        f"beta=f32[{t},2], state=f32[2,128,128], exact={str(is_exact).lower()})"
        for t in (short, long)
    )
    times = dict.fromkeys(("delta_prepare", "delta_scan", "delta_scan_clusters"), (16, 1.0))
    nbytes, flops = tokens * (32 * (2 * 128 + 2) + 2 * key_heads * 128) * 4, tokens * 32 * 6 * 128 * 128
    name = f"{key_heads}/32×128, {tokens} tokens, {'exact' if is_exact else 'fast'}"
    chosen, more = ((gated_delta_net, "BLOCKS", 8), (gated_delta_net, "FILLED", 1)), (tokens - short) / (long - short)
    return Shape(name, case, times, nbytes, flops, asked, chosen, longer=(longer, more))


def shapes(processors: int) -> tuple[Shape, ...]:
    """Those of the table, on a GPU of so many multiprocessors."""
    return (
        *(vector(t, 4096, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(vector(t, 28672, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(prompt(t, 4096, 4096, 512, 0.42) for t in (DType.Q4_K, DType.Q8_0)),
        *(prompt(DType.BF16, 4096, 4096, 512, a, is_exact) for a, is_exact in ((0.37, True), (0.57, False))),
        Shape(
            "16/32×128, batch 32",
            DECODE,
            {"delta_net": (8 * 32, 1.0)},
            2 * 32 * 32 * STATE,
            32 * 32 * 6 * 128 * 128,
            0.81,
        ),
        *(delta_prompt(32, is_exact, asked) for is_exact, asked in ((True, 0.24), (False, 0.4))),
        *(delta_prompt(16, is_exact) for is_exact in (True, False)),
        Shape(
            "32 heads on 8 of 128, 1 token on 8192",
            "attention(q=f32[1,4,128], k=f32[8192,1,128], v=f32[8192,1,128], scale=0.1)",
            {"attend_few": (8, 1.0), "attention_combine": (8, 1.0)},
            2 * 8192 * 8 * 128 * 4,
            4 * 8192 * 32 * 128,
        ),
        Shape(  # 33 splits
            "32 heads on 8 of 128, 1 token on 65536, f16",
            "attention(q=f32[1,4,128], k=f16[4096,1,128], v=f16[4096,1,128], scale=0.1)",
            {"attend_cells": (8 * 33 / 4, 65536 / 33 / 1024), "attention_combine": (8, 1.0)},
            2 * 65536 * 8 * 128 * 2,
            4 * 65536 * 32 * 128,
            0.8,
            ((attention, "MOST_SPLITS", 4),),
        ),
        Shape(  # rows see half of the keys; to find out which tiles they see, a mask of 256 MiB is read besides
            "32 heads on 8 of 128, 8192 tokens, f16",
            "attention(q=f32[32,4,128], k=f16[1024,1,128], v=f16[1024,1,128], scale=0.1)",
            {"attend_short": (8 * 8192 / 32, 4)},
            2 * 8192 * 8 * 128 * 2 + 2 * 8192 * 32 * 128 * 4,
            2 * 8192 * 8192 * 32 * 128,
            0.3,
            ((attention, "MOST_SPLITS", 1),),
        ),
    )


def times_of(number: int) -> dict[str, tuple[float, str]]:
    """By GPU: the seconds that the shape of a number takes, and what sets them."""
    counted: dict[tuple[str, Limits], list[tuple[Counted, ...]]] = {}
    found = {}
    for kind, gpu in GPUS.items():
        shape = shapes(gpu.processors)[number]
        if (shape.case, gpu.limits) not in counted:
            counted[shape.case, gpu.limits] = shape.counted(gpu.limits)
        times = shape.predicted(counted[shape.case, gpu.limits], kind)
        limits = ", ".join(time.limit if len(times) == 1 else f"{name}: {time.limit}" for name, time in times)
        found[kind] = sum(time.total for _, time in times), limits
    return found


def speeds_of(dtype: DType) -> dict[str, Mapping[str, float | str]]:
    """By GPU, what is `REACHED` of products with such weights; a product of many is set by its longest launch."""
    many = prompt(dtype, 4096, 4096, 512)
    counted = {limits: many.counted(limits) for limits in {gpu.limits for gpu in GPUS.values()}}
    found = {}
    for kind, gpu in GPUS.items():
        one = vector(dtype, 28672, 4096, gpu.processors)
        both = (one, one.counted(gpu.limits)), (many, counted[gpu.limits])
        times = [[time for _, time in s.predicted(c, kind)] for s, c in both]
        seconds = [sum(time.total for time in of_one) for of_one in times]
        limits = [max(of_one, key=lambda time: time.total).limit for of_one in times]
        values = one.nbytes / seconds[0], many.flops / seconds[1], *limits
        found[kind] = dict(zip(REACHED, values, strict=True))
    return found


def rows(shape: Shape, times: Mapping[str, tuple[float, str]]) -> Iterator[str]:
    """Of the table, one for each GPU that is shown."""
    for kind in SHOWN:
        seconds, limits = times[kind]
        asked = f"{shape.asked:.0%}" if shape.asked and kind == "h200" else ""
        share = f"{shape.share(seconds, kind):.0%}"
        is_early = shape.ahead and int(GPUS[kind].arch[3:5]) >= FIRST_CAPABILITY
        early = f"{shape.share(seconds - LATENCY, kind):.0%}" if is_early else ""
        yield f"| {shape.name} | {kind} | {1e6 * seconds:.1f} | {limits} | {share} | {early} | {asked} |"


HEAD = """# How long CUDA kernels should take

Written by `python benchmarks/predict_gpu.py`. **Predicted by a model, measured nowhere**: accesses counted in the
emulation, instructions of NVRTC's machine code, and what data sheets say of a GPU
(`backends/cupy/predicted/times.py`). `share` is of the data sheet's bandwidth, or of its 16-bit products where those
take longer; `early` is that of a launch whose first loads are under way while the one before it ends, as devices of
compute capability 9.0 allow; `asked` is what we want of an H200.

| shape | GPU | microseconds | set by | share | early | asked |
|---|---|---|---|---|---|---|
"""


def rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.3g}")


def main() -> None:
    shown = shapes(GPUS[SHOWN[0]].processors)
    dtypes = [*packed.BY_TYPE, DType.F16, DType.BF16, DType.F32]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        times = list(tqdm(pool.map(times_of, range(len(shown))), total=len(shown)))
        reached = list(tqdm(pool.map(speeds_of, dtypes), total=len(dtypes)))
    lines = [line for shape, of_shape in zip(shown, times, strict=True) for line in rows(shape, of_shape)]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", "utf-8")
    microseconds = {
        shape.name: {kind: round(1e6 * seconds, 2) for kind, (seconds, _) in of_shape.items()}
        for shape, of_shape in zip(shown, times, strict=True)
    }
    TIMES.write_text(json.dumps(microseconds, indent=1, ensure_ascii=False) + "\n", "utf-8")
    known = {
        kind: {
            what: {str(dtype): rounded(of[kind][what]) for dtype, of in zip(dtypes, reached, strict=True)}
            for what in reached[0][kind]
        }
        for kind in GPUS
    }
    FILE.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
