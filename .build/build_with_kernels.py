"""The build of hocket: that of setuptools, and then the kernels of the model that comes with it, compiled for the
processor at hand and kept where runs look for them.  So nobody waits for a compiler in the first minute."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (a build backend is its functions)

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import hocket
with hocket.Model() as model:
    for tokens in (20, 2):
        list(model.generate([1] * tokens, max_tokens=2))
"""


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    compile_kernels()
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    compile_kernels()
    return name


def compile_kernels() -> None:
    """Run the model once; where that fails, kernels are compiled when they are first needed, as ever."""
    if os.environ.get("HOCKET_BUILD_KERNELS") == "0":
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, place in (("hocket", ROOT), ("hocket.egg-info", ROOT / "hocket.egg-info")):
            Path(folder, name).symlink_to(place, target_is_directory=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as why:
            sys.stderr.write(f"kernels were not compiled: {why}\n")
            return
    if done.returncode:
        sys.stderr.write(f"kernels were not compiled: {done.stderr.strip().splitlines()[-1:]}\n")
