"""ONNX models: ONNX's own node tests, a model on several devices, files from anywhere, refusals."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest

import hocket
from hocket.frontends.errors import ModelError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="onnx is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the onnx package, about its own numbers
]

RNG = np.random.default_rng(3)
W = RNG.standard_normal((32, 48)).astype(np.float32)
V = RNG.standard_normal((48, 16)).astype(np.float32)
X = RNG.standard_normal((6, 32)).astype(np.float32)


def nmse(ours, theirs):
    """The squared error over the square."""
    return float(np.sum((np.float64(ours) - theirs) ** 2) / np.sum(np.float64(theirs) ** 2))


def node(op, inputs, outputs, **attributes):
    from onnx import helper

    return helper.make_node(op, inputs.split(","), outputs.split(","), **attributes)


def model(nodes, outputs, *, inputs=None, weights=None, functions=(), opset=17):
    """A model of nodes; inputs and outputs by name with their shapes, weights by name."""
    from onnx import TensorProto, helper, numpy_helper

    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in named.items()]
        for named in (inputs or {"x": [6, 32]}, outputs)
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "g", *infos, initializer=initializers), opset_imports=opsets, functions=list(functions)
    )


def layers(rows=6):
    """Two layers and a shape that is computed, of a matrix of rows."""
    nodes = [
        node("Gemm", "x,w", "h"),
        node("Gelu", "h", "a"),
        node("MatMul", "a,v", "y"),
        node("Shape", "y", "s"),
        node("Gather", "s,zero", "n"),
        node("Unsqueeze", "n,zeros", "n1"),
        node("Concat", "n1,rest", "to", axis=0),
        node("Reshape", "y,to", "z"),
        node("Softmax", "z", "p"),
    ]
    weights = {
        "w": W, "v": V, "zero": np.asarray(0), "zeros": np.asarray([0]), "rest": np.asarray([4, -1]),
    }  # fmt: skip
    return model(nodes, {"p": [rows, 4, 4]}, inputs={"x": [rows, 32]}, weights=weights, opset=20)


def reference(proto, **inputs):
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(proto).run(None, inputs)


@pytest.mark.parametrize(
    ("devices", "options"), [("cpu:0", {}), ("cpu:0,cpu:1", {"split_mode": "tensor"})], ids=["one", "two"]
)
def test_a_model_is_what_onnx_says(devices, options):
    proto = layers()
    program = hocket.from_onnx(proto.SerializeToString())
    assert set(program.weights) == {"w", "v"}
    (got,) = program.on(devices, **options)(X)
    (expected,) = reference(proto, x=X)
    assert got.dtype == expected.dtype
    assert nmse(got, expected) < 1e-10


def test_shapes_that_vary_are_reported():
    proto = layers("rows")
    with pytest.raises(ModelError, match=r"varies, \[rows, 32\]; say it: shapes="):
        hocket.from_onnx(proto.SerializeToString())
    (got,) = hocket.from_onnx(proto.SerializeToString(), shapes={"x": (6, 32)}).on()(x=X)
    assert nmse(got, reference(proto, x=X)[0]) < 1e-10
    with pytest.raises(ModelError, match="the model says"):
        hocket.from_onnx(proto.SerializeToString(), shapes={"x": (6, 31)})


def test_a_branch_that_is_known_is_followed():
    from onnx import TensorProto, helper, numpy_helper

    def branch(op, name):
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [6, 32])
        own = [numpy_helper.from_array(W[:, :32], f"of_{name}")]
        return helper.make_graph([node(op, f"x,of_{name}", name)], name, [], [result], initializer=own)

    nodes = [
        node("Equal", "rate,wanted", "truth"),
        node("If", "truth", "y", then_branch=branch("MatMul", "a"), else_branch=branch("NoSuchOp", "b")),
    ]
    inputs = {"x": [6, 32], "rate": [1]}
    proto = model(nodes, {"y": [6, 32]}, inputs=inputs, weights={"wanted": np.ones(1, np.float32)})
    (y,) = hocket.from_onnx(proto.SerializeToString(), fixed={"rate": np.ones(1, np.float32)}).on()(x=X)
    assert nmse(y, X @ W[:, :32]) < 1e-10
    with pytest.raises(ModelError, match=r"no row for: NoSuchOp \(1\)"):
        hocket.from_onnx(proto.SerializeToString(), fixed={"rate": np.zeros(1, np.float32)})


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_recurrences_are_written_out(op):
    """ONNX's own reference has one direction for them, and no reset behind the product."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    weights = {
        "w": RNG.standard_normal((1, 5 * gates, 4)), "r": RNG.standard_normal((1, 5 * gates, 5)),
        "b": RNG.standard_normal((1, 10 * gates)),
    }  # fmt: skip
    outputs = {"y": [3, 1, 2, 5], "last": [1, 2, 5]}
    inputs = {name: array.astype(np.float32) for name, array in weights.items()}
    proto = model([node(op, "x,w,r,b", "y,last", hidden_size=5)], outputs, inputs={"x": [3, 2, 4]}, weights=inputs)
    x = RNG.standard_normal((3, 2, 4)).astype(np.float32)
    for ours, theirs in zip(hocket.from_onnx(proto.SerializeToString()).on()(x), reference(proto, x=x), strict=True):
        assert nmse(ours, theirs) < 1e-10


