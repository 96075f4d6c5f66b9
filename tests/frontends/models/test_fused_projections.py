"""Projections that a file may hold as one tensor or as several: the same model either way, also when it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model, Step
from hocket.frontends.open_model import open_model
from hocket.scheduler import plan
from hocket.scheduler.ir.layout import Shard

from ...given.models.goldens import nmse, path_of
from ...given.models.rewritten import Array, Tensors, tensors_of, write_fixture

ATTENTION = {"llama": (0, 1), "llama-moe": (0, 1), "qwen3": (0, 1), "qwen3moe": (0, 1), "qwen35": (2,)}
"""The layers of each fixture that have attn_q, attn_k and attn_v."""
DEVICE_GROUPS = [
    ("reference:0", "none"),
    ("reference:0,reference:1", "tensor"),
    ("reference:0,reference:1,reference:2", "layer"),
]

SAME = 1e-20
"""NMSE of float64 results that differ in the order of additions alone."""


def join_projections(tensors: Tensors, layer: int, kind: str = "weight") -> Tensors:
    """The tensors with q, k and v of a layer as one."""
    parts = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
    rest = {name: array for name, array in tensors.items() if name not in parts}
    return {**rest, f"blk.{layer}.attn_qkv.{kind}": np.concatenate([tensors[part] for part in parts])}


def by_key_head(heads: int, *parts: Array) -> Array:
    """Return rows of several matrices in the order of key heads: the rows of the first head from each matrix,
    then the next.
    """
    by_heads = [part.reshape(heads, -1, part.shape[-1]) for part in parts]
    return np.concatenate(by_heads, axis=1).reshape(-1, parts[0].shape[-1])


def early(tensors: Tensors, layer: int) -> Tensors:
    """The tensors of a Qwen3-Next with q, k, v and z of a layer as its first converter wrote them."""
    names = [f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_gate.weight"]
    (qkv, z), size, heads = (tensors[name] for name in names), 16, 2
    q, k, v = qkv[: heads * size], qkv[heads * size : 2 * heads * size], qkv[2 * heads * size :]
    rest = {name: array for name, array in tensors.items() if name not in names}
    return {**rest, f"blk.{layer}.ssm_in.weight": by_key_head(heads, q, k, v, z)}


def logits(model: Model, devices: str = "reference:0", mode: str = "none") -> npt.NDArray[np.float64]:
    """Of a few tokens, computed in float64."""
    tokens = np.random.default_rng(1).integers(0, model.vocabulary_size, 24).tolist()
    return (
        Session(model, on=DeviceGroup(devices=tuple(devices.split(",")), split_mode=mode))
        .evaluate([tokens], every_position=True)[0]
        .astype(np.float64)
    )


@pytest.mark.nightly(cases=8)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("devices", "mode"), DEVICE_GROUPS, ids=["one", "tensor", "layer"])
@pytest.mark.parametrize("name", ATTENTION)
def test_q_k_and_v_in_one_tensor_or_in_three_are_the_same_model(
    name: str, devices: str, mode: str, tmp_path: Path
) -> None:
    tensors = tensors_of(name)
    for layer in ATTENTION[name]:
        tensors = join_projections(tensors, layer)
    want = logits(open_model(path_of(name)))
    assert nmse(logits(write_fixture(tmp_path / "model.gguf", name, tensors), devices, mode), want) <= SAME


def test_a_fused_bias_is_that_of_the_parts(tmp_path: Path) -> None:
    tensors, rng = tensors_of("llama"), np.random.default_rng(0)
    for part, n in (("q", 64), ("k", 32), ("v", 32)):
        tensors[f"blk.1.attn_{part}.bias"] = rng.normal(size=n).astype(np.float32)
    want = logits(write_fixture(tmp_path / "parts.gguf", "llama", tensors))
    assert nmse(want, logits(open_model(path_of("llama")))) > 1e-3
    whole = join_projections(join_projections(tensors, 1), 1, "bias")
    assert nmse(logits(write_fixture(tmp_path / "whole.gguf", "llama", whole)), want) <= SAME


def test_a_fused_projection_is_split_inside_each_part(tmp_path: Path) -> None:
    model = write_fixture(tmp_path / "model.gguf", "llama", join_projections(tensors_of("llama"), 0))
    new_plan = plan(model.graph(Step(1, 1, 64, 64, 1)), "cpu:0,cpu:1", split_mode="tensor")
    layout = new_plan.leaves["blk.0.attn_qkv.weight"]
    assert isinstance(layout, Shard)
    assert layout.index_ranges[1] == ((32, 32), (80, 16), (112, 16))


def test_a_file_with_the_whole_and_a_part_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3")
    both = {**join_projections(tensors, 0), "blk.0.attn_k.weight": tensors["blk.0.attn_k.weight"]}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight'\] are not part of this architecture"):
        write_fixture(tmp_path / "model.gguf", "qwen3", both).graph(Step(1, 1, 8, 8, 1))


@pytest.mark.parametrize(("devices", "mode"), DEVICE_GROUPS, ids=["one", "tensor", "layer"])
def test_an_early_file_of_qwen3_next_is_the_same_model(devices: str, mode: str, tmp_path: Path) -> None:
    tensors = early(early(tensors_of("qwen3next"), 0), 1)
    want = logits(open_model(path_of("qwen3next")))
    assert nmse(logits(write_fixture(tmp_path / "model.gguf", "qwen3next", tensors), devices, mode), want) <= SAME


def test_interleaved_rates_are_split_by_key_heads() -> None:
    """Check rows in the order (key head, beta or alpha, repeat): the rows of a key head stay together."""
    model = open_model(path_of("qwen3next"))
    new_plan = plan(model.graph(Step(1, 1, 64, 64, 1)), "cpu:0,cpu:1", split_mode="tensor")
    for name, runs in {
        "blk.0.ssm_ba.weight": ((8, 8),),
        "blk.0.ssm_dt.bias": ((4, 4),),
        "blk.0.attn_qkv.weight": ((16, 16), (48, 16), (128, 64)),
        "blk.0.ssm_out.weight": ((64, 64),),
    }.items():
        layout = new_plan.leaves[name]
        assert isinstance(layout, Shard)
        assert layout.index_ranges[1] == runs
