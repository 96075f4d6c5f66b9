"""Values, nodes, graphs, the rules they obey, and rewriting."""

from __future__ import annotations

import copy
from types import MappingProxyType

import numpy as np
import pytest

from hocket import ops
from hocket.graph import (
    DType,
    Graph,
    GraphError,
    Node,
    Spec,
    Value,
    constant,
    format_graph,
    input,
    list_rule_violations,
    make_spec,
    parse,
    replace_values,
    rewrite_graph,
    state,
    verify,
    view_constant_array,
    weight,
)
from hocket.graph.graph_rules import GRAPH_RULES

from ..given.graphs.random_graphs import bindings, seeded_graph


def node(op: str, *src: Value | None, spec: Spec | None = None, name: str = "", **attrs: object) -> Value:
    """A value, of two numbers unless said otherwise, made without any check."""
    return Value(Node(op, src, MappingProxyType(attrs), (spec or Spec((2,)),), name))  # type: ignore[arg-type]


X = input("x", (2,))
S = state("s", (2,))


# --------------------------------------------------------------------------------------------------------- nodes


def test_the_repr_of_a_node_is_its_line_of_the_dump():
    y = ops.mul_mat(weight("ffn_up", (3, 8), "f16"), input("norm", (2, 8)), name="up")
    assert repr(y.node) == "%up = mul_mat(%ffn_up, %norm, ordered=false, exact=true) : f32[2,3]"
    assert repr(y.node) in format_graph(Graph({"y": y})).splitlines()
    assert repr(y) == "%up: f32[2,3]"


def test_there_is_one_value_of_each_result():
    """So that mappings find it by identity; copies of nodes have results of their own."""
    chosen = Node("top_k", (X,), MappingProxyType({"k": 1}), (Spec((1,)), Spec((1,), DType.I32)))
    assert [Value(chosen), Value(chosen, 1)] == [*chosen.results]
    assert Value(chosen, 1) is chosen.results[1]
    assert copy.copy(X) is X
    assert {X: 1}[Value(X.node)] == 1
    again = copy.copy(chosen)
    assert all(value.node is again and value not in chosen.results for value in again.results)
    assert Value(chosen, 9) not in chosen.results


def test_the_repr_of_an_unnamed_node_calls_it_by_its_op():
    assert repr(ops.softmax(input("x", (1, 2, 3)), None, input("n", (1,))).node) == (
        '%softmax = softmax(%x, _, %n, scale=1.0, max_bias=0.0, mask_heads="one") : f32[1,2,3]'
    )


def test_the_repr_of_a_graph_is_its_dump():
    graph = Graph({"y": ops.silu(X)})
    assert (
        repr(graph)
        == str(graph)
        == format_graph(graph)
        == "%x = input() : f32[2]\n%0 = silu(%x) : f32[2]\nreturn y=%0\n"
    )


def test_a_name_with_a_newline_stays_on_one_line_in_every_message():
    x = input("a\nb", (2,))
    assert repr(x) == '%"a\\nb": f32[2]'
    assert "\n" not in repr(x.node)
    with pytest.raises(GraphError) as caught:
        ops.add(x, input("c\nd", (3,)))
    assert "\n" not in str(caught.value)


def test_nodes_and_values_are_frozen_and_compared_by_identity():
    assert input("x", (2,)) != X
    assert Value(X.node) == X
    for thing, field in ((X, "index"), (X.node, "name"), (X.spec, "shape"), (Graph({"x": X}), "outputs")):
        with pytest.raises(AttributeError):
            setattr(thing, field, None)
    with pytest.raises(TypeError):
        Graph({"x": X}).outputs["y"] = X  # type: ignore[index]


def test_iterating_over_a_value_says_what_to_do_instead():
    with pytest.raises(GraphError, match="take parts of it by index"):
        list(X)


