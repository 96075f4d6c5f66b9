"""Calls of PyTorch that the importer converts to views or to few kernels: the results of PyTorch, and the ops."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import hocket

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def compare(function, *arguments) -> list[str]:
    """Compare a function of tensors with PyTorch; return the ops of its program on the CPU."""
    import torch

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    program = hocket.from_torch(torch.export.export(Model().eval(), arguments, strict=False))
    expected, found = function(*arguments), program.on("cpu:0")(*arguments)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    plan = hocket.plan(program.graph, "cpu:0")
    return [i.op for i in plan.device_plans[0].program.instructions]


def make_tensor(*shape: int):
    import torch

    return torch.from_numpy(np.random.default_rng(4).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (5, 1), (2, 3), (5, 7), 1])
def test_adaptive_means_of_whole_axes_are_one_op(sizes):
    import torch

    ops = compare(lambda x: torch.nn.functional.adaptive_avg_pool2d(x, sizes), make_tensor(2, 3, 5, 7) + 0.5)
    if 1 in (sizes if isinstance(sizes, tuple) else (sizes,)):
        assert ops.count("mean") == 1
        assert "mul_mat" not in ops


def test_rows_of_infinities_have_the_softmax_of_pytorch():
    import torch

    scores = make_tensor(5, 2, 6)
    scores[0, 0] = -np.inf
    scores[1, 0, 2:] = -np.inf
    scores[2, 1, 3] = np.inf
    scores[3, 1, 0] = np.nan
    for axis in (-1, 1):
        ops = compare(lambda x, axis=axis: torch.softmax(x, axis), scores)
        assert ops.count("softmax") == 1


@pytest.mark.parametrize(("start", "stop", "step"), [(0, None, 2), (1, None, 2), (1, -1, 3), (5, None, 4), (2, 9, 5)])
@pytest.mark.parametrize("n", [9, 12, 13])
def test_slices_with_a_step_are_views_where_the_axis_is_long_enough(n: int, start: int, stop: int | None, step: int):
    for shape, axis in (((2, n), 1), ((n, 3), 0), ((2, 3, n, 2, 2), 2)):
        place = (slice(None),) * axis + (slice(start, stop, step),)
        ops = compare(lambda x, place=place: x[place] * 2, make_tensor(*shape))
        if n % step == 0:
            assert "pad" not in ops


@pytest.mark.parametrize("ids", [[[3, 4, 5]], [[0, 1, 2], [0, 1, 2]], [[2, 2], [2, 2]], [[1, 3], [0, 2]], [[5, 4]]])
def test_rows_at_known_indices(ids: list[list[int]]):
    import torch

    known = torch.tensor(ids)
    ops = compare(lambda t: torch.nn.functional.embedding(known, t) + 1, make_tensor(6, 8))
    is_run = all(row == list(range(row[0], row[0] + len(row))) and row == ids[0] for row in ids)
    assert ("get_rows" in ops) == (not is_run and len({*np.ravel(ids)}) > 1)
