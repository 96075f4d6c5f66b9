"""The script for a machine with a GPU, every part of it on emulated devices, and through a stand-in for CuPy."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tarfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from hocket.backends.base import Device
from hocket.backends.cupy import cuda_driver, hip_driver
from hocket.backends.cupy.device import hiprtc, nvrtc
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernel_table import SOURCES
from hocket.backends.cupy.kernels.products import tiled
from hocket.backends.cupy.kernels.recurrent import delta_segments, gated_delta_net
from hocket.benchmarks import run_gpu as gpu
from hocket.benchmarks.gpu import compare_predictions, llama_cpp, several_devices
from hocket.benchmarks.gpu.harness import BenchmarkDevice
from hocket.benchmarks.gpu.machine import CudaMachine, make_machine
from hocket.graph import Graph, input, weight
from hocket.ops import mul_mat

from ..given.devices.emulation import needs_compiler
from ..given.devices.products import tiles_of
from ..given.fakes.fake_cupy import fake_cupy, install_fake_cupy
from ..given.fakes.fake_green_contexts import give_green_contexts
from ..given.models.goldens import path_of
from ..given.waits import WAIT_SECONDS

PARTS = sorted(gpu.PARTS)
THROUGH_CUPY = ("device", "compile", "delta-decode", "products", "models", "sharded")
"""Parts that use every function of the stand-in; the others make the same calls."""
RUN_TWICE = (*THROUGH_CUPY, "candidates")
"""Parts with a test of their own that runs all of their cases."""
SEGMENT_KERNELS = ("begin_segments", "delta_scan", "carry_segments")
OF_OTHERS = ("peers", "llama.cpp", "counters")
"""Parts that need packages or devices that are not installed here."""


def rows_of(part: str, bench: BenchmarkDevice) -> list[dict[str, object]]:
    rows = list(gpu.run_part(gpu.PARTS[part], bench))
    assert rows[-1].get("ends") is not None, rows[-2:]
    return [row for row in rows[:-1] if not {"begins", "ended"} & row.keys()]


def bench_of(folder, **options) -> BenchmarkDevice:
    """With the smallest sizes, on the emulation."""
    driver = EmulatedDriver(0)
    on = driver.device(0)
    return BenchmarkDevice(driver, make_machine(driver, on), on, tiny=True, folder=folder, **options)


def check_rows(part: str, rows: list[dict[str, object]]) -> None:
    """Every case says something, nothing fails, and times and errors are such."""
    assert rows
    for row in rows:
        assert "error" not in row, row
        assert all(value > 0 for name, value in row.items() if name.endswith(("µs", "GB/s")) and name != "±µs"), row
        assert row.get("right", True), row
        assert row.get("fail", 0) == 0, row
        assert row.get("NMSE", 0) <= (1e-7 if row.get("mode") != "fast" else 1e-3), row
        assert row.get("NMSE against one", 0) <= 1e-3, row
    assert part in OF_OTHERS or not [row for row in rows if "left out" in row]


@pytest.fixture
def small_model(monkeypatch):
    """Several devices run a model with rows of 64 columns; the part `models` runs the embedded one."""
    monkeypatch.setattr(several_devices, "list_models", lambda bench: {"qwen3": lambda: path_of("qwen3-q8_0")})


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[pytest.mark.nightly(cases=0)] * (p in RUN_TWICE)) for p in PARTS]
)
def test_every_part_runs_on_the_emulation(part, tmp_path, small_model):
    check_rows(part, rows_of(part, bench_of(tmp_path)))


@pytest.mark.long
@needs_compiler
def test_products_by_clusters_are_in_the_course(tmp_path):
    """The smallest sizes would not be given to them."""
    bench = bench_of(tmp_path)
    cases = [case for case in gpu.PARTS["products"].cases(bench) if "clusters" in case.title]
    with tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1)):
        rows = [row for case in cases for row in case.rows()]
    assert all(row["right"] for row in rows)
    kernels = [f"clustered<{name}, {terms}>" for name in ("bf16_bits", "half_bits") for terms in (2, 1)]
    assert [row["kernel"] for row in rows] == kernels


@pytest.mark.long
@needs_compiler
def test_candidates_are_measured_beside_the_kernels_of_now(tmp_path, monkeypatch):
    monkeypatch.setattr(delta_segments, "MIN_SEGMENTS", 3)
    monkeypatch.setattr(delta_segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(gated_delta_net, "MIN_LONG_CHUNKED_TOKENS", 1)
    with tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1)):
        rows = rows_of("candidates", bench_of(tmp_path))
    check_rows("candidates", rows)
    kernels = [(row["by"], str(row.get("kernels", row.get("kernel")))) for row in rows if "by" in row]
    attention = [("now", "attend_warpgroups"), ("candidates", "attend_roles")]
    products = [("now", "clustered"), ("candidates", "multiply_by_roles")]
    names = [(by, kernel.replace("attention_seen, ", "").partition("<")[0]) for by, kernel in kernels]
    by_segments = f"delta_prepare, {', '.join(SEGMENT_KERNELS)}"
    scans = [
        ("now", "delta_prepare, delta_scan"),
        ("segments", by_segments),
        ("chunks of 64", "delta_prepare, delta_scan"),
        ("both", by_segments),
    ]
    names = [(by, kernel.replace("delta_scan_clusters", "delta_scan")) for by, kernel in names]
    assert names == attention + 3 * products + 2 * scans
    tokens = [str(row["first"]).split(", ")[1] for row in rows if "first" in row]
    assert tokens == 2 * ["32", "32", "64", "64"]


@pytest.mark.parametrize("part", PARTS)
def test_every_case_of_full_size_has_a_name_of_its_own(part):
    driver = EmulatedDriver(0)
    on = Device("cuda-emulated", 0)
    titles = [case.title for case in gpu.PARTS[part].cases(BenchmarkDevice(driver, make_machine(driver, on), on))]
    assert len(set(titles)) == len(titles) > 0


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy that emulates launches."""
    fake = install_fake_cupy(monkeypatch)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    which = shutil.which  # a real nvidia-smi would speak of another device
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else which(name))
    yield fake
    cuda_driver._compile_and_load_module.cache_clear()


