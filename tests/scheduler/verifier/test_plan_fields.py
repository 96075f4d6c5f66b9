"""Every field of everything in a plan is checked, or the verifier's docstring says that no run depends on it."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hocket.graph.errors import HocketError
from hocket.graph.validation import format_value
from hocket.scheduler import plan_to_json, verifier, verify_program
from hocket.scheduler.verifier.plan_verifier import verify_plan

from ...given.plans.campaign import (
    FEW,
    CampaignCounts,
    edit_node_and_lower,
    move_step,
    move_value,
    one_field,
    plan_by_name,
    sites_of,
    truth,
)
from ...given.plans.mutations import FieldSite, put
from ...given.plans.oracle import run_faults


def read_documented_fields() -> dict[str, str]:
    """Return the verifier's documentation of each field, by ``Class.field``."""
    rows: dict[str, str] = {}
    owner = ""
    for line in (verifier.__doc__ or "").splitlines():
        if re.fullmatch("[A-Z][A-Za-z]+", line):
            owner = line
        elif owner and (field := re.match(r"    ([a-z_]+): (.+)", line)):
            rows[f"{owner}.{field[1]}"] = field[2]
    return rows


def fields() -> dict[str, list[str]]:
    """The plans in which there is each field of each record."""
    missed: dict[str, list[str]] = {}
    for name in FEW:
        for field in sites_of(name)[0]:
            missed.setdefault(field, []).append(name)
    return missed


def test_the_docstring_of_the_verifier_names_every_field_of_everything_in_a_plan():
    assert read_documented_fields().keys() == fields().keys() | {"Graph.nodes"}  # which no caller can set


@pytest.mark.parametrize("name", FEW)
def test_the_plans_that_are_broken_run_right(name):
    assert run_faults(plan_by_name(name), truth(name)) is None


@pytest.mark.long
def test_a_field_that_is_wrong_is_found_or_the_plan_runs_right():
    dice, tally = random.Random(5), CampaignCounts()
    checked = {field for field, text in read_documented_fields().items() if not text.startswith("free")} - {
        "Graph.nodes"
    }
    for field, names in fields().items():
        for name in dice.sample(names * 3, len(names) * 3):  # a record may leave few wrong values
            for mutant in one_field(name, field, dice):
                tally.check_mutant(mutant)
            if tally.refused[field] or field not in checked:
                break
    assert not tally.missed
    assert not tally.raised
    assert sorted(checked - tally.refused.keys()) == []
    free = read_documented_fields().keys() - checked
    assert sorted(free & tally.refused.keys()) == []


@pytest.mark.parametrize("kind", [move_value, move_step, edit_node_and_lower])
def test_what_is_changed_in_several_places_at_once_is_found_or_the_plan_runs_right(kind):
    dice, tally = random.Random(6), CampaignCounts()
    for name in FEW:
        for mutant in kind(name, dice):
            tally.check_mutant(mutant)
    assert not tally.missed
    assert not tally.raised
    assert tally.refused


HUGE = 2**100
WRONG_TYPES = (
    *(object(), 1j, [], [1], np.zeros(2), b"1", {1, 2}, (object(),), {1: object()}, {"a": object()}, frozenset({1})),
    *(None, "1", 1.5, math.nan, True, HUGE, 10**5000),
)
"""Values of types that no field has, and values that are right for some fields only."""


def find_values_of_wrong_types(hint: str) -> list[object]:
    """Return the values of `WRONG_TYPES` that a field with this annotation does not accept."""
    right = {"str": ["1"], "float": [1.5, HUGE], "None": [None]}
    accepted = [value for word in hint.split(" | ") for value in right.get(word, ())]
    return [value for value in WRONG_TYPES if not any(value is other for other in accepted)]


@pytest.mark.long
def test_a_value_of_a_wrong_type_in_any_field_is_refused_with_the_names_of_record_and_field():
    silent: list[str] = []
    for field, names in fields().items():
        site = sites_of(names[0])[0][field][-1]
        for value in find_values_of_wrong_types(site.hint):
            for answer in find_refusals(names[0], site, value):
                if not {*field.split(".")} <= {*re.findall(r"\w+", answer)} or "\n" in answer:
                    silent.append(f"{field}={format_value(value)}: {answer}")
    assert not silent


def find_refusals(name: str, site: FieldSite, value: object) -> list[str]:
    """Return the errors of public functions for a plan with a value in a field, as text; empty without an error."""
    try:
        plan = put(plan_by_name(name), site.path, value)
    except HocketError as why:  # the constructor of the record refuses it
        return [str(why)]
    calls = [partial(verify_plan, plan), partial(plan_to_json, plan), plan.explain]
    if site.path[2:3] == (("field", "program"),):
        wrong = plan.device_plans[site.path[1][1]]
        calls.append(partial(verify_program, wrong.graph, wrong.program, wrong.backend))
    return list(map(find_refusal, calls))


def find_refusal(call: Callable[[], object]) -> str:
    """Return the error of hocket that a call raises as text; empty if it raises none."""
    try:
        call()
    except HocketError as why:
        return str(why)
    return ""


def test_the_oracle_finds_a_plan_that_runs_wrong():
    """A step left out, which the verifier is not asked about."""
    plan = plan_by_name("cut")
    program = plan.device_plans[0].program
    path = (("field", "device_plans"), ("item", 0), ("field", "program"))
    less = dataclasses.replace(program, instructions=program.instructions[:-1])
    assert run_faults(put(plan, path, less), truth("cut"))
