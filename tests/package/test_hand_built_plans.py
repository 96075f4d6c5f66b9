"""Every member of a plan or a device plan that was built by hand with a wrong field raises an error of hocket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import hocket
from hocket import ops
from hocket.graph.old_names import RenamedAttribute
from hocket.scheduler.ir import execution_plan
from hocket.scheduler.ir.layout import Shard
from hocket.scheduler.lowering.device_plan import DevicePlan

WRONG_VALUES = (None, "a", -1, (), {}, 2**100)


@cache
def right_plan(kind: str = "numpy") -> hocket.Plan:
    x, w = hocket.input("x", (3, 4)), hocket.weight("w", (8, 4))
    return hocket.plan(hocket.Graph({"y": ops.silu(ops.mul_mat(w, x))}), f"{kind}:0,{kind}:1", split_mode="tensor")


def replace_each_field(record: Any) -> Iterator[Any]:
    """Yield the record with a wrong value in one field, for each field and value."""
    for field in dataclasses.fields(record):
        for value in WRONG_VALUES if field.init else ():
            try:
                yield dataclasses.replace(record, **{field.name: value})
            except hocket.HocketError:
                continue  # the constructor refuses the value


def build_wrong_device_plans(one: DevicePlan) -> Iterator[DevicePlan]:
    """Yield device plans with a wrong value in a field of them, the program, an instruction or a tensor."""
    program = one.program
    first, *later = program.instructions
    firsts = [*replace_each_field(first)]
    firsts += [dataclasses.replace(first, dst=(tensor,)) for tensor in replace_each_field(first.dst[0])]
    programs = [*replace_each_field(program)]
    programs += [dataclasses.replace(program, instructions=(each, *later)) for each in firsts]
    yield from replace_each_field(one)
    yield from (dataclasses.replace(one, program=each) for each in programs)


def build_wrong_plans() -> Iterator[hocket.Plan]:
    """Yield plans with a wrong value in a field of the plan or of a device plan."""
    plan = right_plan()
    one, *others = plan.device_plans
    yield from replace_each_field(plan)
    yield dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, flops=0.0))
    yield from (dataclasses.replace(plan, device_plans=(each, *others)) for each in build_wrong_device_plans(one))


def list_members(kind: type) -> list[str]:
    """Return the names of all methods and properties of a class that are called without arguments."""
    old = {name for name, member in vars(kind).items() if isinstance(member, RenamedAttribute)}
    public = [name for name in vars(kind) if not name.startswith("_") and name not in old]
    return [*public, "__repr__", "__str__", *(name for name in ("_repr_html_",) if name in vars(kind))]


def find_raw_errors(record: Any) -> Iterator[str]:
    for name in list_members(type(record)):
        try:
            member = getattr(record, name)
            if callable(member):
                member()
        except hocket.HocketError as why:
            if "\n" in str(why):
                yield f"{name}: several lines: {why}"
        except Exception as why:  # this test looks for raw errors
            yield f"{name}: {type(why).__name__}: {why}"


def test_no_member_of_a_plan_with_a_wrong_field_raises_an_error_of_python():
    assert not [*find_raw_errors(right_plan())]
    plans = [*build_wrong_plans()]
    assert len(plans) > 60
    assert not {why for plan in plans for why in find_raw_errors(plan)}


@pytest.mark.parametrize("kind", ["numpy", "cpu", "cuda-emulated"])
def test_no_member_of_a_device_plan_with_a_wrong_field_raises_an_error_of_python(kind):
    one = right_plan(kind).device_plans[0]
    assert not [*find_raw_errors(one)]
    device_plans = [*build_wrong_device_plans(one)]
    assert len(device_plans) > 60
    assert not {why for each in device_plans for why in find_raw_errors(each)}


@pytest.mark.parametrize("kind", ["cpu", "cuda-emulated"])
def test_the_error_of_a_device_plan_is_a_plan_error_that_names_the_field(kind):
    one = right_plan(kind).device_plans[0]
    hollow = dataclasses.replace(one, program=dataclasses.replace(one.program, instructions=None))
    with pytest.raises(
        hocket.PlanError, match=r"DevicePlan\.\w+: self: Program.instructions is None at .*; it must be"
    ):
        hollow.predict_launches_by_instruction()


def test_the_error_names_the_record_and_the_field():
    one, *others = right_plan().device_plans
    hollow = dataclasses.replace(one, program=dataclasses.replace(one.program, buffers=None))
    plan = dataclasses.replace(right_plan(), device_plans=(hollow, *others))
    with pytest.raises(hocket.PlanError, match=r"Program.buffers is None at .*; it must be a tuple"):
        _ = plan.cost


def test_layouts_that_changed_after_a_check_are_checked_again():
    plan = dataclasses.replace(right_plan(), leaves=dict(right_plan().leaves))
    plan.explain()
    plan.leaves["w"] = Shard(None, None)
    with pytest.raises(hocket.PlanError, match=r"Shard.axis is None"):
        plan.explain()
    plan.leaves["w"] = right_plan().leaves["w"]
    plan.explain()


def test_a_fault_of_hocket_in_a_right_plan_is_no_fault_of_the_plan(monkeypatch):
    plan = dataclasses.replace(right_plan())
    for error, seen in ((KeyError("x"), hocket.HocketError), (MemoryError(), MemoryError), (OSError(28, ""), OSError)):

        def fail(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(execution_plan, "estimate_run_time", fail)
        with pytest.raises(seen) as raised:
            _ = plan.cost
        assert not isinstance(raised.value, hocket.PlanError)
