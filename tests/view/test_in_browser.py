"""The page in Chromium: it loads without complaint, opens layers, finds nodes, jumps to the peak, obeys keys."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, input, weight
from hocket.scheduler import load, parse_simulated_group, plan, plan_for_group
from hocket.view import view_graph, view_plan

from ..given.browser import browser, complaints, resize
from ..given.graphs.pictured import PICTURED, vision_transformer, without_names

WIDE = 1440
HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">'\"🎼"


def make_plan(mode):
    simulation = parse_simulated_group("cpu:2")
    return plan_for_group(vision_transformer(), simulation.group, hardware=simulation.hardware, split_mode=mode)


def measure_trace():
    """A trace of a few runs on two devices."""
    graph, rng = vision_transformer(), np.random.default_rng(0)
    run = load(
        plan(graph, "numpy:0,numpy:1", split_mode="tensor"),
        {v.node.name: rng.random(v.shape, np.float32) for v in graph.weights},
    )
    with run.tracing() as trace:
        for _ in range(3):
            run.run({"image": np.ones((16, 12))})
    return trace


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    x = input(HOSTILE, (2, 4))
    graphs = {name: make() for name, make in PICTURED.items()}
    graphs["hostile"] = Graph({HOSTILE: ops.add(x, weight(HOSTILE * 2, (4,)), name=HOSTILE * 200)})
    views = {name: view_graph(graph, title=name) for name, graph in graphs.items()}
    layer, tensor = make_plan("layer"), make_plan("tensor")
    views["nameless"] = plan(without_names(vision_transformer()), "cpu:0,cpu:1", split_mode="tensor").view(tokens=16)
    views |= {"measured": measure_trace().view()}
    views |= {"layer": view_plan(layer), "tensor": view_plan(tensor), "both": view_plan(tensor, before=layer)}
    for name, page in views.items():
        page.save(folder / f"{name}.html")
    return {name: (folder / f"{name}.html").as_uri() for name in views}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def at(chromium, pages):
    """Opens a page by name; afterwards nothing may have been said in the console."""

    def open_page(name):
        resize(chromium, WIDE)
        chromium.get(pages[name])
        return chromium

    yield open_page
    assert complaints(chromium) == []


def texts(page, selector):
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )


def click(page, selector, number=0):
    page.execute_script("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, number)


def press(page, *keys):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        ActionChains(page).send_keys(getattr(Keys, key, key)).perform()


@pytest.mark.long
@pytest.mark.parametrize("name", [*PICTURED, "layer", "tensor", "both", "hostile", "measured"])
def test_a_page_loads_without_a_complaint(at, name):
    page = at(name)
    assert texts(page, "#details h2") == ["At a glance"]
    assert texts(page, "#main .box, #main .row")


@pytest.mark.long
def test_a_layer_opens_on_a_click_as_a_graph(at):
    page = at("tensor")
    folded = len(texts(page, ".row.work"))
    click(page, ".fold button.gutter")
    assert len(texts(page, ".row.work")) > folded
    click(page, ".picker .draw")
    assert any("encoder.0" in text for text in texts(page, ".crumbs option"))
    assert any("softmax" in text for text in texts(page, ".box"))
    press(page, "BACKSPACE")
    assert any("× 6" in text for text in texts(page, ".box"))


def test_another_repetition_of_a_layer_can_be_chosen(at):
    page = at("tensor")
    click(page, ".fold button.gutter")
    click(page, ".picker [aria-label=next]")
    assert "encoder.1" in texts(page, ".group.open .row.work .label")


def test_search_finds_a_node_and_shows_it_in_the_plan_and_in_the_graph(at):
    page = at("tensor")
    press(page, "/", "softmax")
    assert len(texts(page, "#results button")) == 6
    press(page, "ENTER")
    assert texts(page, "#details h2") == ["softmax"]
    assert len(texts(page, ".row.chosen")) == 1
    press(page, "2", "/", "encoder.3.mlp.up.weight", "ENTER")
    assert "%encoder.3.mlp.up.weight" in texts(page, "#details .name")
    assert len(texts(page, ".box.chosen")) == 1


def test_the_peak_of_memory_leads_to_its_step(at):
    page = at("tensor")
    step = texts(page, "button.peak")[0].split("step ")[1].split()[0]
    click(page, "button.peak")
    assert texts(page, "#details h2") == [f"step {step}"]
    assert len(texts(page, ".row.chosen")) == 1
    press(page, "ESCAPE")
    assert texts(page, "#details h2") == ["At a glance"]


def test_a_click_on_the_chart_leads_to_the_step_under_it(at):
    page = at("tensor")
    page.execute_script(
        "const c = document.querySelector('.live'), b = c.getBoundingClientRect();"
        "c.dispatchEvent(new MouseEvent('click', {clientX: b.left + b.width / 2, clientY: b.top + 9, bubbles: true}))"
    )
    assert texts(page, "#details h2")[0].startswith("step ")


def test_arrow_keys_walk_from_a_node_to_its_sources_and_users(at):
    page = at("vision")
    press(page, "ARROW_DOWN")
    first = texts(page, ".box.chosen")
    press(page, "ARROW_DOWN")
    assert texts(page, ".box.chosen") != first
    press(page, "ARROW_UP")
    assert texts(page, ".box.chosen") == first
    press(page, "ARROW_DOWN", "ENTER")
    assert any("softmax" in text for text in texts(page, ".box"))


def test_keys_walk_through_the_rows_of_a_plan(at):
    page = at("tensor")
    press(page, "ARROW_DOWN")
    assert len(texts(page, ".row.chosen")) == 1


def test_a_copy_between_devices_has_its_bytes_and_its_route(at):
    page = at("layer")
    assert any("to cpu:1" in text for text in texts(page, ".bar.copy"))


def test_the_passes_of_a_layer_can_be_read(at):
    page = at("tensor")
    press(page, "3")
    for number, words in enumerate(
        ["linear", "sharded", "sharded along axis", "inserted by the planner", " to ", "µs"]
    ):
        click(page, ".passes .steps button", number)
        rows = texts(page, ".passes tbody tr")
        assert len(rows) > 10
        if number > 1:
            assert any(words in row for row in rows), words


def test_a_weight_says_what_the_search_decided_and_what_that_beat(at):
    page = at("tensor")
    press(page, "/", "encoder.3.mlp.up.weight", "ENTER")
    assert any(text.startswith("cut ") for text in texts(page, "#details dd"))


def test_heat_colours_work_by_time(at):
    page = at("tensor")
    page.execute_script(
        "const s = document.querySelector('#heat'); s.value = 'time'; s.dispatchEvent(new Event('change'))"
    )
    heats = page.execute_script(
        "return [...document.querySelectorAll('.cell.work')].map((c) => Number(c.dataset.heat))"
    )
    assert max(heats) > min(heats) >= 0


def test_a_trace_shows_what_was_measured_beside_what_was_estimated(at):
    page = at("measured")
    assert any("median of 3 runs" in text for text in texts(page, "#details dd"))
    assert len(texts(page, ".cell .took")) == len(texts(page, ".cell")) > 4
    press(page, "/", "softmax", "ENTER")
    assert "kernelsoftmaxhocket/ops/reduction/norms.py" in "".join(texts(page, "#details dt, #details dd"))
    assert any("def softmax(" in text for text in texts(page, "#details dd pre"))
    page.execute_script(
        "const s = document.querySelector('#heat'); s.value = 'took'; s.dispatchEvent(new Event('change'))"
    )
    heats = page.execute_script(
        "return [...document.querySelectorAll('.cell.work')].map((c) => Number(c.dataset.heat))"
    )
    assert max(heats) > min(heats) > 0


def test_two_plans_stand_side_by_side_with_what_moved(at):
    page = at("both")
    assert len(texts(page, ".plan")) == 2
    assert any("->" in text for text in texts(page, ".moved li"))


def test_a_page_without_names_answers_what_a_stranger_asks(at):
    page = at("nameless")
    glance = " ".join(texts(page, "#details dd, #details .weights li"))
    assert re.search(r"B a token over all links", glance)
    assert re.search(r"at step \d+ of working memory, \w+ %", glance)
    assert "weight f32[64,32], read by mul_mat as w; sharded along axis 0: 32 on each device" in glance
    press(page, "/", "softmax", "ENTER")
    assert re.search(r"decided\s*cut ", "".join(texts(page, "#details dl")))


def test_hostile_names_appear_as_text(at):
    page = at("hostile")
    assert page.title.startswith("hostile")
    assert texts(page, "img") == []
    press(page, "ARROW_DOWN")
    assert any(HOSTILE in text for text in texts(page, "#details *"))


@pytest.mark.parametrize("name", ["tensor", "layer", "vision"])
def test_nothing_is_wider_than_a_phone(at, name):
    page = at(name)
    resize(page, 400)
    width, inner = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner


def test_light_and_dark_differ_and_can_be_chosen(at):
    page = at("tensor")
    colour = "return getComputedStyle(document.body).color"
    before = page.execute_script(colour)
    press(page, "t")
    assert page.execute_script(colour) != before
