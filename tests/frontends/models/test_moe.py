"""Mixtures of experts: against llama.cpp, against sums written out, and cut across devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import Gguf
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Batch, Model, ModelWeights, Step, load_model
from hocket.frontends.models.inputs.family import FamilyTraits
from hocket.frontends.models.layers.moe import ExpertLayerHyperparameters, run_expert_layer
from hocket.graph import Graph, Value, input
from hocket.scheduler import Plan, load, plan, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.sharding.axes import Factor
from hocket.scheduler.sharding.factors import Factors

from ...given.models.exact import SAME, STEP, ExactRun, compute_logits_in_one_batch, open_with_metadata
from ...given.models.goldens import (
    F64,
    FLOAT_CACHES,
    INDEX,
    MIXTURES,
    golden,
    layers_with_experts,
    nmse,
    open_fixture,
    single_device_logits,
)
from ...given.plans.grouped import devices, reductions


def without(model: Gguf, *names: str) -> Gguf:
    return replace(model, tensors={n: t for n, t in model.tensors.items() if n not in names})


# --------------------------------------------------------------------------------------------- against llama.cpp


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_in_one_batch_equal_those_of_llama_cpp(name: str) -> None:
    tokens, want = golden(name)
    assert (
        nmse(compute_logits_in_one_batch(ExactRun(load_model(open_fixture(name))), tokens), want)
        <= INDEX[name]["tol_f32"]
    )


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_token_by_token_equal_those_of_llama_cpp(name: str) -> None:
    tokens, want = golden(name)
    run, step = ExactRun(load_model(open_fixture(name))), Step(1, 1, 256, 256, 1)
    got = [run(step, Batch([[token]], [i]))[0] for i, token in enumerate(tokens)]
    assert nmse(np.array(got), want) <= INDEX[name]["tol_f32"]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_session_in_pieces_has_the_logits_of_llama_cpp(name: str) -> None:
    tokens, want = golden(name)
    session = Session(load_model(open_fixture(name)), on=DeviceGroup(**FLOAT_CACHES))
    parts = [tokens[:9], *([t] for t in tokens[9:20]), tokens[20:]]
    got = np.concatenate([session.evaluate([part], every_position=True)[0] for part in parts])
    assert nmse(got.astype(np.float64), want) <= INDEX[name]["tol_f32"]


@pytest.mark.parametrize("name", MIXTURES)
def test_ragged_sequences_side_by_side_equal_each_alone(name: str) -> None:
    tokens, model = golden(name)[0], load_model(open_fixture(name))
    texts = [tokens[:12], tokens[20:27], tokens[5:8]]
    want = [compute_logits_in_one_batch(ExactRun(model), text) for text in texts]
    run, lengths, got = ExactRun(model), [0, 0, 0], [[], [], []]
    for bucket, counts in ((8, (7, 5, 0)), (4, (1, 2, 2)), (4, (4, 0, 1))):
        new = [text[at : at + n] for text, at, n in zip(texts, lengths, counts, strict=True)]
        outputs = [(i, t) for i, n in enumerate(counts) for t in range(n)]
        logits = run(Step(3, bucket, 16, 32, 3 * bucket), Batch(new, lengths, outputs))
        for (i, _), row in zip(outputs, logits, strict=False):
            got[i].append(row)
        lengths = [at + n for at, n in zip(lengths, counts, strict=True)]
    for one, single in zip(got, want, strict=True):
        assert nmse(np.array(one), single) <= SAME


# ---------------------------------------------------------------------------------------- against sums written out


def silu(x: F64) -> F64:
    return x / (1.0 + np.exp(-x))


def written_out(w: dict[str, F64], h: F64, experts: ExpertLayerHyperparameters, block: str, shared: bool) -> F64:
    """The answer to one token as the papers have it, every expert run in turn."""
    scores = w[f"{block}.ffn_gate_inp.weight"] @ h
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    chosen = sorted(range(experts.count), key=lambda e: (-shares[e], e))[: experts.experts_per_token]
    whole = sum(shares[e] for e in chosen) if experts.has_normalised_weights else 1.0
    total = np.zeros_like(h)
    for e in chosen:
        gate, up = np.split(w[f"{block}.ffn_gate_up_exps.weight"][e] @ h, 2)
        total += experts.scale * shares[e] / whole * (w[f"{block}.ffn_down_exps.weight"][e] @ (silu(gate) * up))
    if shared:
        inner = silu(w[f"{block}.ffn_gate_shexp.weight"] @ h) * (w[f"{block}.ffn_up_shexp.weight"] @ h)
        opening = 1.0 / (1.0 + np.exp(-(w[f"{block}.ffn_gate_inp_shexp.weight"] @ h)))
        total += opening * (w[f"{block}.ffn_down_shexp.weight"] @ inner)
    return total


PLAIN = ExpertLayerHyperparameters(count=8, experts_per_token=2, family=FamilyTraits(shared_gate=True))


@pytest.mark.parametrize(
    "experts",
    [
        PLAIN,
        replace(PLAIN, experts_per_token=1),
        replace(PLAIN, experts_per_token=8),
        replace(PLAIN, experts_per_token=8, has_normalised_weights=False),
        replace(PLAIN, experts_per_token=3, has_normalised_weights=False),
        replace(PLAIN, experts_per_token=3, scale=2.5),
        replace(PLAIN, scale=0.5, has_normalised_weights=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_a_mixture_is_the_weighted_sum_of_the_experts_that_were_chosen(
    experts: ExpertLayerHyperparameters, ties: bool, shared: bool
) -> None:
    model, rng = open_fixture("qwen35moe"), np.random.default_rng(3)
    if not shared:
        model = without(model, *(n for n in model.tensors if "shexp" in n))
    graph = Graph({"y": run_expert_layer(ModelWeights(model), "blk.1", input("x", (5, 64)), experts)})
    w = {v.node.name: model.tensor(v.node.name).dequantise().astype(np.float64) for v in graph.weights}
    if ties:  # all experts score the same, so the first ones answer
        w["blk.1.ffn_gate_inp.weight"] = np.tile(rng.normal(size=64), (8, 1))
    x = rng.normal(size=(5, 64))
    (got,) = ops.evaluate(graph, {**w, "x": x})[0].values()
    assert nmse(got, np.array([written_out(w, h, experts, "blk.1", shared) for h in x])) <= SAME


def test_gate_and_up_in_one_tensor_or_in_two_are_the_same_model() -> None:
    model, tokens = open_fixture("llama-moe"), golden("llama-moe")[0][:9]
    fused, extra = model, {}
    for block in ("blk.0", "blk.1"):
        pair = [model.tensors[f"{block}.ffn_{kind}_exps.weight"] for kind in ("gate", "up")]
        name = f"{block}.ffn_gate_up_exps.weight"
        extra[name] = np.concatenate([t.dequantise().astype(np.float64) for t in pair], axis=1)
        fused = without(fused, *(f"{block}.ffn_{kind}_exps.weight" for kind in ("gate", "up")))
        fused = replace(fused, tensors={**fused.tensors, name: replace(pair[0], shape=(8, 32, 64))})
    want = compute_logits_in_one_batch(ExactRun(load_model(model)), tokens)
    assert nmse(compute_logits_in_one_batch(ExactRun(load_model(fused), extra), tokens), want) <= SAME


@pytest.mark.parametrize("name", MIXTURES)
def test_all_experts_may_be_used(name: str) -> None:
    model = load_model(open_with_metadata(name, expert_used_count=8))
    tokens, want = golden(name)
    got = compute_logits_in_one_batch(ExactRun(model), tokens[:6])
    assert nmse(got, want[:6]) > 1e-6
    session = Session(model, on=DeviceGroup(**FLOAT_CACHES))
    assert nmse(session.evaluate([tokens[:6]], every_position=True)[0].astype(np.float64), got) <= 1e-9


def test_the_divisor_of_the_shares_has_the_lower_bound_of_llama_cpp() -> None:
    (clamp, *_) = [n for n in load_model(open_fixture("qwen3moe")).graph(STEP).nodes if n.op == "clamp"]
    assert clamp.attrs["min"] == 6.103515625e-05


# ------------------------------------------------------------------------------------------------ several devices


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_on_several_devices_gives_the_logits_of_one(name: str, mode: str, n: int) -> None:
    model, (tokens, want) = load_model(open_fixture(name)), golden(name)
    one = single_device_logits(name).astype(np.float64)
    many = Session(model, on=DeviceGroup(devices=devices(n), split_mode=mode, **FLOAT_CACHES))
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([many.evaluate([part], every_position=True)[0] for part in parts])
    many.reset(0)
    for got in (stepped, many.evaluate([tokens], every_position=True)[0]):
        assert nmse(got.astype(np.float64), one) <= 1e-10
        assert nmse(got.astype(np.float64), want) <= INDEX[name]["tol_f32"]


def columns(graph: Graph, factors: Factors) -> frozenset[Factor]:
    """Return the columns of all experts: a device holds a slice of each expert."""
    down = [Value(v.node) for v in graph.weights if "ffn_down" in v.node.name]
    return frozenset(f for v in down for segment in factors.axes_of(v)[-1] for f in segment if not f.blocked)


def plan_sharded_experts(model: Model, step: Step, n: int) -> Plan:
    """A plan in which the experts' columns are cut, and nothing else: devices that meet late deal no rows of sums."""
    late = Hardware(link_latency=1e-3)
    return plan_for_group(model.graph(step), [find_device(name) for name in devices(n)], choose=columns, hardware=late)


