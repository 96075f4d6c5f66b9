"""Triangular and diagonal matrices in the last two axes."""

from __future__ import annotations

import numpy as np

from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template


@op(
    "x[..., *t, *n] -> [..., t, n]",
    inplace="x",
    check=lambda n_past, **_: f"n_past is {n_past}; it must not be negative" if n_past < 0 else None,
    samples=(
        *expand_template("x=f32[{shape}], n_past={n}", shape=("5,5", "3,8", "2,3,7,4"), n=(0, 1, 5)),
        *("x=f16[4,4], n_past=0", "x=f32[0,3], n_past=0", "x=f32[1,1], n_past=0"),
    ),
    errors=(
        ("x=f32[5], n_past=0", "needs at least 2"),
        ("x=f32[3,3], n_past=-1", "must not be negative"),
        ("x=f32[3,3]", "n_past is missing"),
    ),
    is_required=False,
    compare="exact",
    infinite=("x",),
)
def diag_mask_inf(x: Array, *, n_past: int) -> Array:
    """Apply a causal mask: set ``x[row, column]`` to -inf where column > row + `n_past`. ggml: ``DIAG_MASK_INF``.

    Rows are the tokens after `n_past` earlier ones; columns are the tokens that they attend to.
    """
    row, column = np.ogrid[: x.shape[-2], : x.shape[-1]]
    return np.where(column > n_past + row, -np.inf, x)


_TRIANGLES = {
    "upper_diag": lambda x: np.triu(x),
    "upper": lambda x: np.triu(x, 1),
    "lower_diag": lambda x: np.tril(x),
    "lower": lambda x: np.tril(x, -1),
}


@op(
    dict.fromkeys(_TRIANGLES, "x[..., *n, *n] -> [..., n, n]"),
    signature_key="kind",
    linear=("x",),
    inplace="x",
    samples=(
        *expand_template('x=f32[{shape}], kind="{kind}"', shape=("5,5", "2,3,7,7", "1,1"), kind=tuple(_TRIANGLES)),
        *('x=f16[4,4], kind="lower"', 'x=f32[2,0,0], kind="upper"'),
    ),
    errors=(
        ('x=f32[3,4], kind="lower"', "n is 3"),
        ('x=f32[3,3], kind="left"', "one of upper_diag, upper"),
        ('x=f32[3], kind="lower"', "needs at least 2"),
    ),
    compare="exact",
    infinite=("x",),
)
def tri(x: Array, *, kind: str) -> Array:
    """Keep one triangle of each square matrix, and set the other entries to zero. ggml: ``TRI``.

    `kind` is ``upper_diag``, ``upper``, ``lower_diag`` or ``lower``; ``upper`` and ``lower`` exclude the diagonal.
    """
    return np.asarray(_TRIANGLES[kind](x))


@op(
    "x[..., *n] -> [..., n, n]",
    linear=("x",),
    flops=lambda **_: 0,
    samples=("x=f32[7]", "x=f32[3,5]", "x=f16[2,3,4]", "x=f32[2,1]", "x=f32[2,0]"),
    errors=(("x=f32[]", "needs at least 1"), ("x=f32[1,1,1,1,3]", "rank 6"), ("x=i32[3]", "x is i32")),
    compare="exact",
)
def diag(x: Array) -> Array:
    """Build square matrices with the rows of `x` on their diagonals, and zeros elsewhere. ggml: ``DIAG``.

    ggml has a further axis of size 1.
    """
    return np.where(np.eye(x.shape[-1], dtype=bool), x[..., None], 0.0)


@op(
    "a[..., *n, *n], b[..., *n, m] -> [..., n, m]: f32",
    linear=("b",),
    flops=lambda n, m, **_: n * n * m,
    # The diagonal must not be 0, and a random triangle is ill-conditioned: one near c * ones is not.
    ranges={"a": LegalRange(0.9, 1.1)},
    samples=(
        *expand_template("a=f32[{n},{n}], b=f32[{n},{m}]", n=(1, 5), m=(1, 4)),
        *(
            "a=f32[2,3,7,7], b=f32[2,3,7,5]",
            "a=f32[33,33], b=f32[33,16]",
            "a=f32[3,3], b=f32[3,0]",
            "a=f32[2,0,0], b=f32[2,0,3]",
        ),
    ),
    errors=(
        ("a=f32[3,4], b=f32[4,2]", "n is 3"),
        ("a=f32[3,3], b=f32[4,2]", "n is 3"),
        ("a=f32[2,3,3], b=f32[3,2]", "leading axes"),
    ),
    signed_zeros=False,
)
def solve_tri(a: Array, b: Array) -> Array:
    """Solve the triangular system ``a x = b`` for x, with lower triangular `a`. ggml: ``SOLVE_TRI``.

    Entries of `a` above its diagonal are not read.
    """
    x = np.zeros(b.shape)
    for i in range(a.shape[-1]):
        known = np.einsum("...j,...jm->...m", a[..., i, :i], x[..., :i, :])
        x[..., i, :] = (b[..., i, :] - known) / a[..., i, i, None]
    return x
