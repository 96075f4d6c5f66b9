"""The build of hocket: that of setuptools, after kernels were compiled into the package.  So nobody waits for a
compiler in the first minute.

For the processor at hand these are the kernels of the embedded model, and of decoders with the weight types that most
files have. ``HOCKET_BUILD_KERNELS=all`` makes a wheel for other machines, with kernels for every type and each of
`hocket.backends.cpu.target_cpu.PRECOMPILED_TARGETS`. With ``0`` no kernel is compiled in advance; then each is compiled
at its first use.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (a build backend is its functions)

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".build" / "editable" / "hocket"
"""The root of the repository by the name of the package that it is."""
LONGEST = 3600
"""Seconds for all kernels of one processor; on a machine of two cores they take about one minute."""


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    compile_kernels()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    compile_kernels()
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    if config_settings and config_settings.get("editable_mode"):
        return name
    try:
        LINK.parent.mkdir(exist_ok=True)
        LINK.unlink(missing_ok=True)
        LINK.symlink_to(os.path.join("..", ".."), target_is_directory=True)
    except OSError:  # a system without links keeps the way of setuptools
        return name
    follow_link(Path(wheel_directory, name))
    return name


def follow_link(wheel: Path) -> None:
    """Have an editable `wheel` name the folder of `LINK`, where setuptools has a finder: checkers of types and editors,
    which run no code, follow it, and so does Python, sooner."""
    with zipfile.ZipFile(wheel) as made:
        files = {name: made.read(name) for name in made.namelist() if not name.endswith("_finder.py")}
    (path,) = (name for name in files if name.endswith(".pth"))
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    files[path] = f"{LINK.parent}\n".encode()
    del files[record]
    with zipfile.ZipFile(wheel, "w") as made:
        for name, data in files.items():
            made.writestr(name, data)
        made.writestr(
            record, "".join(f"{name},{digest(data)},{len(data)}\n" for name, data in files.items()) + f"{record},,\n"
        )


def digest(data: bytes) -> str:
    """As the record of a wheel has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def compile_kernels() -> None:
    """Compile kernels into the package; where that fails it is said, and they are compiled when they are needed."""
    asked = os.environ.get("HOCKET_BUILD_KERNELS", "")
    if asked == "0":
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, place in (("hocket", ROOT), ("hocket.egg-info", ROOT / "hocket.egg-info")):
            Path(folder, name).symlink_to(place, target_is_directory=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "hocket.frontends.precompile_kernels",
            *(["--all"] if asked == "all" else []),
        ]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LONGEST)
        except (OSError, subprocess.TimeoutExpired) as why:
            sys.stderr.write(f"kernels were not compiled: {why}\n")
            return
    if done.returncode:
        sys.stderr.write(f"kernels were not compiled: {done.stderr.strip().splitlines()[-1:]}\n")
