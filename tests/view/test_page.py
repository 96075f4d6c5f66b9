"""The data of a page equal the plan, names are only text, and the page is small."""

from __future__ import annotations

import json
import re

import pytest

import hocket
from hocket import ops
from hocket.graph import Graph, input, weight
from hocket.scheduler import parse_simulated_group, plan_for_group
from hocket.view import view_graph, view_plan
from hocket.view.graph_data import RESULT_FACTOR
from hocket.view.page import escape_json_for_script

from ..given.graphs.pictured import PICTURED, vision_transformer
from ..given.graphs.random_graphs import HOSTILE_NAMES

HOSTILE = (
    *HOSTILE_NAMES,
    "</script><script>alert(1)</script>",
    "<!--",
    "<img src=x onerror=alert(1)>",
    "🎼" * 20,
    "x" * 10_000,
)


def data(page):
    """The JSON in a page."""
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.S)
    return json.loads(script[1])


def make_plan(graph, devices=2, mode="tensor"):
    simulation = parse_simulated_group(f"cpu:{devices}")
    return plan_for_group(graph, simulation.group, hardware=simulation.hardware, split_mode=mode)


@pytest.fixture(scope="module")
def plan():
    return make_plan(vision_transformer())


@pytest.fixture(scope="module")
def page_content(plan):
    return data(view_plan(plan))["shown"][0]


def test_a_page_has_every_node_with_what_it_reads(plan, page_content):
    nodes, ops_ = page_content["graph"]["nodes"], page_content["graph"]["ops"]
    assert [ops_[i]["name"] for i in nodes["op"]] == [n.op for n in plan.graph.nodes]
    number = {n: i for i, n in enumerate(plan.graph.nodes)}
    assert nodes["src"] == [[RESULT_FACTOR * number[s.node] + s.index for s in n.inputs] for n in plan.graph.nodes]


def test_every_instruction_stands_in_one_row(plan, page_content):
    seen = [set() for _ in page_content["plan"]["programs"]]
    for op, _, cells, devices, because in page_content["plan"]["rows"]:
        assert because
        assert devices
        for program, first, count in cells:
            steps = set(range(first, first + count))
            assert not steps & seen[program], op
            seen[program] |= steps
    assert [len(s) for s in seen] == [len(p["op"]) for p in page_content["plan"]["programs"]]


def test_an_encoder_that_runs_within_a_decoder_has_rows_of_its_own():
    plan = make_plan(PICTURED["translation"]())
    content = data(view_plan(plan))["shown"][0]
    working = {row[1] for row in content["plan"]["rows"] if row[0] == "work"}
    assert working == set(range(len(content["graph"]["labels"])))
    for number, program in enumerate(content["plan"]["programs"]):
        cells = [c for row in content["plan"]["rows"] for c in row[2] if c[0] == number]
        steps = sorted(at for _, first, count in cells for at in range(first, first + count))
        assert steps == list(range(len(program["op"])))


def test_the_rows_take_as_long_as_the_plan_says(plan, page_content):
    """Each device starts a row when it has done the one before and, to meet, all are there."""
    clock = [0.0] * len(plan.device_plans)
    programs = [d["program"] for d in page_content["plan"]["devices"]]
    seconds = [c[3] for c in page_content["plan"]["costs"]]
    for op, _, cells, devices, _ in page_content["plan"]["rows"]:
        spans = {
            p: sum(seconds[page_content["plan"]["programs"][p]["cost"][s]] for s in range(a, a + n))
            for p, a, n in cells
        }
        start = max(clock[d] for d in devices) if op != "work" else 0.0
        for d in devices:
            clock[d] = (clock[d] if op == "work" else start) + spans[programs[d]]
    assert max(clock) == pytest.approx(plan.cost.total, rel=1e-3)


@pytest.mark.parametrize("mode", ["layer", "tensor", "none"])
def test_layouts_are_those_of_the_plan_and_partial_sums_are_marked(mode):
    new_plan = make_plan(vision_transformer(), mode=mode)
    view_data = data(view_plan(new_plan))["shown"][0]["plan"]
    texts = [view_data["texts"][i] for i in view_data["layouts"]]
    for node, text in zip(new_plan.graph.nodes, texts, strict=True):
        if node.is_leaf:
            assert text == str(new_plan.leaves[node.name])
    summed = {s["name"] for s in _find_reduced_nodes(new_plan)}
    called = data(view_plan(new_plan))["shown"][0]["graph"]["nodes"]["name"]
    partial_sums = {called[i] for i, text in enumerate(texts) if text == "P"}
    assert summed <= partial_sums
    assert bool(partial_sums) == bool(summed)


def _find_reduced_nodes(plan):
    return [
        {"name": n.inputs[0].node.name}
        for n in plan.device_plans[0].graph.nodes
        if n.op in ("all_reduce", "reduce_scatter")
    ]


