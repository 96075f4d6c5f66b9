"""The gated delta net's CUDA kernels, run on emulated devices, against the recurrence in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.device.device_limits import (
    LARGEST_LIMITS,
    KernelLimits,
    UnmeasuredKernelCandidate,
    find_kernel_limits,
)
from hocket.backends.cupy.kernels.recurrent import delta_segments
from hocket.backends.cupy.kernels.recurrent import gated_delta_net as binding
from hocket.backends.cupy.kernels.recurrent.delta_segments import PromptSegments, choose_prompt_segments
from hocket.backends.cupy.kernels.recurrent.delta_tokens import STEP_SOURCES

from ...given.devices.attention import CANDIDATE_LIMITS
from ...given.devices.delta_launches import (
    ORDERS,
    Problem,
    bind,
    check,
    compute_worst_errors,
    copy_aligned,
    problem,
    reference,
    run,
    with_slots,
)
from ...given.devices.emulation import needs_compiler
from ...given.devices.tools import needs

pytestmark = needs_compiler

STEPS, EXACT, FAST = 1e-12, 2e-9, 1e-4
"""The allowed error of each kind of kernel; the first two require 1e-7."""
A100 = find_kernel_limits("80")
SCANS = pytest.mark.parametrize(
    ("limits", "kernel"), [(A100, "delta_scan"), (LARGEST_LIMITS, "delta_scan_clusters")], ids=["alone", "clusters"]
)
KINDS = pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_segments, "MIN_SEGMENTS", 3)
    monkeypatch.setattr(delta_segments, "MIN_SEGMENT_CHUNKS", 1)


@pytest.mark.long(cases=1)
@KINDS
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_token_by_token_the_rule_is_the_recurrence(size: int, channels: bool):
    for tokens in range(1, 18):
        mapping = ("tiled", "interleaved")[tokens % 2]
        p = problem(tokens, size, 1 + tokens % 2, 2 * (1 + tokens % 2), tokens, channels=channels, mapping=mapping)
        bound = bind(p)
        assert bound.kernels == ["delta_net"]
        check(p, bound, STEPS, ORDERS[tokens % 3])


@pytest.mark.long
@KINDS
@SCANS
@pytest.mark.parametrize(("size", "tokens"), [(128, 65), (128, 127), (64, 128), (128, 200), (64, 256), (64, 100)])
def test_by_chunks_the_rule_is_the_recurrence(
    size: int, tokens: int, channels: bool, limits: KernelLimits, kernel: str
):
    p = problem(tokens, size, 1, 2, tokens, batch=1 + tokens % 2, channels=channels)
    bound = bind(p, limits=limits)
    assert bound.kernels[-1] == kernel
    check(p, bound, EXACT, ORDERS[tokens % 3])


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("size", [64, 128])
def test_fast_chunks_are_as_exact_as_bfloat16(size: int, channels: bool):
    p = problem(5, size, 1, 1, 150, channels=channels)
    assert check(p, bind(p, exact=False), FAST) > 1e-7


@pytest.mark.long
@KINDS
def test_a_thousand_tokens_go_through_chunks(channels: bool):
    p = problem(6, 64, 1, 1, 1000, channels=channels)
    check(p, bind(p), EXACT)


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_around_the_crossover_all_is_well(over: int, channels: bool):
    tokens = binding.MIN_CHUNKED_TOKENS[channels] + over
    p = problem(tokens, 64, 2, 2, tokens, batch=3, channels=channels)
    bound = bind(p)
    chunked = over >= 0
    assert ("delta_prepare" in "".join(bound.kernels)) == chunked
    check(p, bound, EXACT if chunked else STEPS)


@pytest.mark.long
@KINDS
def test_decays_of_twenty_a_token_neither_overflow_nor_give_nan(channels: bool):
    """G reaches -1000 within a chunk: e^-G would not be a float."""
    for strong in (1.0, 0.3):
        p = problem(7, 64, 1, 1, 130, channels=channels, strong=strong)
        p.g[...] *= np.float32(2 * (strong == 1.0) + 1)
        check(p, bind(p), EXACT)
        check(p, bind(p, exact=False), FAST)


@pytest.mark.long
@KINDS
def test_a_decay_to_nothing_forgets_the_state(channels: bool):
    p = problem(13, 64, 1, 1, 100, channels=channels)
    p.g[:, [0, 40, 41, 96]] = -np.inf
    check(p, bind(p), EXACT)


@pytest.mark.long
@KINDS
def test_keys_almost_parallel_and_no_decay_cost_no_more_than_is_allowed(channels: bool):
    p = problem(8, 128, 1, 1, 128, channels=channels, hard=True)
    check(p, bind(p), 1e-8)


GGML = [
    # size, heads, tokens, batch, value heads of a key head, permuted, channels, snapshots
    (128, 2, 1, 1, 2, False, False, 1),
    (16, 4, 1, 1, 1, True, True, 1),
    (16, 4, 1, 2, 2, True, False, 1),
    (64, 4, 4, 1, 1, False, False, 1),
    (64, 4, 4, 2, 1, True, False, 1),
    (32, 2, 4, 2, 2, False, True, 1),
    (64, 2, 8, 1, 1, False, False, 1),
    (64, 2, 16, 2, 1, True, True, 1),
    (64, 2, 33, 1, 2, True, True, 1),
    (128, 1, 64, 1, 2, False, False, 1),
    (128, 1, 65, 1, 2, True, True, 1),
    (64, 1, 100, 2, 2, True, False, 1),
    (64, 1, 127, 1, 1, False, True, 1),
    (128, 1, 200, 1, 1, True, False, 1),
    (64, 1, 256, 1, 1, False, False, 1),
    (16, 4, 2, 1, 1, False, False, 2),
    (32, 4, 4, 2, 1, False, True, 4),
    (32, 4, 8, 1, 1, False, False, 3),
    (64, 4, 16, 2, 1, False, False, 4),
    (128, 1, 2, 1, 2, False, True, 4),
    (64, 1, 100, 2, 2, True, False, 4),
    (64, 1, 68, 1, 1, False, True, 2),
]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("size", "heads", "tokens", "batch", "repeat", "permuted", "channels", "snapshots"), GGML)
def test_what_ggml_tests(size, heads, tokens, batch, repeat, permuted, channels, snapshots):
    """``test_gated_delta_net`` of llama.cpp, b11434, with fewer heads."""
    p = problem(
        tokens, size, heads, heads * repeat, tokens, batch, permuted=permuted, channels=channels, snapshots=snapshots,
        strong=1.0,
    )  # fmt: skip
    bound = bind(p)
    check(p, bound, EXACT if "delta_prepare" in "".join(bound.kernels) else STEPS)


def test_snapshots_behind_chunks_go_token_by_token():
    p = problem(1, 64, 1, 1, 80, snapshots=3)
    assert bind(p, limits=A100).kernels == ["delta_prepare", "delta_scan", "delta_net"]
    assert bind(replace(p, snapshots=1)).kernels == ["delta_prepare", "delta_scan_clusters"]


def test_without_tokens_the_state_stays_and_older_snapshots_are_zeros():
    p = problem(2, 32, 1, 2, 0, batch=2, snapshots=3)
    bound = bind(p)
    run(bound.items)
    assert np.array_equal(bound.new[:, 0], p.state)
    assert not bound.new[:, 1:].any()


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_a_state_is_updated_in_its_own_memory(tokens: int):
    p = problem(3, 64, 1, 2, tokens, batch=2)
    expected_out, expected_state = reference(p)
    bound = bind(p, in_place=True)
    assert bound.new is p.state
    run(bound.items)
    assert compute_worst_errors(bound.out, expected_out)[0] < EXACT
    assert compute_worst_errors(bound.new, expected_state)[0] < EXACT


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("tokens", "snapshots"), [(0, 1), (1, 1), (2, 3), (5, 2), (70, 1), (70, 2)])
def test_states_of_a_pool_are_found_and_left_where_the_slots_say(tokens: int, snapshots: int, in_place: bool):
    """Check sequences that swap slots, read a slot that another one writes, and begin with the same state."""
    p = problem(4, 64, 1, 1, tokens, batch=3, snapshots=snapshots)
    out = {1: [2, 5, 0], 2: [[2, 1], [5, 3], [0, 6]], 3: [[2, 1, 7], [5, 3, 8], [0, 6, 4]]}[snapshots]
    p = with_slots(p, 9, [5, 2, 2], out)
    expected_out, expected_pool = reference(p)
    for order in ORDERS:
        pool = copy_aligned(p.state)
        bound = bind(replace(p, state=pool), in_place=in_place)
        run(bound.items, order)
        assert not tokens or compute_worst_errors(bound.out, expected_out)[0] < EXACT
        assert compute_worst_errors(bound.new, expected_pool)[0] < EXACT
        untouched = sorted(set(range(9)) - set(np.ravel(out)))
        assert np.array_equal(bound.new[untouched], p.state[untouched])


def test_states_of_a_pool_are_read_and_the_pool_stays():
    p = with_slots(problem(5, 32, 1, 2, 3, batch=2), 6, [4, 1])
    before = p.state.copy()
    check(p, bind(p), STEPS)
    assert np.array_equal(p.state, before)


@pytest.mark.parametrize("tokens", [2, 70])
@pytest.mark.parametrize(
    ("slots_in", "slots_out", "wrong"), [([1, 9], [0, 1], 9), ([1, -1], [0, 1], -1), ([1, 0], [0, 7], 7)]
)
def test_a_slot_that_is_not_there_is_noted_and_touches_nothing(tokens, slots_in, slots_out, wrong):
    p = with_slots(problem(6, 64, 1, 1, tokens, batch=2), 7, slots_in, slots_out)
    bound = bind(p, in_place=True)
    before = p.state.copy()
    run(bound.items)
    assert bound.fault.tolist() == [1, wrong]
    assert np.array_equal(p.state[2:], before[2:])


@pytest.mark.long(cases=1)
@KINDS
@pytest.mark.parametrize(
    ("size", "values", "tokens"),
    [(64, 12, 5), (64, 48, 80), (64, 16, 80), (8, 5, 3), (24, 7, 11), (100, 3, 4), (200, 9, 2)],
)
def test_sizes_of_keys_and_values_are_free(size: int, values: int, tokens: int, channels: bool):
    p = problem(7, size, 1, 2, tokens, values=values, channels=channels)
    bound = bind(p)
    check(p, bound, EXACT if "delta_prepare" in "".join(bound.kernels) else STEPS)


def _apart(x: np.ndarray, gap: int) -> np.ndarray:
    """Return the same numbers with `gap` between neighbouring elements."""
    room = copy_aligned(np.full((*x.shape[:-1], x.shape[-1] * gap), np.nan, np.float32))
    room[..., ::gap] = x
    return room[..., ::gap]


@KINDS
def test_rows_with_gaps_and_off_alignment_are_read_one_by_one(channels: bool):
    p = problem(8, 64, 1, 2, 70, channels=channels)
    gaps = replace(p, q=_apart(p.q, 3), v=_apart(p.v, 2), beta=_apart(p.beta, 5))
    bound = bind(gaps)
    assert bound.kernels == ["delta_net"]
    check(gaps, bound, STEPS)
    shifted = np.concatenate([np.zeros(1, np.float32), p.k.ravel()])[1:].reshape(p.k.shape)
    check(replace(p, k=shifted), bind(replace(p, k=shifted)), STEPS)


def _results(p: Problem, order: int, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    bound = bind(p, exact=exact)
    run(bound.items, order)
    return bound.out, bound.new


@pytest.mark.long(cases=1)
@KINDS
@pytest.mark.parametrize(("tokens", "exact"), [(19, True), (100, True), (100, False)])
def test_the_order_of_threads_changes_no_bit(tokens: int, exact: bool, channels: bool):
    p = problem(9, 64, 1, 2, tokens, batch=2, channels=channels)
    first, *others = (_results(p, order, exact) for order in ORDERS)
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@KINDS
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", binding.CHUNKED_KEY_SIZES)
def test_the_distribution_of_values_over_blocks_changes_no_bit(size: int, exact: bool, channels: bool):
    """In clusters or alone."""
    p = problem(10, size, 1, 1, 70, values=128, channels=channels)
    results = []
    for values, limits in product(binding.SLICE_ROWS, (A100, LARGEST_LIMITS)):

        def launch(launches, call, rule, exact, values=values):
            carried = binding.bind_states_and_prepare_memory(launches, call, rule.sequences, rule.tokens)
            chunk = binding.ChunkedDeltaRuleVariant(rule.key_size, rule.has_channel_decay, exact)
            memory = binding.allocate_key_and_value_chunk_scratch(launches, rule, rule.tokens, chunk)
            binding.launch_delta_rule_by_chunks(launches, rule, carried, memory, chunk, values)

        bound = bind(p, exact=exact, launch=launch, limits=limits)
        check(p, bound, EXACT if exact else FAST)
        results.append(bound.out)
    assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("size", "tokens"), [(64, 225), (64, 200), (128, 130)])
def test_segments_that_are_scanned_at_once_are_the_recurrence(
    size: int, tokens: int, exact: bool, channels: bool, short_segments: None
):
    """Down to one token after the last segment; the state of the prompt has its part in all of them."""
    p = problem(tokens, size, 1, 2, tokens, channels=channels, strong=0.0)
    bound = bind(p, exact=exact, limits=CANDIDATE_LIMITS)
    scan = "delta_scan_clusters" if size == 128 else "delta_scan"
    prepare = "delta_prepare_channels" if channels else "delta_prepare"
    assert bound.kernels == [prepare, "begin_segments", scan, scan, "carry_segments", scan, scan]
    check(p, bound, EXACT if exact else FAST, ORDERS[tokens % 3])


@pytest.fixture
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "MIN_LONG_CHUNKED_TOKENS", 1)


LONG_LIMITS = replace(LARGEST_LIMITS, candidates=frozenset((UnmeasuredKernelCandidate.DELTA_LONG_CHUNKS,)))


@pytest.mark.long
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("size", "tokens"), [(64, 63), (64, 129), (128, 64), (128, 150), (128, 200), (64, 300)])
def test_long_chunks_are_the_recurrence(size: int, tokens: int, exact: bool, long_chunks: None):
    p = problem(tokens, size, 1, 2, tokens, batch=1 + tokens % 2, mapping=("tiled", "interleaved")[tokens % 2])
    bound = bind(p, exact=exact, limits=LONG_LIMITS)
    assert ["64, 64" in x.kernel.name or "128, 64" in x.kernel.name for x in bound.items] == [True, True]
    check(p, bound, EXACT if exact else FAST, ORDERS[tokens % 3])


@pytest.mark.long
@pytest.mark.parametrize("exact", [True, False])
def test_long_chunks_give_the_same_bits_for_all_slices_and_orders(exact: bool, long_chunks: None):
    p = problem(10, 64, 1, 2, 140, values=128)
    outs = []
    for values in binding.SLICE_ROWS:

        def launch(launches, call, rule, exact, values=values):
            carried = binding.bind_states_and_prepare_memory(launches, call, rule.sequences, rule.tokens)
            chunk = binding.choose_chunk_variant(launches, rule, exact)
            memory = binding.allocate_key_and_value_chunk_scratch(launches, rule, rule.tokens, chunk)
            binding.launch_delta_rule_by_chunks(launches, rule, carried, memory, chunk, values)

        for order in ORDERS:
            bound = bind(p, exact=exact, launch=launch, limits=LONG_LIMITS)
            run(bound.items, order)
            outs.append(bound.out)
    assert all(np.array_equal(outs[0], other) for other in outs)


def test_long_chunks_are_chosen_by_candidates_for_long_prompts_with_one_decay():
    short, long = (problem(1, 64, 1, 1, n) for n in (64, binding.MIN_LONG_CHUNKED_TOKENS))
    kernels = [bind(p, limits=LONG_LIMITS).items[0].kernel.name for p in (short, long)]
    assert kernels == ["delta_prepare<64, 32, true>", "delta_prepare<64, 64, true>"]
    assert bind(long).items[0].kernel.name == kernels[0]
    by_channel = problem(1, 64, 1, 1, binding.MIN_LONG_CHUNKED_TOKENS, channels=True)
    assert "64, 32" in bind(by_channel, limits=LONG_LIMITS).items[0].kernel.name


def test_long_chunks_go_through_segments(short_segments: None, long_chunks: None):
    p = problem(4, 64, 1, 2, 270, strong=0.0)
    bound = bind(p, limits=CANDIDATE_LIMITS)
    assert bound.kernels[1] == "begin_segments"
    assert all(", 64, 64" in x.kernel.name for x in bound.items if "scan" in x.kernel.name)
    check(p, bound, EXACT)


def test_snapshots_behind_segments_go_token_by_token(short_segments: None):
    p = problem(1, 64, 1, 1, 140, snapshots=3)
    bound = bind(p, limits=CANDIDATE_LIMITS)
    assert bound.kernels[-3:] == ["delta_scan", "delta_scan", "delta_net"]
    check(p, bound, EXACT)


def test_segments_fill_the_device_and_leave_a_token() -> None:
    for tokens, blocks, expected in (
        (8192, 16, (8, 1023)),
        (8193, 16, (8, 1024)),
        (8192, 8, (16, 511)),
        (2048, 8, (7, 292)),
        (8192, 32, None),
        (1024, 8, None),
    ):
        found = choose_prompt_segments(tokens, blocks, binding.CHUNK_TOKENS)
        assert found == (expected and PromptSegments(expected[0], expected[1] // 32 * 32))
        assert found is None or found.count * found.tokens < tokens


@pytest.mark.parametrize("mapping", ["tiled", "interleaved"])
def test_value_heads_that_a_block_prepares_together_change_no_bit(mapping: str, monkeypatch):
    p = problem(14, 64, 2, 6, 70, batch=2, mapping=mapping)
    results = []
    for filled, blocks in ((1, 2), (1 << 20, 6)):
        monkeypatch.setattr(binding, "FULL_DEVICE_BLOCKS", filled)
        bound = bind(p)
        assert bound.items[0].grid == (3, blocks, 2)
        check(p, bound, EXACT, ORDERS[2])
        results.append(bound.out)
    assert np.array_equal(*results)


# ---------------------------------------------------------------------------------------------------------- NVRTC


@pytest.mark.long
def test_a_step_of_128_keys_has_no_spills_and_80_registers_or_fewer():
    """That nothing else spills, test_nvrtc.py says."""
    needs(nvrtc.load_nvrtc)
    for name, used in nvrtc.compile(STEP_SOURCES[128], "sm_90a").resources.items():
        assert used.spilled_bytes == 0, name
        assert used.registers <= 80, name


def test_sizes_in_bytes_fit_a_block_of_a_device():
    """227 KiB: devices of compute capability 9.0 and 10.0."""
    for chunk in binding.CHUNK_VARIANTS:
        of_scans = [
            chunk.compute_scan_shared_bytes(values, cluster)
            for values, cluster in product(binding.SLICE_ROWS, (1, binding.CLUSTER_SIZES[0]))
            if chunk.tokens == binding.CHUNK_TOKENS or chunk.can_scan_fit_shared_memory(values, cluster)
        ]
        assert max(chunk.compute_prepare_bytes_of_value_heads(2), *of_scans) <= 227 * 1024