@pytest.mark.long(cases=1)
@needs_compiler
@pytest.mark.parametrize("part", THROUGH_CUPY)
def test_parts_make_the_calls_of_cupy_that_there_are(part, tmp_path, cupy, monkeypatch, small_model):
    if part == "sharded":
        give_green_contexts(monkeypatch, cupy)
    driver = cuda_driver.CudaDriver()
    machine = make_machine(driver, driver.device(0), cupy)
    assert isinstance(machine, CudaMachine)
    rows = rows_of(part, BenchmarkDevice(driver, machine, driver.device(0), tiny=True, folder=tmp_path))
    check_rows(part, rows)
    in_turn = [row for row in rows if str(row.get("step")).endswith("launches in turn")]
    assert bool(in_turn) is (part == "models")


@needs_compiler
def test_devices_of_amd_say_what_they_are(tmp_path, monkeypatch):
    fake = fake_cupy(SOURCES, is_hip=True)
    monkeypatch.setattr(cuda_driver, "_cupy", lambda: fake)
    monkeypatch.setattr(hiprtc, "version", lambda: (7, 0))
    driver = hip_driver.HipDriver()
    about = make_machine(driver, driver.device(0), fake).describe_device()
    assert about["hiprtc"] == "7.0"
    assert about["architecture"].startswith("gfx90a:")


# ------------------------------------------------------------------------------------------------------------ peers