@pytest.mark.parametrize("make", [input, weight, state])
def test_a_leaf_without_a_name_is_refused(make):
    with pytest.raises(GraphError, match="has no name"):
        make("", (2,))


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((1,) * 6, "f32", "rank 6"),
        ((-1,), "f32", "negative"),
        ((2.5,), "f32", "sequence of integers"),
        ("23", "f32", "sequence of integers"),
        (3, "f32", "sequence of integers"),
        ((10**5000,), "f32", "more than"),
        ((2**40, 2**40), "f32", "more than"),
        ((2,), "f33", "unknown dtype 'f33'"),
        ((2,), float, "must be a DType"),
        ((33,), "q8_0", "multiple"),
        ((), "q4_K", "multiple"),
    ],
)
def test_an_illegal_spec_is_refused_in_one_line(shape, dtype, why):
    with pytest.raises(GraphError, match=why) as caught:
        make_spec(shape, dtype)
    assert "\n" not in str(caught.value)


def test_a_shape_may_hold_numpy_integers():
    assert make_spec(np.array([2, 3])) == Spec((2, 3))


def test_bytes_of_a_spec_count_whole_blocks():
    assert Spec((3, 64), DType.Q8_0).nbytes == 3 * 2 * 34
    assert Spec((), DType.F16).nbytes == 2
    assert Spec((0, 32), DType.Q8_0).nbytes == 0


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.float32(1.5), "f32"),
        (2.5, "f32"),
        (7, "i64"),
        ([], "f32"),
        (np.zeros((3, 0, 2), np.float16), "f16"),
        (np.arange(6, dtype=np.int32).reshape(2, 3).T, "i32"),
        (np.arange(4, dtype=">i2"), "i16"),
        (np.array([1.5], ">f8"), "f32"),
        (np.arange(3, dtype=np.int8), "i8"),
    ],
)
def test_a_constant_keeps_shape_and_numbers(array, dtype):
    value = constant("c", array)
    assert value.spec == Spec(np.shape(array), DType[dtype.upper()])
    again = parse(format_graph(Graph({"c": value}))).outputs["c"].node
    for one in (value.node, again):
        back = view_constant_array(one)
        assert back.dtype == value.dtype.storage
        assert back.shape == np.shape(array)
        np.testing.assert_array_equal(back, array)
        assert not back.flags.writeable
    verify(Graph({"c": value}))


@pytest.mark.parametrize("array", [True, 1j, "text", np.uint8(3), None])
def test_a_constant_of_another_kind_is_refused(array):
    with pytest.raises(GraphError, match="constant %c has NumPy dtype"):
        constant("c", array)


# --------------------------------------------------------------------------------------------------------- graphs


def test_nodes_come_once_and_after_their_sources():
    for seed in range(20):
        graph = seeded_graph(seed)
        place = {n: i for i, n in enumerate(graph.nodes)}
        assert len(place) == len(graph.nodes)
        assert all(place[s.node] < place[n] for n in graph.nodes for s in n.inputs)


def test_the_order_depends_on_outputs_alone():
    first, second = ops.silu(X), ops.tanh(X)
    late, early = Graph({"a": second, "b": first}), Graph({"a": first, "b": second})
    assert [n.op for n in late.nodes] == ["input", "tanh", "silu"]
    assert [n.op for n in early.nodes] == ["input", "silu", "tanh"]


def test_users_are_listed_once_for_each_value():
    y = ops.add(X, X)
    users = Graph({"y": y}).users()
    assert users == {X: [y.node], y: []}


def test_leaves_are_found_by_kind():
    w, c = weight("w", (2,)), constant("c", [1.0, 2.0])
    y = ops.add(ops.add(ops.add(X, w), S), c)
    graph = Graph({"y": y}, {S: y})
    assert (graph.inputs, graph.weights, graph.states, graph.leaves("constant")) == ((X,), (w,), (S,), (c,))


