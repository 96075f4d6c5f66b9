"""The neighbours of the delta rule in a layer, on emulated CUDA devices: convolution, norms and gates, gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import LaunchError
from hocket.backends.cupy.emulation.access_budget import list_budget_violations
from hocket.backends.cupy.emulation.access_counters import run_with_counters
from hocket.backends.cupy.kernels.recurrent.delta_gates import GateProducts
from hocket.backends.cupy.kernels.recurrent.short_convolution import (
    DeltaNetWeights,
    DeltaRuleInputs,
    OperandsBeforeDeltaRule,
    launch_delta_net_inputs,
    launch_gated_rms_norm,
)

from ...given.devices.delta_launches import NOTHING, ORDERS, compute_worst_errors, copy_aligned, operand, run
from ...given.devices.emulation import needs_compiler, with_fault

pytestmark = needs_compiler

EPS, LIMIT = 1e-6, 1e-12
SOURCES = ("x", "alpha", "beta", "valid", "old")


@dataclass(frozen=True)
class Parts:
    """A layer's inputs, float32: x [B,T,(2 Hk + Hv) d], rates [B,T,Hk,2,Hv / Hk] with alpha and beta, valid [B,T],
    weights, and old rows."""

    size: int
    key_heads: int
    value_heads: int
    build_inputs: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        rates = self.build_inputs["rates"]
        return {"alpha": rates[..., 0, :], "beta": rates[..., 1, :]}.get(name, self.build_inputs.get(name))


def parts(size: int, key_heads: int, value_heads: int, batch: int, tokens: int) -> Parts:
    rng = np.random.default_rng(size + tokens)
    channels = (2 * key_heads + value_heads) * size
    valid = (rng.random((batch, tokens)) < 0.8).astype(np.float32)
    shapes = {
        "x": (batch, tokens, channels),
        "rates": (batch, tokens, key_heads, 2, value_heads // key_heads),
        "w": (channels, 4),
        "a": (value_heads,),
        "dt": (value_heads,),
        "old": (batch, 3, channels),
    }
    arrays = {name: rng.normal(0, 1, shape) for name, shape in shapes.items()} | {"valid": valid}
    arrays["a"] = -np.exp(arrays["a"])
    return Parts(size, key_heads, value_heads, {n: copy_aligned(x.astype(np.float32)) for n, x in arrays.items()})


def compute_expected(p: Parts) -> dict[str, np.ndarray]:
    a = {name: x.astype(np.float64) for name, x in p.build_inputs.items()}
    rows = np.concatenate([a["old"], a["x"]], axis=1)
    tokens = a["x"].shape[1]
    y = sum(rows[:, j : j + tokens] * a["w"][:, j] for j in range(4))
    y = (y / (1 + np.exp(-y))).reshape(*y.shape[:2], -1, p.size)
    q, k, v = np.split(y, [p.key_heads, 2 * p.key_heads], axis=2)
    q, k = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + EPS) for x in (q, k))
    valid = a["valid"][..., None]
    alpha, beta = (np.float64(p[name]).reshape(*valid.shape[:2], p.value_heads) for name in ("alpha", "beta"))
    g = np.logaddexp(0, alpha + a["dt"]) * a["a"] * valid
    return {"q": q, "k": k, "v": v, "g": g, "beta": valid / (1 + np.exp(-beta)), "next_rows": rows[:, -3:]}


def parts_with_products(tokens: int, batch: int = 1, columns: int = 1348) -> Parts:
    """Parts with logits that are products of rows [B,T,columns] and weights [value heads,columns]."""
    p = parts(64, 2, 4, batch, tokens)
    rng = np.random.default_rng(tokens)
    shapes = {"rows": (batch, tokens, columns), "w_alpha": (4, columns), "w_beta": (4, columns)}
    arrays = {n: copy_aligned(rng.normal(0, 0.1, shape).astype(np.float32)) for n, shape in shapes.items()}
    for k, name in enumerate(("w_alpha", "w_beta")):
        logits = np.float64(arrays["rows"]) @ np.float64(arrays[name]).T
        p.build_inputs["rates"][..., k, :] = logits.reshape(batch, tokens, 2, 2)
    p.build_inputs.update(arrays)
    return p


def bind_inputs(p: Parts, in_place: bool = False) -> tuple[list, dict[str, np.ndarray]]:
    outputs = {name: copy_aligned(np.full(x.shape, NOTHING, np.float32)) for name, x in compute_expected(p).items()}
    if in_place:
        outputs["next_rows"] = p["old"]
    launches = LaunchBuilder(upload_array=lambda array: array.ctypes.data)
    layer = DeltaNetWeights(operand(p["w"]), operand(p["a"]), operand(p["dt"]))
    source = (operand(p[name]) for name in SOURCES)
    products = None
    if "rows" in p.build_inputs:
        products = GateProducts((0, 1), *(operand(p[name]) for name in ("rows", "w_alpha", "w_beta")))
        source = (operand(p[n] if n in p.build_inputs else np.full_like(p[n], NOTHING)) for n in SOURCES)
    sources = OperandsBeforeDeltaRule(*source, layer, EPS, products=products)
    launch_delta_net_inputs(launches, sources, DeltaRuleInputs(**{name: operand(x) for name, x in outputs.items()}))
    return launches.items, outputs


def difference(p: Parts, order: int = 0, edit: Callable = lambda launch: launch, in_place: bool = False) -> float:
    expected_arrays = compute_expected(p)
    items, outputs = bind_inputs(p, in_place)
    run([edit(launch) for launch in items], order)
    return max(compute_worst_errors(outputs[name], expected_arrays[name])[0] for name in expected_arrays)


@pytest.mark.long
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 17, 40])
def test_inputs_of_the_rule_are_computed_in_one_launch(size: int, tokens: int):
    p = parts(size, 1 + tokens % 2, 3 + tokens % 2, 1 + tokens % 3, tokens)
    assert len(bind_inputs(p)[0]) == 1
    assert difference(p, ORDERS[tokens % 3]) < LIMIT


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1, 3), (4, 1)])
def test_logits_of_gates_are_computed_in_the_same_launch(tokens: int, batch: int):
    p = parts_with_products(tokens, batch)
    assert len(bind_inputs(p)[0]) == 1
    assert difference(p, ORDERS[tokens % 3]) < LIMIT


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_the_rows_that_a_convolution_keeps_take_the_place_of_the_old_ones(tokens: int):
    for order in ORDERS:
        assert difference(parts(64, 1, 2, 2, tokens), order, in_place=True) < LIMIT


@pytest.mark.long
def test_inputs_ask_memory_for_no_more_than_they_must():
    problem = parts(128, 2, 4, 1, 1)  # the launch knows addresses alone
    (launch,), _ = bind_inputs(problem)
    assert list_budget_violations(run_with_counters(launch)) == []


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_the_gated_norm_is_norm_weight_and_gate(size: int):
    rng = np.random.default_rng(size)
    x, z = (copy_aligned(rng.normal(0, 1, (2, 3, 5, size)).astype(np.float32)) for _ in range(2))
    w, out = (
        copy_aligned(rng.normal(0, 1, size).astype(np.float32)),
        copy_aligned(np.full(x.shape, NOTHING, np.float32)),
    )
    launches = LaunchBuilder(upload_array=lambda array: array.ctypes.data)
    launch_gated_rms_norm(launches, *map(operand, (x, z, w, out)), EPS)
    run(launches.items)
    wide = x.astype(np.float64)
    expected_arrays = (
        wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * w * z / (1 + np.exp(-z.astype(np.float64)))
    )
    assert compute_worst_errors(out, expected_arrays)[0] < LIMIT


LAUNCH, COMPUTATION = "short_convolution.cu", "delta_inputs.cuh"
FAULTS = {
    "runs without the rows before": (COMPUTATION, "first - 3, channel), x1", "first - 2, channel), x1"),
    "old rows of another sequence": (COMPUTATION, "old + (n * 3 + t + 3)", "old + (t + 3)"),
    "kept rows one early": (COMPUTATION, ": (int)tokens + i;", ": (int)tokens + i - 1;"),
    "values are normed, too": (COMPUTATION, "if (is_normed) y *=", "y *="),
    "tokens behind the last": (LAUNCH, "min(first + RUN, tokens)", "first + RUN"),
    "heads behind the last": (
        LAUNCH,
        "is_there = head < 2 * from.key_heads + from.value_heads",
        "is_there = head <= 2 * from.key_heads + from.value_heads",
    ),
    "padding writes": (COMPUTATION, "is_valid / (1.0f + expf(", "1.0f / (1.0f + expf("),
    "gates of the first group alone": (COMPUTATION, "group = h / of_group", "group = 0"),
    "a norm of half a head": (COMPUTATION, "m = LANES / 2; m; m /= 2", "m = LANES / 4; m; m /= 2"),
}
PRODUCT_FAULTS = {
    "rows of the first token": (COMPUTATION, "p.x + (n * tokens + t) * p.x_step", "p.x + n * tokens * p.x_step"),
    "weights of the first head": (COMPUTATION, "*w_alpha = p.alpha + h * p.columns", "*w_alpha = p.alpha"),
    "rates of decays": (COMPUTATION, "*w_beta = p.beta + h", "*w_beta = p.alpha + h"),
    "columns of the first threads": (COMPUTATION, "c += 4 * blockDim.x", "c += 8 * blockDim.x"),
    "logits of one warp": (COMPUTATION, "sum.x = block_sum(sum.x, room),", "sum.x = warp_sum(sum.x),"),
    "gates of the next head": (LAUNCH, "(computes ? from.value_heads : 1);", "(computes ? from.value_heads - 1 : 1);"),
    "heads are gates": (LAUNCH, "gate_head >= 0;", "gate_head >= -1;"),
}


@pytest.mark.nightly(cases=6)
@pytest.mark.long
@pytest.mark.parametrize("name", [*FAULTS, *PRODUCT_FAULTS])
def test_a_fault_planted_in_the_inputs_is_found(name: str):
    file, good, bad = (FAULTS | PRODUCT_FAULTS)[name]

    def is_detected(order: int) -> bool:
        p = parts(64, 2, 4, 2, 35) if name in FAULTS else parts_with_products(4)
        try:
            return difference(p, order, lambda launch: with_fault(launch, file, good, bad)) > LIMIT
        except LaunchError:
            return True

    assert any(map(is_detected, ORDERS))
