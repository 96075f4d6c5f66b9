"""States of 16-bit numbers and of blocks on CUDA, emulated: written and read as they are, not as float32."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket import DType, Graph, input, ops, state
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import CACHE_DTYPES
from hocket.graph.errors import StepError
from hocket.ops.block_layouts import IQ4_NL_CODE_BOOK
from hocket.ops.quantisation import decode_array, encode_array
from hocket.scheduler import load, plan_for_group

from ..given.devices.emulation import WRONG_RESULTS, finding, needs_compiler
from ..given.models.goldens import nmse, path_of, tokens_of
from ..given.state_ways import build_state_graphs, inputs_of

pytestmark = needs_compiler
HALVES = ["f16", "bf16"]
BLOCK_CACHES = [str(dtype) for dtype in CACHE_DTYPES if dtype.is_quantised]
TYPES = [*HALVES, *BLOCK_CACHES]
ONE = "cuda-emulated:0"
MULTIPLES = {
    **{"q8_0": range(-127, 127), "q4_0": range(-8, 8), "q4_1": range(-8, 8)},
    **{"q5_0": range(-16, 16), "q5_1": range(-16, 16), "iq4_nl": [*map(int, IQ4_NL_CODE_BOOK)]},
}
"""The multiples of its scale that a block has if the first and the last of them are in it."""
STATE_GRAPHS = [(name, dtype) for dtype in TYPES for name, _ in build_state_graphs(dtype)]


@pytest.mark.parametrize(("graph_name", "dtype"), STATE_GRAPHS)
def test_a_state_holds_what_its_type_can_hold(graph_name: str, dtype: str) -> None:
    """Check exact values: the definition has the same bits, except for the order of additions in a product."""
    graph = dict(build_state_graphs(dtype))[graph_name]
    inputs = inputs_of(graph, MULTIPLES.get(dtype, range(-99, 99)))
    right, run = (hocket.load(hocket.plan(graph, on), {}) for on in ("reference:0", ONE))
    assert run.store.count_bytes_by_kind()[0]["state"] == DType(dtype).count_bytes(9 * 64)
    for _ in range(3):
        expected, results = right.run(inputs), run.run(inputs)
        for name in expected:
            np.testing.assert_allclose(results[name], expected[name], rtol=1e-5 if graph_name == "a matrix" else 0)
        assert np.array_equal(run.store.state("s"), right.store.state("s"))
        assert np.any(np.array(run.store.state("s")))


def rounds_as_numpy(dtype: str, backend: DriverBackend) -> bool:
    """Return whether written rows have the bits of NumPy's rounding."""
    rng, kind = np.random.default_rng(0), DType(dtype)
    width = 96 if kind.is_quantised else 37
    rows = (rng.standard_normal((8, width)) * 10.0 ** rng.integers(-6, 4, (8, width))).astype(np.float32)
    rows[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38]
    rows[1, :4] = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8]  # ties
    rows[2, 32:], rows[3, :3], rows[4] = 0.0, [1e-7, -1e-7, 2e-9], rows[4] * 1e-9
    old = state("s", (9, width), dtype)
    new = ops.set_rows(old, input("rows", (8, width)), input("ids", (8,), "i32"))
    graph = Graph({"y": new}, {old: new})
    run = load(plan_for_group(graph, [(backend, backend.device(0))]), {})
    run.run({"rows": rows, "ids": np.arange(8, dtype=np.int32)})
    with np.errstate(over="ignore"):
        expected = decode_array(encode_array(rows, kind), kind)
    return np.array_equal(np.array(run.store.state("s"))[:8], expected, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_rounded_to_the_nearest(dtype: str) -> None:
    assert rounds_as_numpy(dtype, EmulatedBackend())


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "kind", "mask"), [("f16", "half", "0xffffe000u"), ("bf16", "bf16", "0xffff0000u")])
def test_truncated_rows_are_found(dtype: str, kind: str, mask: str) -> None:
    good, truncating = f"to->bits = float_to_{kind}(x)", f"__uint_as_float(__float_as_uint(x) & {mask})"
    bad = f"to->bits = float_to_{kind}({truncating})"
    assert finding("cells.cuh", good, bad, lambda backend: rounds_as_numpy(dtype, backend)) == WRONG_RESULTS


