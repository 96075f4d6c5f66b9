"""Rotary position embedding (RoPE): pairs of elements of a head are rotated by angles that grow with the position."""

from __future__ import annotations

import math

import numpy as np

from ...graph.attrs import Attrs
from ...graph.errors import format_count
from ..declaration.attributes import float_attribute
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template

ROPE_MODES = ("normal", "neox")
"""Modes of `rope`."""
MULTI_MODES = ("mrope", "imrope", "vision")
"""Modes of `rope_multi`."""


def _check_rope(
    n_dims: int,
    d: int,
    mode: str,
    ext_factor: float,
    original_context: int,
    base: float,
    offset: int = 0,
    f: int | None = None,
    modes: tuple[str, ...] = ROPE_MODES,
    **_: object,
) -> str | None:
    if mode not in modes:
        return f"mode is {mode!r}; one of {', '.join(modes)}"
    if n_dims % 2 or not 0 <= n_dims <= d:
        return f"n_dims is {n_dims}; it must be even and at most the head size {d}"
    if offset % 2 or not 0 <= offset <= d - n_dims:
        return f"offset is {offset}; it must be even and at most {d - n_dims}, the dimensions without rotation"
    if not base > 0:
        return f"base is {base}; it must be positive"
    if ext_factor and original_context <= 0:
        return "original_context must be positive where ext_factor mixes angles (YaRN)"
    count = n_dims if mode == "vision" else n_dims // 2
    if f is not None and f < count:
        return f"factors has {format_count(f, 'entry', 'entries')}; there are {count} pairs"
    return None


@op(
    "x[..., t, h, *d], pos[..., t]: i32, factors[*f]? -> [..., t, h, d]",
    linear=("x",),
    inplace="x",
    check=_check_rope,
    flops=lambda t, h, d, **_: 3 * t * h * d,
    ranges={"pos": LegalRange(0, 1000), "factors": LegalRange(0.5, 8.0)},
    samples=(
        *expand_template(
            'x={x}[5,3,16], pos=i32[5], n_dims={n}, mode="{mode}"', x=("f32", "f16"), n=(16, 8), mode=ROPE_MODES
        ),
        "x=f32[2,5,3,16], pos=i32[2,5], factors=f32[8], n_dims=16, base=500000.0",
        *expand_template('x=f32[5,3,16], pos=i32[5], n_dims=8, offset={o}, mode="{mode}"', o=(2, 8), mode=ROPE_MODES),
        "x=f32[0,3,16], pos=i32[0], n_dims=0",
        "x=f32[5,3,16], pos=i32[5], n_dims=16, freq_scale=0.25, ext_factor=1.0, attn_factor=1.2, original_context=64",
        "x=f32[5,3,16], pos=i32[5], n_dims=16, freq_scale=0.25, ext_factor=1.0, original_context=64, truncate=false",
    ),
    errors=(
        ("x=f32[5,3,16], pos=i32[4], n_dims=16", "t is 5"),
        ("x=f32[5,3,16], pos=i32[5], n_dims=18", "at most the head size"),
        ("x=f32[5,3,16], pos=i32[5], factors=f32[3], n_dims=16", "factors has 3"),
        ("x=f32[5,3,16], pos=i32[5], n_dims=8, offset=10", "offset is 10"),
        ("x=f32[5,3,16], pos=i32[5], n_dims=8, offset=3", "must be even"),
        ('x=f32[5,3,16], pos=i32[5], n_dims=16, mode="glm"', "one of normal, neox"),
    ),
    signed_zeros=False,
)
def rope(
    x: Array,
    pos: Array,
    factors: Array | None = None,
    *,
    n_dims: int,
    mode: str = "normal",
    base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
    truncate: bool = True,
    offset: int = 0,
) -> Array:
    """Apply rotary position embedding: rotate pairs of elements of each head by angles that grow with the position.

    The angle of pair i is ``pos * base^(-2i/n_dims) * freq_scale / factors[i]``. Pairs are neighbours (2i, 2i+1) in
    mode ``normal`` and halves (i, i + n_dims/2) in mode ``neox``, counted from `offset`. `n_dims` elements are rotated.
    `ext_factor` > 0 mixes in unscaled angles and scales the magnitude (YaRN: Peng et al., 2023). `truncate` rounds the
    ends of the ramp between scaled and unscaled angles to whole pairs, as ggml does. ggml: ``ROPE``; Su et al., 2021.
    """
    half = n_dims // 2
    attrs: Attrs = {
        "base": base,
        "freq_scale": freq_scale,
        "ext_factor": ext_factor,
        "attn_factor": attn_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "original_context": original_context,
        "truncate": truncate,
    }
    inverse, magnitude = compute_rope_frequencies(half, attrs)
    if factors is not None:
        inverse = inverse / factors[:half]
    return _rotate_pairs_by_angles(
        x, pos[..., None] * inverse, magnitude, *make_rotary_pair_slices(n_dims, mode, offset)
    )


