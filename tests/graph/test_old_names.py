"""Old names of renamed definitions work with a warning, and other names are no attributes."""

from __future__ import annotations

from importlib import import_module

import pytest

import hocket.backends.base
import hocket.scheduler
from hocket.graph.old_names import make_module_getattr


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [(hocket.backends.base, "find", "find_device"), (hocket.scheduler, "plan_for", "plan_for_group")],
    ids=["backends", "scheduler"],
)
def test_an_old_name_gives_the_renamed_definition_with_a_warning(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(module, old) is getattr(module, new)
    assert not hasattr(module, "nothing_like_it")


def test_every_old_name_stands_for_a_definition():
    getter = make_module_getattr({"__name__": "module", "new": 1}, old="new")
    with pytest.warns(DeprecationWarning, match="old is now called new"):
        assert getter("old") == 1


@pytest.mark.parametrize("old", sorted(hocket.scheduler._OLD_NAMES))
def test_every_old_export_of_the_scheduler_is_there(old):
    with pytest.warns(DeprecationWarning, match="is now called"):
        assert getattr(hocket.scheduler, old) is not None


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("hocket.backends.host", "HostBackend"),
        ("hocket.backends.cpu.steps", "StepTableBuilder"),
        ("hocket.backends.cpu.kernels.rows", "load_lanes"),
    ],
)
def test_a_package_that_was_a_module_has_its_old_definitions_with_a_warning(package: str, name: str):
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} is now called"):
        assert getattr(import_module(package), name).__class__
    assert not hasattr(import_module(package), "nothing_like_it")
