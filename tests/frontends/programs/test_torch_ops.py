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

    from hocket.frontends.torch.dynamo import compile_graph

    torch._dynamo.reset()
    return torch.compile(function, backend=compile_graph, options={"devices": "cpu:0"})


def sample_of(op, seed):
    """A sample of the op for a seed; each seed takes one from another fifth of the samples."""
    import torch

    types = [t for t in (torch.float32, torch.int64, torch.bool) if t in op.supported_dtypes("cpu")]
    torch.manual_seed(seed)
    samples = list(op.sample_inputs("cpu", types[0])) if types else []
    return samples[seed * len(samples) // 5] if samples else None


def copy_tensor(x):
    """Copy a tensor with all of its storage, which ops such as `as_strided` read beyond a view."""
    import torch

    whole = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(whole, x.storage_offset(), x.shape, x.stride())


def problem_of(function, sample):
    """Describe the error or the wrong result in one line; None if the result is right."""
    import torch

    def copy_operands():
        operands = (sample.input, sample.args, sample.kwargs)
        return torch.utils._pytree.tree_map(lambda t: copy_tensor(t) if isinstance(t, torch.Tensor) else t, operands)

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
@pytest.mark.nightly(cases=6)
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


@pytest.mark.long
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
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_is_larger_than_infinity_in_sorts_of_both_orders(axis):
    import torch

    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, 1.0, inf, -0.0, 0.0, nan, -inf, 1.0, 2.0]).repeat(7)[:60].reshape(6, 10)

    def sort_and_select(x):
        down, up = (torch.sort(x, dim=axis, descending=descending, stable=True) for descending in (True, False))
        largest, smallest = (torch.topk(x, 4, dim=axis, largest=is_largest).values for is_largest in (True, False))
        return *down, *up, largest, smallest

    for dtype in (torch.float32, torch.float16, torch.float64):
        got, want = (call(x.to(dtype)) for call in (compile_for_cpu(sort_and_select), sort_and_select))
        assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(got, want, strict=True))


@pytest.mark.long
def test_only_an_unstable_sort_with_places_is_left_to_pytorch(recwarn):
    import torch

    x = torch.randint(0, 3, (40,)).float()
    with torch.no_grad():
        compile_for_cpu(lambda x: (x.sort().values, x.sort(stable=True).indices, x[:16].argsort()))(x)
        assert not [w for w in recwarn if "PyTorch runs" in str(w.message)]
        with pytest.warns(UserWarning, match=r"has no row for: aten\.argsort\.default \(1\)"):
            compile_for_cpu(lambda x: x.argsort())(x)


def assert_hocket_gives_the_results_of_pytorch(function, *args):
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*degrees of freedom")
        warnings.filterwarnings("error", message="PyTorch runs")
        ours, theirs = compile_for_cpu(function)(*args), function(*args)
    torch.testing.assert_close(ours, theirs, equal_nan=True, check_stride=False)


def variances(x):
    """The variance of x [6] or [] by each overload, with degrees of freedom and without."""
    import torch

    return (
        [f(x, unbiased) for f in (torch.var, torch.std, torch.var_mean, torch.std_mean) for unbiased in (False, True)],
        [f(x, dim, False, True) for f in (torch.var, torch.var_mean, torch.std_mean) for dim in (0, [0], [])],
        [torch.var_mean(x, dim, correction=c) for dim in (None, 0) for c in (None, 0, 0.5, 1, 6, 7, -1)],
        torch.var_mean(x),
        torch.std(x, 0, correction=7),
    )


@pytest.mark.long
@pytest.mark.parametrize("shape", [(6,), (0,), ()], ids=str)
def test_variances_of_all_overloads_and_degrees_of_freedom_are_those_of_pytorch(shape):
    import torch

    torch.manual_seed(0)
    assert_hocket_gives_the_results_of_pytorch(variances, torch.randn(shape))


@pytest.mark.long
def test_variances_of_equal_entries_and_along_empty_axes_are_those_of_pytorch():
    import torch

    def compute(same, empty):
        return variances(same), [(x.mean(axis), x.var(axis)) for x in (empty, empty.t()) for axis in (0, 1)]

    assert_hocket_gives_the_results_of_pytorch(compute, torch.full((6,), 0.5), torch.zeros(0, 3))


@pytest.mark.long
def test_a_softmax_of_a_row_that_is_masked_completely_is_nan_and_a_safe_softmax_is_zero():
    import torch

    inf = float("inf")
    x = torch.tensor([[1, 2, 3], [-inf] * 3, [-inf, 1, 2], [inf, 1, 2], [inf, -inf, 1], [float("nan"), 1, 2]])

    def compute(x, low, empty):
        return (
            [f(y, axis) for f in (torch.softmax, torch.log_softmax) for y in (x, -x, x.half()) for axis in (0, 1)],
            [torch.masked.softmax(x, axis, mask=x > 1) for axis in (0, 1)],
            [torch.masked.softmin(x, axis, mask=x > 1) for axis in (0, 1)],
            [torch_op("_safe_softmax")(y, 0) for y in (x, low)],
            [f(y, 0) for f in (torch.softmax, torch.log_softmax) for y in (low, -low, low.exp())],
            [empty.softmax(axis) for axis in (0, 1)],
        )

    assert_hocket_gives_the_results_of_pytorch(compute, x, torch.tensor(-inf), torch.zeros(0, 3))


@pytest.mark.long
def test_reductions_compute_in_the_type_of_their_result():
    import torch

    def compute(x, i):
        import torch

        return (
            [f(1, dtype=torch.int64) for f in (x.sum, x.prod, x.cumsum, x.cumprod)],
            [i.prod(), i.prod(1), i.cumprod(1), i.cumsum(1), i.sum(1), i.to(torch.int8).cumprod(1)],
            [f(1, dtype=torch.float32) for f in (i.long().prod, i.long().cumprod, i.mean)],
            (x - x.flip(1)).sum(1, dtype=torch.bool),
        )

    x = torch.tensor([[0.5, 0.75, 2.5], [1.5, -2.5, 0.0]])
    i = torch.tensor([[2**30, 2**30, 2**30], [7, -3, 2]], dtype=torch.int32)
    assert_hocket_gives_the_results_of_pytorch(compute, x, i)


@pytest.mark.long
@pytest.mark.parametrize("op", ["as_strided", "as_strided_copy", "as_strided_scatter"])
def test_an_op_that_reads_the_memory_of_a_result_is_left_to_pytorch_with_its_graph(op):
    import torch

    source = [torch.zeros(2, 2)] if op == "as_strided_scatter" else []

    def compute(x):
        return torch_op(op)((x + 1).t(), *source, (2, 2), (1, 2)) * 2

    x = torch.arange(6.0).reshape(2, 3)
    with torch.no_grad(), pytest.warns(UserWarning, match=f"this graph itself.*{op}.* reads the memory of a result"):
        assert torch.equal(compile_for_cpu(compute)(x), compute(x))


def test_a_copy_of_an_operand_has_the_storage_beyond_its_view():
    import torch

    view = torch.arange(8.0).reshape(2, 4)[:, 1:3].t()
    ours, theirs = (torch.as_strided(x, (2, 3), (4, 1)) for x in (copy_tensor(view), view))
    assert torch.equal(ours, theirs)
    assert ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
