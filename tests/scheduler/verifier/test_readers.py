"""The work of planning grows in proportion to the readers of one value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

import hocket
from hocket import ops

MAX_GROWTH = 2.3
"""Work for twice as many readers, divided by the work for half as many."""


def add_up(values: Sequence[hocket.Value]) -> hocket.Value:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def build_scaled(count: int) -> hocket.Value:
    h = ops.silu(hocket.input("x", (2, 8)))
    return add_up([ops.scale(h, scale=i + 1.0, bias=0.5) for i in range(count)])


def read_first(count: int) -> hocket.Value:
    h = ops.silu(hocket.input("x", (2, 8)))
    return add_up([ops.mul(h, hocket.weight(f"w{i}", (2, 8))) for i in range(count)])


def read_second(count: int) -> hocket.Value:
    h = ops.silu(hocket.input("x", (2, 8)))
    return add_up([ops.sub(hocket.weight(f"w{i}", (2, 8)), h) for i in range(count)])


def build_sliced(count: int) -> hocket.Value:
    h = ops.silu(hocket.input("x", (count, 8)))
    return add_up([h[i : i + 1] for i in range(count)])


FANS = {build.__name__: build for build in (build_scaled, read_first, read_second, build_sliced)}


def lines_run(build: Callable[[int], hocket.Value], count: int, devices: str, mode: str, folder: str) -> int:
    """Lines of Python of a folder of the scheduler that planning runs: a count of its work."""
    graph = hocket.Graph({"y": build(count)})
    lines = 0

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if f"scheduler/{folder}" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        hocket.plan(graph, devices, split_mode=mode)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("name", FANS)
@pytest.mark.parametrize(("devices", "mode"), [("numpy:0", "none"), ("numpy:0,numpy:1,numpy:2", "tensor")])
def test_the_work_of_the_verifier_grows_no_faster_than_the_readers_of_a_value(name, devices, mode):
    few, many = (lines_run(FANS[name], count, devices, mode, "verifier") for count in (40, 80))
    assert few > 40
    assert many <= MAX_GROWTH * few
