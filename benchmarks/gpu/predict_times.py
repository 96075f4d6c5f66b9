"""Predict the times of CUDA kernels on GPUs that are not present, and the speeds that plans for these GPUs use.

    python benchmarks/gpu/predict_times.py

The script writes ``benchmarks/kernels_cuda_times.md`` and ``.json``, and ``backends/cupy/predicted.json``. It takes
some minutes, and needs g++, NVRTC, nvdisasm and SciPy.

1. The emulation counts the memory accesses of a small case.
2. The machine code gives the number of instructions for these accesses.
3. The counts are scaled from the case to a shape, and a time model converts them to seconds.

Shapes have the titles of cases of `benchmarks/run_gpu.py`, which compares measured times with these predictions.
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

from hocket.backends.capabilities import OTHER_OPS, KernelSpeeds, PredictedSpeeds
from hocket.backends.cupy.device.dependent_launch import MIN_EARLY_CAPABILITY
from hocket.backends.cupy.device.device_limits import KernelLimits
from hocket.backends.cupy.emulation import emulated_driver as emulated
from hocket.backends.cupy.emulation.access_counters import LaunchCounters
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.kernels.products import packed, tiled
from hocket.backends.cupy.kernels.recurrent import gated_delta_net
from hocket.backends.cupy.predicted_speeds import SPEEDS_FILE
from hocket.backends.cupy.time_model.launch_time import GPUS, MEMORY_LATENCY_SECONDS, estimate_launch_time
from hocket.backends.cupy.time_model.launch_work import estimate_launch_work
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders
from hocket.conformance.cases.case import parse_test_case
from hocket.conformance.checks.case_graph import build_case_graph
from hocket.conformance.reports.emulator_checks import emulate_cases_and_count_accesses
from hocket.graph import DType
from hocket.ops import op_of
from hocket.scheduler.costs.device_catalogue import DATA_SHEETS

TABLE = Path(__file__).parents[1] / "kernels_cuda_times.md"
TIMES = TABLE.with_suffix(".json")
LISTED_GPUS = ("h200", "a100", "rtx4090")
CACHED_BYTES = 25e6
"""Bytes that remain in the L2 cache until the next launch reads them."""
SelectionConstant = tuple[object, str, int]
"""A module, the name of one of its constants, and the value that the constant gets for a case."""
DELTA_DECODE_SHAPE = "16/32×128, batch 32"
DELTA_PROMPT_SHAPE = "32×128, 8192 tokens"
ATTENTION_DECODE_SHAPE = "32 heads on 8 of 128, 1 token on 65536, f16"
ATTENTION_PROMPT_SHAPE = "32 heads on 8 of 128, 8192 tokens, f16"
SWIGLU_SHAPE, NORM_SHAPE, TOP_K_SHAPE, ROPE_SHAPE = (
    "swiglu 4096×4096",
    "rms_norm 4096×4096",
    "top_k 4096×128",
    "rope 4096×32×128",
)
OPS: Mapping[str, tuple[str, str | None]] = {
    "attention": (ATTENTION_DECODE_SHAPE, ATTENTION_PROMPT_SHAPE),
    "gated_delta_net": (DELTA_DECODE_SHAPE, f"32/{DELTA_PROMPT_SHAPE}, exact"),
    "ssm_conv": ("ssm_conv 4096×4096", None),
    **dict.fromkeys(("rms_norm", "l2_norm", "norm"), (NORM_SHAPE, None)),
    **dict.fromkeys(("rope", "rope_multi"), (ROPE_SHAPE, None)),
    **dict.fromkeys(("swiglu", "geglu", "swiglu_oai"), (SWIGLU_SHAPE, None)),
    "set_rows": ("set_rows 4096×1024", None),
    **dict.fromkeys(("top_k", "argsort"), (TOP_K_SHAPE, None)),
    OTHER_OPS: ("add 4096×4096", None),
}
"""For each op: the shape that gives its bytes/s, and the prompt shape that gives its FLOP/s.