@pytest.mark.long
def test_a_chain_of_a_hundred_thousand_nodes_can_be_built_ordered_and_dropped():
    x = X
    for _ in range(100_000):
        x = Value(Node("neg", (x,), X.node.attrs, X.node.specs))
    graph = Graph({"y": x})
    assert len(graph.nodes) == 100_001
    ops.verify(graph)
    del x, graph


# ---------------------------------------------------------------------------------------------------------- rules

DEEP: tuple = ()
for _ in range(9):
    DEEP = (DEEP,)


def changed_into_a_cycle() -> Graph:
    first = ops.silu(input("c", (2,)))
    graph = Graph({"y": ops.silu(first)})
    object.__setattr__(first.node, "src", (graph.outputs["y"],))
    return graph


BROKEN = {
    "operands_precede_users_and_results_exist": [
        (changed_into_a_cycle(), "%silu reads %silu, which no earlier node computes")
    ],
    "references_exist": [
        (Graph({"y": Value(X.node, 1)}), "%x#1: input has 1 result"),
        (Graph({"y": X}, {S: Value(X.node, 3)}), "%x#3: input has 1 result"),
        (Graph({"y": node("silu", Value(X.node, -1))}), "%x#-1: input has 1 result"),
    ],
    "graph_has_output_or_update": [
        (Graph({}), "the graph has neither outputs nor updates, so there is nothing to compute")
    ],
    "leaves_have_distinct_names": [
        (Graph({"y": ops.add(X, input("x", (2,)))}), "%x names 2 different leaves; rename all but one"),
        (Graph({"y": ops.add(X, weight("x", (2,)))}), "%x names 2 different leaves; rename all but one"),
        (Graph({"y": node("input")}), "1 leaves have no name; give each its own"),
    ],
    "leaves_have_one_result_no_operands": [
        (Graph({"y": node("input", X, name="z")}), "%z = input(%x) : f32[2]: a leaf has no operands and one result"),
        (
            Graph({"y": Value(Node("state", (), X.node.attrs, (Spec((2,)),) * 2, "z"), 1)}),
            "%z = state() : f32[2], f32[2]: a leaf has no operands and one result",
        ),
    ],
    "specs_have_legal_shapes": [
        (Graph({"y": node("input", name="z", spec=Spec((-2,)))}), "%z: f32[-2] has a negative size"),
        (Graph({"y": node("weight", name="z", spec=Spec((1,) * 6))}), "%z: f32[1,1,1,1,1,1] has rank 6"),
        (Graph({"y": node("weight", name="z", spec=Spec((33,), DType.Q8_0))}), "%z: q8_0[33]: rows of q8_0 are blocks"),
        (Graph({"y": node("input", name="z", spec=Spec((10**5000,)))}), "more than 2^63 - 1 entries"),
        (Graph({"y": node("constant", name="z", spec=Spec((), DType.Q8_0))}), "%z: q8_0[]: rows of q8_0 are blocks"),
    ],
    "updates_match_states": [
        (Graph({}, {X: X}), "update of %x: f32[2]: it is an input; only a state can be updated"),
        (
            Graph({}, {S: input("y", (3,))}),
            "update of %s: f32[2] with %y: f32[3]: shape and dtype must stay the same",
        ),
        (
            Graph({}, {S: input("y", (2,), "f16")}),
            "update of %s: f32[2] with %y: f16[2]: shape and dtype must stay the same",
        ),
    ],
    "constants_hold_their_bytes": [
        (Graph({"y": node("constant", name="c")}), "%c: f32[2] needs 8 bytes of data, got none"),
        (Graph({"y": node("constant", name="c", data=b"1234")}), "%c: f32[2] needs 8 bytes of data, got 4"),
        (Graph({"y": node("constant", name="c", data="12345678")}), "%c: f32[2] needs 8 bytes of data, got none"),
        (
            Graph({"y": node("constant", name="c", spec=Spec((2,), DType.BF16), data=b"1234")}),
            "%c: a constant cannot be bf16; use f32, f16 or an integer type",
        ),
    ],
    "ops_are_declared": [
        (Graph({"y": node("warp", X)}), "%warp: there is no op 'warp'; `hocket ops` lists them"),
        (Graph({"y": node("", X, name="a\nb")}), "%\"a\\nb\": there is no op ''; `hocket ops` lists them"),
    ],
    "specs_and_attributes_match_op": [
        (Graph({"y": node("silu", X, spec=Spec((3,)))}), "%silu = silu(%x) : f32[3]: operands give f32[2]"),
        (Graph({"y": node("silu")}), "%silu = silu() : f32[2]: operand x is missing"),
        (Graph({"y": node("silu", X, X)}), "%silu = silu(%x, %x) : f32[2]: takes 1 operand, got 2"),
        (Graph({"y": node("silu", X, a=1)}), "%silu = silu(%x, a=1) : f32[2]: no operand or attribute a"),
        (Graph({"y": node("silu", X, **{"a\nb": 1})}), 'no operand or attribute "a\\nb"'),
        (Graph({"y": node("cast", X)}), "%cast = cast(%x) : f32[2]: attribute dtype is missing"),
        (Graph({"y": node("rms_norm", X)}), "%rms_norm = rms_norm(%x) : f32[2]: attribute eps is missing"),
        (Graph({"y": node("reshape", X, shape=(2**62,) * 300)}), "%reshape = reshape(%x, shape=("),
        (Graph({"y": node("cast", input("i", (2,), "i32"), dtype="f32")}), "dtype is 'f32'; it must be a DType"),
    ],
}


