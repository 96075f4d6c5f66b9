"""Dumps without defaults: short, and the same graph when they are read back; floats to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.frontends.models import Step, load_model
from hocket.graph import format_graph
from hocket.graph import parse as parse_all
from hocket.graph.attrs import format_attribute
from hocket.graph.parse import parse_case

from ..given.graphs.random_graphs import HOSTILE_NAMES, PLAIN_NAMES, seeded_graph
from ..given.models.goldens import DENSE, open_fixture


@pytest.mark.parametrize("seed", range(30))
def test_a_dump_without_defaults_reads_back_as_the_same_graph(seed):
    graph = seeded_graph(seed, names=(*HOSTILE_NAMES, *PLAIN_NAMES))
    text = hocket.dump(graph)
    again = hocket.parse(text)
    assert again.digest() == graph.digest()
    assert [tuple(n.attrs.items()) for n in again.nodes] == [tuple(n.attrs.items()) for n in graph.nodes]
    assert hocket.dump(again) == text == str(graph)
    assert len(text) <= len(format_graph(graph))


@pytest.mark.parametrize("seed", range(10))
def test_a_dump_with_defaults_reads_back_too(seed):
    graph = seeded_graph(seed)
    assert hocket.parse(format_graph(graph)).digest() == parse_all(format_graph(graph)).digest() == graph.digest()


def test_a_rotation_shows_only_what_was_asked_for():
    x, at = hocket.input("x", (1, 2, 4, 8)), hocket.input("at", (1, 2), "i32")
    graph = hocket.Graph({"y": ops.rope(x, at, n_dims=8, base=1e6)})
    assert "rope(%x, %at, n_dims=8, base=1000000.0) : " in hocket.dump(graph)


@pytest.mark.parametrize("name", DENSE)
def test_no_line_of_a_small_model_is_longer_than_a_screen(name):
    graph = load_model(open_fixture(name)).graph(Step(1, 1, 16, 16, 1))
    lines = hocket.dump(graph).splitlines()
    assert hocket.parse("\n".join(lines)).digest() == graph.digest()
    assert max(map(len, lines)) < 200


def test_what_a_float32_says_in_fewer_digits_is_written_so_and_is_exact():
    value = float(np.float32(1e-5))
    assert repr(value) == "9.999999747378752e-06"
    assert format_attribute(value) == "1e-05f"
    assert parse_case("eps=1e-05f") == {"eps": value}
    assert format_attribute(1e-5) == "1e-05"
    assert format_attribute(0.5) == "0.5"


@pytest.mark.parametrize("seed", range(20))
def test_any_float_reads_back_to_the_bit(seed):
    rng = np.random.default_rng(seed)
    doubles = rng.standard_normal(50) * 10.0 ** rng.integers(-300, 300, 50)
    singles = rng.standard_normal(50).astype(np.float32).astype(np.float64)
    for value in (*doubles, *singles, 0.0, -0.0, 1e300, 5e-324, 1e-45, math.inf, -math.inf):
        back = parse_case(f"x={format_attribute(float(value))}")["x"]
        assert np.float64(back).tobytes() == np.float64(value).tobytes()
    assert math.isnan(parse_case(f"x={format_attribute(math.nan)}")["x"])