The second is None if memory bounds prompts too.
"""


DTYPES = (*packed.TILED_SOURCE_BY_DTYPE, DType.F16, DType.BF16, DType.F32)
"""Weight dtypes with predicted matmul speeds."""


class LaunchPrediction(NamedTuple):
    """The predicted seconds of a kernel launch, and the resource that limits it."""

    kernel: str
    seconds: float
    limit: str


LaunchPredictions = Sequence[LaunchPrediction]


@dataclass(frozen=True)
class KernelShape:
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
    scale_by_kernel: Mapping[str, tuple[float, float]]
    nbytes: float
    flops: float
    target_share: float | None = None
    selection_constants: Sequence[SelectionConstant] = field(default=())
    shared_bytes: float = 0.0
    loads_early: bool = False
    longer_case: tuple[str, float] | None = None

    def count_launches(self, limits: KernelLimits) -> list[tuple[LaunchCounters, ...]]:
        """Count the launches in the emulation: each launch of the case, with its counterpart of the longer case."""
        cases = [self.case] if self.longer_case is None else [self.case, self.longer_case[0]]
        with ExitStack() as stack:
            for module, name, value in self.selection_constants:
                stack.enter_context(patch.object(module, name, value))
            # The cache has the scratch bytes of kernels that other constants chose.
            compute_scratch_bytes_at_placeholders.cache_clear()
            return list(zip(*(emulate_cases_and_count_accesses([case], limits) for case in cases), strict=True))

    def predict_launches(self, counted: Sequence[tuple[LaunchCounters, ...]], kind: str) -> LaunchPredictions:
        """Return the predicted time of each launch on a GPU kind."""
        gpu, times = GPUS[kind], list[LaunchPrediction]()
        for launches in counted:
            name = launches[0].launch.kernel.name.partition("<")[0]
            if name not in self.scale_by_kernel:
                continue
            work, *longer = (estimate_launch_work(launch, gpu.arch) for launch in launches)
            if self.longer_case is not None:
                work = work.extrapolate(longer[0], self.longer_case[1])
            work = work.scale_blocks_and_block_work(*self.scale_by_kernel[name])
            moved = work.memory_bytes - self.shared_bytes * (work.block_count - 1)
            work = replace(work, memory_bytes=min(moved, 2 * self.nbytes))
            time = estimate_launch_time(work, gpu, cached=bool(times) and work.memory_bytes < CACHED_BYTES)
            times.append(LaunchPrediction(name, time.total_seconds, time.limiting_resource))
        return times

    def compute_share(self, seconds: float, kind: str) -> float:
        """Return the time that the data sheet allows, as a share of `seconds`."""
        return max(self.nbytes / DATA_SHEETS[kind].bandwidth, self.flops / DATA_SHEETS[kind].flops) / seconds


def make_vector_shape(
    dtype: DType, rows: int, columns: int, processors: int, target_share: float | None = None
) -> KernelShape:
    """Make the shape of a product of weights and one vector.

    Args:
        dtype: The dtype of the weights.
        rows: Rows of the weights.
        columns: Columns of the weights.
        processors: Multiprocessors of the GPU; packed rows are distributed over them evenly.
        target_share: The wanted share of the bandwidth.
    """
    row_multiple = 16 if dtype in packed.BLOCK_RECORD_DTYPES else 8
    own = -(-rows // processors // row_multiple) * row_multiple if dtype in packed.TILED_SOURCE_BY_DTYPE else 64
    nbytes = rows * columns // dtype.block * dtype.block_bytes + 4 * (rows + columns)
    case = f"mul_mat(w={dtype}[{own},{columns}], x=f32[1,{columns}])"
    name = f"{dtype} {rows}×{columns}, 1 token"
    chosen = ((emulated, "EMULATED_MULTIPROCESSORS", 1),)
    kernels = {"few": (rows / own, 1.0)}
    return KernelShape(
        name, case, kernels, nbytes, 2 * rows * columns, target_share, chosen, 4 * columns, loads_early=True
    )


def make_prompt_shape(
    dtype: DType, rows: int, columns: int, tokens: int, target_share: float | None = None, is_exact: bool = True
) -> KernelShape:
    """Make the shape of a matmul of weights and many tokens.

    The case has one tile. Two blocks share the columns of a tile of 256 rows, or of the tiles of a cluster.

    Args:
        dtype: The dtype of the weights.
        rows: Rows of the weights.
        columns: Columns of the weights.
        tokens: Tokens of the prompt.
        target_share: The wanted share of the 16-bit matmul FLOP/s.
        is_exact: Use pairs of 16-bit products instead of single ones.
    """
    high, wide, full = (512, 256, 8) if dtype in tiled.FLOAT_DTYPES else (256, 128, 2)
    many, longer = rows / high * tokens / wide, columns / 4096
    by_blocks = ("clustered", "grouped", "grouped_packed", "tiled", "tiled_packed", "matmul")
    kernels = {
        **dict.fromkeys(by_blocks, (many, longer)),
        **dict.fromkeys(("split_tiles", "split_rows"), (tokens / wide, longer)),
        "add_shares": (many, 1.0),
    }
    chosen = ((tiled, "FULL_DEVICE_TILES", full), (tiled, "MIN_BF16_TILES", 1))
    nbytes = rows * columns // dtype.block * dtype.block_bytes + 4 * tokens * (rows + columns)
    name = f"{dtype} {rows}×{columns}, {tokens} tokens" + ("" if is_exact else ", fast")
    case = f"mul_mat(w={dtype}[{high},4096], x=f32[{wide},4096], exact={str(is_exact).lower()})"
    return KernelShape(name, case, kernels, nbytes, 2 * rows * columns * tokens, target_share, chosen)


STATE_BYTES = 128 * 128 * 4
DELTA_FLOPS_PER_TOKEN = 128 * (7 * 128 + 3)
"""FLOPs of one token and one head."""
DELTA_DECODE_CASE = (
    "gated_delta_net(q=f32[1,2,128], k=f32[1,2,128], v=f32[1,4,128], g=f32[1,4,1], beta=f32[1,4], state=f32[4,128,128])"
)


def make_delta_prompt_shape(key_heads: int, is_exact: bool, target_share: float | None = None) -> KernelShape:
    """Make the shape of a gated delta net with 32 heads over 8192 tokens.

    The case has two heads and 128 tokens, so the state is a large share of its bytes; the longer case has 256 tokens.

    Args:
        key_heads: The number of key heads.
        is_exact: Use pairs of 16-bit products instead of single ones.
        target_share: The wanted share of the data sheet's limit.
    """
    short, long, tokens, keys = 128, 256, 8192, key_heads // 16
    case, longer = (
        f"gated_delta_net(q=f32[{t},{keys},128], k=f32[{t},{keys},128], v=f32[{t},2,128], g=f32[{t},2,1], "
        f"beta=f32[{t},2], state=f32[2,128,128], exact={str(is_exact).lower()})"
        for t in (short, long)
    )
    times = dict.fromkeys(("delta_prepare", "delta_scan", "delta_scan_clusters"), (16, 1.0))
    nbytes, flops = tokens * (32 * (2 * 128 + 2) + 2 * key_heads * 128) * 4, tokens * 32 * DELTA_FLOPS_PER_TOKEN
    name = f"{key_heads}/{DELTA_PROMPT_SHAPE}, {'exact' if is_exact else 'fast'}"
    chosen = ((gated_delta_net, "MIN_SCAN_BLOCKS", 8), (gated_delta_net, "FULL_DEVICE_BLOCKS", 1))
    more = (tokens - short) / (long - short)
    return KernelShape(name, case, times, nbytes, flops, target_share, chosen, longer_case=(longer, more))


def make_attention_prompt_shape() -> KernelShape:
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
    name, chosen = ATTENTION_PROMPT_SHAPE, ((attention, "MAX_KEY_SPLITS", 1),)
    more = (tokens / 2 - short) / (long - short)
    return KernelShape(name, case, times, nbytes, flops, 0.35, chosen, longer_case=(longer, more))


def make_row_shape(name: str, case: str, kernel: str, times: int) -> KernelShape:
    """Make a shape with `times` times the rows of a case, for an op with one kernel."""
    (node,) = (node for node in build_case_graph(parse_test_case(case)).graph.nodes if not node.is_leaf)
    declared = op_of(node)
    return KernelShape(
        name, case, {kernel: (times, 1.0)}, times * declared.count_bytes(node), times * declared.count_flops(node)
    )


def make_shapes(processors: int) -> tuple[KernelShape, ...]:
    """Return the shapes of the table, for a GPU with `processors` multiprocessors."""
    return (
        *(make_vector_shape(t, 4096, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(make_vector_shape(t, 28672, 4096, processors, a) for t, a in ((DType.Q4_K, 0.7), (DType.Q8_0, 0.82))),
        *(make_prompt_shape(t, 4096, 4096, 512, 0.42) for t in (DType.Q4_K, DType.Q8_0)),
        *(make_prompt_shape(DType.BF16, 4096, 4096, 512, a, is_exact) for a, is_exact in ((0.37, True), (0.57, False))),
        KernelShape(
            DELTA_DECODE_SHAPE,
            DELTA_DECODE_CASE,
            {"delta_net": (8 * 32, 1.0)},
            2 * 32 * 32 * STATE_BYTES,
            32 * 32 * DELTA_FLOPS_PER_TOKEN,
            0.81,
        ),
        *(
            make_delta_prompt_shape(32, is_exact, target_share)
            for is_exact, target_share in ((True, 0.24), (False, 0.4))
        ),
        *(make_delta_prompt_shape(16, is_exact) for is_exact in (True, False)),
        KernelShape(
            "32 heads on 8 of 128, 1 token on 8192",
            "attention(q=f32[1,4,128], k=f32[8192,1,128], v=f32[8192,1,128], scale=0.1)",
            {"attend_few": (8, 1.0), "attention_combine_few": (8, 1.0)},
            2 * 8192 * 8 * 128 * 4,
            4 * 8192 * 32 * 128,
        ),
        KernelShape(  # 33 splits
            ATTENTION_DECODE_SHAPE,
            "attention(q=f32[1,4,128], k=f16[4096,1,128], v=f16[4096,1,128], scale=0.1)",
            {"attend_cells": (8 * 33 / 4, 65536 / 33 / 1024), "attention_combine_few": (8, 1.0)},
            2 * 65536 * 8 * 128 * 2,
            4 * 65536 * 32 * 128,
            0.8,
            ((attention, "MAX_KEY_SPLITS", 4),),
        ),
        make_attention_prompt_shape(),
        make_row_shape("add 4096×4096", "add(a=f32[8,4096], b=f32[8,4096])", "binary", 512),
        make_row_shape(SWIGLU_SHAPE, "swiglu(gate=f32[8,4096], up=f32[8,4096])", "binary", 512),
        make_row_shape(NORM_SHAPE, "rms_norm(x=f32[8,4096])", "norm_by", 512),
        make_row_shape(ROPE_SHAPE, "rope(x=f32[8,8,128], pos=i32[8], n_dims=128)", "rope", 2048),
        make_row_shape(
            "set_rows 4096×1024", "set_rows(into=f32[64,1024], rows=f32[8,1024], ids=i32[8])", "scatter", 512
        ),
        make_row_shape("ssm_conv 4096×4096", "ssm_conv(x=f32[67,256], w=f32[256,4])", "short_convolution", 1024),
        make_row_shape(TOP_K_SHAPE, "top_k(x=f32[64,128], k=8)", "sort_runs", 64),
    )


def sum_seconds(times: LaunchPredictions) -> float:
    return sum(took.seconds for took in times)


def find_limiting_resource(times: LaunchPredictions) -> str:
    """Return the resource that limits the longest launch."""
    return max(times, key=lambda took: took.seconds).limit


def predict_shape(number: int) -> dict[str, LaunchPredictions]:
    """Return the predicted launches of the shape with index `number`, by GPU kind."""
    counted: dict[tuple[str, KernelLimits], list[tuple[LaunchCounters, ...]]] = {}
    found = {}
    for kind, gpu in GPUS.items():
        shape = make_shapes(gpu.multiprocessor_count)[number]
        if (shape.case, gpu.limits) not in counted:
            counted[shape.case, gpu.limits] = shape.count_launches(gpu.limits)
        found[kind] = shape.predict_launches(counted[shape.case, gpu.limits], kind)
    return found


def predict_product_speeds(dtype: DType) -> dict[str, KernelSpeeds]:
    """Return the predicted speeds of matmuls with weights of a dtype, by GPU kind."""
    many = make_prompt_shape(dtype, 4096, 4096, 512)
    counted = {limits: many.count_launches(limits) for limits in {gpu.limits for gpu in GPUS.values()}}
    found = {}
    for kind, gpu in GPUS.items():
        one = make_vector_shape(dtype, 28672, 4096, gpu.multiprocessor_count)
        few, all_ = (
            one.predict_launches(one.count_launches(gpu.limits), kind),
            many.predict_launches(counted[gpu.limits], kind),
        )
        found[kind] = collect_speeds({str(dtype): (one, few)}, {str(dtype): (many, all_)})
    return found


ShapePredictions = Mapping[str, tuple[KernelShape, LaunchPredictions]]


def collect_speeds(few: ShapePredictions, many: ShapePredictions) -> KernelSpeeds:
    """Return the speeds and limits of shapes: bytes/s of decode shapes (`few`), FLOP/s of prompt shapes (`many`)."""
    return KernelSpeeds(
        {name: float(f"{shape.nbytes / sum_seconds(times):.3g}") for name, (shape, times) in few.items()},
        {name: float(f"{shape.flops / sum_seconds(times):.3g}") for name, (shape, times) in many.items()},
        {name: find_limiting_resource(times) for name, (_, times) in few.items()},
        {name: find_limiting_resource(times) for name, (_, times) in many.items()},
    )


def collect_op_speeds(known: Sequence[tuple[KernelShape, Mapping[str, LaunchPredictions]]], kind: str) -> KernelSpeeds:
    """Return the predicted speeds of ops on a GPU kind, from shapes with known times."""
    named = {shape.name: (shape, times[kind]) for shape, times in known}
    few = {op: named[name] for op, (name, _) in OPS.items()}
    return collect_speeds(few, {op: named[name] for op, (_, name) in OPS.items() if name is not None})


def format_table_rows(shape: KernelShape, times: Mapping[str, LaunchPredictions]) -> Iterator[str]:
    """Yield the table rows of a shape, one for each listed GPU."""
    for kind in LISTED_GPUS:
        took = sum_seconds(times[kind])
        limits = ", ".join(f"{t.kernel}: " * (len(times[kind]) > 1) + t.limit for t in times[kind])
        target_share = f"{shape.target_share:.0%}" if shape.target_share and kind == "h200" else ""
        share = f"{shape.compute_share(took, kind):.0%}"
        is_early = shape.loads_early and int(GPUS[kind].arch[3:5]) >= MIN_EARLY_CAPABILITY
        early = f"{shape.compute_share(took - MEMORY_LATENCY_SECONDS, kind):.0%}" if is_early else ""
        yield f"| {shape.name} | {kind} | {1e6 * took:.1f} | {limits} | {share} | {early} | {target_share} |"


HEAD = """# Predicted times of CUDA kernels