@pytest.mark.parametrize(
    "value",
    [[1], {}, np.float32(1), np.arange(2), object(), 1j, 2**63, 10**5000, (1, [2]), (10**5000,), DEEP],
    ids=lambda value: type(value).__name__,
)
def test_an_attribute_that_is_no_plain_data_is_refused_by_its_node(value):
    with pytest.raises(GraphError, match=r"^Node: attrs: attribute a has a value that a graph cannot keep$"):
        node("input", name="z", a=value)


@pytest.mark.parametrize("attrs", [{1: 2}, MappingProxyType({None: 2}), [("a", 1)], None])
def test_attributes_without_names_are_refused_by_their_node(attrs):
    with pytest.raises(GraphError, match=r"^Node: attrs is .* it must be a mapping from names to numbers"):
        Node("silu", (X,), attrs, (X.spec,))


@pytest.mark.parametrize("index", [True, 1.0, "0", None, 10**5000], ids=lambda value: type(value).__name__)
def test_the_number_of_a_result_is_an_integer_of_64_bits(index):
    with pytest.raises(GraphError, match=r"^Value: index is .* it must be the number of a result$"):
        Value(X.node, index)


def test_a_graph_with_a_cycle_is_refused():
    with pytest.raises(GraphError, match="%silu reads its own result"):
        Graph({"y": changed_into_a_cycle().outputs["y"]})


@pytest.mark.parametrize("rule", ops.OP_RULES, ids=lambda rule: rule.__name__)
def test_breaking_one_rule_gives_its_message(rule):
    assert rule.__doc__
    for graph, message in BROKEN[rule.__name__]:
        faults = list_rule_violations(graph, ops.OP_RULES)
        assert any(message in why for why in faults), faults
        assert not [why for why in faults if "\n" in why]
        with pytest.raises(GraphError):
            ops.verify(graph)


