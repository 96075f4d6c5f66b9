"""An op from another package, package_folder, is planned, cut, verified, checked and dumped like hocket's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from ..given.models.goldens import ROOT

PROGRAM = """
import numpy as np
import hocket

graph = hocket.parse(
    "%x = input() : f32[2,768]\\n%w = weight() : f32[768,768]\\n"
    "%c = centre(%w) : f32[768,768]\\n%y = mul_mat(%c, %x) : f32[2,768]\\nreturn y=%y\\n"
)  # nobody has imported the package
rng = np.random.default_rng(0)
x, w = rng.normal(size=(2, 768)).astype(np.float32), rng.normal(size=(768, 768)).astype(np.float32)
expected = x @ (w - w.mean(-1, keepdims=True)).T
for devices in ("cpu:0", "cpu:0,cpu:1,cpu:2", "numpy:0,numpy:1,numpy:2"):
    plan = hocket.plan(graph, devices, split_mode="tensor")
    run = hocket.load(plan, {"w": w})
    np.testing.assert_allclose(run.run({"x": x})["y"], expected, atol=1e-3)
    print(sorted(set(run.list_kernel_names())), plan.leaves["w"])
print(hocket.ops.centre)
"""


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory):
    """Where the example is package_folder, from a copy, since building leaves files behind."""
    source, site = tmp_path_factory.mktemp("source") / "op", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "third_party_op", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(site), str(source)], check=True)
    return site


def run(site, *arguments):
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT.parent)


@pytest.mark.long
def test_it_runs_on_one_device_and_sharded_over_three_with_its_own_kernels(package_folder):
    done = run(package_folder, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    one, three, in_numpy, text = done.stdout.splitlines()
    assert "hocket_centre.cpu_kernel.subtract_mean" in one
    assert one.endswith(" R")
    assert "hocket_centre.cpu_kernel.subtract_mean" in three
    assert three.endswith(" S0(256|256|256)")
    assert "centre" in in_numpy
    assert text == "<op centre>"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "cpu", "cuda-emulated"])
def test_the_kit_passes_its_kernels_and_finds_a_fault_in_them(package_folder, backend, tmp_path):
    if backend == "cuda-emulated" and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    kit = ("-m", "hocket.conformance", "--backend", backend, "--op", "centre")
    passed = run(package_folder, *kit)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    site = shutil.copytree(package_folder, tmp_path / "site")
    file, right, wrong = {
        "numpy": ("numpy_kernel.py", "np.subtract, x, means", "np.subtract, means, x"),
        "cpu": ("cpu_kernel.py", "load_lanes(x, c, n, 4))  # beyond", "load_lanes(x, 0, n, 4))  # beyond"),
        "cuda-emulated": ("centre.cu", "sum += x[c]", "sum += x[0]"),
    }[backend]
    path = site / "hocket_centre" / file
    text = path.read_text("utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), "utf-8")
    one_case = (*kit[:-2], "--case", "centre(x=f32[7,33])")
    failed = run(site, *(kit if backend == "numpy" else one_case))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "centre(" in failed.stdout
