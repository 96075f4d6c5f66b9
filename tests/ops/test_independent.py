"""References against implementations that others wrote, in float64: SciPy and, where it is installed, PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.ops import REGISTRY

from ..given.arrays import assert_elements_close

RNG = np.random.default_rng(7)
X = RNG.standard_normal((3, 5, 16)) * 2
EXTREME = np.concatenate([np.linspace(-40, 40, 321), [-1e-9, 0.0, 1e-9]])


def ref(name, *arrays, **attrs):
    op = REGISTRY[name]
    return op.run_reference(list(arrays), {**op.defaults, **attrs})[0]


# ------------------------------------------------------------------------------------------------------------ SciPy


def test_softmax_is_scipys():
    special = pytest.importorskip("scipy.special")
    assert_elements_close(ref("softmax", X, None, None, scale=0.7), special.softmax(X * 0.7, axis=-1), atol=1e-14)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sigmoid", lambda s, x: s.expit(x)),
        ("softplus", lambda s, x: np.where(x > -30, -s.log_expit(-x), np.exp(x))),
        ("silu", lambda s, x: x * s.expit(x)),
        ("expm1", lambda s, x: np.expm1(x)),
    ],
)
def test_an_activation_is_scipys(name, function):
    special = pytest.importorskip("scipy.special")
    assert_elements_close(ref(name, EXTREME), function(special, EXTREME), atol=1e-14)


def test_gelu_erf_is_scipys_normal_distribution():
    special = pytest.importorskip("scipy.special")
    assert_elements_close(ref("gelu_erf", EXTREME), EXTREME * special.ndtr(EXTREME), atol=1e-14)


def test_solve_tri_is_scipys():
    linalg = pytest.importorskip("scipy.linalg")
    a = np.tril(RNG.uniform(-0.3, 0.3, (6, 6)), -1) + np.diag(RNG.uniform(0.9, 1.1, 6))
    b = RNG.standard_normal((6, 4))
    assert_elements_close(ref("solve_tri", a, b), linalg.solve_triangular(a, b, lower=True), atol=1e-14)


@pytest.mark.long
def test_ssm_conv_is_scipys_correlation():
    signal = pytest.importorskip("scipy.signal")
    x, w = RNG.standard_normal((9, 4)), RNG.standard_normal((4, 3))
    assert_elements_close(
        ref("ssm_conv", x, w), np.stack([signal.correlate(x[:, c], w[c], "valid") for c in range(4)], -1), atol=1e-14
    )


# ---------------------------------------------------------------------------------------------------------- PyTorch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_pytorchs(torch, approximate):
    name = {"none": "gelu_erf", "tanh": "gelu"}[approximate]
    assert_elements_close(
        ref(name, EXTREME), torch.nn.functional.gelu(torch.tensor(EXTREME), approximate=approximate), atol=1e-14
    )


@pytest.mark.parametrize("name", ["elu", "relu", "softplus", "silu", "hardswish", "hardsigmoid"])
def test_an_activation_is_pytorchs(torch, name):
    options = {"threshold": 1e9} if name == "softplus" else {}
    assert_elements_close(
        ref(name, EXTREME), getattr(torch.nn.functional, name)(torch.tensor(EXTREME), **options), atol=1e-14
    )


def test_norms_are_pytorchs(torch):
    f, t = torch.nn.functional, torch.tensor(X)
    assert_elements_close(ref("norm", X, eps=1e-5), f.layer_norm(t, (16,), eps=1e-5), atol=1e-14)
    assert_elements_close(ref("rms_norm", X, eps=1e-5), f.rms_norm(t, (16,), eps=1e-5), atol=1e-14)
    assert_elements_close(ref("l2_norm", X, eps=1e-5, clamp=True), f.normalize(t, dim=-1, eps=1e-5), atol=1e-14)


def test_cumsum_argsort_and_topk_are_pytorchs(torch):
    t = torch.tensor(X)
    assert_elements_close(ref("cumsum", X), torch.cumsum(t, -1), atol=1e-14)
    assert_elements_close(ref("argsort", X), torch.argsort(t, dim=-1, stable=True), atol=1e-14)
    assert_elements_close(ref("top_k", X, k=4), torch.topk(t, 4).indices, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_pytorchs(torch, causal):
    q, k, v = RNG.standard_normal((6, 4, 8)), RNG.standard_normal((6, 2, 8)), RNG.standard_normal((6, 2, 12))
    mask = np.where(np.tri(6, dtype=bool), 0.0, -np.inf) if causal else None

    def heads(x):
        return torch.tensor(np.repeat(x, 4 // x.shape[1], axis=1)).transpose(0, 1)

    want = torch.nn.functional.scaled_dot_product_attention(
        heads(q), heads(k), heads(v), attn_mask=None if mask is None else torch.tensor(mask), scale=0.3
    )
    assert_elements_close(ref("attention", q, k, v, mask, None, scale=0.3), want.transpose(0, 1), atol=1e-14)


def test_a_quantity_of_matrices_is_pytorchs_product(torch):
    w, x = RNG.standard_normal((2, 5, 8)), RNG.standard_normal((4, 3, 8))
    want = torch.tensor(x) @ torch.tensor(np.repeat(w, 2, axis=0)).transpose(1, 2)
    assert_elements_close(ref("mul_mat", w, x), want, atol=1e-14)


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize(("bias", "occurrences", "token"), [([5.0, 0.0], None, 2), (None, [0, 1], 1), (None, None, 3)])
def test_a_token_is_sampled_by_biases_or_occurrences_alone(bias, occurrences, token):
    numbers = np.array([0.0, 1.0, 0.0, 1.0, 9.0, 0.0, 0.5]).view(np.int64)
    changes = (None if change is None else np.array(change) for change in (bias, occurrences))
    logits, tokens = np.array([1.0, 2.0, 1.0, 3.0]), np.array([0, 1, 2, 3])
    assert ref("sample_token", logits, tokens, np.array(4), numbers, *changes) == token
