"""Products of prompts with routed experts by tiles of AMX, which machines without it emulate."""

import numpy as np
import pytest

from hocket.backends.cpu.kernels.matmul import amx_moe, gated_moe_amx
from hocket.backends.cpu.kernels.matmul.amx_weights import make_amx_weight_type
from hocket.backends.cpu.kernels.packed.activation_quantisation import (
    PANEL_ROWS,
    TILE_ROW_BYTES,
    TILED_KIND,
    compute_quantised_activation_bytes,
)
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.steps.work_queue import QUEUE_BYTES
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import bf16_to_f32, dequantise

from ...given.packed_rows import aligned_scratch, call, pack_rows, round_to_bf16, target_of, tile_operands
from ...given.random_rows import nightly_unless, random_rows

RNG = np.random.default_rng(12)
EXPERTS, THREADS = 5, 3
TRIED = (DType.Q4_0, DType.Q8_0, DType.F16)
"""Types with a kernel in each run: two packed types and a float. `test_amx_matmul` expands more types."""


def sorted_by(ids: np.ndarray) -> np.ndarray:
    """Return the result of `experts.sort_expert_slots`: the first slot of each expert, then the slots.

    `EXPERTS` means elsewhere.
    """
    counts = np.bincount(ids, minlength=EXPERTS + 1)
    return np.concatenate([[0], np.cumsum(counts), np.argsort(ids, kind="stable")]).astype(np.int32)


class Prompt:
    """Tokens with two slots each that choose experts unevenly: one expert has no token, one has most tokens."""

    def __init__(self, dtype: DType, rows: int, columns: int, tokens: int, shared: int):
        self.dtype, self.rows, self.columns, self.shared = dtype, rows, columns, shared
        self.ids = RNG.choice([0, 1, 2, 4, 5], 2 * tokens, p=[0.7, 0.1, 0.02, 0.1, 0.08])
        self.x = RNG.standard_normal((tokens * shared, columns)).astype(np.float32)
        self.raw = [random_rows(dtype, EXPERTS * rows, columns, RNG) for _ in range(2)]

    def products(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of each slot, zero for an expert elsewhere; and the same product of magnitudes."""
        w = tile_operands(self.dtype, dequantise(raw, self.dtype)).reshape(EXPERTS, self.rows, self.columns)
        x = tile_operands(self.dtype, self.x)[
            np.arange(len(self.ids)) // 2 * self.shared + np.arange(len(self.ids)) % self.shared
        ]
        y, size = np.zeros((2, len(self.ids), self.rows))
        for expert in range(EXPERTS):
            here = self.ids == expert
            y[here], size[here] = x[here] @ w[expert].T, np.abs(x[here]) @ np.abs(w[expert]).T
        return y, size

    def run(self, kernel, weights, y: np.ndarray, rounding: tuple) -> None:
        """By a thread that does all, and two for which it leaves nothing."""
        kind = make_amx_weight_type(self.dtype).activation_kind
        stride, pitch = self.raw[0].shape[1], compute_quantised_activation_bytes(1, self.columns, kind)
        scratch, tickets = (
            aligned_scratch(THREADS * amx_moe.compute_amx_moe_thread_scratch_bytes(pitch)),
            np.zeros(QUEUE_BYTES, np.uint8),
        )
        words = (*weights, stride, self.rows * stride, self.rows, self.columns, target_of(self.x, kind), pitch)
        words = (*words, sorted_by(self.ids), EXPERTS, 2, self.shared, y, y.strides[0], scratch, tickets, *rounding)
        for thread in range(THREADS):
            assert call(kernel, *words, thread=thread, threads=THREADS) == 0
        assert not tickets.any(), "the last thread lays out new tickets"


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "shared"), [(90, 1), (90, 2), (400, 2)])
@pytest.mark.parametrize("dtype", nightly_unless(TRIED, [*FORMATS, DType.BF16, DType.F16, DType.F32]), ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(48, 768), (272, 2304)])
def test_each_slot_is_multiplied_by_its_expert(dtype: DType, rows: int, columns: int, tokens: int, shared: int):
    """Check experts with more slots than are gathered at once, without slots, and on other devices."""
    prompt = Prompt(dtype, rows, columns, tokens, shared)
    y, weight = np.full((2 * tokens, rows + 3), np.nan, np.float32), pack_rows(dtype, prompt.raw[0], columns)
    second = weight[16 * prompt.raw[0].shape[1] :]
    prompt.run(amx_moe.make_single_weight_amx_moe_kernel(make_amx_weight_type(dtype)), (weight, second), y, (0,))
    want, size = prompt.products(prompt.raw[0])
    assert (np.abs(y[:, :rows] - want) <= 2e-6 * size + 1e-30).all(), "but for the order of float32 sums"
    assert np.isnan(y[:, rows:]).all(), "nothing is written beside the result"


@pytest.mark.long
@pytest.mark.parametrize("dtype", nightly_unless(TRIED, [DType.Q4_0, DType.Q6_K, DType.MXFP4, DType.F16]), ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(96, 768), (288, 2304)])
def test_units_of_slots_are_rounded_where_they_are_computed(dtype: DType, rows: int, columns: int):
    prompt = Prompt(dtype, rows, columns, 300, 1)
    weights, y = [pack_rows(dtype, raw, columns) for raw in prompt.raw], np.full((600, rows), np.nan, np.float32)
    tiles, pitch = (
        aligned_scratch(compute_quantised_activation_bytes(600, rows, TILED_KIND)),
        compute_quantised_activation_bytes(1, rows, TILED_KIND),
    )
    prompt.run(gated_moe_amx.make_many_row_gated_moe_kernel(dtype, "reglu"), weights, y, (1, tiles, pitch, TILED_KIND))
    (gate, gate_size), (up, up_size) = (prompt.products(raw) for raw in prompt.raw)
    bound = 3e-6 * (np.abs(gate) * up_size + np.abs(up) * gate_size + 1e-5 * gate_size * up_size) + 1e-30
    assert (np.abs(y - np.maximum(gate, 0) * up) <= bound).all()
    rounded = (
        tiles.view(np.uint16)
        .reshape(-1, rows // 32, PANEL_ROWS, TILE_ROW_BYTES // 2)
        .transpose(0, 2, 1, 3)
        .reshape(-1, rows)
    )
    assert np.array_equal(bf16_to_f32(rounded[:600]), round_to_bf16(y).astype(np.float32))
