"""``rope.scaling.type = longrope``, and divisors of the speeds of rotation in families of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.hyperparameter_keys import ArchitectureMetadata
from hocket.frontends.models import ARCHITECTURES, Model, Step
from hocket.frontends.models.layers.rope import Rope
from hocket.frontends.open_model import open_model
from hocket.graph import Graph

from ...given.models.architectures import write_model
from ...given.models.exact import with_metadata
from ...given.models.goldens import path_of
from ...given.models.rewritten import tensors_of, write_fixture

FIXTURE_NAMES = ("llama", "qwen2", "qwen3", "gemma3")


def with_factors(name: str, path: Path, **metadata: object) -> Model:
    """A fixture with divisors for short contexts and for those beyond 64 tokens, and with these metadata."""
    pairs = int(open_model(path_of(name)).hyper.blocks[0].mixers[0].rope.n_dims) // 2  # type: ignore[attr-defined]
    tensors = tensors_of(name)
    tensors["rope_factors_short.weight"] = np.linspace(1.0, 1.5, pairs, dtype=np.float32)
    tensors["rope_factors_long.weight"] = np.linspace(3.0, 9.0, pairs, dtype=np.float32)
    return with_metadata(write_fixture(path, name, tensors), **metadata)


LONGROPE = {
    "rope__scaling__type": "longrope",
    "rope__scaling__original_context_length": 64,
    "rope__scaling__attn_factor": 1.25,
}


def rotations(graph: Graph) -> list[tuple[str, float, float]]:
    """Of every rotation of a graph: the leaf that divides its speeds, the scale of its speeds, and its magnitude."""
    return [
        (
            node.src[2].node.name if len(node.src) > 2 and node.src[2] is not None else "",
            node.attrs.get("freq_scale", 1.0),
            node.attrs.get("attn_factor", 1.0),
        )
        for node in graph.nodes
        if node.op == "rope"
    ]


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_short_factors_count_up_to_the_original_context_and_long_ones_beyond(name: str, tmp_path: Path) -> None:
    model = with_factors(name, tmp_path / "m.gguf", **LONGROPE)
    layers_without_factors = {""} if ARCHITECTURES[model.architecture].factors_in_global_layers_only else set()
    for context, factors in ((64, "rope_factors_short.weight"), (65, "rope_factors_long.weight")):
        found = rotations(model.graph(Step(1, 2, 2, context, 1)))
        assert found
        assert {one[0] for one in found} == {factors, *layers_without_factors}
        assert 1.25 in {one[2] for one in found}


def test_a_factor_and_both_magnitudes_scale_longrope_as_they_scale_linear_positions() -> None:
    model = open_model(path_of("llama"))
    scaled = {"rope__scaling__factor": 4.0, "rope__scaling__yarn_attn_factor": 0.5, "rope__scaling__attn_factor": 3.0}
    for kind in ("longrope", "linear"):
        graph = with_metadata(model, rope__scaling__type=kind, **scaled).graph(Step(1, 1, 1, 64, 1))
        assert set(rotations(graph)) == {("", 0.25, 1.5)}


def test_an_extrapolation_factor_of_the_file_replaces_that_of_the_type() -> None:
    model = open_model(path_of("llama"))

    def rope(**values: object) -> Rope:
        changed = with_metadata(model, rope__scaling__factor=4.0, **values)
        return Rope.from_keys(ArchitectureMetadata(changed.gguf, "llama"), "normal", 16)

    assert rope(rope__scaling__type="yarn").ext_factor == 1.0
    assert rope(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=-1.0).ext_factor == 1.0
    assert rope(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5).ext_factor == 0.5
    assert rope(rope__scaling__type="linear", rope__scaling__yarn_ext_factor=1.0) == rope(rope__scaling__type="yarn")
    assert rope(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.0) == rope(rope__scaling__type="linear")


def test_an_unknown_type_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"is 'dynamic'; need one of none, linear, yarn, longrope"):
        with_metadata(open_model(path_of("llama")), rope__scaling__type="dynamic")


@pytest.mark.parametrize("name", ["cogvlm-dense", "llada-dense", "pangu-embedded-dense"])
def test_divisors_that_an_architecture_ignores_divide_nothing(name: str, tmp_path: Path) -> None:
    model = open_model(write_model(name, tmp_path))
    assert "rope_freqs.weight" in ARCHITECTURES[model.architecture].ignores
    assert not any(one[0] for one in rotations(model.graph(Step(1, 1, 1, 64, 1))))
