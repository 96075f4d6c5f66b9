"""Names of NumPy and PyTorch lead to ops of hocket."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.ops.other_names import OPS_BY_OTHER_NAME
from hocket.ops.page import build_op_reference
from hocket.ops.registry import BUILTIN_OPS


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("matmul", "; did you mean mul_mat"),
        ("conv2d", "; did you mean convolution"),
        ("stack", "; use reshape, then concat"),
        ("sofmax", "; did you mean softmax"),
        ("qqq", "; `hocket ops` lists all"),
    ],
)
def test_an_unknown_name_leads_to_an_op(name: str, words: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(ops, name)
    assert str(caught.value) == f"there is no op {name!r}{words}"


def test_other_names_lead_to_ops_and_are_none_themselves() -> None:
    known = BUILTIN_OPS.keys() | ops.COMPOSITE_OPS.keys()
    assert not known & OPS_BY_OTHER_NAME.keys()
    assert {op for found in OPS_BY_OTHER_NAME.values() for op in found} <= known


SAME_RESULT = {
    "clip": (lambda x: ops.clamp(x, min=-0.5, max=0.5), lambda x: np.clip(x, -0.5, 0.5)),
    "layer_norm": (
        lambda x: ops.norm(x, eps=1e-5),
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    ),
    "cumprod": (lambda x: ops.accumulate(x, kind="prod"), lambda x: np.cumprod(x, -1)),
    "amax": (lambda x: ops.reduce(x, kind="max"), lambda x: x.max(-1, keepdims=True)),
    "sort": (lambda x: ops.gather(x, ops.argsort(x)), lambda x: np.sort(x, -1)),
    "take_along_axis": (
        lambda x: ops.gather(x, ops.argsort(x)),
        lambda x: np.take_along_axis(x, np.argsort(x, -1), -1),
    ),
}
"""The ops of some names, applied in the order of the table, and NumPy's result."""


@pytest.mark.parametrize("name", SAME_RESULT)
def test_the_ops_of_a_name_compute_what_numpy_computes(name: str) -> None:
    import hocket

    build, expected = SAME_RESULT[name]
    data = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    graph = hocket.Graph({"y": build(hocket.input("x", data.shape))})
    assert {node.op for node in graph.nodes} >= set(OPS_BY_OTHER_NAME[name])
    result = hocket.run(graph, {"x": data}, {}, devices="numpy:0")["y"]
    assert np.allclose(result, expected(data), atol=1e-5)


def test_the_op_reference_lists_every_op_in_one_family() -> None:
    families = build_op_reference().partition("## Families")[2].partition("## Names of NumPy")[0]
    assert [families.count(f"[{name}](#{name})") for name in BUILTIN_OPS] == [1] * len(BUILTIN_OPS)
