"""Kernels that are ready when installation ends: a first run of a usual file compiles none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hocket.backends.base import find_devices
from hocket.backends.cpu.execution.program_binding import find_program_kernels
from hocket.frontends.inference.device_group import ONE_DEVICE
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.frontends.precompile_kernels import STEP_TOKEN_COUNTS, list_kernels_to_precompile
from hocket.scheduler import plan_for_group

from ...given.models.goldens import FIXTURES

FILES = ("llama", "qwen2", "qwen3-bf16", "qwen3-q4_0", "qwen3-q4_1", "qwen3-q6_k", "qwen3-q8_0")
KEYS, VALUES = ONE_DEVICE.cache_dtypes


@pytest.mark.long
def test_a_first_run_of_a_usual_file_compiles_no_kernel():
    ready, group = (
        {kernel.name for kernel in list_kernels_to_precompile(of_all_types=False)},
        find_devices(["cpu:0"], 1),
    )
    for file in FILES:
        model = open_model(FIXTURES / file / "model.gguf")
        for tokens in STEP_TOKEN_COUNTS:
            (lane,) = plan_for_group(
                model.graph(Step(1, tokens, 256, 256, 1, keys=KEYS, values=VALUES)), group
            ).device_plans
            assert {kernel.name for kernel in find_program_kernels(lane.program, 1)} <= ready, file


IN_TURN = """
import os, sys
from pathlib import Path
from time import sleep
from hocket.frontends import precompile_kernels
folder = Path(sys.argv[1])
def compile_one(kernels):
    (name,) = kernels
    while name == "slow" and len([*folder.iterdir()]) < 5:
        sleep(0.01)
    (folder / name).write_text(str(os.getpid()))
os.cpu_count, precompile_kernels.compile_kernels_into_package = lambda: 2, compile_one
assert precompile_kernels.compile_in_parallel_and_return_worst_status(["slow", *"abcde"]) == 0
"""


def test_a_slow_kernel_leaves_the_others_to_the_other_process(tmp_path):
    subprocess.run([sys.executable, "-c", IN_TURN, str(tmp_path)], check=True, timeout=60)
    processes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert processes.keys() == {"slow", *"abcde"}
    assert len({processes[name] for name in "abcde"} - {processes["slow"]}) == 1
