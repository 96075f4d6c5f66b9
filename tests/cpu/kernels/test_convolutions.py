"""Convolutions on the CPU: one kernel that reads the image in place, and its padding as zero."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.kernels.recurrent.sliding_windows import SlidingWindowShape
from hocket.ops import REGISTRY

from ...given.plans.cpu_runs import list_cpu_kernels, run_on_cpu

RNG = np.random.default_rng(61)


def convolve(x: np.ndarray, w: np.ndarray, groups: int, settings: dict[str, tuple[int, ...]]) -> np.ndarray:
    """The convolution in float64, from the windows that the reference of `windows` collects."""
    windows = REGISTRY["windows"].reference(x.astype(np.float64), **settings, value=0.0)  # [n, windows, c, taps]
    n, count, channels, taps = windows.shape
    parts = windows.reshape(n, count, groups, channels // groups * taps)
    weights = w.astype(np.float64).reshape(groups, w.shape[0] // groups, -1)
    return np.einsum("nwgk,gok->ngow", parts, weights).reshape(n, w.shape[0], count)


CASES = {
    "same size": ((2, 4, 16, 16), 8, 1, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), None),
    "depthwise": ((1, 6, 9, 20), 6, 6, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), None),
    "strides and one side": ((2, 4, 17, 15), 8, 4, (3, 2), (2, 3), (1, 1), (0, 2), (3, 0), None),
    "dilation": ((1, 4, 11, 9), 6, 2, (3, 3), (1, 2), (3, 2), (4, 1), (2, 5), None),
    "more padding than image": ((2, 2, 1, 2), 3, 1, (3, 3), (1, 1), (1, 1), (4, 3), (5, 4), None),
    "windows in the padding": ((1, 1, 2, 2), 2, 1, (1, 1), (1, 1), (1, 1), (3, 17), (2, 17), None),
    "one axis": ((2, 4, 50), 8, 1, (7,), (3,), (2,), (9,), (1,), None),
    "three axes": ((1, 4, 5, 6, 7), 8, 2, (3, 2, 3), (1, 2, 1), (1, 1, 2), (0, 3, 1), (2, 1, 4), None),
    "channels last": ((2, 4, 6, 5), 3, 1, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (0, 3, 1, 2)),
    "transposed": ((1, 3, 4, 4), 5, 1, (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), (0, 1, 3, 2)),
    "transposed with padding": ((1, 2, 4, 4), 5, 1, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (0, 1, 3, 2)),
}
"""Shape of the image, channels, groups, window, strides, dilations, padding of both sides, and axes of a view."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_is_one_kernel_that_reads_padding_as_zero(name: str, threads: int):
    shape, o, groups, size, stride, dilation, left, right, axes = CASES[name]
    source = shape if axes is None else tuple(np.empty(shape).transpose(np.argsort(axes)).shape)
    image = hocket.input("x", source)
    view = image if axes is None else ops.permute(image, axes=axes)
    weight = hocket.weight("w", (o, shape[1] // groups, *size))
    settings = {"stride": stride, "dilation": dilation, "left": left, "right": right}
    graph = hocket.Graph({"y": ops.convolution(view, weight, **settings, groups=groups)})
    assert list_cpu_kernels(graph) == ["windows mul_mat"]
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in (source, weight.shape))
    y = run_on_cpu(graph, {"w": w}, {"x": x}, threads)["y"]
    expected = convolve(x if axes is None else x.transpose(axes), w, groups, {"size": size, **settings})
    assert np.abs(y.reshape(expected.shape) - expected).max() < 1e-4


def test_an_infinity_in_the_image_stays_out_of_other_windows():
    settings = {"stride": (1, 1), "dilation": (1, 1), "left": (1, 1), "right": (1, 1)}
    graph = hocket.Graph(
        {"y": ops.convolution(hocket.input("x", (1, 1, 6, 20)), hocket.weight("w", (1, 1, 3, 3)), **settings)}
    )
    x = np.ones((1, 1, 6, 20), np.float32)
    x[..., 0, 0] = np.inf
    y = run_on_cpu(graph, {"w": np.ones((1, 1, 3, 3), np.float32)}, {"x": x}, 1)["y"]
    assert np.isinf(y[0, 0, :2, :2]).all()
    assert np.isfinite(y).sum() == y.size - 4


@pytest.mark.parametrize("value", [-0.0, 1.0, -np.inf])
def test_another_padding_is_copied_around_the_image(value: float):
    padding = {"stride": (1, 1), "dilation": (1, 1), "left": (1, 0), "right": (0, 1), "size": (2, 2)}
    taken = ops.windows(hocket.input("x", (1, 3, 5, 6)), **padding, value=value)
    rows = ops.reshape(taken, shape=(1, 30, 12))
    graph = hocket.Graph({"y": ops.mul_mat(rows, hocket.weight("w", (1, 4, 12)))})
    assert len(list_cpu_kernels(graph)) == 2
    x, w = (
        RNG.standard_normal((1, 3, 5, 6)).astype(np.float32),
        np.abs(RNG.standard_normal((1, 4, 12))).astype(np.float32),
    )
    y = run_on_cpu(graph, {"w": w}, {"x": x}, 1)["y"]
    windows = REGISTRY["windows"].reference(x.astype(np.float64), **padding, value=value).reshape(30, 12)
    assert np.allclose(y[0], w[0] @ windows.T, rtol=1e-5, atol=1e-5)


def test_only_windows_with_adjacent_elements_are_read_at_once():
    """The first and the last of 16 windows of a transposed 4 x 4 image are 15 elements apart, and others are not."""
    x = hocket.input("x", (1, 1, 4, 4))
    graph = hocket.Graph({"y": ops.windows(x, size=(1, 1), stride=(1, 1), dilation=(1, 1), left=(0, 0), right=(0, 0))})
    backend = CpuBackend(1)
    program = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program
    shape = SlidingWindowShape((1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 0.0)

    class Image:
        shape = (1, 1, 4, 4)
        strides: tuple[int, ...] = program.instructions[0].src[0].strides

    class Transposed(Image):
        strides = (16, 16, 1, 4)

    assert shape.compute_window_groups(Image)[0].tolist() == [[0]]
    assert shape.compute_window_groups(Transposed)[0].tolist() == [[1]]


def test_a_window_of_the_whole_image_is_a_product_of_vectors():
    x, w = hocket.input("x", (3, 5, 2, 4)), hocket.weight("w", (7, 5, 2, 4))
    graph = hocket.Graph({"y": ops.relu(ops.convolution(x, w, stride=(2, 3)))})
    assert list_cpu_kernels(graph) == ["mul_mat relu"]
    values = [RNG.standard_normal(v.shape).astype(np.float32) for v in (x, w)]
    y = run_on_cpu(graph, {"w": values[1]}, {"x": values[0]}, 1)["y"]
    expected = np.maximum(np.einsum("ncij,ocij->no", *(v.astype(np.float64) for v in values)), 0)
    assert y.shape == (3, 7, 1, 1)
    assert np.abs(y[..., 0, 0] - expected).max() < 1e-4
