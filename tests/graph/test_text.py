"""The dump parses back, for any names; other texts are refused in one line with the position."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import ops
from hocket.graph import DType, Graph, GraphError, Node, Spec, Value, format_graph, from_json, input, parse, to_json

from ..given.graphs.random_graphs import HOSTILE_NAMES, PLAIN_NAMES, graphs, seeded_graph

NAMES = (*HOSTILE_NAMES, *PLAIN_NAMES)
some = settings(max_examples=60, deadline=None, derandomize=True, database=None)
many = settings(max_examples=300, deadline=None, derandomize=True, database=None)

ATTRS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(DType),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def same(a: Graph, b: Graph) -> None:
    assert format_graph(a) == format_graph(b)
    assert a.digest() == b.digest()


def unknown(op: str, name: str = "", attrs: dict | None = None) -> Graph:
    """A graph of one op that no registry knows."""
    return Graph({"out": Value(Node(op, (), attrs or {}, (Spec((2,)),), name))})


# ------------------------------------------------------------------------------------------------------- legal values


@some
@given(graphs(names=NAMES))
def test_a_dump_parses_back_to_the_same_graph(graph):
    same(parse(format_graph(graph)), graph)


@some
@given(graphs(names=NAMES))
def test_json_reads_back_to_the_same_graph(graph):
    same(from_json(to_json(graph)), graph)


@pytest.mark.parametrize("seed", range(40))
def test_a_parsed_graph_obeys_the_same_rules(seed):
    graph = seeded_graph(seed, names=NAMES)
    ops.verify(graph)
    ops.verify(parse(format_graph(graph)))
    ops.verify(from_json(to_json(graph)))


@pytest.mark.long
@many
@given(st.text(), st.text(), st.text(), ATTRS)
def test_any_op_name_attribute_and_value_survives(op, name, key, value):
    graph = unknown(op, name, {key: value, "x": 1})
    for again in (parse(format_graph(graph)), from_json(to_json(graph))):
        same(again, graph)
        (node,) = again.nodes
        assert node.op == op
        assert repr(dict(node.attrs)) == repr({key: value, "x": 1})


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_of_a_leaf_an_output_and_a_result_survives(name):
    x = input(name, (2, 3))
    graph = Graph({name: ops.silu(x, name=name), "second": x})
    for again in (parse(format_graph(graph)), from_json(to_json(graph))):
        same(again, graph)
        assert again.inputs[0].node.name == name
        assert list(again.outputs) == [name, "second"]


def test_repeated_names_become_distinct_and_leaves_keep_theirs():
    x = input("up~2", (3,))
    inner = ops.silu(ops.silu(ops.silu(x, name="up"), name="up"), name="up~2")
    graph = Graph({"y": inner})
    assert [text.split(" =")[0] for text in format_graph(graph).splitlines()[:-1]] == [
        "%up~2",
        "%up",
        "%up~3",
        "%up~2~2",
    ]
    same(parse(format_graph(graph)), graph)


def test_an_unnamed_node_gets_a_number_that_no_name_is():
    graph = Graph({"y": ops.silu(ops.silu(ops.silu(input("0", (3,)))), name="2")})
    assert [text.split(" =")[0] for text in format_graph(graph).splitlines()[:-1]] == ['%"0"', "%1", "%3", '%"2"']
    assert [node.name for node in parse(format_graph(graph)).nodes] == ["0", "", "", "2"]


def test_comments_and_blank_lines_are_skipped():
    graph = parse("// a graph\n\n%x = input() : f32[2]\n  // its end\nreturn y=%x\n")
    assert format_graph(graph) == "%x = input() : f32[2]\nreturn y=%x\n"


@pytest.mark.long
def test_a_chain_of_twenty_thousand_nodes_is_no_problem():
    x = input("x", (3,))
    for _ in range(20_000):
        x = ops.neg(x)
    graph = Graph({"y": x})
    same(parse(format_graph(graph)), graph)
    same(from_json(to_json(graph)), graph)


# ----------------------------------------------------------------------------------------------------- refused values

BAD_LINES = {
    "%x": (1, 3, "expected =, got 'end of line'"),
    '%"\x00"': (1, 1, r'"\x00" is no JSON string'),
    "%x = input() : f33[2]": (1, 16, "unknown dtype 'f33'"),
    "%x = input() : f32[-2]": (1, 16, "negative size"),
    "%x = input() : f32[2.5]": (1, 20, "expected an integer, got '2.5'"),
    "%x = input() : f32[1,1,1,1,1,1]": (1, 16, "rank 6; at most 5"),
    "%x = input() : q8_0[3,33]": (1, 16, "multiple"),
    "%x = input() : f32[1" + "0" * 5000 + "]": (1, 20, "5001 digits"),
    f"%x = input() : f32[{2**40},{2**40}]": (1, 16, "more than 2^63 - 1 elements"),
    "%x = input() : f32[2]\n%x = input() : f32[2]": (2, 1, "%x is defined twice"),
    "%y = silu(%x) : f32[2]": (1, 11, "%x is used before it is defined"),
    '%y = silu(%"a\\nb") : f32[2]': (1, 11, '%"a\\nb" is used before it is defined'),
    "%x = input() : f32[2]\n%y = silu(%x#1) : f32[2]": (2, 11, "%x has 1 result, so there is no #1"),
    "%x = input() : f32[2]\n%y = silu(%x#" + "9" * 5000 + ") : f32[2]": (2, 11, "so there is no #9"),
    "%x#0 = input() : f32[2]": (1, 1, "expected %name, return or update"),
    "%x = input(a=1, a=2) : f32[2]": (1, 17, "a is given twice"),
    "%x = input(a=x) : f32[2]": (1, 14, "expected an attribute value, got 'x'"),
    '%x = input(a=x"0") : f32[2]': (1, 14, "expected an attribute value"),
    "%x = input(a=" + "(" * 3000: (1, 23, "nested more than 8 deep"),
    "%x = input(a=" + "1" * 5000 + ") : f32[2]": (1, 14, "does not fit in 64 bits"),
    '%x = input(a="\\q") : f32[2]': (1, 14, "is no JSON string"),
    "%x = input() : f32[2] %x": (1, 23, "unexpected '%x'"),
    "%x = input() ; f32[2]": (1, 13, "cannot read ' ; f32[2]'"),
    "%x = input() : f32[2]\nreturn y=%x, y=%x": (2, 14, "y is given twice"),
    "%x = input() : f32[2]\nreturn =%x": (2, 8, "expected the name of an output, got '='"),
    "%x = input() : f32[2]\nupdate %x = %x\nupdate %x = %x": (3, 8, "%x is updated twice"),
}


@pytest.mark.parametrize("text", BAD_LINES, ids=lambda text: text[:40])
def test_a_parse_error_shows_line_column_and_reason(text):
    line, column, why = BAD_LINES[text]
    with pytest.raises(GraphError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"line {line}, column {column}: ")
    assert why in str(caught.value)
    assert str(caught.value).isprintable()


NODE = '{"name": "x", "op": "input", "src": [], "attrs": {}, "specs": [{"dtype": "f32", "shape": [2]}]}'
BAD_JSON = {
    "": "JSONDecodeError",
    "[]": "TypeError",
    "{}": "KeyError",
    '{"format": "hocket-graph-9"}': "this reads hocket-graph-1",
    "[" * 100_000: "RecursionError",
    NODE.replace("[2]", "[2.5]"): "sequence of integers",
    NODE.replace("[2]", '"2"'): "sequence of integers",
    NODE.replace("[2]", "[1e999]"): "sequence of integers",
    NODE.replace("[2]", "[-1]"): "negative size",
    NODE.replace("[2]", f"[1{'0' * 4000}]"): "more than 2^63 - 1 entries",
    NODE.replace("[2]", f"[1{'0' * 5000}]"): "not a graph in JSON",
    NODE.replace("[2]", "[0,0,0,0,0,0]"): "rank 6",
    NODE.replace('"f32"', "32"): "dtype is 32",
    NODE.replace('"f32"', '"f33"'): "unknown dtype 'f33'",
    NODE.replace('"x"', "null"): "expected a string, got None",
    NODE.replace('"input"', "7"): "expected a string, got 7",
    NODE.replace("[]", "[[0, 0]]"): "refers to node 0 before it is defined",
    NODE.replace("[]", "[[-1, 0]]"): "refers to node -1 before it is defined",
    NODE.replace("[]", "[[0]]"): "ValueError",
    NODE.replace("[]", "[[false, false]]"): "a reference is two integers",
    NODE.replace("{}", '{"a": {"b": 1}}'): "is not of a known kind",
    NODE.replace("{}", '{"a": {"dtype": "f33"}}'): "KeyError",
    NODE.replace("{}", '{"a": {"hex": "0"}}'): "ValueError",
    NODE.replace("{}", '{"a": ' + "[" * 9 + "]" * 9 + "}"): "nested more than 8 deep",
    NODE.replace("{}", '{"a": ' + "9" * 30 + "}"): "does not fit in 64 bits",
    NODE + "}, {": "not a graph in JSON",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:100])
def test_bad_json_is_refused_in_one_line(text):
    whole = text
    if text.startswith('{"name"'):
        whole = '{"format": "hocket-graph-1", "nodes": [' + text + '], "outputs": {"y": [0, 0]}, "updates": []}'
    with pytest.raises(GraphError) as caught:
        from_json(whole)
    assert BAD_JSON[text] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "updates", "why"),
    [
        ('{"y": null}', "[]", "refers to no value"),
        ('{"y": [1, 0]}', "[]", "before it is defined"),
        ('{"y": [0, 1]}', "[]", "has no result 1"),
        ("[]", "[]", "AttributeError"),
        ("{}", "[[[0, 0], null]]", "refers to no value"),
        ("{}", "[[[0, 0], [0, 0]], [[0, 0], [0, 0]]]", "updated twice"),
        ("{}", "7", "TypeError"),
    ],
)
def test_bad_outputs_and_updates_in_json_are_refused(outputs, updates, why):
    text = f'{{"format": "hocket-graph-1", "nodes": [{NODE}], "outputs": {outputs}, "updates": {updates}}}'
    with pytest.raises(GraphError, match=why):
        from_json(text)


def refuses_or_reads(read, text: str) -> None:
    """Check that `read` raises only GraphErrors of one line, and that its result can be verified or is refused in
    one line.
    """
    try:
        graph = read(text)
        ops.verify(graph)
        same(parse(format_graph(graph)), graph)
    except GraphError as error:
        message = str(error)
    else:
        return
    assert message
    assert len(message.splitlines()) == 1


FRAGMENTS = (
    '"',
    "\\",
    "\n",
    "%",
    "#",
    "(",
    ")",
    "[",
    "]",
    ",",
    "=",
    "-",
    "~2",
    "1e999",
    "9" * 30,
    "inf",
    "\u2028",
    "{",
)


def mutate(text: str, chance: random.Random) -> str:
    """`text` with one to four characters deleted, doubled, flipped, or exchanged for a piece of syntax."""
    for _ in range(chance.randint(1, 4)):
        at, to = (chance.randrange(len(text) + 1) for _ in range(2))
        end = min(len(text), at + chance.choice((0, 1, 1, 5)))
        new = chance.choice(("", text[at:end] * 2, chance.choice(FRAGMENTS), text[to : to + 3], chance.choice("019")))
        text = text[:at] + new + text[end:]
    return text


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_dump_raises_nothing_but_graph_errors(seed):
    chance = random.Random(seed)
    graph = seeded_graph(seed, steps=5, names=NAMES)
    for read, text in ((parse, format_graph(graph)), (from_json, to_json(graph))):
        for _ in range(40):
            refuses_or_reads(read, mutate(text, chance))


@many
@given(
    st.text() | st.lists(st.sampled_from((*FRAGMENTS, "%x", "input", "return ", "update ", " : ", "f32"))).map("".join)
)
def test_any_text_raises_nothing_but_graph_errors(text):
    refuses_or_reads(parse, text)
    refuses_or_reads(from_json, text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.long
@many
@given(JSON, st.sampled_from(("name", "op", "src", "attrs", "specs", "nodes", "outputs", "updates")))
def test_any_value_in_the_place_of_a_field_raises_nothing_but_graph_errors(value, field):
    import json

    document = {"format": "hocket-graph-1", "nodes": [json.loads(NODE)], "outputs": {"y": [0, 0]}, "updates": []}
    (document if field in document else document["nodes"][0])[field] = value
    refuses_or_reads(from_json, json.dumps(document))