@pytest.mark.nightly(cases=6)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_sharded_inside_need_one_collective_per_layer_to_be_combined(name: str, rows: int, n: int) -> None:
    """Check that the reduced value is the weighted sum [T, E] with the shared expert, not the answers [T, used, E]."""
    new_plan = plan_sharded_experts(load_model(open_fixture(name)), Step(1, rows, 32, 32, rows), n)
    assert reductions(new_plan) == [("all_reduce", (rows, 64))] * layers_with_experts(name)
    local = {node.name: node.specs[0].shape for node in new_plan.device_plans[0].graph.nodes if node.op == "weight"}
    assert local["blk.0.ffn_down_exps.weight"] == (8, 64, 16 // n)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_search_shards_experts_where_a_batch_makes_it_pay(name: str) -> None:
    model = load_model(open_fixture(name))
    new_plan = plan(model.graph(Step(1, 128, 256, 256, 128)), devices(2), split_mode="tensor")
    assert any("_exps" in leaf for leaf, *_ in new_plan.sharded_factors)
    assert reductions(new_plan) == [("all_reduce", (128, 64))] * (2 * model.layer_count_without_mtp)


@pytest.mark.nightly(cases=3)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_sharded_inside_give_the_logits_of_one_device(name: str, n: int) -> None:
    model, tokens = load_model(open_fixture(name)), golden(name)[0][:24]
    step = Step(1, 24, 32, 32, 24)
    feed = model.inputs(step, Batch([tokens], [0], [(0, i) for i in range(24)]))
    weights = {v.node.name: model.gguf.tensor(v.node.name).dequantise() for v in model.graph(step).weights}
    one, many = (
        load(each_plan, weights).run(feed)["logits"]
        for each_plan in (plan_sharded_experts(model, step, k) for k in (1, n))
    )
    assert nmse(many.astype(np.float64), one.astype(np.float64)) <= 1e-10


def test_devices_agree_on_the_experts_where_scores_are_equal() -> None:
    model, tokens = load_model(open_fixture("llama-moe")), golden("llama-moe")[0][:8]
    step = Step(1, 8, 8, 8, 8)
    feed = model.inputs(step, Batch([tokens], [0], [(0, i) for i in range(8)]))
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for leaf in model.graph(step).weights:
        array = model.gguf.tensor(leaf.node.name).dequantise()
        weights[leaf.node.name] = np.zeros_like(array) if "ffn_gate_inp" in leaf.node.name else array
    one, two = (load(plan_sharded_experts(model, step, n), weights).run(feed)["logits"] for n in (1, 2))
    assert nmse(two.astype(np.float64), one.astype(np.float64)) <= 1e-10


# -------------------------------------------------------------------------------------------------- metadata of files


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama-moe", {"expert_count": -1}, "expert_count is -1; need at least 1"),
        ("llama-moe", {"expert_used_count": 9}, "expert_used_count is 9; need 1 to expert_count 8"),
        ("llama-moe", {"expert_used_count": None}, "expert_used_count is missing"),
        ("qwen3moe", {"expert_count": None}, "expert_count is missing"),
        ("qwen3moe", {"expert_count": 0}, "expert_count is 0; need at least 1"),
        ("qwen3moe", {"expert_count": 1 << 40}, "need at most 2147483647"),
        ("qwen3moe", {"expert_used_count": 0}, "expert_used_count is 0; need 1 to expert_count 8"),
        ("qwen3moe", {"expert_weights_scale": -1.0}, "expert_weights_scale is -1.0; need a positive number"),
        ("qwen3moe", {"expert_weights_scale": float("nan")}, "need a positive number"),
        ("qwen3moe", {"expert_group_count": 3}, "expert_group_count is 3; need a divisor of 8"),
        ("qwen3next", {"ssm__time_step_rank": 7}, "ssm.time_step_rank is 7; need a multiple of group_count 2"),
    ],
)
def test_bad_hyperparameters_are_refused(name: str, keys: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(open_with_metadata(name, **keys))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama-moe", {"expert_count": 4}, r"ffn_gate_inp\.weight has shape \[8, 64\]; need \[4, 64\]"),
        ("qwen3next", {"ssm__group_count": 4}, r"attn_qkv\.weight has shape \[192, 64\]; need \[256, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_hyperparameters_are_refused(
    name: str, keys: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(open_with_metadata(name, **keys)).graph(STEP)


@pytest.mark.parametrize("kind", ["gate_inp", "gate_up_exps", "down_exps", "gate_inp_shexp", "up_shexp"])
def test_a_missing_tensor_of_the_experts_is_named(kind: str) -> None:
    missing = "up_exps" if kind == "gate_up_exps" else kind  # one or the other must be there
    with pytest.raises(ModelError, match=rf"tensor blk\.1\.ffn_{missing}\.weight is missing"):
        load_model(without(open_fixture("qwen35moe"), f"blk.1.ffn_{kind}.weight")).graph(STEP)


def test_a_tensor_of_another_kind_of_routing_is_refused() -> None:
    model = open_fixture("qwen3moe")
    bias = replace(model.tensors["output_norm.weight"], shape=(8,))
    for name in ("blk.0.exp_probs_c.bias", "blk.1.ffn_gate_inp_shexp.weight"):
        with pytest.raises(ModelError, match="are not part of this architecture"):
            load_model(replace(model, tensors={**model.tensors, name: bias})).graph(STEP)


def test_a_scale_of_the_shares_can_be_set_and_zero_means_none() -> None:
    plain = load_model(open_fixture("qwen3moe")).graph(STEP)
    for unset in (0.0, 1.0):
        assert (
            load_model(open_with_metadata("qwen3moe", expert_weights_scale=unset)).graph(STEP).digest()
            == plain.digest()
        )
    scaled = load_model(open_with_metadata("qwen3moe", expert_weights_scale=2.5)).graph(STEP)
    assert [n.attrs["scale"] for n in scaled.nodes if n.op == "scale"] == [2.5, 2.5]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_built_twice_gives_the_same_graph(name: str) -> None:
    one, two = (load_model(open_fixture(name)).graph(Step(2, 4, 16, 32, 3)) for _ in range(2))
    assert one.digest() == two.digest()
    assert str(one) == str(two)
