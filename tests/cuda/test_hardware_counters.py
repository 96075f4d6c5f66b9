"""Hardware counters by a stand-in for ``ncu``, which writes pages as the manual of Nsight Compute describes them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hocket.backends.base import Device
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.benchmarks import run_gpu as gpu
from hocket.benchmarks.gpu import hardware_counters
from hocket.benchmarks.gpu.harness import BenchmarkDevice, NothingToMeasure
from hocket.benchmarks.gpu.machine import make_machine

from ..given.devices.emulation import needs_compiler

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NAMES = (
    *("ID", "Kernel Name", "gpu__time_duration.sum", "launch__grid_size", "lts__t_sector_hit_rate.pct"),
    *(STALL.format(reason) for reason in ("barrier", "long_scoreboard", "wait")),
)
PAGE = "\n".join(
    [
        "==PROF== Connected to process 12",
        ",".join(f'"{name}"' for name in NAMES),
        '"","","nsecond","","%","inst","inst","inst"',
        '"0","few","5,240","2,048","31.5","0.02","4.5","1.25"',
        '"1","few","5,300","2,048","31.7","0.04","4.7","1.25"',
        '"2","few","5,000","2,048","32.5","0.03","4.6","1.5"',
        "==PROF== Disconnected from process 12",
    ]
)
NCU_SCRIPT = """#!{python}
import pathlib, subprocess, sys
words = sys.argv[1:]
at = words.index(sys.executable)
options = dict(zip(words[:at], words[1:at]))
assert options["--kernel-name"] == "regex:^few$" and options["--page"] == "raw" and "--csv" in words[:at]
done = subprocess.run(words[at:], capture_output=True, text=True)
assert '"ended": "measured"' in done.stdout, done.stdout + done.stderr
pathlib.Path(options["--log-file"]).write_text({page!r})
sys.exit({code})
"""


def make_bench(folder: Path, *, tiny: bool = True) -> BenchmarkDevice:
    driver = EmulatedDriver(0)
    on = driver.device(0) if tiny else Device("cuda-emulated", 0)
    return BenchmarkDevice(driver, make_machine(driver, on), on, tiny=tiny, folder=folder)


def install_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, code: int = 0) -> None:
    program = folder / "ncu"
    program.write_text(NCU_SCRIPT.format(python=sys.executable, page=page, code=code), "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.long
@needs_compiler
def test_a_case_of_another_part_is_profiled(tmp_path, monkeypatch):
    install_ncu(tmp_path, monkeypatch, PAGE, code=9)  # ncu ends the program, which then has no exit code of 0
    (case,) = hardware_counters.make_counter_cases(make_bench(tmp_path))
    first, *stalls = case.rows()
    assert first == {"launches": 3, "µs": pytest.approx(5.24), "blocks": 2048.0, "L2 hits %": 31.7}
    assert stalls == [
        {"waits for": "long_scoreboard", "warps an instruction": 4.6},
        {"waits for": "wait", "warps an instruction": 1.25},
    ]
    install_ncu(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - no permission\n==PROF== end\n", code=1)
    with pytest.raises(RuntimeError, match=r"measured no few<q8_0> \(exit code 1\) and said: ==ERROR== ERR_NVGPUCTR"):
        list(case.rows())


def test_without_ncu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    case, *_ = hardware_counters.make_counter_cases(make_bench(tmp_path, tiny=False))
    with pytest.raises(NothingToMeasure, match="there is no ncu"):
        list(case.rows())


def test_a_page_without_launches_has_no_numbers():
    assert hardware_counters.read_raw_page("==PROF== Connected\n==WARNING== No kernels were profiled.\n") == []
    assert hardware_counters.read_raw_page("") == []


@pytest.mark.parametrize("unit", hardware_counters.MICROSECONDS_BY_UNIT)
def test_a_duration_is_in_microseconds(unit):
    (launch,) = hardware_counters.read_raw_page(f'"gpu__time_duration.sum"\n"{unit}"\n"12"\n')
    assert launch == {"gpu__time_duration.sum": 12 * {"n": 1e-3, "u": 1.0, "m": 1e3}[unit[0]]}


@pytest.mark.parametrize("kernel", hardware_counters.PROFILED_KERNELS, ids=lambda kernel: kernel.title)
def test_a_kernel_has_one_case_of_its_part_at_full_size(kernel, tmp_path):
    titles = [case.title for case in gpu.PARTS[kernel.part].cases(make_bench(tmp_path, tiny=False))]
    assert sum(re.search(kernel.case, title) is not None for title in titles) == 1