LLAMA_SCRIPT = """#!{python}
import sys
said = {{
    "GATED_DELTA_NET": "type=f32,head_count=4,head_size=64,n_seq_tokens={{n}},n_seqs=1,v_repeat=1,permuted=0,kda=0,K=1",
    "MUL_MAT": "type_a=q4_K,type_b=f32,m=4096,n={{n}},k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3]",
    "FLASH_ATTN_EXT": "hsk=128,hsv=128,nh=8,nr23=[4,1],kv={{n}},nb=1,type_K=f16",
}}
assert sys.argv[1:3] == ["perf", "-o"] and sys.argv[4:6] == ["-b", "CPU"]
op = sys.argv[3]
print("Testing 1 devices")
for n in (1, 512):
    print(f"  {{op}}({{said[op].format(n=n)}}):   63 runs -   257.15 us/run -  4160 kB/run - \033[1;34m 15 GB/s\033[0m")
"""


@pytest.mark.long
@needs_compiler
def test_what_llama_cpp_measures_stands_beside_ours(tmp_path):
    program = tmp_path / llama_cpp.PROGRAM
    program.write_text(LLAMA_SCRIPT.format(python=sys.executable), "utf-8")
    program.chmod(0o755)
    bench = bench_of(tmp_path, llama=tmp_path)
    rows = rows_of("llama.cpp", bench)
    check_rows("llama.cpp", rows)
    left_out = {row["case"]: row["left out"] for row in rows if "left out" in row}
    assert left_out == {
        "build": "--llama names no source of llama.cpp",
        "llama-bench, random, tiny": (
            "there is no llama-bench of llama.cpp; name the folder that has it, or a source, with --llama"
        ),
    }
    rows = [row for row in rows if "left out" not in row]
    assert [row["case"] for row in rows] == [op for op in llama_cpp.SELECTED_CASES for _ in (1, 512)]
    assert all(row["theirs µs"] == 257.15 for row in rows)
    assert all(row["theirs / ours"] == 257.15 / row["ours µs"] for row in rows if row["case"] != "FLASH_ATTN_EXT")
    program.write_text(f"#!{sys.executable}\nprint('CUDA9 is not there')\n", "utf-8")
    errors = [row["error"] for row in gpu.run_part(gpu.PARTS["llama.cpp"], bench) if "error" in row]
    assert errors == [
        "RuntimeError: test-backend-ops measured no GATED_DELTA_NET on CPU (exit code 0) and said: CUDA9 is not there"
    ]


CMAKE_SCRIPT = """#!{python}
import pathlib, sys
if sys.argv[1] == "-S":
    assert "-DLLAMA_CURL=OFF" in sys.argv and pathlib.Path(sys.argv[2], "CMakeLists.txt").exists()
    pathlib.Path(sys.argv[4]).mkdir()
else:
    assert sys.argv[1] == "--build" and sys.argv[5] == "--target"
    programs = pathlib.Path(sys.argv[2], "bin")
    programs.mkdir()
    for name in sys.argv[6:]:
        (programs / name).write_text({bench!r})
        (programs / name).chmod(0o755)
"""
LLAMA_BENCH_SCRIPT = """#!{python}
import json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert pathlib.Path(options["-m"]).read_bytes()[:4] == b"GGUF" and options["-o"] == "json"
same = dict(avg_ts=12.5, stddev_ts=0.5, backends="CPU", build_commit="abc", n_depth=0)
print(json.dumps([dict(same, n_prompt=int(options["-p"]), n_gen=0), dict(same, n_prompt=0, n_gen=int(options["-n"]))]))
"""


