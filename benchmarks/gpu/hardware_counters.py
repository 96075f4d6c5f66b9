"""Read the hardware counters of the main kernels by Nsight Compute: why their warps wait, and which unit is the limit.

``ncu`` runs one case of another part of this benchmark, and measures some launches of one kernel. The command line and
the pages of its output are described in https://docs.nvidia.com/nsight-compute/NsightComputeCli/.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType

from .harness import BenchmarkDevice, Case, NothingToMeasure, ResultRow

GPU_SCRIPT = Path(__file__).parents[1] / "run_gpu.py"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy")
SKIPPED_LAUNCHES, MEASURED_LAUNCHES = 2, 3
MAX_NCU_SECONDS = 170
"""Seconds after which ``ncu`` is stopped."""
MIN_STALLED_WARPS = 0.05
"""The least number of waiting warps for each issued instruction for which a stall reason has a row."""
STALL_METRIC = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+)_per_issue_active\.ratio")
METRIC_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "gpu__time_duration.sum": "µs",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute %",
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
        "lts__t_sector_hit_rate.pct": "L2 hits %",
        "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots %",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
        "launch__registers_per_thread": "registers",
        "launch__grid_size": "blocks",
    }
)
"""The labels of the metrics of a kernel that its first row has."""
MICROSECONDS_BY_UNIT = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
"""Microseconds in each unit of time, by the names of new and of old versions of ``ncu``."""


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, and the case of the benchmark that launches it.

    Args:
        title: The title of the case here.
        function: A regular expression that the whole name of the kernel matches, without template arguments.
        part: The part of the benchmark.
        case: A regular expression that is searched in the titles of the part's cases.
    """

    title: str
    function: str
    part: str
    case: str


PROFILED_KERNELS = (
    ProfiledKernel("few<q4_K>", "few", "products", r"^q4_K 9216×2560, 1 token$"),
    ProfiledKernel("few<q6_K>", "few", "products", r"^q6_K 248320×2560, 1 token$"),
    ProfiledKernel("clustered<bf16>", "clustered", "products", r"^bf16 18432×2560, 8192 tokens, fast$"),
    ProfiledKernel("delta_scan_clusters", "delta_scan_clusters", "delta-prefill", r"^16/32×128, 8192 tokens$"),
    ProfiledKernel("attend_warpgroups", "attend_warpgroups", "attention", r"^32 heads on 8 of 128, 8192 tokens, f16$"),
    ProfiledKernel("scaled_norm", "scaled_norm", "models", r"^Qwen3\.5-4B"),
)
TINY_KERNELS = (ProfiledKernel("few<q8_0>", "few", "products", r"^q8_0 64×64, 1 tokens$"),)


def make_counter_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    for one in bench.select_size(PROFILED_KERNELS, TINY_KERNELS):
        yield Case(one.title, partial(_profile_kernel, bench, one))


def _profile_kernel(bench: BenchmarkDevice, kernel: ProfiledKernel) -> Iterator[ResultRow]:
    """Yield a row of metrics of a kernel, and a row for each reason for which its warps wait.

    Raises:
        NothingToMeasure: There is no ``ncu``.
        RuntimeError: ``ncu`` failed, or the kernel was not launched.
    """
    if (ncu := shutil.which("ncu")) is None:
        raise NothingToMeasure("there is no ncu; it comes with Nsight Compute")
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        log = Path(folder, "ncu.csv")
        words = ["--csv", "--page", "raw", "--log-file", str(log), "--clock-control", "none"]
        words += ["--kernel-name-base", "function", "--kernel-name", f"regex:^{kernel.function}$", "--kill", "yes"]
        words += ["--launch-skip", str(SKIPPED_LAUNCHES), "--launch-count", str(MEASURED_LAUNCHES)]
        words += [word for section in SECTIONS for word in ("--section", section)]
        case = [sys.executable, str(GPU_SCRIPT), kernel.part, "--work", "0", "--cases", kernel.case]
        case += ["--kind", f"{bench.on.kind}:{bench.on.index}", *["--tiny"] * bench.tiny, "--scratch", folder]
        try:
            done = subprocess.run([ncu, *words, *case], capture_output=True, text=True, timeout=MAX_NCU_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu was not done within {MAX_NCU_SECONDS} s") from None
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    launches = read_raw_page(text)
    if not launches:
        errors = [line for line in text.splitlines() if line.startswith("==ERROR==")] or done.stderr.splitlines()
        message = errors[-1] if errors else "nothing"
        raise RuntimeError(f"ncu measured no {kernel.title} (exit code {done.returncode}) and said: {message}")
    yield from summarise_launches(launches)


def read_raw_page(text: str) -> list[dict[str, float]]:
    """Return the numbers of each launch by the names of their metrics; the duration is in microseconds.

    The page is a CSV table with a line of names, a line of units, and a line for each launch. Lines of ``ncu`` itself
    begin with ``==``.
    """
    table = [*csv.reader(line for line in text.splitlines() if line and not line.startswith("=="))]
    if len(table) < 2:
        return []
    names, units, *rows = table
    launches = []
    for row in rows:
        numbers: dict[str, float] = {}
        for name, unit, cell in zip(names, units, row, strict=False):
            try:
                number = float(cell.replace(",", ""))
            except ValueError:  # the cell is a name
                continue
            numbers[name] = number * MICROSECONDS_BY_UNIT.get(unit, 1.0) if name == "gpu__time_duration.sum" else number
        launches.append(numbers)
    return launches


def summarise_launches(launches: Sequence[Mapping[str, float]]) -> Iterator[ResultRow]:
    """Yield a row with the medians of `METRIC_LABELS`, then a row for each stall reason, the most frequent first."""

    def take_median(name: str) -> float:
        return median(launch[name] for launch in launches if name in launch)

    names = dict.fromkeys(name for launch in launches for name in launch)
    yield {"launches": len(launches)} | {
        label: take_median(name) for name, label in METRIC_LABELS.items() if name in names
    }
    stalls = {match["reason"]: take_median(name) for name in names if (match := STALL_METRIC.fullmatch(name))}
    for reason, warps in sorted(stalls.items(), key=lambda item: -item[1]):
        if warps >= MIN_STALLED_WARPS:
            yield {"waits for": reason, "warps an instruction": warps}
