"""Attention on emulated devices: cases, their permitted errors, and kernels that a device would not choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from hocket.backends.cupy.device.device_limits import LARGEST_LIMITS, UnmeasuredKernelCandidate
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.attention import attention
from hocket.backends.cupy.trial_binding import compute_scratch_bytes_at_placeholders
from hocket.conformance.cases.case import parse_test_case

TOLERANCE = 5e-12
"""Of the worst row, in the normalised mean square: errors of 2e-6.  Products of halves alone are off by 1e-4."""
ROUNDED = {"f16": 1e-6, "bf16": 6e-5}
"""Where queries and weights become such cells."""
CANDIDATE_LIMITS = replace(LARGEST_LIMITS, candidates=frozenset(UnmeasuredKernelCandidate))
"""Limits of a device that uses all candidates."""


@contextmanager
def by_warps() -> Iterator[None]:
    """Many rows meet keys and values by products of single warps."""
    compute_scratch_bytes_at_placeholders.cache_clear()  # it knows how much scratch other kernels take
    kinds = {kind: source for kind, source in attention.TILED_SOURCES.items() if not kind.uses_warpgroups}
    try:
        with patch.object(attention, "TILED_SOURCES", kinds):
            yield
    finally:
        compute_scratch_bytes_at_placeholders.cache_clear()


@contextmanager
def by_candidates() -> Iterator[None]:
    """Emulated devices use all candidates."""
    with patch.object(EmulatedDriver, "limits", lambda self, on: CANDIDATE_LIMITS):
        yield


def allowed_nmse(case):
    rows = case.specs["q"].shape[-3] * case.specs["q"].shape[-2] // case.specs["k"].shape[-2]
    short = case.specs["k"].shape[-1] <= 256 and case.specs["v"].shape[-1] <= 256
    is_rounded = rows >= attention.MIN_TILED_ROWS and short
    return ROUNDED.get(str(case.specs["k"].dtype), TOLERANCE) if is_rounded else TOLERANCE


def case(t, h, g, s, d, e=None, rest="", ahead="", mask=None, inputs="normal", layout="contiguous", cells="f32"):
    """A case over `t` tokens, `h` heads for each of `g` key heads, `s` keys of size `d`, values of size `e`."""
    specs = [f"q=f32[{ahead}{t},{h * g},{d}]", f"k={cells}[{ahead}{s},{g},{d}]", f"v={cells}[{ahead}{s},{g},{e or d}]"]
    specs += [f"mask=f32[{mask}{t},{s}]"] if mask is not None else []
    return parse_test_case(
        f"attention({', '.join(specs)}, scale={d**-0.5:.4f}{rest and ', ' + rest}, layout={layout}, inputs={inputs})"
    )
