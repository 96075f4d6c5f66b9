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


def compile_for_cpu(function):
    import torch

    from hocket.frontends.torch.dynamo import compiled

    torch._dynamo.reset()
    return torch.compile(function, backend=compiled, options={"devices": "cpu:0"})


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

    def copy_operands():
        operands = (sample.input, sample.args, sample.kwargs)
        return torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, operands)

    def call(first, args, kwargs):
        return function(first, *args, **kwargs)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = call(*copy_operands())
        try:
            result = compile_for_cpu(call)(*copy_operands())
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
        except Exception as why:
            return f"{type(why).__name__}: {why}".partition("\n")[0]
    return None


@pytest.mark.long
@pytest.mark.nightly(cases=PARTS)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("seed", range(5))
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


CALLS = {
    "norms": lambda x, n, i: [torch_norm(x, p) for p in (0, 0.5, 1, 1.5, 3, -1, -2.5, float("inf"), -float("inf"))],
    "masked": lambda x, n, i: (
        import_masked().norm(x, 3.0, 1, mask=x > 0),
        import_masked().normalize(x, 1.5, 1, mask=x > 0),
        import_masked().logsumexp(x, 1, mask=x > 9),
    ),
    "no axes": lambda x, n, i: (
        n.sort(),
        n.topk(1),
        n.scatter(0, i, n),
        n.scatter_add(0, i, n),
        n.index_select(0, i),
        n.index_add(0, i, n),
        n.index_copy(0, i, n),
        x.index_select(1, i),
        x.log_softmax(1),
    ),
    "second and third results": lambda x, n, i: (
        torch_op("native_layer_norm")(x, [6], None, None, 1e-5),
        torch_op("max_pool2d_with_indices")(x[None], [2, 2]),
    ),
    "order of ties": lambda x, n, i: (
        (x.flatten() > 0).long().repeat(9).argsort(),
        (x.flatten() > 0).long().repeat(9).sort(descending=True).indices,
        (x.flatten() > 0).long().repeat(9).argsort(stable=True),
        x.flatten().repeat(9).sort().values,
    ),
}
"""Calls of x [4, 6], n and i without axes."""


def torch_norm(x, power):
    import torch

    return torch.linalg.vector_norm(x, power, 1)


def torch_op(name):
    import torch

    return getattr(torch.ops.aten, name)


def import_masked():
    import torch

    return torch.masked


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_calls_give_the_results_of_pytorch(name):
    import torch

    torch.manual_seed(0)
    args = torch.randn(4, 6), torch.tensor(2.5), torch.tensor(0)
    with torch.no_grad():
        ours, theirs = compile_for_cpu(CALLS[name])(*args), CALLS[name](*args)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, check_stride=False)


@pytest.mark.long
def test_only_an_unstable_sort_with_places_is_left_to_pytorch(recwarn):
    import torch

    x = torch.randint(0, 3, (40,)).float()
    with torch.no_grad():
        compile_for_cpu(lambda x: (x.sort().values, x.sort(stable=True).indices, x[:16].argsort()))(x)
        assert not [w for w in recwarn if "PyTorch runs" in str(w.message)]
        with pytest.warns(UserWarning, match=r"has no row for: aten\.argsort\.default \(1\)"):
            compile_for_cpu(lambda x: x.argsort())(x)