@pytest.fixture
def outside(tmp_path):
    """Return a model with weights in an external file, and a function that changes its entries about them."""
    import onnx

    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(layers(), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)

    def change_entries(**entries):
        proto = onnx.load(path, load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                entry.value = entries.get(entry.key, entry.value)
        path.write_bytes(proto.SerializeToString())
        return path

    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    (folder / "link").symlink_to(tmp_path / "secret")
    return change_entries


def test_weights_may_be_in_a_file_of_their_own(outside):
    from hocket.frontends.graph_file import read_graph

    path = outside()
    assert nmse(hocket.from_onnx(path).on()(X)[0], reference(layers(), x=X)[0]) < 1e-10
    assert [v.node.name for v in read_graph(str(path)).inputs] == ["x"]
    with pytest.raises(ModelError, match="give the model's path"):
        hocket.from_onnx(path.read_bytes())


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "../secret"}, {"location": "/etc/passwd"}, {"location": "link"}, {"location": "none"},
        {"location": ""}, {"offset": "-8"}, {"offset": str(1 << 62)}, {"offset": "x"}, {"length": "12"},
    ],
    ids=str,
)  # fmt: skip
def test_no_file_outside_the_folder_is_read(outside, entries):
    with pytest.raises(ModelError, match=r"^%[wv] (is in|says|has)[^\n]+$"):
        hocket.from_onnx(outside(**entries))


def hostile():
    """Return the bytes of wrong models with their error messages, by name."""
    from onnx import TensorProto, helper

    whole = layers().SerializeToString()
    contradictory, huge = layers(), layers()
    contradictory.graph.initializer[0].dims[0] = 33
    huge.graph.initializer[0].dims[0] = 1 << 60
    negative = layers()
    negative.graph.initializer[0].dims[0] = -32
    out = {"y": [6, 32]}
    cycle = model([node("Add", "x,b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")], out)
    twice = model([node("Relu", "x", "y"), node("Abs", "x", "y")], out)
    calls = [helper.make_node("f", ["x"], ["y"], domain="own")]
    itself = helper.make_function("own", "f", ["x"], ["y"], calls, [helper.make_opsetid("own", 1)])
    many = [
        helper.make_function(
            "own", f"f{i}", ["x"], ["y"],
            [helper.make_node(f"f{i - 1}" if i else "Relu", ["x"], ["y"], domain="own" if i else "") for _ in range(9)],
            [helper.make_opsetid("own", 1), helper.make_opsetid("", 17)],
        )
        for i in range(20)
    ]  # fmt: skip
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 32])])
    body = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    size = {"n": np.asarray([1 << 40, 1 << 20])}
    random = [node("RandomNormalLike", "x", "a"), node("Multinomial", "a", "b"), node("RandomNormalLike", "b", "y")]
    return {
        "no protobuf": (b"no model at all", "is no ONNX model"),
        "empty": (b"", "it has no graph"),
        "truncated": (whole[:-12], "only part of one"),
        "lying dims": (contradictory, "its data do not hold"),
        "huge dims": (huge, "its data do not hold"),
        "negative dims": (negative, "need numbers of entries"),
        "a cycle": (cycle, "reads %b before any node gives it, or in a cycle"),
        "given twice": (twice, "is given already"),
        "a function that calls itself": (model(calls, out, functions=[itself]), "calls itself"),
        "functions that grow": (model([helper.make_node("f19", ["x"], ["y"], domain="own")], out, functions=many),
                                r"nodes with its functions written out"),
        "control flow": (model([body], out), "If: which branch is taken depends on an input"),
        "no such branch": (model([helper.make_node("If", ["t"], ["y"])], out, weights={"t": np.asarray(True)}),
                           "the branch that is taken is missing"),
        "all missing ops": (model(random, out), r"RandomNormalLike \(2\), Multinomial \(1\)"),
        "a foreign domain": (model(calls, out), r"own\.f \(1\)"),
        "a huge constant": (model([node("ConstantOfShape", "n", "y")], out, weights=size), "need at most"),
        "a wrong attribute": (model([node("Relu", "x", "y", slope=2.0)], out), "Relu: .*slope"),
        "no such output": (model([node("Relu", "x", "z")], out), "an output that no node gives"),
    }  # fmt: skip


