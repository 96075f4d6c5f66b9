"""Tokens in chunks from sum to sum: the same bits, always work during a sum, verified, and only where it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket.backends.null.backend import NullBackend
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph.errors import PlanError
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.planning import repeated_layers
from hocket.scheduler.reports.critical_path import find_critical_path
from hocket.scheduler.runtime.virtual_clock import simulate_run
from hocket.scheduler.sharding import overlap_chunks
from hocket.scheduler.sharding.sequence_parallel import SequenceParallelChooser
from hocket.scheduler.verifier.plan_verifier import find_plan_faults
from hocket.scheduler.verifier.values.facts import DeviceValueFact, infer_copied_or_sliced_value_facts
from hocket.scheduler.verifier.values.partial_sums import make_contraction_partial_sum

from ...given.graphs import layered
from ...given.plans.chunked import chunked_plan, make_gated_layers
from ...given.plans.grouped import make_binder
from ...given.plans.interleaved import InterleavedPlan
from ...given.plans.ways import compare_results, values_of
from ...given.plans.ways import results as run_results

SLOW_LINK = Hardware(flops=1e6, bandwidth=1e9, launch=0.0, link_bandwidth=5e4, link_latency=1e-6)
LONG_LAUNCHES = Hardware(flops=1e6, bandwidth=1e9, launch=1e-3, link_bandwidth=1e6, link_latency=1e-6)
WORK_ON_ROWS = Hardware(flops=1e6, bandwidth=3e5, launch=0.0, link_bandwidth=1e5, link_latency=1e-6)
"""Devices that take long for replicated work, such as norms."""
TOKENS = 8


class Overlapping(ReferenceBackend):
    """Plans are made as for devices that compute while they meet."""

    def can_overlap_collectives(self, devices):
        return True


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(overlap_chunks, "MIN_CHUNK_TOKENS", 1)
    for name in ("T", "C"):
        monkeypatch.setattr(layered, name, TOKENS)


def plan_layers(backend, devices=2, hardware=SLOW_LINK, layers=3):
    group = [(backend, backend.device(d)) for d in range(devices)]
    return plan_for_group(layered.decoder(layers), group, hardware=hardware, split_mode="tensor")


def sums_in(plan, name):
    return [
        i.node for i in plan.device_plans[0].program.instructions if i.op == "all_reduce" and i.node.startswith(name)
    ]


def results(plan, seed):
    rng = np.random.default_rng(seed)
    values = {v.node.name: rng.standard_normal(v.shape).astype(np.float32) for v in plan.graph.weights}
    values |= {v.node.name: np.zeros(v.shape, np.float32) for v in plan.graph.states}
    count = np.arange(TOKENS, dtype=np.int32)
    feed = {"pos": count[None], "slots": count, "wanted": count[-1:]}
    feed["x"] = rng.standard_normal((TOKENS, layered.E)).astype(np.float32)
    run = InterleavedPlan(plan, make_binder(plan.graph, values, plan.leaves))
    return run.run(feed, seed) | {name: np.array(run.store.state(name)) for name in run.store.states}


def test_a_sum_is_taken_in_chunks_with_products_beside_it():
    plan = plan_layers(Overlapping())
    device_plan = plan.device_plans[0]
    steps = device_plan.program.instructions
    assert len(sums_in(plan, "blk.0.out")) in overlap_chunks.CHUNK_COUNTS
    beside = {
        steps[at].node: [steps[n].op for n in numbers] for at, numbers in device_plan.overlapped_instructions.items()
    }
    for name in ("blk.0.mixed.sum.chunk.0", "blk.0.out.sum.chunk.0"):
        assert "mul_mat" in beside[name]
    assert "chunks from sum to sum" in plan.explain()


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_chunks_give_the_bits_of_the_whole(devices):
    in_chunks, whole = plan_layers(Overlapping(), devices), plan_layers(ReferenceBackend(), devices)
    assert len(sums_in(in_chunks, "blk.0")) > len(sums_in(whole, "blk.0")) > 0
    for seed in range(3):
        expected = results(whole, seed)
        got = results(in_chunks, seed)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize("devices", [3, 2])
def test_repeated_layers_have_the_chunks_of_a_plan_lowered_step_by_step(devices, monkeypatch):
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", 1)
    short = plan_layers(Overlapping(), devices, layers=7)
    monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", float("inf"))
    long = plan_layers(Overlapping(), devices, layers=7)
    assert all(device_plan.short is not None for device_plan in short.device_plans)
    assert all(device_plan.short is None for device_plan in long.device_plans)
    assert short.cost.total <= 1.01 * long.cost.total
    assert len(sums_in(short, "blk.4.mixed.sum.chunk")) == len(sums_in(long, "blk.4.mixed.sum.chunk")) > 1
    assert (
        list(
            find_plan_faults(
                replace(short, device_plans=tuple(replace(device_plan) for device_plan in short.device_plans))
            )
        )
        == []
    )
    expected, got = results(long, 0), results(short, 0)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)


def nodes_of_op(plan, op):
    return [i.node for i in plan.device_plans[0].program.instructions if i.op == op]


def test_chunks_are_distributed_where_work_on_their_rows_takes_long():
    plan = plan_layers(Overlapping(), 4, WORK_ON_ROWS)
    assert "each dealt to the devices" in plan.explain()
    assert {"blk.0.mixed.part.chunk.0", "blk.0.mixed.part.chunk.1"} < {*nodes_of_op(plan, "reduce_scatter")}
    assert any(name.endswith(".whole.chunk.1") for name in nodes_of_op(plan, "all_gather"))
    assert plan.cost.overlapped_seconds > 0
    expected, got = results(plan_layers(ReferenceBackend(), 1), 0), results(plan, 0)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-10)


@pytest.mark.long
def test_distributed_chunks_of_repeated_layers_are_those_of_a_plan_lowered_step_by_step(monkeypatch):
    plans, known = [], SequenceParallelChooser.shard_rows_if_saving
    monkeypatch.setattr(
        SequenceParallelChooser, "shard_rows_if_saving", lambda options, rows, _: known(options, rows, 0.0)
    )
    for min_gain in (1, float("inf")):
        monkeypatch.setattr(repeated_layers, "MIN_SAVED_NODES", min_gain)
        plans.append(plan_layers(Overlapping(), 4, WORK_ON_ROWS, layers=9))
    short, long = plans
    assert all(device_plan.short is not None for device_plan in short.device_plans)
    assert len(nodes_of_op(short, "reduce_scatter")) == len(nodes_of_op(long, "reduce_scatter")) > 9
    expected, got = results(long, 0), results(short, 0)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 2), (1, 0, 1)])
def test_chunks_over_any_shares_give_what_one_device_gives(is_distributed, count, shares):
    backend = ReferenceBackend()
    plan = chunked_plan(
        make_gated_layers(7),
        [(backend, backend.device(d)) for d in range(len(shares))],
        count,
        is_distributed=is_distributed,
        shares=shares,
    )
    assert [*find_plan_faults(plan)] == []
    assert len(nodes_of_op(plan, "all_gather" if is_distributed else "all_reduce")) == 2 * count
    values = values_of(plan.graph, 1)
    alone = plan_for_group(plan.graph, [(backend, backend.device(0))])
    assert not compare_results(run_results(plan, values), run_results(alone, values))


@pytest.mark.long
def test_stages_of_layers_take_their_sums_in_chunks():
    group = [(backend, backend.device(d)) for backend in [Overlapping()] for d in range(4)]
    plan = plan_for_group(layered.decoder(4), group, hardware=SLOW_LINK, split_mode="layer,tensor")
    for device_plan in plan.device_plans:
        assert any(".chunk.1" in i.node for i in device_plan.program.instructions if i.op == "all_reduce")
        assert device_plan.overlapped_instructions
    assert "chunks from sum to sum" in plan.explain()
    again = plan_for_group(layered.decoder(4), group, hardware=SLOW_LINK, like=plan)
    assert again.leaves == plan.leaves
    assert "chunks from sum to sum" in again.explain()
    values = values_of(plan.graph, 1)
    expected = run_results(plan_layers(ReferenceBackend(), 1, layers=4), values)
    for each_plan in (plan, again):
        assert not compare_results(run_results(each_plan, values), expected)


def test_the_virtual_clock_gains_what_the_plan_says():
    plans = [plan_layers(NullBackend(SLOW_LINK, computes_beside=does)) for does in (True, False)]
    (fast, predicted), (slow, one_by_one) = ((simulate_run(plan).total_seconds, plan.cost.total) for plan in plans)
    assert fast < 0.8 * slow
    assert sum(link.stage.seconds for link in find_critical_path(plans[0].timeline, 2)) == pytest.approx(predicted)
    assert slow - fast == pytest.approx(one_by_one - predicted, rel=0.01)


def test_where_launches_cost_more_than_chunks_hide_sums_stay_whole():
    plan = plan_layers(Overlapping(), hardware=LONG_LAUNCHES)
    assert any(i.op in COLLECTIVES for i in plan.device_plans[0].program.instructions)
    assert not [i.node for i in plan.device_plans[0].program.instructions if "chunk" in i.node]


def test_a_step_of_few_tokens_stays_whole(monkeypatch):
    monkeypatch.setattr(overlap_chunks, "MIN_CHUNK_TOKENS", TOKENS // 2 + 1)
    assert "chunk" not in plan_layers(Overlapping()).explain()


def test_devices_that_do_one_thing_at_a_time_have_no_chunks():
    assert "chunk" not in plan_layers(ReferenceBackend()).explain()


# ------------------------------------------------------------------------------------------------------------ planted


def swap_chunks(self, value, number):
    """Each chunk in the place of another."""
    return PLAIN(self, value, self.chunk_count - 1 - number if value in self.chunk_values else number)


def shift_tokens(self, value, number):
    """Read a value without chunks at the tokens of another chunk."""
    return PLAIN(self, value, number if value in self.chunk_values else 0)


PLAIN = overlap_chunks._ChunkedGraph._find_or_slice_chunk


@pytest.mark.parametrize("planted", [swap_chunks, shift_tokens])
def test_a_chunk_of_other_tokens_is_refused(planted, monkeypatch):
    monkeypatch.setattr(overlap_chunks._ChunkedGraph, "_find_or_slice_chunk", planted)
    with pytest.raises(PlanError, match=r"is not a node of the graph|have different entries"):
        plan_layers(Overlapping())


def exchanged_shares(self, node, number):
    """The shares of two devices exchanged, where a chunk is put together."""
    attrs = LOCAL(self, node, number)
    return {"runs": attrs["runs"][::-1]} if node.op == "all_gather" else attrs


def exchanged_numbers(self, node, number=None):
    """The sums of two chunks, each in the place of the other."""
    new_node = NODE(self, node, number)
    if node.op != "reduce_scatter" or number is None:
        return new_node
    return NODE(self, node, self.chunk_count - 1 - number)


LOCAL, NODE = (
    overlap_chunks._ChunkedGraph._localise_attributes_to_chunk,
    overlap_chunks._ChunkedGraph._build_whole_or_chunk_node,
)
DISTRIBUTED_ROWS = {
    "_localise_attributes_to_chunk": (exchanged_shares,),
    "_build_whole_or_chunk_node": (exchanged_numbers,),
    "_find_or_slice_chunk": (swap_chunks,),
}


@pytest.mark.parametrize(("name", "planted"), [(name, one) for name, some in DISTRIBUTED_ROWS.items() for one in some])
def test_a_wrong_share_of_a_chunk_is_refused(name, planted, monkeypatch):
    monkeypatch.setattr(overlap_chunks._ChunkedGraph, name, planted)
    backend = ReferenceBackend()
    group = [(backend, backend.device(d)) for d in range(2)]
    try:
        plan = chunked_plan(make_gated_layers(8), group, 2, is_distributed=True)
    except PlanError:
        return
    assert [*find_plan_faults(plan)]


def test_chunks_of_a_sum_are_one_only_where_the_device_has_the_same_terms_of_both():
    plan = plan_layers(Overlapping())
    concat = next(n for n in plan.device_plans[0].graph.nodes if n.op == "concat")
    first, second, others = (make_contraction_partial_sum((((start, 4),),), (8,)) for start in (0, 0, 4))
    assert first is not second

    def join_facts(is_partial):
        return infer_copied_or_sliced_value_facts(
            concat,
            [DeviceValueFact(5, (((0, 2),), ((0, 8),)), first), DeviceValueFact(5, (((2, 2),), ((0, 8),)), is_partial)],
        )

    assert join_facts(second) == [DeviceValueFact(5, (((0, 4),), ((0, 8),)), first)]
    assert join_facts(others) == []
    assert join_facts(None) == []
