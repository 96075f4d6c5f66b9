"""Groups of declared ops: which ops join, and the bits of a program that has a kernel for each op."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.capabilities import STAND_IN
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import program_binding
from hocket.backends.fusion.expression_groups import GroupComposition
from hocket.backends.fusion.operand_views import find_strides_of_reshape, reshape_box
from hocket.backends.fusion.operands import NoKernelError
from hocket.conformance.cases.random_graphs import make_random_graph_and_weights
from hocket.ops import REGISTRY, op
from hocket.ops.declaration import scalar
from hocket.ops.declaration.scalar import Scalar

from ...given.arrays import assert_equal_bits

ROWS, COLUMNS = 5, 40
RNG = np.random.default_rng(0)


def make_program(graph: hocket.Graph, threads: int = 1):
    backend = CpuBackend(threads)
    return hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))]).device_plans[0].program


def list_fused_ops(graph: hocket.Graph) -> list[str]:
    """The ops of each generated kernel with several ops."""
    program = make_program(graph)
    kernels = CpuBackend(1).describe_fusion(program).expressions
    return [" ".join(program.instructions[n].op for n in k.instruction_numbers) for k in kernels]


def run(graph: hocket.Graph, weights: Mapping[str, np.ndarray], threads: int) -> dict[str, np.ndarray]:
    """Run a graph on equal random inputs."""
    backend, rng = CpuBackend(threads), np.random.default_rng(3)
    inputs = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in graph.inputs}
    plan = hocket.scheduler.plan_for_group(graph, [(backend, backend.device(0))])
    return dict(hocket.load(plan, weights).run(inputs))


def x(*shape: int, name: str = "x") -> hocket.Value:
    return hocket.input(name, shape or (ROWS, COLUMNS))


@pytest.mark.long(cases=6)
@pytest.mark.parametrize("seed", range(30))
def test_a_random_program_has_the_bits_of_its_ops_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch):
    graph, weights = make_random_graph_and_weights(seed)
    fused = run(graph, weights, threads=1 + seed % 2)
    monkeypatch.setattr(program_binding, "choose_expression_groups", lambda flow: [])
    for name, expected in run(graph, weights, threads=1).items():
        assert_equal_bits(fused[name], expected)


def test_a_residual_sum_its_norm_and_its_gate_are_one_kernel_with_two_results():
    total = ops.add(x(), x(name="r"))
    normed = ops.mul(ops.rms_norm(total), hocket.weight("w", (COLUMNS,)))
    graph = hocket.Graph({"total": total, "gated": ops.mul(ops.silu(normed), total)})
    assert list_fused_ops(graph) == ["add rms_norm mul silu mul"]
    (kernel,) = CpuBackend(1).describe_fusion(make_program(graph)).expressions
    assert len(kernel.results) == 2
    assert kernel.saved_bytes > 0


def test_numbers_of_a_row_are_values_of_the_kernel():
    rows = x()
    total = ops.sum_rows(ops.abs(rows))
    graph = hocket.Graph({"y": ops.div(rows, ops.sqrt(ops.scale(total, scale=2.0)))})
    assert list_fused_ops(graph) == ["abs sum_rows scale sqrt div"]


@pytest.mark.parametrize("columns", [1, 5, 40])
def test_a_number_per_row_from_outside_joins_and_keeps_all_bits(columns: int, monkeypatch: pytest.MonkeyPatch):
    rows, one = x(ROWS, columns), hocket.weight("one", (1,))
    inverse = ops.div(hocket.weight("top", (ROWS, 1)), ops.sqrt(ops.add(ops.sum_rows(ops.sqr(rows)), one)))
    graph = hocket.Graph({"y": ops.mul(rows, inverse), "inverse": inverse})
    if columns > 1:
        assert list_fused_ops(graph) == ["sqr sum_rows add sqrt div mul"]
    weights = {"one": np.ones(1, np.float32), "top": np.arange(ROWS, dtype=np.float32)[:, None]}
    fused = run(graph, weights, threads=2)
    monkeypatch.setattr(program_binding, "choose_expression_groups", lambda flow: [])
    for name, expected in run(graph, weights, threads=1).items():
        assert_equal_bits(fused[name], expected)


def make_placed_graphs() -> dict[str, tuple[hocket.Graph, list[str]]]:
    """Graphs with concatenations and padding, and the ops of their kernels."""
    heads = x(2, 3, ROWS, 16)
    low, high = (ops.slice_(heads, axis=-1, start=s, stop=s + 8) for s in (0, 8))
    rotated = ops.concat(ops.neg(high), low, axis=-1)
    cos, sin = (hocket.weight(n, (ROWS, 16)) for n in ("cos", "sin"))
    nested = ops.concat(
        ops.concat(x(3, 2, 4, 6), ops.abs(x(3, 1, 4, 6, name="r")), axis=1), x(3, 3, 4, 6, name="z"), axis=1
    )
    padded = ops.pad(ops.neg(x(ROWS, 7)), left=(1, 2), right=(0, 30))
    rows = x()
    rolled = ops.concat(ops.slice_(rows, axis=0, start=3, stop=ROWS), ops.slice_(rows, axis=0, start=0, stop=3), axis=0)
    row = ops.set_(ops.slice_(rows, axis=0, start=2, stop=3), ops.relu(x(1, 7, name="r")), offsets=(0, 30))
    written = ops.set_(ops.neg(x()), ops.abs(x(2, 9, name="r")), offsets=(1, 30))
    copied = ops.reshape(ops.permute(x(4, ROWS, 10), axes=(1, 0, 2)), shape=(ROWS, 40))
    across = ops.concat(ops.permute(x(6, 4), axes=(1, 0)), ops.permute(x(20, 4, name="r"), axes=(1, 0)), axis=1)
    return {
        "rotary": (
            hocket.Graph({"y": ops.add(ops.mul(heads, cos), ops.mul(rotated, sin))}),
            ["mul neg concat mul add"],
        ),
        "nested": (
            hocket.Graph({"y": ops.relu(ops.reshape(nested, shape=(18, 24)))}),
            ["abs concat concat relu"],
        ),
        "padding": (hocket.Graph({"y": ops.exp(padded)}), ["neg pad exp"]),
        "norm": (hocket.Graph({"y": ops.rms_norm(ops.pad(x(), left=(0, 3), right=(2, 1)))}), ["pad rms_norm"]),
        "roll": (hocket.Graph({"y": ops.sub(rows, rolled)}), ["concat sub"]),
        "region": (hocket.Graph({"y": ops.rms_norm(written)}), ["neg abs set rms_norm"]),
        "region of a row": (hocket.Graph({"y": ops.exp(ops.set_(rows, row, offsets=(2, 0)))}), ["relu set set exp"]),
        "copy": (hocket.Graph({"y": ops.exp(ops.mul(copied, ops.relu(copied)))}), ["cont relu mul exp"]),
        "strided": (hocket.Graph({"y": ops.mul(across, across)}), ["concat mul"]),
        "two readers": (hocket.Graph({"y": ops.exp(rotated), "z": ops.neg(rotated)}), ["neg concat exp neg"]),
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "name",
    ["rotary", "nested", "padding", "norm", "roll", "region", "region of a row", "copy", "strided", "two readers"],
)
def test_placed_operands_join_and_keep_all_bits(name: str, threads: int, monkeypatch: pytest.MonkeyPatch):
    graph, fused_ops = make_placed_graphs()[name]
    assert list_fused_ops(graph) == fused_ops
    weights = {v.node.name: RNG.standard_normal(v.shape).astype(np.float32) for v in graph.weights}
    fused = run(graph, weights, threads)
    monkeypatch.setattr(program_binding, "choose_expression_groups", lambda flow: [])
    for output, expected in run(graph, weights, threads=1).items():
        assert_equal_bits(fused[output], expected)


@pytest.mark.parametrize(("shape", "offsets"), [((2, 7), (1, 20)), ((ROWS, 1), (0, 39)), ((0, 3), (1, 2))])
def test_set_in_place_copies_the_region_only(shape: tuple[int, int], offsets):
    product, part = ops.mul_mat(hocket.weight("w", (COLUMNS, 8)), x(ROWS, 8)), x(*shape, name="r")
    graph = hocket.Graph({"y": ops.set_(product, part, offsets=offsets)})
    weights = {"w": RNG.standard_normal((COLUMNS, 8)).astype(np.float32)}
    program, backend = make_program(graph), CpuBackend(1)
    (change,) = (i for i in program.instructions if i.op == "set")
    assert change.dst == change.src[:1]
    assert STAND_IN not in {call.kernel for call in backend.list_kernels(program, backend.device(0))}
    alone = run(hocket.Graph({"y": product, "minus": ops.neg(part)}), weights, threads=1)
    region = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
    alone["y"][region] = -alone["minus"]
    assert_equal_bits(run(graph, weights, threads=2)["y"], alone["y"])


@pytest.mark.parametrize(
    ("own", "box", "shape", "expected"),
    [
        ((2, 3, 4), ((0, 2), (1, 3), (0, 4)), (2, 12), ((0, 2), (4, 12))),
        ((2, 12), ((0, 2), (4, 12)), (2, 3, 4), ((0, 2), (1, 3), (0, 4))),
        ((2, 3, 4), ((1, 2), (0, 3), (0, 4)), (24,), ((12, 24),)),
        ((6, 1, 4), ((2, 4), (0, 1), (0, 4)), (3, 2, 4), ((1, 2), (0, 2), (0, 4))),
        ((2, 3, 4), ((0, 2), (0, 3), (1, 4)), (6, 4), ((0, 6), (1, 4))),
        ((2, 3, 4), ((0, 2), (1, 3), (0, 4)), (24,), None),
        ((6, 4), ((1, 4), (0, 4)), (3, 2, 4), None),
        ((2, 3, 4), ((0, 2), (0, 3), (1, 4)), (2, 12), None),
    ],
)
def test_a_reshaped_box_has_the_same_elements_or_is_refused(own, box, shape, expected):
    if expected is None:
        with pytest.raises(NoKernelError):
            reshape_box(own, box, shape)
        return
    assert reshape_box(own, box, shape) == expected
    inside = np.zeros(own, bool)
    inside[tuple(slice(*bounds) for bounds in box)] = True
    reshaped = np.zeros(shape, bool)
    reshaped[tuple(slice(*bounds) for bounds in expected)] = True
    assert np.array_equal(inside.reshape(shape), reshaped)


def test_views_with_the_same_elements_in_the_same_order_join():
    heads = ops.rms_norm(ops.reshape(x(), shape=(ROWS, 4, COLUMNS // 4)))
    flat = ops.reshape(heads, shape=(ROWS, COLUMNS))
    assert list_fused_ops(hocket.Graph({"y": ops.mul(flat, hocket.weight("w", (COLUMNS,)))})) == ["rms_norm mul"]


def make_channel_graph() -> hocket.Graph:
    """Images with a factor and a shift per channel, as batch norm computes them: both read the factor."""
    mean, variance, weight = (hocket.input(name, (6,)) for name in ("mean", "variance", "weight"))
    factor = ops.mul(ops.div(weight, ops.sqrt(ops.sqr(variance))), weight)
    factors, shifts = (ops.reshape(v, shape=(6, 1, 1)) for v in (factor, ops.sub(mean, ops.mul(mean, factor))))
    return hocket.Graph({"y": ops.relu(ops.add(ops.mul(x(2, 6, 3, 5), factors), shifts))})


def make_column_graph() -> hocket.Graph:
    """Rows times ``1 + w`` with a weight per column, which the rows repeat."""
    return hocket.Graph({"y": ops.mul(x(), ops.scale(hocket.input("w", (COLUMNS,)), scale=1.0, bias=1.0))})


def make_nested_graph() -> hocket.Graph:
    """A number and a weight per column that a matrix repeats, and images that repeat the matrix."""
    number, weight = ops.exp(hocket.input("n", ())), ops.abs(hocket.input("w", (6,)))
    matrix = ops.add(ops.mul(hocket.input("m", (5, 6)), weight), number)
    return hocket.Graph({"y": ops.sub(ops.reshape(ops.mul(x(2, 5, 6), matrix), shape=(60,)), number)})


def make_column_sum_graph() -> hocket.Graph:
    """Sums of the columns of matrices that have a factor per row: too many elements for several strided operands."""
    product = ops.mul(x(8, 30, 40), hocket.input("w", (8, 30, 1)))
    return hocket.Graph({"y": ops.neg(ops.sum_rows(ops.permute(product, axes=(0, 2, 1))))})


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (make_column_sum_graph, "mul sum_rows neg"),
        (make_channel_graph, "sqr sqrt div mul mul mul sub add relu"),
        (make_column_graph, "scale mul"),
        (make_nested_graph, "abs mul exp add mul sub"),
    ],
    ids=["column sums", "channels", "columns", "nested"],
)
def test_producers_that_are_repeated_join_and_keep_all_bits(make, fused: str, monkeypatch: pytest.MonkeyPatch):
    graph = make()
    assert list_fused_ops(graph) == [fused]
    (kernel,) = CpuBackend(1).describe_fusion(make_program(graph)).expressions
    assert len(kernel.results) == 1
    together = run(graph, {}, threads=2)["y"]
    monkeypatch.setattr(program_binding, "choose_expression_groups", lambda flow: [])
    assert_equal_bits(together, run(graph, {}, threads=1)["y"])


def test_a_large_value_of_two_whole_operands_is_not_permuted_by_its_reader():
    products = [ops.mul(x(8, 30, 40), r) for r in (x(8, 30, 40, name="r"), ops.neg(x(8, 30, 40, name="r")))]
    for product in products:
        y = ops.sum_rows(ops.permute(product, axes=(0, 2, 1)))
        assert "mul sum_rows" not in " ".join(list_fused_ops(hocket.Graph({"y": y})))


def test_a_repeated_result_that_is_an_output_is_computed_once():
    factor = ops.sqrt(hocket.input("w", (COLUMNS,)))
    assert list_fused_ops(hocket.Graph({"y": ops.mul(x(), factor), "factor": factor})) == []


@pytest.mark.parametrize(
    "read",
    [
        lambda y: ops.neg(ops.permute(y, axes=(1, 0))),
        lambda y: ops.neg(ops.slice(y, axis=1, start=0, stop=8)),
        lambda y: ops.rms_norm(ops.reshape(y, shape=(ROWS * 2, COLUMNS // 2))),
        lambda y: ops.add(hocket.input("wide", (3, ROWS, COLUMNS)), y),
    ],
    ids=["transposed", "sliced", "other rows", "repeated"],
)
def test_other_views_stay_apart(read):
    assert list_fused_ops(hocket.Graph({"y": read(ops.rms_norm(x()))})) == []


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=["no rows", "no columns"])
def test_ops_without_elements_stay_alone(shape: tuple[int, int]):
    rows = ops.neg(x(*shape))
    graph = hocket.Graph({"y": ops.abs(rows), "sums": ops.scale(ops.sum_rows(rows), scale=2.0)})
    assert list_fused_ops(graph) in ([], ["sum_rows scale"])
    assert np.array_equal(run(graph, {}, threads=1)["sums"], np.zeros((shape[0], 1), np.float32))


def test_a_scalar_and_a_row_of_one_number_are_no_error():
    number = ops.neg(hocket.input("x", ()))
    graph = hocket.Graph({"y": ops.abs(ops.sum_rows(ops.reshape(number, shape=(1, 1)))), "z": ops.abs(number)})
    assert run(graph, {}, threads=1)["y"].shape == (1, 1)


def test_each_op_of_a_long_chain_is_composed_a_few_times(monkeypatch: pytest.MonkeyPatch):
    """One time when it joins, and one time for the canonical order; not again at each later join."""
    added: list[int] = []
    add = GroupComposition.add_with_producers

    def count(composition: GroupComposition, number: int, place: object = None) -> None:
        assert place is None
        added.append(number)
        add(composition, number)

    y, r = x(), x(name="r")
    for length in range(240):
        y = ops.neg(y) if length % 2 else ops.add(y, r)
    program = make_program(hocket.Graph({"y": y}))
    monkeypatch.setattr(GroupComposition, "add_with_producers", count)
    kernels = CpuBackend(1).describe_fusion(program).expressions
    assert sum(len(k.instruction_numbers) for k in kernels) == 240
    assert len(added) <= 5 * 240  # a producer that is there counts as well


def test_a_state_is_no_result_of_a_group():
    state = hocket.state("s", (ROWS, COLUMNS))
    new = ops.add(state, ops.abs(ops.neg(x())))
    assert list_fused_ops(hocket.Graph({"y": ops.exp(x(name="r"))}, {state: new})) == ["neg abs"]


def test_an_exponential_is_not_computed_again_in_each_pass_over_a_row():
    assert list_fused_ops(hocket.Graph({"y": ops.norm(ops.exp(x(64, 256)))})) == []
    assert list_fused_ops(hocket.Graph({"y": ops.norm(ops.neg(x(64, 256)))})) == ["neg norm"]


def test_an_op_of_another_package_joins_by_its_declaration_alone(monkeypatch: pytest.MonkeyPatch):
    @op("x[..., *c], w[c] -> [..., c]", samples=("x=f32[3], w=f32[3]",), errors=())
    def centre_scaled(x: Scalar, w: Scalar, *, shift: float = 0.25) -> Scalar:
        """Return ``w (x - mean(x)) + shift``.  Test, 2026."""
        return scalar.fma(w, x - scalar.row_sum(x) / scalar.row_count(), shift)

    monkeypatch.setattr(REGISTRY, "_ops", {**REGISTRY._ops, "centre_scaled": centre_scaled})
    graph = hocket.Graph({"y": ops.relu(centre_scaled(ops.neg(x()), hocket.weight("w", (COLUMNS,))))})
    assert list_fused_ops(graph) == ["neg centre_scaled relu"]
    weights = {"w": np.linspace(-1, 1, COLUMNS, dtype=np.float32)}
    fused = run(graph, weights, threads=1)
    monkeypatch.setattr(program_binding, "choose_expression_groups", lambda flow: [])
    assert_equal_bits(fused["y"], run(graph, weights, threads=1)["y"])


@pytest.mark.parametrize(
    ("own", "strides", "shape", "expected"),
    [
        ((4, 6), (6, 1), (24,), (1,)),
        ((4, 6), (6, 1), (2, 2, 6), (12, 6, 1)),
        ((4, 6), (0, 1), (2, 2, 6), (0, 0, 1)),
        ((4, 6), (0, 1), (24,), None),
        ((4, 6), (1, 0), (4, 2, 3), (1, 0, 0)),
        ((4, 6), (8, 1), (8, 3), None),
        ((4, 6), (8, 1), (4, 1, 6), (8, 0, 1)),
        ((1, 6), (0, 1), (6, 1), (1, 0)),
        ((1,), (0,), (1, 1), (0, 0)),
    ],
)
def test_strides_of_a_reshape_address_the_same_elements(own, strides, shape, expected):
    assert find_strides_of_reshape(own, strides, shape) == expected
    if expected is not None:
        memory = np.arange(64)
        views = (
            np.lib.stride_tricks.as_strided(memory, sizes, [8 * s for s in steps])
            for sizes, steps in ((own, strides), (shape, expected))
        )
        assert np.array_equal(*(view.reshape(-1) for view in views))
