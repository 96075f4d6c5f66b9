"""The packages: the sdist is the repository, the wheel is the package, and both work from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ..given.models.goldens import ROOT

BUILD = """
import sys
sys.path.insert(0, ".build")
import build_with_kernels
out = sys.argv[1]  # setuptools has arguments of its own
build_with_kernels.build_sdist(out)
build_with_kernels.build_wheel(out)
build_with_kernels.build_editable(out)
"""
PRINTED = """
import hocket, sys
assert hocket.__file__.startswith(sys.argv[1]), hocket.__file__
with hocket.Model(exact=True, context=32) as model:
    print("".join(model.generate("It is a truth", max_tokens=4, temperature=0)))
"""
OUTSIDE = ("benchmarks", "docs", "examples", "tests", ".build", ".ci", ".github")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not in a repository of git")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built_packages(tracked_files, tmp_path_factory) -> tuple[Path, Path, Path]:
    """An sdist, a wheel and an editable one, built from a copy, since building leaves files behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packed")
    for name in tracked_files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    quiet = {**os.environ, "HOCKET_BUILD_KERNELS": "0"}
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, env=quiet, capture_output=True, check=True)
    (sdist,), (editable, wheel) = out.glob("*.tar.gz"), sorted(out.glob("*.whl"))
    return sdist, wheel, editable


def test_the_sdist_has_every_file_of_the_repository(built_packages, tracked_files):
    with tarfile.open(built_packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in tracked_files if name not in names]


def test_the_wheel_has_every_file_of_the_package_and_works_from_another_folder(built_packages, tracked_files, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(built_packages[1]) as archive:
        archive.extractall(site)
    inside = [name for name in tracked_files if "/" in name and name.split("/")[0] not in OUTSIDE]
    assert not [name for name in inside if not (site / "hocket" / name).is_file()]
    command, environment = [sys.executable, "-c", PRINTED, site], {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == " which I am not\n", done.stderr


def test_the_tests_of_the_sdist_run_over_the_wheel(built_packages, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(built_packages[1]) as archive, tarfile.open(built_packages[0]) as sources:
        archive.extractall(site)
        sources.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("hocket-*")
    folder = unpacked.rename(tmp_path / "hocket")  # the root is a package, so pytest needs a name that one can have
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [
        "tests/graph/test_graph.py",
        "tests/docs/test_docs.py",
        "-k",
        "graph or (up_to_date and not map) or links",
    ]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_an_editable_install_is_a_folder_that_checkers_of_types_follow(built_packages, tmp_path):
    with zipfile.ZipFile(built_packages[2]) as archive:
        archive.extractall(tmp_path)
        names = set(archive.namelist())
    (record,) = tmp_path.glob("*.dist-info/RECORD")
    assert {line.partition(",")[0] for line in record.read_text("utf-8").splitlines()} == names
    (path,) = (Path(file.read_text("utf-8").strip()) for file in tmp_path.glob("*.pth"))
    assert (path / "hocket" / "py.typed").is_file()
    assert not [name for name in names if "finder" in name]