def make_rotary_pair_slices(n_dims: int, mode: str, offset: int = 0) -> tuple[slice, slice]:
    """Return two slices of the last axis: the first elements of all rotated pairs, and their second elements.

    Args:
        n_dims: number of rotated elements.
        mode: ``normal`` pairs neighbours; ``neox`` pairs element i with element ``i + n_dims / 2``.
        offset: first rotated element.
    """
    if mode == "normal":
        return slice(offset, offset + n_dims, 2), slice(offset + 1, offset + n_dims, 2)
    half = n_dims if mode == "vision" else n_dims // 2
    return slice(offset, offset + half), slice(offset + half, offset + 2 * half)


def _rotate_pairs_by_angles(x: Array, angle: Array, magnitude: float, low: slice, high: slice) -> Array:
    """Rotate the pairs of `x` by ``angle[..., t, pair]`` in radians, and multiply them by `magnitude`.

    Args:
        x: heads [..., tokens, heads, d].
        angle: angle of each token and pair in radians.
        magnitude: factor of rotated elements.
        low: slice of the first elements of the pairs.
        high: slice of the second elements of the pairs.
    """
    angle = angle[..., None, :]
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    out = x.copy()
    out[..., low] = x[..., low] * cos - x[..., high] * sin
    out[..., high] = x[..., low] * sin + x[..., high] * cos
    return out


def _check_multi_rope(
    sections: tuple[int, ...], n_dims: int, d: int, mode: str, offset: int, **rest: object
) -> str | None:
    if len(sections) != 4 or min(sections) < 0 or not any(sections[:3]):
        return f"sections is {sections}; it must be four numbers of pairs, one of the first three positive"
    if sum(sections) > d:
        return f"sections add up to {sum(sections)}, more than the head size {d}"
    if mode == "vision" and (2 * n_dims != d or offset or sum(sections) < n_dims):
        return f"mode vision rotates the whole head: n_dims must be {d // 2}, offset 0, sections add up to n_dims"
    return _check_rope(n_dims=n_dims, d=d, mode=mode, offset=offset, modes=MULTI_MODES, **rest)  # type: ignore[arg-type]  # sizes and attributes by name