HOSTILE = (
    *("no protobuf", "empty", "truncated", "lying dims", "huge dims", "negative dims", "a cycle", "given twice"),
    *(
        "a function that calls itself",
        "functions that grow",
        "control flow",
        "no such branch",
        "all missing ops",
        "a foreign domain",
    ),
    *("a huge constant", "a wrong attribute", "no such output"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_model_is_one_line(name):
    proto, why = hostile()[name]
    data = proto if isinstance(proto, bytes) else proto.SerializeToString()
    with pytest.raises(ModelError, match=why) as raised:
        hocket.from_onnx(data)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("arguments", [{}, {"x": X[1:]}, {"x": X.astype(np.float64)}, {"x": X, "y": X}])
def test_a_wrong_call_is_one_line(arguments):
    program = hocket.from_onnx(model([node("Relu", "x", "y")], {"y": [6, 32]}).SerializeToString())
    with pytest.raises(ModelError, match=r"^[^\n]*the model takes[^\n]*$"):
        program.inputs(**arguments)


# ------------------------------------------------------------------------------------------- ONNX's own node tests

SETTINGS = {"scales", "roi", "start", "limit", "delta", "constant_value", "ratio"}
"""Float inputs that are settings of an op, not operands."""


INNER = re.compile(r"\n|\.cc:|Assertion|unexpected keyword|\bError\b")
"""Parts of errors of other packages, which a user cannot act on."""


def in_our_types(case):
    """Whether all inputs and outputs are tensors of static shapes in types that hocket has."""
    from onnx import helper

    from hocket.frontends.tensors.call_signature import DTYPES_BY_NAME

    for info in (*case.model.graph.input, *case.model.graph.output):
        kind = info.type.tensor_type
        if not info.type.HasField("tensor_type") or not all(d.HasField("dim_value") for d in kind.shape.dim):
            return False
        if np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name not in DTYPES_BY_NAME:
            return False
    return True


def verdict(case):
    """Return ``right``, ``fixed`` if small shape inputs had to be constants, ``refused``, or a description of the
    error.
    """
    from onnx import TensorProto, numpy_helper

    inputs, expected = (
        [numpy_helper.to_array(a) if isinstance(a, TensorProto) else np.asarray(a) for a in arrays]
        for arrays in case.data_sets[0]
    )
    arguments = dict(zip((info.name for info in case.model.graph.input), inputs, strict=False))
    fixed = {}
    try:
        try:
            program = hocket.from_onnx(case.model.SerializeToString())
        except ModelError as why:
            if "fixed={" not in str(why):
                raise
            fixed = {n: a for n, a in arguments.items() if a.ndim < 2 and (a.dtype.kind in "ib" or n in SETTINGS)}
            program = hocket.from_onnx(case.model.SerializeToString(), fixed=fixed)
    except ModelError as why:
        return f"an inner error: {why}" if INNER.search(str(why)) else "refused"
    got = program.on("cpu:0")(**{n: a for n, a in arguments.items() if n not in fixed})
    for ours, theirs in zip(got, expected, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{ours.dtype}{ours.shape} for {theirs.dtype}{theirs.shape}"
        rtol = {"float16": 1e-2, "bfloat16": 2e-2}.get(theirs.dtype.name, 1e-3)  # 1e-3 is the limit of onnx itself
        a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
        if not np.allclose(a, b, rtol, 1e-5 if rtol == 1e-3 else rtol / 10, equal_nan=True):
            return f"differs by {np.abs(a - b).max()}"
    return "fixed" if fixed else "right"


def test_an_op_that_onnx_cannot_write_out_is_named_with_its_node():
    """onnx 1.23 fails an assertion of its own where a function asks for the type of an absent input."""
    from onnx import TensorProto, helper

    shapes = {"q": [1, 2, 4, 8], "k": [1, 2, 6, 8], "v": [1, 2, 6, 8]}
    attend = helper.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], name="attend")
    wrong = model([attend], {"y": [1, 2, 4, 8]}, inputs=shapes, opset=24)
    wrong.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [1]))
    with pytest.raises(
        ModelError, match=r"^node 'attend': onnx does not write Attention out .* input 3; export [^\n]+$"
    ):
        hocket.from_onnx(wrong.SerializeToString())


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_of_blocks_is_ordered_as_the_mode_says(mode):
    from hocket.frontends.onnx.op_calls import space_to_depth
    from hocket.frontends.tensors.tensor import Tensor
    from hocket.graph import DType, Graph, input

    x = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
    y = space_to_depth(Tensor(input("x", x.shape, DType.F32), x.shape), blocksize=2, mode=mode)
    (result,) = hocket.load(hocket.plan(Graph({"y": y.value}), "numpy:0"), {}).run({"x": x}).values()
    blocks = x.reshape(2, 3, 2, 2, 2, 2)  # batch, channel, row, row in the block, column, column in the block
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    assert np.array_equal(result, blocks.transpose(order).reshape(2, 12, 2, 2))


