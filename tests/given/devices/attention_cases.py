"""Conformance cases of attention on CUDA, and the errors that their results may have."""

from __future__ import annotations

from hocket.backends.cupy.kernels.attention import attention as binding
from hocket.conformance.cases.case import parse_test_case

TOLERANCE = 5e-12
"""Of the worst row, in the normalised mean square: errors of 2e-6.  Products of halves alone are off by 1e-4."""
ROUNDED = {"f16": 1e-6, "bf16": 6e-5}
"""Where queries and weights become such cells."""


def allowed_nmse(case):
    many = case.specs["q"].shape[-3] * case.specs["q"].shape[-2] // case.specs["k"].shape[-2] >= binding.MIN_TILED_ROWS
    short = case.specs["k"].shape[-1] <= 256 and case.specs["v"].shape[-1] <= 256
    return ROUNDED.get(str(case.specs["k"].dtype), TOLERANCE) if many and short else TOLERANCE


def case(t, h, g, s, d, e=None, rest="", ahead="", mask=None, inputs="normal", layout="contiguous", cells="f32"):
    """A case over `t` tokens, `h` heads for each of `g` key heads, `s` keys of size `d`, values of size `e`."""
    specs = [f"q=f32[{ahead}{t},{h * g},{d}]", f"k={cells}[{ahead}{s},{g},{d}]", f"v={cells}[{ahead}{s},{g},{e or d}]"]
    specs += [f"mask=f32[{mask}{t},{s}]"] if mask is not None else []
    return parse_test_case(
        f"attention({', '.join(specs)}, scale={d**-0.5:.4f}{rest and ', ' + rest}, layout={layout}, inputs={inputs})"
    )