def test_a_sharded_weight_names_the_decision_and_its_alternatives(plan, page_content):
    decided, reasons = page_content["plan"]["decided"], page_content["plan"]["decisions"]
    assert decided
    nodes = plan.graph.nodes
    assert {nodes[int(number)].op for number in decided} >= {"softmax", "mul_mat", "weight"}
    for number, own in decided.items():
        node = nodes[int(number)]
        assert not node.is_leaf or str(plan.leaves[node.name]).startswith("S")
        assert all(reasons[r].startswith("cut ") for r in own)
    assert any(" beat " in reasons[r] or " saves more " in reasons[r] for own in decided.values() for r in own)
    sharded = {n for n, node in enumerate(nodes) if node.op == "weight" and str(plan.leaves[node.name]).startswith("S")}
    assert sharded == {int(number) for number in decided if nodes[int(number)].op == "weight"}


def test_a_weight_that_could_lie_elsewhere_has_a_hint():
    x = ops.get_rows(weight("table", (500, 64)), input("number", (3,), "i32"))
    down = ops.mul_mat(weight("down", (64, 256)), ops.silu(ops.mul_mat(weight("up", (256, 64)), x)))
    new_plan = hocket.plan(Graph({"y": ops.add(x, down)}), "cpu:0,cpu:1", split_mode="tensor")
    page_content = data(new_plan.view(tokens=3))
    (hint,) = page_content["shown"][0]["plan"]["hinted"].values()
    assert hint.startswith("place='table=cpu:0' saves 125.0 KiB on cpu:1, costs ")
    assert page_content["tokens"] == 3


def test_a_node_names_its_kernel_and_where_that_is_written():
    graph = Graph({"y": ops.softmax(input("x", (2, 4, 64), "f32"))})
    page_content = data(view_plan(hocket.plan(graph, "cpu:0")))["shown"][0]["plan"]
    (program,) = page_content["programs"]
    step = [program["ops"][op] for op in program["op"]].index("softmax")
    (number,), together = page_content["calls"][program["calls"][step]]
    name, place, text = page_content["kernels"][number]
    assert (name.startswith("rows."), together) == (True, 1)
    file, line = place.split(":")
    assert file == "hocket/ops/reduction/norms.py", "the declaration in the scalar language"
    assert "def softmax(" in text
    assert int(line) > 1


def test_memory_never_exceeds_the_arena_and_its_peak_nearly_fills_it(plan, page_content):
    for device, device_plan in zip(page_content["plan"]["devices"], plan.device_plans, strict=True):
        live = page_content["plan"]["programs"][device["program"]]["live"]
        assert len(live) == len(device_plan.program.instructions)
        assert (
            0.5 * device_plan.count_memory_bytes_by_kind()["arena"]
            <= max(live)
            <= device_plan.count_memory_bytes_by_kind()["arena"]
        )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_data_and_nothing_else(name):
    x = hocket.input("x" + name, (2, 4))
    graph = hocket.Graph({"y" + name: ops.add(x, hocket.weight("w" + name, (4,)), name=name)})
    page = view_graph(graph, title=name)
    plain = view_graph(hocket.Graph({"y": ops.add(hocket.input("x", (2, 4)), hocket.weight("w", (4,)))}))
    assert page.html.count("<script") == plain.html.count("<script")
    assert page.html.count("<!--") == plain.html.count("<!--")
    page.html.encode("utf-8")
    assert "x" + name in data(page)["shown"][0]["graph"]["nodes"]["name"]


def test_what_ends_a_script_or_a_line_of_one_is_escaped():
    text = json.dumps("</script>\u2028\u2029<!--\ud800", ensure_ascii=False)
    assert escape_json_for_script(text) == '"\\u003c/script>\\u2028\\u2029\\u003c!--\\ud800"'
    assert json.loads(escape_json_for_script(text)) == "</script>\u2028\u2029<!--\ud800"


def test_a_page_asks_no_network_for_anything(plan):
    page = view_plan(plan).html
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)


@pytest.mark.parametrize("name", PICTURED)
def test_any_graph_has_a_page(name):
    graph = PICTURED[name]()
    view_data = data(view_graph(graph))["shown"][0]["graph"]
    assert len(view_data["nodes"]["op"]) == len(graph.nodes)
    blocks = view_data["nodes"]["block"]
    assert {b for b in blocks if b >= 0} == set(range(len(view_data["labels"])))


def test_the_page_of_two_plans_has_both_and_what_moved(plan):
    pages = data(view_plan(plan, before=make_plan(vision_transformer(), mode="layer")))
    assert len(pages["shown"]) == 2
    assert any(line.startswith("layout: ") for line in pages["moved"])


def test_graphs_and_plans_show_themselves_in_notebooks(plan):
    assert plan._repr_html_().startswith("<iframe srcdoc=")
    assert plan.graph._repr_html_().startswith("<iframe srcdoc=")
    assert "<script" not in plan.graph._repr_html_()


def test_dagre_is_the_file_that_npm_has():
    import hashlib
    from importlib.resources import files

    folder = files("hocket.view") / "page" / "dagre"
    known = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text("utf-8").splitlines())
    assert set(known) == {"dagre.min.js", "LICENSE", "dagre.min.js.LEGAL.txt"}
    for name, digest in known.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
