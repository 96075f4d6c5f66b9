"""PyTorch's own samples of its ops through the backend of `torch.compile`: right, or run by PyTorch with a warning."""

from __future__ import annotations

import importlib.util
import re
import warnings

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]

PARTS = 24
"""Cases of a seed; each takes every 24th op."""
LEFT_OUT = re.compile(
    r"jiterator|rand|normal$|bernoulli|multinomial|dropout|rrelu|exponential|cauchy|geometric|uniform|empty"
    r"|complex|polar|view_as_real|fft|stft|sparse"
    r"|linalg\.(?!norm|vector_norm)|svd|pca|geqrf|ormqr|cholesky|^lu|pinverse|lobpcg"
)
"""Ops of GPUs alone, by chance, of complex numbers, of sparse tensors, and of linear algebra."""


def sample_of(op, seed):
    """A sample of the op for a seed; each seed takes one from another fifth of the samples."""
    import torch

    types = [t for t in (torch.float32, torch.int64, torch.bool) if t in op.supported_dtypes("cpu")]
    torch.manual_seed(seed)
    samples = list(op.sample_inputs("cpu", types[0])) if types else []
    return samples[seed * len(samples) // 5] if samples else None


def problem_of(function, sample):
    """Describe the error or the wrong result in one line; None if the result is right."""
    import torch

    from hocket.frontends.torch.dynamo import compiled

    def copy_operands():
        operands = (sample.input, sample.args, sample.kwargs)
        return torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, operands)

    def call(first, args, kwargs):
        return function(first, *args, **kwargs)

    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = call(*copy_operands())
        try:
            result = torch.compile(call, backend=compiled, options={"devices": "cpu:0"})(*copy_operands())
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
        except Exception as why:
            return f"{type(why).__name__}: {why}".partition("\n")[0]
    return None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("part", range(PARTS))
def test_samples_of_all_ops_are_right_or_run_by_pytorch(seed, part):
    pytest.importorskip("expecttest", reason="expecttest is not installed")
    from torch.testing._internal.common_methods_invocations import op_db

    ops = {(op.name, op.variant_test_name): op for op in op_db if not LEFT_OUT.search(op.name)}
    problems = {}
    for name in sorted(ops)[part::PARTS]:
        sample = sample_of(ops[name], seed)
        if sample is not None and (problem := problem_of(ops[name].op, sample)):
            problems[name] = problem
    assert problems == {}


def test_cases_have_ops():
    pytest.importorskip("expecttest", reason="expecttest is not installed")
    from torch.testing._internal.common_methods_invocations import op_db

    assert sum(not LEFT_OUT.search(op.name) for op in op_db) > 10 * PARTS
