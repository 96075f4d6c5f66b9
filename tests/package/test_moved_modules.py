"""Old paths of moved modules give the module with the new path, and warn."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from hocket.moved_modules import read_new_module_paths

MOVED = "from hocket.scheduler.machines.hardware import Hardware"


def test_every_new_path_is_a_module_and_no_old_path_is():
    for old, new in read_new_module_paths().items():
        assert find_spec(f"hocket.{new}") is not None, new
        spec = find_spec(f"hocket.{old}")
        assert spec is not None, old
        assert spec.origin is None, f"{old} is a module, too"


def test_an_old_path_gives_the_same_module_and_warns_at_the_import():
    code = f"{MOVED}\nfrom hocket.scheduler.costs import hardware\nassert hardware.Hardware is Hardware"
    code += "\nassert hardware.__spec__.name == hardware.__name__ == 'hocket.scheduler.costs.hardware'"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<string>:1: DeprecationWarning: hocket.scheduler.machines.hardware is now" in done.stderr


@pytest.mark.parametrize("name", ["hocket.nothing", "hocket.scheduler.machines.nothing"])
def test_a_module_that_never_existed_is_not_found(name: str):
    with pytest.raises(ModuleNotFoundError, match=name):
        __import__(name)