def test_blocks_of_images_are_added_where_they_overlap():
    nodes = [node("Col2Im", "x,image,block", "y", pads=[1, 0, 0, 1], strides=[2, 1])]
    sizes = {"image": np.array([4, 3]), "block": np.array([3, 2])}
    proto = model(nodes, {"y": [2, 3, 4, 3]}, inputs={"x": [2, 18, 6]}, weights=sizes, opset=18)
    x = np.random.default_rng(1).standard_normal((2, 18, 6)).astype(np.float32)
    expected = np.zeros((2, 3, 5, 4))
    for number, entry in np.ndindex(6, 6):
        row, column = number // 3 * 2 + entry // 2, number % 3 + entry % 2
        expected[:, :, row, column] += x.reshape(2, 3, 6, 6)[:, :, entry, number]
    (got,) = hocket.from_onnx(proto.SerializeToString()).on("numpy:0")(x)
    assert np.allclose(got, expected[:, :, 1:, :3], atol=1e-6)


def test_a_softmax_of_a_row_of_infinities_alone_is_nan():
    proto = model([node("Softmax", "x", "y")], {"y": [4, 3]}, inputs={"x": [4, 3]})
    x = np.array([[1, 2, 3], [-np.inf] * 3, [-np.inf, 1, 2], [np.inf, 1, 2]], np.float32)
    (got,) = hocket.from_onnx(proto.SerializeToString()).on("cpu:0")(x)
    with np.errstate(invalid="ignore"):
        (expected,) = reference(proto, x=x)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.isnan(got).all(axis=1).tolist() == [False, True, False, True]


@cache
def list_node_cases():
    """List ONNX's own tests of nodes in our types: the first one of each set of ops, and the others."""
    from onnx.backend.test.case.node import collect_testcases

    cases, first = [case for case in collect_testcases(None) if in_our_types(case)], {}
    for case in cases:
        first.setdefault(frozenset(node.op_type for node in case.model.graph.node), case)
    chosen = [*first.values()]
    names = {case.name for case in chosen}
    return chosen, [case for case in cases if case.name not in names]


@pytest.mark.long
@pytest.mark.nightly(cases=1)
@pytest.mark.parametrize(("are_others", "min_count", "min_share"), [(False, 260, 0.83), (True, 1160, 0.85)])
def test_onnx_own_node_tests(are_others, min_count, min_share):
    cases = list_node_cases()[are_others]
    verdicts = {case.name: verdict(case) for case in cases}
    counts = Counter(verdicts.values())
    assert not {n: v for n, v in verdicts.items() if v not in ("right", "fixed", "refused")}
    assert len(cases) > min_count
    assert counts["right"] + counts["fixed"] >= min_share * len(cases), counts
