"""The hardest files of planner and verifier open with a worked example, and it is true."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = (
    *("sharding.axes", "sharding.factors", "sharding.factor_layouts", "sharding.propagation", "sharding.shard_ranges"),
    "lowering.arena",
    *(f"verifier.values.{name}" for name in ("index_sets", "restricted_ops", "partial_sums", "value_numbering")),
)


@pytest.mark.parametrize("name", MODULES)
def test_the_worked_example_at_the_head_of_a_file_is_true(name):
    module = import_module(f"hocket.scheduler.{name}")
    assert ">>>" in (module.__doc__ or "")
    assert not doctest.testmod(module).failed
