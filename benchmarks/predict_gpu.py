"""Predict the times of CUDA kernels on GPUs that are not present, and the speeds that plans for these GPUs use.

    python benchmarks/predict_gpu.py

The script writes ``benchmarks/kernels_cuda_times.md`` and ``.json``, and ``backends/cupy/predicted.json``. It takes
some minutes, and needs g++, NVRTC, nvdisasm and SciPy.

1. The emulation counts the memory accesses of a small case.
2. The machine code gives the number of instructions for these accesses.
3. The counts are scaled from the case to a shape, and a time model converts them to seconds.

Shapes have the titles of cases of `benchmarks/gpu.py`, which compares measured times with these predictions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tqdm import tqdm

from hocket.backends.abilities import OTHERS, Predicted, Reached
from hocket.backends.cupy.binding.trial import tried
from hocket.backends.cupy.device.early import FIRST_CAPABILITY
from hocket.backends.cupy.device.limits import Limits
from hocket.backends.cupy.emulation import emulated_driver as emulated
from hocket.backends.cupy.emulation.access_counters import LaunchCounters
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.kernels.products import packed, tiled
from hocket.backends.cupy.kernels.recurrent import gated_delta_net
from hocket.backends.cupy.predicted_speeds import SPEEDS_FILE
from hocket.backends.cupy.time_model.launch_time import GPUS, MEMORY_LATENCY_SECONDS, estimate_launch_time
from hocket.backends.cupy.time_model.launch_work import estimate_launch_work
from hocket.conformance.cases.case import parse_test_case
from hocket.conformance.checks.case_graph import build_case_graph
from hocket.conformance.reports.emulator_checks import collect_counters
from hocket.graph import DType
from hocket.ops import op_of
from hocket.scheduler.machines.catalogue import MACHINES

TABLE = Path(__file__).parent / "kernels_cuda_times.md"
TIMES = TABLE.with_suffix(".json")
SHOWN = ("h200", "a100", "rtx4090")
CACHED = 25e6
"""Bytes that remain in the L2 cache until the next launch reads them."""
Part = tuple[object, str, int]
"""A module, the name of one of its constants, and the value that the constant gets for a case."""
DELTA_DECODE = "16/32×128, batch 32"
DELTA_PROMPT = "32×128, 8192 tokens"
ONE_TOKEN = "32 heads on 8 of 128, 1 token on 65536, f16"
PROMPT = "32 heads on 8 of 128, 8192 tokens, f16"
SWIGLU, NORM, SORTED, ROTATED = "swiglu 4096×4096", "rms_norm 4096×4096", "top_k 4096×128", "rope 4096×32×128"
OPS: Mapping[str, tuple[str, str | None]] = {
    "attention": (ONE_TOKEN, PROMPT),
    "gated_delta_net": (DELTA_DECODE, f"32/{DELTA_PROMPT}, exact"),
    "ssm_conv": ("ssm_conv 4096×4096", None),
    **dict.fromkeys(("rms_norm", "l2_norm", "norm"), (NORM, None)),
    **dict.fromkeys(("rope", "rope_multi"), (ROTATED, None)),
    **dict.fromkeys(("swiglu", "geglu", "swiglu_oai"), (SWIGLU, None)),
    "set_rows": ("set_rows 4096×1024", None),
    **dict.fromkeys(("top_k", "argsort"), (SORTED, None)),
    OTHERS: ("add 4096×4096", None),
}
"""For each op: the shape that gives its bytes/s, and the prompt shape that gives its FLOP/s.

