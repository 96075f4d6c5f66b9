"""Caches in blocks of 32 numbers: their precision and size, over devices, and as saved states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType

from ...given.models.goldens import nmse, path_of, tokens_of

TOKENS = tokens_of("qwen3")[:12]


def group(kind: str, **more: object) -> DeviceGroup:
    return DeviceGroup(cache_type_k=kind, cache_type_v=kind, **more)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize(
    ("kind", "worst"), [("q8_0", 1e-3), ("q4_0", 0.3), ("q4_1", 0.1), ("q5_0", 0.1), ("q5_1", 0.05), ("iq4_nl", 0.3)]
)
def test_blocks_hold_nearly_what_float32_does(kind: str, worst: float, tmp_path: Path) -> None:
    """Check random weights, which amplify rounding; a saved state goes to float32 and back unchanged."""
    model = open_model(path_of("qwen3"))
    blocks, floats = Session(model, on=group(kind)), Session(model, on=group("f32"))
    dtype = DType(kind)
    block_bytes, wide = (s.store.count_bytes_by_kind()[0]["state"] for s in (blocks, floats))
    assert block_bytes * 4 * dtype.block == wide * dtype.block_bytes
    want = floats.evaluate([TOKENS], every_position=True)[0]
    assert 0 < nmse(blocks.evaluate([TOKENS], every_position=True)[0], want) <= worst
    stored = np.array(blocks.store.state("cache_v.0"))
    for number, (saved, loaded) in enumerate([(blocks, floats), (floats, blocks)]):
        save_state(saved, [TOKENS], tmp_path / f"{number}")
        loaded.reset(0)
        assert load_state(loaded, tmp_path / f"{number}") == [TOKENS]
        assert np.array_equal(np.array(loaded.store.state("cache_v.0"))[:12], stored[:12])


@pytest.mark.long
def test_heads_are_distributed_with_their_blocks() -> None:
    """One of two on each device has the bits that it has on one device, and some numbers are put back as they were."""
    model, tokens = open_model(path_of("qwen3moe")), tokens_of("qwen3moe")[:12]
    one = Session(model, on=group("q8_0"))
    two = Session(model, on=group("q8_0", devices=("cpu:0", "cpu:1"), split_mode="tensor"))
    assert nmse(two.evaluate([tokens])[0], one.evaluate([tokens])[0]) <= 1e-8
    assert [s["state"] * 2 for s in two.store.count_bytes_by_kind()] == [
        one.store.count_bytes_by_kind()[0]["state"]
    ] * 2
    whole, sharded = (s.store.state("cache_k.0") for s in (one, two))
    assert np.array_equal(np.array(whole)[:12], np.array(sharded)[:12])
    before = np.array(sharded)
    sharded[3, 5:40] = before[3, 5:40]
    assert np.array_equal(np.array(sharded), before)


def test_heads_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"heads of 16 numbers are no whole blocks of q4_0.*use cache_type_v='f16'$"):
        Session(open_model(path_of("llama")), on=DeviceGroup(cache_type_v="q4_0"))