@pytest.mark.parametrize("rule", GRAPH_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_of_graphs_needs_no_registry_and_is_alone_broken(rule):
    graph, message = BROKEN[rule.__name__][0]
    (only,) = list_rule_violations(graph)
    assert message in only
    assert not [why for other in GRAPH_RULES if other is not rule for why in list_rule_violations(graph, [other])]


def test_the_message_has_the_first_problem_and_the_number_of_others():
    graph = Graph({"y": node("warp", input("x", (2,))), "z": node("weft", X)})
    with pytest.raises(GraphError) as caught:
        ops.verify(graph)
    assert str(caught.value) == "%x names 2 different leaves; rename all but one (and 2 more)"


def test_random_graphs_obey_every_rule_and_can_be_computed():
    for seed in range(60):
        graph = seeded_graph(seed)
        ops.verify(graph)
        outputs, updates = ops.evaluate(graph, bindings(graph, np.random.default_rng(seed)))
        assert {k: v.shape for k, v in outputs.items()} == {k: v.shape for k, v in graph.outputs.items()}
        assert {k: v.shape for k, v in updates.items()} == {o.node.name: o.shape for o in graph.updates}


# ------------------------------------------------------------------------------------------------------ rewriting


def test_rewriting_nothing_gives_the_graph_itself():
    for seed in range(20):
        graph = seeded_graph(seed)
        assert rewrite_graph(graph, lambda node: None) is rewrite_graph(graph, lambda node: node.results) is graph


def test_rewriting_one_node_shares_the_nodes_below_and_leaves_the_old_graph_alone():
    below = ops.silu(X, name="below")
    graph = Graph({"y": ops.neg(ops.tanh(below)), "below": below})
    before = format_graph(graph)
    again = rewrite_graph(graph, lambda node: ops.relu(node.inputs[0]) if node.op == "tanh" else None)
    assert [n.op for n in again.nodes] == ["input", "silu", "relu", "neg"]
    assert again.outputs["below"] is below or again.outputs["below"].node is below.node
    assert format_graph(graph) == before
    assert [n.op for n in graph.nodes] == ["input", "silu", "tanh", "neg"]


def test_a_rule_sees_sources_that_are_already_rewritten():
    graph = Graph({"y": ops.silu(ops.silu(X))})
    again = rewrite_graph(graph, lambda node: ops.neg(node.inputs[0]) if node.op == "silu" else None)
    assert [n.op for n in again.nodes] == ["input", "neg", "neg"]


def delta() -> tuple[Graph, Value, Value, Value]:
    q, g, beta, old = input("q", (2, 1, 4)), input("g", (2, 1, 1)), input("beta", (2, 1)), state("s", (1, 4, 4))
    out, new = ops.gated_delta_net(q, q, q, g, beta, old, name="delta")
    return Graph({"y": ops.neg(out), "new": new}, {old: new}), out, new, old


def test_a_node_with_two_results_can_have_both_or_one_replaced():
    graph, out, new, old = delta()

    def rule(node: Node) -> tuple[Value, ...] | None:
        return (ops.cont(Value(node, 0)), ops.cont(Value(node, 1))) if node.op == "gated_delta_net" else None

    both = rewrite_graph(graph, rule)
    assert [both.outputs["y"].node.inputs[0].node.op, both.outputs["new"].node.op] == ["cont", "cont"]
    assert both.updates == {old: both.outputs["new"]}

    replaced = ops.scale(old, scale=2.0)
    one = replace_values(graph, {new: replaced})
    assert one.outputs["y"] == graph.outputs["y"]
    assert one.outputs["new"] == one.updates[old] == replaced
    assert out.node in one.nodes


def test_substituting_a_value_of_another_spec_is_refused():
    with pytest.raises(GraphError) as caught:
        replace_values(Graph({"y": ops.silu(X)}), {X: input("z", (3,))})
    assert str(caught.value) == "cannot replace %x: f32[2] by %z: f32[3]; shape and dtype must stay the same"


def test_substituting_a_leaf_changes_all_its_readers_and_updates():
    graph, _, new, old = delta()
    other = state("other", (1, 4, 4))
    again = replace_values(graph, {old: other})
    assert again.states == (other,)
    assert list(again.updates) == [other]
    assert again.outputs["y"].node is not graph.outputs["y"].node
    assert graph.updates == {old: new}
