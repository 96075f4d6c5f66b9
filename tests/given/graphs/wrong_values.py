"""Wrong values for the arguments of public functions, and objects of the right classes from other graphs and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

import hocket
from hocket import ops, scheduler
from hocket.backends import base
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model, Step
from hocket.frontends.open_model import open_model
from hocket.scheduler.ir.execution_plan import PinnedNodes
from hocket.scheduler.ir.layout import Local, Shard

from ..models.goldens import FIXTURES


class Awkward:
    """A value without text, truth or array."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


def holder(value: Any) -> Any:
    objects = np.empty(3, object)
    objects[0] = value
    return objects


x, w, ids = hocket.input("x", (3, 4)), hocket.weight("w", (5, 4)), hocket.input("ids", (3,), "i32")
s, q = hocket.state("s", (3, 5)), hocket.weight("q", (2, 32), "q8_0")
image, kernel = hocket.input("image", (1, 2, 5)), hocket.weight("kernel", (2, 2, 3))
windows_of_image = hocket.input("windows", (1, 2, 2, 3))
new = ops.add(ops.mul_mat(w, x), s)
graph = hocket.Graph({"y": new, "z": ops.get_rows(w, ids), "q": ops.get_rows(q, ids)}, {s: new})
WEIGHTS = {"w": np.ones((5, 4), np.float32), "q": np.zeros((2, 34), np.uint8)}
INPUTS = {"x": np.ones((3, 4), np.float32), "ids": np.zeros(3, np.int32)}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 2**100, 10**5000, 1.5, float("nan"), float("inf"), 1j),
    *("", "text", "a\0b", "\ud800", "line\nline", "9" * 5000, "x" * 100_000, b"bytes", bytearray(b"b")),
    *([], [None], [-1], [1.5], [float("nan")], [2**100], ["a"], [["a"]], [[1], [1, 2]], [("a", "b")], ["cpu:0", None]),
    *({}, {"a": 1}, {1: 2}, {"y": x.node}, {"y": x}, {x: x}, {1, 2}, (), range(3), iter([1]), slice(1)),
    *(np.array([1j]), np.array(["a"]), holder(None), holder("a"), np.array(2**40), np.array([2**40]), np.zeros((2, 2))),
    *(np.float32("nan"), np.datetime64("2026-01-01"), np.zeros(0), np.zeros(3, "i4,f4"), np.array([0.5, -1.0])),
    *(object(), Awkward(), int, len, x, x.node, x.spec, graph, hocket.DType.F32, base.Device("cpu", 0)),
)


@cache
def plan() -> Any:
    return hocket.plan(graph, "numpy:0")


@cache
def executor(device: str = "numpy:0") -> Any:
    return hocket.load(hocket.plan(graph, device), WEIGHTS)


@cache
def model() -> Model:
    return open_model(FIXTURES / "llama/model.gguf")


@cache
def session() -> Session:
    return Session(model(), on=DeviceGroup(devices=("numpy:0",)), context=64)


@cache
def language_model() -> hocket.Model:
    return hocket.Model(None, devices="numpy:0", context=64)


@cache
def tokenizer() -> Tokenizer:
    return tokenizer_from_metadata(open_model(None).gguf.metadata)


def hollow_records(plan: Any) -> Iterator[Any]:
    """Yield a program, a device plan and plans of the right classes, with None in a field of one of their records."""
    one, *others = plan.device_plans
    first, *later = one.program.instructions
    tensor = dataclasses.replace(first.dst[0], strides=None)
    misplaced = (first, *later, first.dst[0])  # a checked record in the place of another class
    for instructions in (None, (dataclasses.replace(first, dst=(tensor,)), *later), misplaced):
        program = dataclasses.replace(one.program, instructions=instructions)
        device_plan = dataclasses.replace(one, program=program)
        yield from (program, device_plan, dataclasses.replace(plan, device_plans=(device_plan, *others)))
    for field in ("leaves", "outputs"):
        yield dataclasses.replace(plan, **{field: dict.fromkeys(getattr(plan, field), Shard(None, None))})
    yield dataclasses.replace(plan, pinned_nodes=(PinnedNodes(None, None, None),))
    yield dataclasses.replace(plan, sharded_factors=frozenset({None}))


@cache
def relatives() -> tuple[Any, ...]:
    """Objects of the right classes from another graph, plan, group, store or model."""
    wide, v = hocket.input("x", (7, 4)), hocket.state("s", (4, 4, 4), "f16")
    grown = ops.mul_mat(hocket.weight("w", (6, 4)), wide)
    other = hocket.Graph({"y": grown, "v": v}, {v: ops.scale(v, scale=2.0, bias=0.0)})
    same = hocket.Graph({"y": ops.silu(hocket.weight("w", (5, 4)))})
    deep = hocket.input("x", (8, 512))
    for layer in range(4):
        deep = ops.mul_mat(hocket.weight(f"w{layer}", (512, 512)), deep)
    sharded = {"devices": "numpy:0,numpy:1,numpy:2", "split_mode": "tensor"}
    plans = (
        *(hocket.plan(other, "numpy:0"), hocket.plan(other, **sharded), hocket.plan(graph, **sharded)),
        *(hocket.plan(graph, "cpu:0"), hocket.plan(graph, "numpy:1"), hocket.plan(same, "numpy:0")),
        hocket.plan(hocket.Graph({"y": deep}), "numpy:0,numpy:1,numpy:2,numpy:3", split_mode="layer,tensor"),
        *(hocket.plan(graph, "numpy:0,numpy:1", split_mode=mode) for mode in ("none", "layer")),
    )
    stores = tuple(hocket.Store(candidate.group) for candidate in plans)
    layouts = {layout: None for plan in plans for layout in (*plan.leaves.values(), *plan.outputs.values())}
    parts = (other, same, wide, v, grown, grown.node, v.node, v.spec, grown.spec, hocket.Value(grown.node, 1))
    values = ({"y": grown}, {v: grown}, {"x": wide}, (grown, None), (grown.spec, v.spec), grown.node.attrs)
    fields = (
        getattr(candidate, name)
        for candidate in plans[:3]
        for name in ("device_plans", "leaves", "outputs", "sharded_factors", "hardware", "group", "cost")
    )
    machines = (
        base.find_device("cpu:0"),
        scheduler.parse_simulated_group("cpu:3"),
        hocket.Trace(),
        DeviceGroup(devices=("numpy:0", "numpy:1")),
    )
    steps = (Step(2, 3, 16, 16, 3), Step(sequences=1, tokens=1, cells=10**6, context=10**6, outputs=1))
    ended = hocket.Model(None, devices="numpy:0", context=8)
    ended.close()
    theirs = (open_model(FIXTURES / "qwen3/model.gguf"), Sampling(bias=((10**6, 1.0),)), hocket.Token(1, "a", -1.0))
    executors = (executor("cpu:0"), hocket.load(plans[4], WEIGHTS))
    wrong = (*hollow_records(plans[1]), Shard(None, None), Local(None))
    return (*parts, *values, *wrong, *plans, *stores, *layouts, *fields, *machines, *steps, ended, *theirs, *executors)