The second is None if memory bounds prompts too.
"""


DTYPES = (*packed.BY_TYPE, DType.F16, DType.BF16, DType.F32)
"""Weight dtypes with predicted matmul speeds."""


class Took(NamedTuple):
    """The predicted seconds of a launch, and the resource that limits it."""

    kernel: str
    seconds: float
    limit: str


Launches = Sequence[Took]


@dataclass(frozen=True)
class Shape:
    """A shape of an op, predicted from a small case that runs in the emulation.

    `scale_by_kernel` has two factors for each kernel: the number of blocks, and the work of a block, relative to the
    case. Kernels without factors are launched only for the case, and not counted. `nbytes` and `flops` are the least
    work of any kernel. `target_share` is the wanted share of the H200's bandwidth, or of its 16-bit matmul FLOP/s.

    Some kernels need more:

    - `longer_case` is a second case and a factor; the work that it adds to the case is multiplied by the factor.
    - `selection_constants` make hocket choose for the case the kernel that it chooses for the shape.
    - `shared_bytes` are read by all blocks of a launch, and counted once.
    - A kernel with `loads_early` loads its weights before it waits for the previous launch.
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

    def counted(self, limits: Limits) -> list[tuple[LaunchCounters, ...]]:
        """Count the launches in the emulation: each launch of the case, with its counterpart of the longer case."""
        cases = [self.case] if self.longer is None else [self.case, self.longer[0]]
        with ExitStack() as stack:
            for module, name, value in self.chosen:
                stack.enter_context(patch.object(module, name, value))
            tried.cache_clear()  # it remembers the scratch bytes of kernels that other constants chose
            return list(zip(*(collect_counters([case], limits) for case in cases), strict=True))

    def predicted(self, counted: Sequence[tuple[LaunchCounters, ...]], kind: str) -> Launches:
        """Return the predicted time of each launch on a GPU kind."""
        gpu, times = GPUS[kind], list[Took]()
        for launches in counted:
            name = launches[0].launch.kernel.name.partition("<")[0]
            if name not in self.times:
                continue
            work, *longer = (estimate_launch_work(launch, gpu.arch) for launch in launches)
            if self.longer is not None:
                work = work.extrapolate(longer[0], self.longer[1])
            work = work.multiply(*self.times[name])
            moved = work.memory_bytes - self.common * (work.block_count - 1)
            work = replace(work, memory_bytes=min(moved, 2 * self.nbytes))
            time = estimate_launch_time(work, gpu, cached=bool(times) and work.memory_bytes < CACHED)
            times.append(Took(name, time.total_seconds, time.limiting_resource))
        return times

    def share(self, seconds: float, kind: str) -> float:
        """Return the time that the data sheet allows, as a share of `seconds`."""
        return max(self.nbytes / MACHINES[kind].bandwidth, self.flops / MACHINES[kind].flops) / seconds


