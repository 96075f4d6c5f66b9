"""Attention on CUDA, emulated: every variant against its definition in float64, over every shape that has a kernel."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernels.attention import attention as binding
from hocket.backends.cupy.kernels.blocks import BLOCK_TYPE_NAMES
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.inputs import generate_random_operands
from hocket.conformance.checks.run_case import run_three_times_guarded
from hocket.ops import attention

from ...given.devices.attention import TOLERANCE, allowed_nmse, by_candidates, by_warps, case
from ...given.devices.emulation import needs_compiler
from ...given.devices.key_blocks import run_over_empty_cache

pytestmark = needs_compiler

STRIDED_LAYOUTS = ("offset", "sliced", "permuted", "broadcast")
FEW = (
    *(case(1, h, 2, 45, 64) for h in (1, 2, 3, 8, 9)),
    *(case(t, 2, 1, 70, 32, mask="") for t in range(2, 10)),
    *(case(2, 3, 2, s, 16, mask="", inputs="infinities") for s in (0, 1, 31, 32, 33, 129)),
    *(case(2, 4, 1, s, 64, mask="", inputs="infinities") for s in (300, 1100)),  # splits
    *(case(1, 1, 1, 128 * n, 8) for n in (70, 130)),  # more than are added up at once, and as many as there may be
    *(case(3, 2, 1, 40, d, mask="") for d in (4, 60, 68, 96, 128, 200, 256)),
    *(case(1, 2, 1, 150, d, e) for d, e in ((192, 128), (576, 512), (64, 512), (512, 4))),
    *(case(2, 1, 2, 20, d, e) for d, e in ((1, 1), (7, 5), (66, 130), (644, 8), (8, 1030))),  # any size
    case(33, 1, 2, 40, 64, mask=""),
    case(1, 1, 2, 40, 7, mask=""),
    *(case(2, 4, 2, 40, 64, mask="", layout=how) for how in STRIDED_LAYOUTS),
)
TILED = (
    case(33, 2, 2, 70, 64, mask="", inputs="infinities"),
    case(70, 1, 1, 130, 64),
    case(70, 3, 1, 65, 40, 24, mask=""),
    *(case(t, 1, 2, 600, 64, mask="") for t in (64, 140)),  # splits of few rows, and of many
    case(64, 1, 1, 0, 64, mask=""),
    case(65, 1, 1, 1, 16, mask=""),
    *(case(66, 1, 1, 70, *s, mask="", inputs="infinities") for s in ((128, 128), (192, 128), (256, 250), (7, 129))),
    *(case(9, 8, 2, 70, 128, mask="", layout=how) for how in STRIDED_LAYOUTS),
    case(33, 2, 2, 70, 576, 512, mask="", inputs="infinities"),  # latent: rows, half rows, keys that are left
    *(case(2, 33, 1, s, 576, 512, rest="sinks=f32[33]") for s in (1, 17)),
    case(1, 64, 1, 300, 576, 512, mask=""),  # splits
    case(64, 1, 1, 33, 300, 260, ahead="2,", mask="", layout="permuted"),
)
CELLS = (
    *(case(t, 2, 2, 75, 64, mask="", inputs="infinities", cells=c) for t in (3, 33) for c in ("f16", "bf16")),
    *(case(70, 2, 1, s, 128, cells="f16") for s in (0, 1, 63, 65, 200)),
    *(
        case(t, 1, 1, 70, d, e, mask="", cells=c)
        for t in (1, 66)
        for c, d, e in (("f16", 192, 128), ("bf16", 250, 256))
    ),
    *(case(t, 1, 1, 40, d, e, cells="f16") for t in (1, 66) for d, e in ((7, 5), (66, 130), (576, 512), (8, 1030))),
    *(case(t, 8, 2, 70, 128, mask="", layout=how, cells="f16") for t in (1, 9) for how in STRIDED_LAYOUTS),
    *(case(64, 1, 2, s, 64, mask="", cells="bf16") for s in (600, 700)),  # splits
    *(case(1, 4, 1, s, 128, mask="", inputs="infinities", cells=c) for c in ("f16", "bf16") for s in (300, 1100)),
    case(1, 2, 1, 9000, 64, cells="f16"),  # as many splits as there may be
)
VARIANTS = tuple(
    case(t, 2, 2, 75, 64, ahead=ahead, mask=mask, inputs=inputs, rest=", ".join(rest), cells=cells)
    for t, cells in ((3, "f32"), (33, "f32"), (3, "f16"), (33, "f16"))
    for ahead, mask, inputs, rest in (
        ("", "", "normal", ("sinks=f32[4]",)),
        ("", "", "infinities", ("sinks=f32[4]", "softcap=2.0")),
        ("", None, "normal", ("softcap=5.0",)),
        ("", "", "infinities", ("max_bias=8.0",)),
        ("", "4,", "normal", ('mask_heads="each"',)),
        ("", "2,", "infinities", ('mask_heads="tiled"', "max_bias=8.0")),
        ("2,", "", "normal", ()),
        ("2,", "2,", "normal", ()),
        ("4,", "2,", "infinities", ("sinks=f32[4]",)),
        ("2,3,", "3,", "normal", ()),
        ("2,2,", "2,1,4,", "normal", ('mask_heads="each"',)),
        *(("", "", kind, ()) for kind in ("uniform", "large", "denormal", "ties", "zeros", "constant")),
    )
)
SIZES = tuple(
    case(t, 1, 1, 40, d, e, cells=cells)
    for t in (1, 2, 4, 8, 64)
    for d, e in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512), (7, 5))
    for cells in ("f32", "f16", "bf16")
)
BY_HALVES = [c for c in CELLS + VARIANTS + SIZES if "f16" in str(c) and allowed_nmse(c) > TOLERANCE]


@pytest.mark.nightly(cases=52)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("case", FEW + TILED + CELLS + VARIANTS + SIZES, ids=str)
def test_attention_is_its_definition_in_every_order_of_threads(case):
    """The kit runs a case three times, each in another order, and wants the same bits."""
    backend = EmulatedBackend()
    result = run_case(case, backend, backend.device(0))
    assert result.outcome is Outcome.PASS, result.why
    if case.inputs in ("normal", "infinities"):
        assert result.difference.nmse < allowed_nmse(case)


@pytest.mark.nightly(cases=18)
@pytest.mark.long
@pytest.mark.parametrize("choose", [by_warps, by_candidates])
@pytest.mark.parametrize("case", BY_HALVES, ids=str)
def test_attention_by_other_kernels_is_its_definition(case, choose):
    with choose():
        test_attention_is_its_definition_in_every_order_of_threads(case)


@pytest.mark.long
def test_every_kernel_has_a_case():
    """Each size of heads, each count of rows; `test_chains` has the kernels that compute heads, too."""
    launched = set()

    class Driver(EmulatedDriver):
        def record(self, launches, on):
            launched.update(launch.kernel.name for launch in launches)
            return lambda: None

    backend = DriverBackend(Driver())
    backend.driver.prepare_kernel = lambda kernel, on: None  # nothing runs
    for variant, c in product((nullcontext, by_warps, by_candidates), (*FEW, *TILED, *CELLS, *VARIANTS, *SIZES)):
        with variant():
            run_case(c, backend, backend.device(0))
    for cache, size, tokens in product(BLOCK_TYPE_NAMES, (64, 256), (1, 2, 4, 70)):
        run_over_empty_cache((backend, backend.device(0)), cache, size, tokens)
    with_heads = {kind.name_with_heads for kind in binding.PLACING_CELL_SOURCES}
    assert launched == {name for source in binding.SOURCES for name in source.names} - with_heads


@pytest.mark.parametrize(("t", "cells"), [(1, "f32"), (4, "f32"), (70, "f32"), (70, "f16")])
def test_tiles_that_are_hidden_are_not_read(t, cells):
    """A causal mask over a long cache: keys behind the last token, and before the window, may hold anything."""
    keys, window, last = 640, 100, 300
    c = case(t, 1, 1, keys, 64, mask="", cells=cells)
    units = generate_random_operands(c)
    distance = last - t + 1 + np.arange(t)[:, None] - np.arange(keys)
    units["mask"] = np.where((distance >= 0) & (distance < window), 0.0, -np.inf)
    want = attention.reference(*units.values(), scale=c.attributes_with_defaults["scale"])
    dirty = {**units, "k": units["k"].copy(), "v": units["v"].copy()}
    for x in (dirty["k"], dirty["v"]):
        x[384:] = x[:128] = np.nan
    backend = EmulatedBackend()
    (got,) = run_three_times_guarded(c, dirty, backend, backend.device(0))
    np.testing.assert_allclose(got, want, atol=3e-3 if cells == "f16" else 3e-6)


def test_numbers_of_any_size_keep_their_digits():
    """Keys and values that differ by powers of ten, as halves of powers of two for each row."""
    c = case(66, 1, 1, 70, 64)
    units = generate_random_operands(c)
    size = 10.0 ** np.random.default_rng(1).integers(-9, 9, (70, 1, 1))
    units["k"], units["v"] = units["k"] / size, units["v"] * size
    units = {name: x.astype(np.float32).astype(np.float64) for name, x in units.items()}
    want = attention.reference(*units.values(), scale=c.attributes_with_defaults["scale"])
    bound = attention.reference(units["q"], units["k"], np.abs(units["v"]), scale=c.attributes_with_defaults["scale"])
    (got,) = run_three_times_guarded(c, units, backend := EmulatedBackend(), backend.device(0))
    assert np.max(np.abs(got - want) / bound) < 2e-5  # of scores near 30, in float32


def test_shared_memory_fits_every_device():
    """Check the limit of devices without warpgroup products; other devices have more."""
    assert all(t.shared_bytes + 1024 <= (227 if t.uses_warpgroups else 99) * 1024 for t in binding.TILED_SOURCES)