@pytest.mark.long
@needs_compiler
def test_programs_of_llama_cpp_are_built_from_an_archive_and_measure_the_same_file(tmp_path, monkeypatch):
    archive, tools = tmp_path / "llama_cpp_python.tar.gz", tmp_path / "tools"
    tools.mkdir()
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("x/vendor/llama.cpp/CMakeLists.txt", "x/vendor/llama.cpp/ggml/CMakeLists.txt", "x/setup.py"):
            packed.addfile(tarfile.TarInfo(name))
    cmake = tools / "cmake"
    cmake.write_text(
        CMAKE_SCRIPT.format(python=sys.executable, bench=LLAMA_BENCH_SCRIPT.format(python=sys.executable)), "utf-8"
    )
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    bench = bench_of(tmp_path, llama=archive)
    cases = {case.title: case for case in llama_cpp.make_llama_cpp_cases(bench)}
    assert [row["step"] for row in cases["build"].rows()] == ["configured", "built"]
    source = tmp_path / "llama_cpp_python.tar.gz.source"
    assert sorted(path.name for path in source.iterdir()) == ["CMakeLists.txt", "build", "ggml"]
    with pytest.raises(gpu.NothingToMeasure, match="the programs are built"):
        list(cases["build"].rows())
    rows = list(cases["llama-bench, random, tiny"].rows())
    assert [row["llama.cpp"] for row in rows] == ["prompt of 8 after 0", "4 new tokens after 0"]
    assert all(row["theirs tokens/s"] == 12.5 for row in rows)
    (source / "build" / "bin" / llama_cpp.BENCH_PROGRAM).write_text(f"#!{sys.executable}\nprint('no device')\n")
    with pytest.raises(RuntimeError, match=r"llama-bench failed \(exit code 0\) and said: no device"):
        list(cases["llama-bench, random, tiny"].rows())
    cmake.write_text(f"#!{sys.executable}\nraise SystemExit('no compiler')\n", "utf-8")
    (source / "build" / "bin" / llama_cpp.PROGRAM).unlink()
    with pytest.raises(RuntimeError, match=r"llama.cpp is not configured \(exit code 1\): no compiler"):
        list(cases["build"].rows())


# fmt: off
def chunk_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                           cu_seqlens=None, use_qk_l2norm_in_kernel=False): ...
def gated_delta_rule_decode_pretranspose(q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None,
                                         use_qk_l2norm=True): ...
def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", pos_encoding_mode="NONE"): ...
# fmt: on


FLASHINFER = {
    "gdn_prefill": chunk_gated_delta_rule,
    "gdn_decode": gated_delta_rule_decode_pretranspose,
    "decode": single_decode_with_kv_cache,
}
"""The functions in the package's manual with their parameters, by module."""


@pytest.mark.long
@needs_compiler
def test_peers_are_called_as_their_manuals_say(tmp_path, monkeypatch):
    torch = MagicMock()
    torch.cuda.Event().elapsed_time.return_value = 0.5
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "flash_qla", "flashinfer", "torch.nn", "torch.nn.attention")
    modules = {"torch": torch, **{name: MagicMock() for name in names}}
    modules |= {f"flashinfer.{name}": SimpleNamespace(**{f.__name__: f}) for name, f in FLASHINFER.items()}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    rows = rows_of("peers", bench_of(tmp_path))
    check_rows("peers", rows)
    assert not [row for row in rows if "left out" in row]
    compared = [row for row in rows if "theirs µs" in row]
    assert {str(row["case"]).partition(",")[0] for row in compared} == {
        "flash-linear-attention",
        "FlashQLA",
        "FlashInfer",
    }
    assert len(compared) >= 5
    back_ends = [row["by"] for row in rows if str(row["case"]).startswith("PyTorch, attention")]
    assert back_ends == ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
    monkeypatch.delattr(sys.modules["flashinfer.gdn_prefill"], "chunk_gated_delta_rule")
    (prompt,) = (case for case in gpu.PARTS["peers"].cases(bench_of(tmp_path)) if case.title == "FlashInfer, 65 tokens")
    with pytest.raises(gpu.NothingToMeasure, match="another version"):
        list(prompt.rows())


# ------------------------------------------------------------------------------------------------------ the runner

BROKEN = """
import os, subprocess, sys, time
from hocket.benchmarks import run_gpu as gpu

def hang():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])  # it has the pipes of this process too
    time.sleep(3600)

def talk():
    print("a library says something")
    os.system("echo a program says something")
    yield {"x": 1}

def fail():
    yield {"x": 1.5}
    raise ValueError("no such\\nthing")

def cases(bench):
    yield gpu.Case("good", talk)
    yield gpu.Case("fails", fail)
    yield gpu.Case("dies", lambda: os._exit(3))
    yield gpu.Case("hangs", hang)
    yield gpu.Case("left out", lambda: (_ for _ in ()).throw(gpu.NothingToMeasure("not here")))
    yield gpu.Case("last", lambda: [{"x": 2}])

gpu.PARTS["broken"] = gpu.BenchmarkPart(cases, 1)
gpu.main()
"""


