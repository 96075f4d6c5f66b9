"""Results of captured graphs share memory with arguments and with each other, as in eager PyTorch.

Code after a graph break changes a tensor in place, and reads the change through another tensor.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of its own deprecations
]


def break_graph():
    import torch

    torch._dynamo.graph_break()


def change_view_of_argument(x):
    view = x[1:, ::2]
    total = x.sum()
    break_graph()
    view.mul_(3)
    return x + total, view


def change_transposed_argument(x):
    view = x.t().reshape(2, 3, 4)
    total = x.sum()
    break_graph()
    view.add_(1)
    return x * total, view.sum(0)


def change_copy_of_argument(x):
    copy = x.t().reshape(24)
    total = x.sum()
    break_graph()
    copy.add_(1)
    return x * total, copy


def change_result_of_update(x):
    same = x.add_(1)
    row = x[0]
    break_graph()
    same.mul_(2)
    row.add_(5)
    return x * 1, row


def change_view_of_result(x):
    hidden = torch_relu(x) + 1
    row, column = hidden[1], hidden[:, 2:4]
    break_graph()
    row.mul_(2)
    column.add_(1)
    return hidden * 1, row, column


def change_changed_view(x):
    hidden = x + 1
    row = hidden[0]
    row.mul_(2)
    break_graph()
    row.sub_(3)
    return hidden * 1, row


def change_parts(x):
    first, second = (x * 2).chunk(2, dim=-1)
    transposed = first.t()
    break_graph()
    transposed.mul_(2)
    second.add_(1)
    return first + second, transposed


def change_base_of_repeated_rows(x):
    hidden = x + 1
    rows = hidden[:1].expand(3, -1)
    break_graph()
    hidden.mul_(2)
    return rows * 1


def change_before_op_without_row(x):
    hidden = torch_op("special_i1")(x) + 1
    row = hidden[0]
    break_graph()
    row.mul_(2)
    return hidden * 1


def torch_relu(x):
    import torch

    return torch.relu(x)


def torch_op(name):
    import torch

    return getattr(torch.ops.aten, name)


CASES = (
    *(change_view_of_argument, change_transposed_argument, change_copy_of_argument, change_result_of_update),
    *(change_view_of_result, change_changed_view, change_parts, change_base_of_repeated_rows),
    change_before_op_without_row,
)


@pytest.mark.long(cases=3)
@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        pytest.param(function, dynamic, marks=[pytest.mark.nightly(cases=0)] if (number + bool(dynamic)) % 2 else [])
        for number, function in enumerate(CASES)
        for dynamic in (None, True)
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_change_after_a_graph_break_is_seen_through_other_tensors(function, dynamic):
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    torch._dynamo.reset()
    torch.manual_seed(0)
    call = torch.compile(function, backend=compile_graph, options={"devices": "cpu:0"}, dynamic=dynamic)
    whole = torch.randn(6, 8)
    for mine in (torch.randn(4, 6), whole.t()[1:5], torch.randn(4, 6)):
        other = mine.clone() if mine.is_contiguous() else whole.clone().t()[1:5]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="PyTorch runs this graph itself: (?!it changes)")
            ours, theirs = call(mine), function(other)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_view_of_the_storage_does_not_depend_on_the_first_entry_of_its_operand():
    import torch

    from hocket.frontends.torch.dynamo import compile_graph

    def view_storage(x):
        return torch.as_strided(x, (2, 2), (1, 2), 1), x + 1

    torch._dynamo.reset()
    call = torch.compile(view_storage, backend=compile_graph, options={"devices": "cpu:0"})
    for first in (4, 6, 0):
        x = torch.arange(20.0)[first : first + 8]
        with torch.no_grad():
            view = call(x)[0]
        assert view.tolist() == [[1, 3], [2, 4]]
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.long
def test_results_share_memory_only_where_they_do_in_pytorch():
    import torch

    from hocket.frontends.torch.result_aliases import find_result_aliases, may_share_memory

    def compute(x, y):
        hidden = x + y
        return hidden, hidden[0], x[:2], y, hidden * 2

    graph = torch.fx.symbolic_trace(compute)
    assert may_share_memory(graph)
    aliases = find_result_aliases(graph, (torch.randn(4, 6), torch.randn(4, 6)))
    assert aliases.argument_by_result == {3: 1}
    assert list(aliases.argument_views) == [2]
    assert [list(group) for group in aliases.groups] == [[0, 1]]
    assert not find_result_aliases(torch.fx.symbolic_trace(lambda x: x + 1), (torch.randn(2),))
