"""Sessions with KV caches in pools of blocks: the same bits as with a region per sequence, for any block table."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.frontends.errors import ModelError
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step
from hocket.frontends.models.inputs.graph_builder import StepGraphBuilder
from hocket.frontends.open_model import open_model
from hocket.scheduler.ir.layout import REPLICATE

from ...given.models.goldens import nmse, path_of

SEQUENCES, CONTEXT, BLOCKS = 3, 200, 14


def make_sessions(name: str, **options):
    group = DeviceGroup(**options)
    in_order = Session(open_model(path_of(name)), on=group, sequences=SEQUENCES, context=CONTEXT, batch=64)
    by_blocks = Session(in_order.model, like=in_order, sequences=SEQUENCES, context=CONTEXT, batch=64, blocks=BLOCKS)
    table = np.random.default_rng(5).permutation(np.arange(1, BLOCKS))[: SEQUENCES * 4].reshape(SEQUENCES, 4)
    by_blocks.tables = table.tolist()
    return in_order, by_blocks


def run_steps(session: Session):
    rng, vocabulary = np.random.default_rng(2), session.model.vocabulary_size
    counts = ((70, 0, 33), (64, 20, 1), (1, 1, 1), (1, 0, 1), (50, 40, 2), (1, 1, 1))
    return [session.evaluate([rng.integers(0, vocabulary, n).tolist() for n in new]) for new in counts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("qwen3", {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}),
        ("qwen35", {"threads": 2}),
        ("llama", {"devices": ("cpu:0", "cpu:1"), "split_mode": "tensor"}),
        ("llama", {"devices": ("cpu:0", "cpu:1")}),
    ],
)
def test_sequences_in_blocks_have_the_bits_of_sequences_in_order(name, options):
    in_order, by_blocks = make_sessions(name, **options)
    for want, got in zip(run_steps(in_order), run_steps(by_blocks), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.long
def test_layers_with_a_window_have_no_ring_in_a_pool_of_blocks():
    in_order, by_blocks = make_sessions("gemma3")
    assert in_order.cell_count("cache_k.0") < CONTEXT == by_blocks.cell_count("cache_k.0")
    for want, got in zip(run_steps(in_order), run_steps(by_blocks), strict=True):
        assert all(nmse(a, b) < 1e-6 for a, b in zip(want, got, strict=True) if a.size)  # a ring has another order


def test_pools_are_sharded_by_heads_and_tables_are_whole():
    _, session = make_sessions("llama", devices=("cpu:0", "cpu:1"), split_mode="tensor")
    plan = session.plan(session.make_step(1, CONTEXT, SEQUENCES))
    assert {plan.leaves[f"cache_{name}.0"].axis for name in "kv"} == {1}
    assert plan.leaves["table"] == REPLICATE


def test_two_sequences_read_the_same_blocks():
    _, session = make_sessions("llama")
    prompt, more = list(range(3, 67)), [5, 6, 7]
    session.evaluate([prompt, [], []])
    session.tables[1] = [session.tables[0][0], *session.tables[1][1:]]
    session.lengths[1] = len(prompt)
    first, second, _ = session.evaluate([more, more, []])
    assert np.array_equal(first, second)


def test_reset_zeroes_the_blocks_of_the_sequence_alone():
    _, session = make_sessions("llama")
    session.evaluate([[3] * 60, [4] * 60, []])
    session.reset(0)
    pool = np.array(session.store.state("cache_k.0")).reshape(BLOCKS, 64, -1)
    assert not pool[session.tables[0]].any()
    assert pool[session.tables[1][0], :60].any(axis=-1).all()


def test_a_table_with_too_few_blocks_is_refused():
    _, session = make_sessions("llama")
    session.tables[1] = session.tables[1][:1]
    with pytest.raises(ModelError, match="sequence 1 would have 65 tokens in 1 block of 64 cells; add blocks"):
        session.evaluate([[], [3] * 65, []])


def test_caches_that_keep_their_cells_in_order_are_refused():
    frame = StepGraphBuilder(Step(1, 1, 64, 64, 1, blocks=3))
    with pytest.raises(ModelError, match="keeps its cells in order; leave out blocks"):
        frame.write_and_read_cache("cache_k.0", hocket.input("k", (1, 1, 2, 16)))
