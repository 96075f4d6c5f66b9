"""Composite ops against PyTorch, direct definitions, and themselves on several devices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.graph.errors import GraphError

RNG = np.random.default_rng(4)


def run(build: Callable[..., hocket.Value], *arrays: np.ndarray, devices: str = "cpu:0") -> np.ndarray:
    """Run a function of inputs."""
    inputs = [hocket.input(f"x{i}", a.shape, {"float16": "f16"}.get(str(a.dtype), "f32")) for i, a in enumerate(arrays)]
    graph = hocket.Graph({"y": build(*inputs)})
    split = {"split_mode": "tensor"} if "," in devices else {}
    return np.asarray(hocket.run(graph, {f"x{i}": a for i, a in enumerate(arrays)}, {}, devices=devices, **split)["y"])


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(dtype)


CONVOLUTIONS = {
    "one axis": ((2, 4, 9), (3, 4, 3), {"left": (1,), "right": (1,)}),
    "two axes": ((2, 3, 7, 10), (5, 3, 3, 2), {"stride": (2, 3), "dilation": (1, 2), "left": (2, 0), "right": (2, 0)}),
    "three axes": ((1, 2, 4, 5, 3), (4, 2, 2, 1, 3), {"left": (0, 1, 1), "right": (0, 1, 1)}),
    "two groups": ((1, 4, 6, 5), (6, 2, 3, 3), {"groups": 2}),
    "depthwise": ((1, 9, 12, 7), (9, 1, 3, 3), {"groups": 9, "stride": (2, 2), "left": (1, 1), "right": (1, 1)}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize(("dtype", "devices"), [(np.float32, "cpu:0"), (np.float16, "cpu:0,cpu:1")])
def test_convolution_is_pytorchs(case: str, dtype: type, devices: str) -> None:
    torch = pytest.importorskip("torch")
    x_shape, w_shape, settings = CONVOLUTIONS[case]
    x, w = draw(*x_shape), draw(*w_shape, dtype=dtype)
    names = {"stride": "stride", "dilation": "dilation", "left": "padding", "groups": "groups"}
    its = {names[name]: setting for name, setting in settings.items() if name in names}
    function = getattr(torch.nn.functional, f"conv{len(x_shape) - 2}d")
    expected = function(torch.from_numpy(x).double(), torch.from_numpy(w).double(), **its)
    got = run(lambda a, b: ops.convolution(a, b, **settings), x, w, devices=devices)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_convolution_with_windows_of_no_entries_is_zero() -> None:
    x, w = hocket.input("x", (2, 3, 4, 5)), hocket.input("w", (6, 3, 0, 2))
    y = ops.convolution(x, w)
    assert np.array_equal(hocket.run(hocket.Graph({"y": y}), {}, {}, devices="cpu:0")["y"], np.zeros((2, 6, 5, 4)))


TRANSPOSED = {
    "gaps": ((2, 3, 4), (3, 2, 2), {"stride": (3,)}),
    "long windows": ((1, 2, 13), (2, 3, 37), {}),
    "removed beyond the images": ((1, 2, 2), (2, 1, 1), {"left": (5,), "right": (-10,)}),
    "strides of 1": ((1, 4, 5, 3), (4, 3, 4, 2), {"left": (4, 0), "right": (1, -2), "groups": 2}),
    "removed and added": ((2, 4, 5, 3), (4, 3, 4, 3), {"stride": (2, 3), "left": (1, 2), "right": (0, -2)}),
    "dilation and groups": ((1, 4, 3, 4), (4, 2, 3, 2), {"stride": (2, 1), "dilation": (2, 3), "groups": 2}),
    "three axes": ((1, 2, 3, 2, 4), (2, 2, 2, 3, 1), {"stride": (1, 2, 2)}),
}


@pytest.mark.parametrize("case", TRANSPOSED)
@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_transposed_convolution_is_pytorchs(case: str, devices: str) -> None:
    torch = pytest.importorskip("torch")
    x_shape, w_shape, settings = TRANSPOSED[case]
    x, w = draw(*x_shape), draw(*w_shape)
    function = getattr(torch.nn.functional, f"conv_transpose{len(x_shape) - 2}d")
    its = {name: settings[name] for name in ("stride", "dilation", "groups") if name in settings}
    whole = function(torch.from_numpy(x).double(), torch.from_numpy(w).double(), **its)
    left, right = (settings.get(side, (0,) * (len(x_shape) - 2)) for side in ("left", "right"))
    padded = np.pad(whole, [(0, 0), (0, 0), *((max(-a, 0), max(-b, 0)) for a, b in zip(left, right, strict=True))])
    inside = tuple(slice(max(a, 0), n - max(b, 0)) for n, a, b in zip(padded.shape[2:], left, right, strict=True))
    got = run(lambda a, b: ops.transposed_convolution(a, b, **settings), x, w, devices=devices)
    np.testing.assert_allclose(got, padded[(..., *inside)], atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("f16", 1e-3)])
def test_add_windows_is_the_transpose_of_windows(dtype: str, tolerance: float) -> None:
    settings = {"size": (3, 2), "stride": (2, 3), "dilation": (2, 1), "left": (1, 0), "right": (3, 1)}
    image = draw(2, 3, 9, 8)
    taken = run(lambda a: ops.windows(a, **settings), image).astype(np.float64)
    weights = draw(*taken.shape, dtype=np.float16)
    back = run(lambda a: ops.add_windows(ops.cast(a, dtype=dtype), shape=(9, 8), **settings), weights)
    assert ops.add_windows(hocket.input("x", taken.shape, dtype), shape=(9, 8), **settings).dtype.name == dtype.upper()
    products = taken * weights, image.astype(np.float64) * back
    assert abs(products[0].sum() - products[1].sum()) < tolerance * np.abs(products[0]).sum()


@pytest.mark.parametrize("kind", ["max", "sum", "mean", "inner_mean"])
def test_pool_reduces_each_window(kind: str) -> None:
    x = draw(2, 3, 7, 5)
    settings = {"size": (3, 2), "stride": (2, 1), "dilation": (1, 2), "left": (3, 0), "right": (1, 2)}
    got = run(lambda a: ops.pool(a, kind=kind, **settings), x)
    expected = np.zeros((2, 3, 5, 5))
    for row, column in np.ndindex(5, 5):
        inside = [
            x[:, :, i, j]
            for i in range(2 * row - 3, 2 * row)
            for j in (column, column + 2)
            if 0 <= i < 7 and 0 <= j < 5
        ]
        whole = np.stack(inside, -1).astype(np.float64) if inside else np.zeros((2, 3, 0))
        divisor = {"mean": 6, "inner_mean": max(1, len(inside))}.get(kind, 1)
        expected[:, :, row, column] = whole.max(-1, initial=-np.inf) if kind == "max" else whole.sum(-1) / divisor
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [(14, 4), (9, 13), (3, 2), (1, 11)])
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("nearest", {}),
        ("linear", {}),
        ("linear", {"align_corners": True}),
        ("linear", {"antialias": True}),
        ("cubic", {}),
        ("cubic", {"align_corners": True}),
    ],
)
def test_interpolation_is_pytorchs(mode: str, settings: dict[str, bool], sizes: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    x = draw(2, 3, 7, 4)
    names = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}
    expected = torch.nn.functional.interpolate(torch.from_numpy(x).double(), size=sizes, mode=names[mode], **settings)
    got = run(lambda a: ops.interpolate(a, shape=(2, 3, *sizes), mode=mode, **settings), x)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_nearest_entries_are_copies_along_every_axis_and_constants_are_shared() -> None:
    x = draw(3, 2, 4, 3)
    x[1, 0, 2, 1] = np.inf

    def resize(a: hocket.Value) -> hocket.Value:
        return ops.interpolate(ops.interpolate(a, shape=(5, 2, 6, 3)), shape=(3, 7, 4, 5))

    ids = [np.arange(new) * old // new for old, new in ((3, 5), (2, 2), (4, 6), (3, 3))]
    again = [np.arange(new) * old // new for old, new in ((5, 3), (2, 7), (6, 4), (3, 5))]
    assert np.array_equal(run(resize, x), x[np.ix_(*ids)][np.ix_(*again)])
    twice = run(lambda a: ops.interpolate(a, shape=(5, 5, 4, 5)), draw(3, 3, 4, 3))  # the same numbers three times
    assert twice.shape == (5, 5, 4, 5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: ops.convolution(x, hocket.weight("w", (4, 2, 3, 3))), "3 channels in 1 groups do not fit"),
        (lambda x: ops.convolution(x, hocket.weight("w", (4, 3, 3))), "both need two axes before"),
        (lambda x: ops.convolution(x, hocket.weight("w", (4, 3, 9, 9))), "convolution: windows span"),
        (lambda x: ops.convolution(x, hocket.weight("w", (2, 3, 0, 99))), "0, 99. do not fit"),
        (lambda x: ops.transposed_convolution(x, hocket.weight("w", (3, 3, 1, 1)), left=(6, 0)), "leave no entry"),
        (lambda x: ops.add_windows(x, shape=(4,), size=(2,)), "needs 3 windows of 2 entries"),
        (lambda x: ops.pool(x, kind="median", size=(2, 2)), "kind is 'median'; one of max, sum"),
        (lambda x: ops.interpolate(x, shape=(2, 3, 0, 7)), "none empty"),
        (lambda x: ops.interpolate(x, shape=(2, 3, 6, 7), mode="area"), "mode is 'area'; one of nearest"),
        (lambda x: ops.interpolate(x, shape=(2, 3, 6, 9), mode="cubic", antialias=True), "cubic has no antialias"),
    ],
)
def test_what_does_not_fit_is_refused(build: Callable[[hocket.Value], hocket.Value], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build(hocket.input("x", (2, 3, 6, 7)))


def test_equal_constants_are_one_leaf_while_a_graph_has_them():
    x = hocket.input("x", (1, 2, 3))
    first, second = (ops.interpolate(x, shape=(1, 2, 7), mode="linear") for _ in range(2))
    (one,) = hocket.Graph({"a": first, "b": second}).leaves("constant")
    node = weakref.ref(one.node)
    del first, second, one
    gc.collect()
    assert node() is None