@pytest.mark.parametrize("dtype", TYPES)
def test_a_run_that_fails_leaves_a_state_as_it_was(dtype: str) -> None:
    """It is changed before it is read, at a row that it does not have."""
    width = 96 if dtype in BLOCK_CACHES else 37
    old = state("s", (9, width), dtype)
    new = ops.set_rows(old, input("rows", (3, width)), input("ids", (3,), "i32"))
    graph = Graph({"y": ops.get_rows(new, input("read", (1,), "i32"))}, {old: new})
    run = hocket.load(hocket.plan(graph, ONE), {})
    rows = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    run.run({"rows": rows, "ids": [2, 4, 8], "read": [2]})
    before = np.array(run.store.state("s"))
    with pytest.raises(StepError, match="id 9 names no row"):
        run.run({"rows": 2 * rows, "ids": [4, 2, 1], "read": [9]})
    assert np.array_equal(run.store.state("s"), before)


@pytest.mark.long
@pytest.mark.parametrize("dtype", TYPES)
def test_a_saved_state_goes_to_other_types_and_back(dtype: str, tmp_path) -> None:
    """From CUDA to the CPU, which keeps the same numbers, and to float32."""
    model, tokens = open_model(path_of("qwen3")), tokens_of("qwen3")[:12]

    def session(on: str, kind: str) -> Session:
        return Session(model, on=DeviceGroup(devices=(on,), cache_type_k=kind, cache_type_v=kind))

    short, wide, cpu = session(ONE, dtype), session(ONE, "f32"), session("cpu:0", dtype)
    narrow, floats = (s.store.count_bytes_by_kind()[0]["state"] for s in (short, wide))
    assert narrow * 4 * DType(dtype).block == floats * DType(dtype).block_bytes
    want = wide.evaluate([tokens], every_position=True)[0]
    worst = {"f16": 1e-5, "bf16": 1e-3, "q8_0": 1e-3, "q5_0": 0.1, "q5_1": 0.05, "q4_1": 0.1}.get(dtype, 0.3)
    assert 0 < nmse(short.evaluate([tokens], every_position=True)[0], want) <= worst
    stored_rows = np.array(short.store.state("cache_v.0"))[:12]
    for number, (saved, loaded) in enumerate([(short, cpu), (cpu, wide), (wide, short)]):
        save_state(saved, [tokens], tmp_path / f"{number}")
        loaded.reset(0)
        assert load_state(loaded, tmp_path / f"{number}") == [tokens]
        assert np.array_equal(np.array(loaded.store.state("cache_v.0"))[:12], stored_rows)


def test_caches_are_f16_unless_results_are_to_be_exact() -> None:
    model = open_model(path_of("qwen3"))
    usual, exact = (
        Session(model, on=DeviceGroup(devices=(ONE,), exact=exact)).store.count_bytes_by_kind()[0]["state"]
        for exact in (False, True)
    )
    assert 2 * usual == exact


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALVES)
def test_a_prompt_that_is_to_be_exact_rounds_nothing_to_the_type_of_its_caches(dtype: str) -> None:
    """As single tokens do not, over the same caches."""
    model, tokens = open_model(path_of("qwen3")), (2 * tokens_of("qwen3"))[:40]

    def session(exact: bool) -> Session:
        return Session(model, on=DeviceGroup(devices=(ONE,), exact=exact, cache_type_k=dtype, cache_type_v=dtype))

    one_by_one, exact, usual = (session(exact) for exact in (True, True, False))
    expected = np.concatenate([one_by_one.evaluate([[token]], every_position=True)[0] for token in tokens])
    errors = [nmse(s.evaluate([tokens], every_position=True)[0], expected) for s in (exact, usual)]
    kernels = [" ".join(s.executor(s.make_step(64, len(tokens)))._program_runners[0].kernels()) for s in (exact, usual)]
    assert ["attend_warpgroups" in names for names in kernels] == [False, True]
    assert errors[0] < {"f16": 1e-8, "bf16": 1e-7}[dtype] < errors[1]