Written by `python benchmarks/gpu/predict_times.py`. All times are **predictions of a model**, which an H100
contradicted in part ([first run on a GPU](../docs/first-gpu.md)). The model uses access counts of the emulation,
instructions of the machine code of NVRTC, and data sheets of GPUs (`backends/cupy/time_model/launch_time.py`).

- `share` is the share of the bandwidth in the data sheet, or of its 16-bit FLOP/s where these take longer.
- `early` is the share of a launch that starts its first loads while the previous launch ends, on devices of compute
  capability 9.0 or more.
- `target` is the required share on an H200. For prompts it is 0.6 (packed weights) and 0.8 (bf16) of 71 %, the assumed
  share of cuBLAS.
- Exact products with bf16 need twice the FLOPs, with a target of 37 %.
- For attention the target is half of 70 %, the assumed share of FlashAttention-3.

| shape | GPU | microseconds | limit | share | early | target |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    shapes = make_shapes(GPUS[LISTED_GPUS[0]].multiprocessor_count)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        times = list(tqdm(pool.map(predict_shape, range(len(shapes))), total=len(shapes)))
        by_dtype = list(tqdm(pool.map(predict_product_speeds, DTYPES), total=len(DTYPES)))
    both = list(zip(shapes, times, strict=True))
    TABLE.write_text(
        HEAD + "\n".join(line for shape, of in both for line in format_table_rows(shape, of)) + "\n", "utf-8"
    )
    microseconds = {
        shape.name: {kind: round(1e6 * sum_seconds(launches), 2) for kind, launches in of.items()} for shape, of in both
    }
    TIMES.write_text(json.dumps(microseconds, indent=1, ensure_ascii=False) + "\n", "utf-8")
    known = {
        kind: asdict(PredictedSpeeds(merge_speeds([of[kind] for of in by_dtype]), collect_op_speeds(both, kind)))
        for kind in GPUS
    }
    SPEEDS_FILE.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def merge_speeds(parts: Sequence[KernelSpeeds]) -> KernelSpeeds:
    """Merge speeds of several dtypes."""
    return KernelSpeeds(
        *({k: v for part in parts for k, v in getattr(part, of.name).items()} for of in fields(KernelSpeeds))
    )


if __name__ == "__main__":
    main()
