"""The kit from the outside: a backend of another package, and the cases as tests of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hocket.conformance import plugin
from hocket.conformance.generate_cases import select_quick_cases
from hocket.ops import REGISTRY

from ..given.models.goldens import ROOT


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """An environment in which the example backend is installed."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    copied = source / "third_party_backend"
    example = ROOT / "examples" / "third_party_backend"
    for path in example.rglob("*"):  # a copy, since building leaves files behind
        if path.is_file() and path.suffix in (".py", ".toml", ".md") and "build" not in path.parts:
            (copied / path.relative_to(example)).parent.mkdir(parents=True, exist_ok=True)
            (copied / path.relative_to(example)).write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(target), str(copied)], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}


def run_outside(outside, *arguments):
    return subprocess.run([sys.executable, *arguments], env=outside, capture_output=True, text=True, cwd=ROOT.parent)


@pytest.mark.long
def test_a_backend_from_another_package_is_checked_by_name(outside):
    kit = ("-m", "hocket.conformance", "--backend", "toy", "--op")
    done = run_outside(outside, *kit, "add|mul_mat|rms_norm|silu|softmax")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hocket_toy has no kernel for softmax" in done.stdout
    required = run_outside(outside, *kit, "softmax", "--require", "MUST")
    assert required.returncode == 1
    assert "unsupported, but MUST is required" in required.stdout


@pytest.mark.long
def test_the_same_cases_run_under_pytest(outside):
    options = ("-p", "hocket.conformance.plugin") if not plugin_is_installed() else ()
    kit = ("-m", "pytest", *options, "-q", "-p", "no:cacheprovider", "--pyargs", "hocket.conformance")
    done = run_outside(outside, *kit, "--backend", "toy", "--conformance-op", "silu|softmax")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(select_quick_cases(REGISTRY['silu']))} passed" in done.stdout
    one = run_outside(outside, *kit, "--backend", "toy", "--conformance-case", "add(a=f32[3,5], b=f32[3,5])")
    assert one.returncode == 0, one.stdout + one.stderr
    assert "1 passed" in one.stdout


@pytest.mark.parametrize(
    "wrong", [("--backend", "gpu"), ("--conformance-xfail", "nofile"), ("--conformance-from-graph", "no.gguf")]
)
def test_what_the_plugin_cannot_run_is_an_error_of_usage_before_the_first_case(wrong):
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    options = parser.parse([*wrong, "--conformance-op", "neg"])
    config = SimpleNamespace(getoption=lambda name: vars(options)[name.strip("-").replace("-", "_")])
    asked = SimpleNamespace(fixturenames=[plugin.FIXTURE], config=config)
    with pytest.raises(pytest.UsageError, match=wrong[1]):
        plugin.pytest_generate_tests(asked)


def plugin_is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(e.value == "hocket.conformance.plugin" for e in entry_points(group="pytest11"))