def vector(dtype: DType, rows: int, columns: int, processors: int, asked: float | None = None) -> Shape:
    """Make the shape of a product of weights and one vector.

    Args:
        dtype: The dtype of the weights.
        rows: Rows of the weights.
        columns: Columns of the weights.
        processors: Multiprocessors of the GPU; packed rows are distributed over them evenly.
        asked: The wanted share of the bandwidth.
    """
    least = 16 if dtype in packed.OWN_RECORDS else 8
    own = -(-rows // processors // least) * least if dtype in packed.BY_TYPE else 64
    nbytes = rows * columns // dtype.block * dtype.block_bytes + 4 * (rows + columns)
    case = f"mul_mat(w={dtype}[{own},{columns}], x=f32[1,{columns}])"
    name = f"{dtype} {rows}×{columns}, 1 token"
    chosen = ((emulated, "EMULATED_MULTIPROCESSORS", 1),)
    kernels = {"few": (rows / own, 1.0)}
    return Shape(name, case, kernels, nbytes, 2 * rows * columns, asked, chosen, 4 * columns, ahead=True)


def prompt(
    dtype: DType, rows: int, columns: int, tokens: int, asked: float | None = None, is_exact: bool = True
) -> Shape:
    """Make the shape of a matmul of weights and many tokens.

    The case has one tile. Two blocks share the columns of a tile of 256 rows, or of the tiles of a cluster.

    Args:
        dtype: The dtype of the weights.
        rows: Rows of the weights.
        columns: Columns of the weights.
        tokens: Tokens of the prompt.
        asked: The wanted share of the 16-bit matmul FLOP/s.
        is_exact: Use pairs of 16-bit products instead of single ones.
    """
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
DELTA_FLOPS = 128 * (7 * 128 + 3)
"""FLOPs of one token and one head."""
DECODE = (
    "gated_delta_net(q=f32[1,2,128], k=f32[1,2,128], v=f32[1,4,128], g=f32[1,4,1], beta=f32[1,4], state=f32[4,128,128])"
)


def delta_prompt(key_heads: int, is_exact: bool, asked: float | None = None) -> Shape:
    """Make the shape of a gated delta net with 32 heads over 8192 tokens.

    The case has two heads and 128 tokens, so the state is a large share of its bytes; the longer case has 256 tokens.

    Args:
        key_heads: The number of key heads.
        is_exact: Use pairs of 16-bit products instead of single ones.
        asked: The wanted share of the data sheet's limit.
    """
    short, long, tokens, keys = 128, 256, 8192, key_heads // 16
    case, longer = (
        f"gated_delta_net(q=f32[{t},{keys},128], k=f32[{t},{keys},128], v=f32[{t},2,128], g=f32[{t},2,1], "
        f"beta=f32[{t},2], state=f32[2,128,128], exact={str(is_exact).lower()})"
        for t in (short, long)
    )
    times = dict.fromkeys(("delta_prepare", "delta_scan", "delta_scan_clusters"), (16, 1.0))
    nbytes, flops = tokens * (32 * (2 * 128 + 2) + 2 * key_heads * 128) * 4, tokens * 32 * DELTA_FLOPS
    name = f"{key_heads}/{DELTA_PROMPT}, {'exact' if is_exact else 'fast'}"
    chosen, more = ((gated_delta_net, "BLOCKS", 8), (gated_delta_net, "FILLED", 1)), (tokens - short) / (long - short)
    return Shape(name, case, times, nbytes, flops, asked, chosen, longer=(longer, more))


def attention_prompt() -> Shape:
    """Make the shape of an attention of 8192 tokens; each token sees half of the keys on average.

    The case is a block of queries over few keys, so queries and results are a large share of its bytes; the longer case
    has more keys. The kernel also reads a mask of 256 MiB to find the visible tiles.
    """
    tokens, short, long = 8192, 1024, 2048
    case, longer = (
        f"attention(q=f32[32,4,128], k=f16[{keys},1,128], v=f16[{keys},1,128], scale=0.1)" for keys in (short, long)
    )
    times = dict.fromkeys(("attend_short", "attend_warpgroups"), (8 * tokens / 32, 1.0))
    nbytes, flops = 2 * tokens * 8 * 128 * 2 + 2 * tokens * 32 * 128 * 4, 2 * tokens * tokens * 32 * 128
    name, chosen = PROMPT, ((attention, "MOST_SPLITS", 1),)
    more = (tokens / 2 - short) / (long - short)
    return Shape(name, case, times, nbytes, flops, 0.35, chosen, longer=(longer, more))


def rows_of(name: str, case: str, kernel: str, times: int) -> Shape:
    """Make a shape with `times` times the rows of a case, for an op with one kernel."""
    (node,) = (node for node in build_case_graph(parse_test_case(case)).graph.nodes if not node.is_leaf)
    declared = op_of(node)
    return Shape(
        name, case, {kernel: (times, 1.0)}, times * declared.count_bytes(node), times * declared.count_flops(node)
    )


def shapes(processors: int) -> tuple[Shape, ...]:
    """Return the shapes of the table, for a GPU with `processors` multiprocessors."""
    return (
        *(vector(t, 4096, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(vector(t, 28672, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(prompt(t, 4096, 4096, 512, 0.42) for t in (DType.Q4_K, DType.Q8_0)),
        *(prompt(DType.BF16, 4096, 4096, 512, a, is_exact) for a, is_exact in ((0.37, True), (0.57, False))),
        Shape(
            DELTA_DECODE,
            DECODE,
            {"delta_net": (8 * 32, 1.0)},
            2 * 32 * 32 * STATE,
            32 * 32 * DELTA_FLOPS,
            0.81,
        ),
        *(delta_prompt(32, is_exact, asked) for is_exact, asked in ((True, 0.24), (False, 0.4))),
        *(delta_prompt(16, is_exact) for is_exact in (True, False)),
        Shape(
            "32 heads on 8 of 128, 1 token on 8192",
            "attention(q=f32[1,4,128], k=f32[8192,1,128], v=f32[8192,1,128], scale=0.1)",
            {"attend_few": (8, 1.0), "attention_combine_few": (8, 1.0)},
            2 * 8192 * 8 * 128 * 4,
            4 * 8192 * 32 * 128,
        ),
        Shape(  # 33 splits
            ONE_TOKEN,
            "attention(q=f32[1,4,128], k=f16[4096,1,128], v=f16[4096,1,128], scale=0.1)",
            {"attend_cells": (8 * 33 / 4, 65536 / 33 / 1024), "attention_combine_few": (8, 1.0)},
            2 * 65536 * 8 * 128 * 2,
            4 * 65536 * 32 * 128,
            0.8,
            ((attention, "MOST_SPLITS", 4),),
        ),
        attention_prompt(),
        rows_of("add 4096×4096", "add(a=f32[8,4096], b=f32[8,4096])", "binary", 512),
        rows_of(SWIGLU, "swiglu(gate=f32[8,4096], up=f32[8,4096])", "binary", 512),
        rows_of(NORM, "rms_norm(x=f32[8,4096])", "norm_by", 512),
        rows_of(ROTATED, "rope(x=f32[8,8,128], pos=i32[8], n_dims=128)", "rope", 2048),
        rows_of("set_rows 4096×1024", "set_rows(into=f32[64,1024], rows=f32[8,1024], ids=i32[8])", "scatter", 512),
        rows_of("ssm_conv 4096×4096", "ssm_conv(x=f32[67,256], w=f32[256,4])", "short_convolution", 1024),
        rows_of(SORTED, "top_k(x=f32[64,128], k=8)", "sort_runs", 64),
    )


def seconds(times: Launches) -> float:
    return sum(took.seconds for took in times)


def limit(times: Launches) -> str:
    """Return the resource that limits the longest launch."""
    return max(times, key=lambda took: took.seconds).limit


def times_of(number: int) -> dict[str, Launches]:
    """Return the predicted launches of the shape with index `number`, by GPU kind."""
    counted: dict[tuple[str, Limits], list[tuple[LaunchCounters, ...]]] = {}
    found = {}
    for kind, gpu in GPUS.items():
        shape = shapes(gpu.multiprocessor_count)[number]
        if (shape.case, gpu.limits) not in counted:
            counted[shape.case, gpu.limits] = shape.counted(gpu.limits)
        found[kind] = shape.predicted(counted[shape.case, gpu.limits], kind)
    return found


def of_products(dtype: DType) -> dict[str, Reached]:
    """Return the predicted speeds of matmuls with weights of a dtype, by GPU kind."""
    many = prompt(dtype, 4096, 4096, 512)
    counted = {limits: many.counted(limits) for limits in {gpu.limits for gpu in GPUS.values()}}
    found = {}
    for kind, gpu in GPUS.items():
        one = vector(dtype, 28672, 4096, gpu.multiprocessor_count)
        few, all_ = one.predicted(one.counted(gpu.limits), kind), many.predicted(counted[gpu.limits], kind)
        found[kind] = reached({str(dtype): (one, few)}, {str(dtype): (many, all_)})
    return found


Judged = Mapping[str, tuple[Shape, Launches]]


def reached(few: Judged, many: Judged) -> Reached:
    """Return the speeds and limits of shapes: bytes/s of decode shapes (`few`), FLOP/s of prompt shapes (`many`)."""
    return Reached(
        {name: float(f"{shape.nbytes / seconds(times):.3g}") for name, (shape, times) in few.items()},
        {name: float(f"{shape.flops / seconds(times):.3g}") for name, (shape, times) in many.items()},
        {name: limit(times) for name, (_, times) in few.items()},
        {name: limit(times) for name, (_, times) in many.items()},
    )


def of_ops(known: Sequence[tuple[Shape, Mapping[str, Launches]]], kind: str) -> Reached:
    """Return the predicted speeds of ops on a GPU kind, from shapes with known times."""
    named = {shape.name: (shape, times[kind]) for shape, times in known}
    few = {op: named[name] for op, (name, _) in OPS.items()}
    return reached(few, {op: named[name] for op, (_, name) in OPS.items() if name is not None})


def rows(shape: Shape, times: Mapping[str, Launches]) -> Iterator[str]:
    """Yield the table rows of a shape, one for each listed GPU."""
    for kind in SHOWN:
        took = seconds(times[kind])
        limits = ", ".join(f"{t.kernel}: " * (len(times[kind]) > 1) + t.limit for t in times[kind])
        asked = f"{shape.asked:.0%}" if shape.asked and kind == "h200" else ""
        share = f"{shape.share(took, kind):.0%}"
        is_early = shape.ahead and int(GPUS[kind].arch[3:5]) >= FIRST_CAPABILITY
        early = f"{shape.share(took - MEMORY_LATENCY_SECONDS, kind):.0%}" if is_early else ""
        yield f"| {shape.name} | {kind} | {1e6 * took:.1f} | {limits} | {share} | {early} | {asked} |"


HEAD = """# How long CUDA kernels should take

Written by `python benchmarks/predict_gpu.py`. **Predicted by a model** that an H100 found wrong in part
(`docs/first-gpu.md`): accesses counted in the emulation, instructions of NVRTC's machine code, and what data sheets say
of a GPU (`backends/cupy/time_model/launch_time.py`). `share` is of the data sheet's bandwidth, or of its 16-bit
products where those take longer; `early` is that of a launch whose first loads are under way while the one before it
ends, as devices of compute capability 9.0 allow; `asked` is what we want of an H200.  Of prompts that is 0.6 (packed
weights) and 0.8 (bf16) of the 71 % that cuBLAS is taken to reach; exact products with bf16 are twice as many, of which
37 % is asked; of attention it is half of the 70 % that FlashAttention-3 is taken to reach.

| shape | GPU | microseconds | set by | share | early | asked |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    shown = shapes(GPUS[SHOWN[0]].multiprocessor_count)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        times = list(tqdm(pool.map(times_of, range(len(shown))), total=len(shown)))
        by_dtype = list(tqdm(pool.map(of_products, DTYPES), total=len(DTYPES)))
    both = list(zip(shown, times, strict=True))
    TABLE.write_text(HEAD + "\n".join(line for shape, of in both for line in rows(shape, of)) + "\n", "utf-8")
    microseconds = {
        shape.name: {kind: round(1e6 * seconds(launches), 2) for kind, launches in of.items()} for shape, of in both
    }
    TIMES.write_text(json.dumps(microseconds, indent=1, ensure_ascii=False) + "\n", "utf-8")
    known = {kind: asdict(Predicted(joined([of[kind] for of in by_dtype]), of_ops(both, kind))) for kind in GPUS}
    SPEEDS_FILE.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def joined(parts: Sequence[Reached]) -> Reached:
    """Merge speeds of several dtypes."""
    return Reached(*({k: v for part in parts for k, v in getattr(part, of.name).items()} for of in fields(Reached)))


if __name__ == "__main__":
    main()