@op(
    "x[..., t, h, *d], pos[..., 4, t]: i32, factors[*f]? -> [..., t, h, d]",
    linear=("x",),
    inplace="x",
    check=_check_multi_rope,
    flops=lambda t, h, d, **_: 3 * t * h * d,
    ranges={"pos": LegalRange(0, 1000), "factors": LegalRange(0.5, 8.0)},
    samples=(
        *expand_template(
            'x={x}[5,3,16], pos=i32[4,5], n_dims={n}, sections={s}, mode="{mode}"',
            x=("f32", "f16"),
            n=(16, 8),
            s=((3, 3, 2, 0), (4, 2, 1, 1), (1, 1, 1, 0)),
            mode=("mrope", "imrope"),
        ),
        *expand_template(
            'x=f32[2,5,1,16], pos=i32[2,4,5], n_dims=8, sections={s}, mode="vision"', s=((4, 4, 0, 0), (2, 3, 2, 1))
        ),
        "x=f32[2,5,3,18], pos=i32[2,4,5], factors=f32[9], n_dims=16, sections=(4,2,2,0), offset=2, base=500000.0",
        "x=f32[3,2,16], pos=i32[4,3], factors=f32[8], n_dims=8, sections=(4,4,0,0), ext_factor=1.0, freq_scale=0.25,"
        ' original_context=64, mode="vision"',
        "x=f32[0,3,16], pos=i32[4,0], n_dims=16, sections=(4,4,0,0)",
    ),
    errors=(
        ("x=f32[5,3,16], pos=i32[5,4], n_dims=16, sections=(3,3,2,0)", "it must be 4"),
        ("x=f32[5,3,16], pos=i32[4,5], n_dims=16, sections=(3,3,2)", "must be four numbers"),
        ("x=f32[5,3,16], pos=i32[4,5], n_dims=16, sections=(0,0,0,8)", "one of the first three"),
        ('x=f32[5,3,16], pos=i32[4,5], n_dims=16, sections=(3,3,2,0), mode="neox"', "one of mrope, imrope, vision"),
        ('x=f32[5,3,16], pos=i32[4,5], n_dims=16, sections=(8,8,0,0), mode="vision"', "n_dims must be 8"),
    ),
    signed_zeros=False,
)
def rope_multi(
    x: Array,
    pos: Array,
    factors: Array | None = None,
    *,
    n_dims: int,
    sections: tuple[int, ...],
    mode: str = "mrope",
    base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 0,
    truncate: bool = True,
    offset: int = 0,
) -> Array:
    """Apply rotary position embedding with four positions per token: time, height, width and a further one.

    They are ``pos[0]`` to ``pos[3]``. Pairs are halves, as in mode ``neox`` of `rope`. `mode` assigns a position to
    each pair:

    * ``mrope``: the first ``sections[0]`` pairs have the time, the next ``sections[1]`` the height, and so on; after
      the last section the sections repeat.
    * ``imrope``: pairs 3i, 3i + 1 and 3i + 2 have time, height and width, each up to the size of its section.
    * ``vision``: as ``mrope``, on the whole head, with n_dims half of it; the angles start again in each section.

    ggml: ``ROPE`` (``ggml_rope_multi``); Wang et al., 2024.
    """
    attrs: Attrs = {
        "base": base,
        "freq_scale": freq_scale,
        "ext_factor": ext_factor,
        "attn_factor": attn_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "original_context": original_context,
        "truncate": truncate,
    }
    plane, index = map_pairs_to_positions_and_frequencies(n_dims if mode == "vision" else n_dims // 2, sections, mode)
    inverse, magnitude = compute_rope_frequencies(n_dims // 2, attrs, index)
    if factors is not None:
        inverse = inverse / factors[: len(plane)]
    angle = np.swapaxes(np.take(pos, plane, axis=-2), -1, -2) * inverse
    return _rotate_pairs_by_angles(x, angle, magnitude, *make_rotary_pair_slices(n_dims, mode, offset))


def map_pairs_to_positions_and_frequencies(count: int, sections: tuple[int, ...], mode: str) -> tuple[Array, Array]:
    """Assign to each rotary pair of `rope_multi` one of its four positions and one frequency.

    Args:
        count: number of pairs.
        sections: number of pairs of each position.
        mode: assignment of positions, as in `rope_multi`.

    Returns:
        For each pair, the index of its position (0 to 3); and for each pair, the index of its frequency.
    """
    pair = np.arange(count)
    sector = pair % sum(sections)
    ends = np.cumsum(sections)
    plane = np.searchsorted(ends, sector, side="right")
    if mode == "imrope":
        plane = sector % 3
        return np.where(sector < 3 * np.take(sections, plane), plane, 3), pair
    return plane, sector - (ends - sections)[plane] if mode == "vision" else pair


def compute_rope_frequencies(half: int, attrs: Attrs, index: Array | None = None) -> tuple[Array, float]:
    """Compute the rotary frequency of each pair, and the magnitude, which is the factor of cosine and sine.

    Args:
        half: number of frequencies.
        attrs: attributes of `rope`.
        index: index of the frequency of each pair; 0 to ``half - 1`` by default.

    Returns:
        Angles in radians per position, float64 [pairs], before the division by `factors`; and the magnitude.
    """
    base, scale, mix = (float(float_attribute(attrs, k)) for k in ("base", "freq_scale", "ext_factor"))
    magnitude = float(float_attribute(attrs, "attn_factor"))
    index = np.arange(half) if index is None else index
    inverse = base ** (-index / max(1, half))
    if not mix:
        return inverse * scale, magnitude
    share = mix * _compute_yarn_ramp(len(index), half, base, attrs)
    return inverse * (scale * (1 - share) + share), magnitude * (1.0 + 0.1 * math.log(1.0 / scale))


def _compute_yarn_ramp(count: int, half: int, base: float, attrs: Attrs) -> Array:
    """Compute for each pair the weight of the unscaled angle in YaRN, from 0 to 1.

    Pairs that rotate fast have weight 1, and pairs that rotate slowly have 0. A linear ramp lies between.
    """
    context, fast, slow = (float(float_attribute(attrs, k)) for k in ("original_context", "beta_fast", "beta_slow"))

    def pair(rotations: float) -> float:
        return half * math.log(context / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair(fast), pair(slow)
    if attrs["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(2 * half - 1.0, high)
    return 1.0 - np.clip((np.arange(count) - low) / max(0.001, high - low), 0.0, 1.0)