@pytest.fixture
def broken_part(tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN, "utf-8")
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "STARTUP_SECONDS", WAIT_SECONDS)
    return Patient()


class Patient:
    """A part with a fourth case that has a limit of two seconds."""

    environment = ()

    def __init__(self):
        self.limits = iter([WAIT_SECONDS, WAIT_SECONDS, WAIT_SECONDS, 2.0, WAIT_SECONDS, WAIT_SECONDS])

    @property
    def limit(self):
        return next(self.limits)


@pytest.mark.long
@needs_compiler
def test_a_case_that_fails_dies_or_hangs_costs_no_other(broken_part, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "broken", broken_part)
    rows = list(gpu.run_part_in_processes("broken", ["--kind", "cuda-emulated"], math.inf))
    assert [(row["case"], row["ended"]) for row in rows if "ended" in row] == [
        ("good", "measured"),
        ("fails", "failed"),
        ("dies", "failed"),
        ("hangs", "failed"),
        ("left out", "left out"),
        ("last", "measured"),
    ]
    assert [row for row in rows if "ended" not in row] == [
        {"case": "good", "x": 1},
        {"case": "fails", "x": 1.5},
        {"case": "fails", "error": "ValueError: no such thing"},
        {"case": "dies", "error": "the process ended: exit code 3"},
        {"case": "hangs", "error": "nothing for 2 s"},
        {"case": "left out", "left out": "not here"},
        {"case": "last", "x": 2},
        {"ends": {}},
    ]


@needs_compiler
def test_a_part_ends_when_its_time_is_over(broken_part, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "broken", broken_part)
    rows = list(gpu.run_part_in_processes("broken", ["--kind", "cuda-emulated"], 0.0))
    assert rows == [{"case": "start", "left out": "the time of the part is over"}]


@pytest.mark.long
@needs_compiler
def test_rows_are_saved_as_they_come(tmp_path, monkeypatch, capsys):
    words = [
        "gpu.py",
        "device",
        "--kind",
        "cuda-emulated",
        "--tiny",
        "--save",
        str(tmp_path / "out"),
        "--seconds",
        "300",
    ]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    saved = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert saved["about"]["tiny"] is True
    assert {row["part"] for row in saved["rows"]} == {"device"}
    assert "launch of one element, how plain" in capsys.readouterr().out
    assert (tmp_path / "out.md").read_text("utf-8").count("| launch of one element |") == 4


def test_without_the_device_the_script_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "device"])
    monkeypatch.setattr(cuda_driver.CudaDriver, "_count_usable_devices", lambda self: 0)
    with pytest.raises(SystemExit, match=r"gpu.py: there is no device cuda:0"):
        gpu.main()


def test_a_step_is_predicted_for_the_gpu_that_runs_it():
    assert compare_predictions.find_gpu_kind("NVIDIA H200 NVL") == "h200"
    assert compare_predictions.find_gpu_kind("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert compare_predictions.find_gpu_kind("none: emulated") == ""
    graph = Graph({"y": mul_mat(weight("w", (4096, 4096), "q8_0"), input("x", (1, 4096)))})
    row = {"case": "a model", "step": "tg64", **compare_predictions.predict_step_row(graph, "NVIDIA H100 80GB HBM3")}
    assert row["predicted µs"] == pytest.approx(7.6, rel=0.1)  # as an H100 takes
    assert compare_predictions.predict_step_row(graph, "none: emulated") == {}
    rows = [{**row, "µs": row["predicted µs"] * factor} for factor in (0.9, 0.5)]
    assert list(compare_predictions.list_wrong_predictions(rows)) == [
        "a model, tg64: predicted 2.00 times the measured time"
    ]
    assert "## Wrong predictions" in gpu.format_tables([{"part": "models", **row} for row in rows])
