"""Compressed attention: single tokens of a window, and one key per block of tokens before it.

DeepSeek-AI, DeepSeek-V4, 2026; graph: llama.cpp ``deepseek4.cpp``. Shapes use B for sequences, T for new tokens per
sequence, and E for the model width.

Example: blocks have 4 tokens, and a sequence has the tokens 0 to 9. Blocks 0 (tokens 0 to 3) and 1 (tokens 4 to 7)
are complete. Token 9 attends to the tokens of its window and to the keys of blocks 0 and 1. The key of block 1 is
computed from the tokens 0 to 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .... import ops
from ....graph import DType, Value
from ....graph.lazy_dataclass import dataclass
from ...gguf.hyperparameter_keys import ArchitectureMetadata
from ..inputs.attention_window import AttentionWindow
from ..inputs.graph_builder import CACHE_INPUTS, StepGraphBuilder
from ..inputs.step import Batch, Step, count_cache_rows_with_spare
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, matmul
from .rope import Rope

BLOCK_RATIOS = (0, 4, 128)
"""Accepted numbers of tokens per block; 0 for layers without blocks.

The keys of blocks of 4 tokens include the tokens of the previous block.
"""


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of ``ratio`` (R) consecutive tokens with one cached key each, for attention to compressed keys.

    The object makes the graph inputs of the blocks. A run completes at most ``max_block_count(step)`` (N) blocks of
    each sequence.

    - ``block_rows.R`` i32[B, N*tokens_per_key]: the tokens of each block, as row numbers in [history rows, new
      tokens].
    - ``block_pos.R`` i32[B, N]: the position of the first own token of each block.
    - ``block_slot.R`` i32[B*N]: the cache row of each block; an incomplete block writes a spare row.
    """

    ratio: int

    @property
    def tokens_per_key(self) -> int:
        """Number of tokens from which the key of a block is computed; it may include tokens before the block."""
        return 2 * self.ratio if self.ratio == BLOCK_RATIOS[1] else self.ratio

    @property
    def ngram_history_token_count(self) -> int:
        """Number of earlier tokens of a sequence that the key of a later block may still need."""
        return self.tokens_per_key - 1

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset(f"block_{kind}.{self.ratio}" for kind in ("rows", "pos", "slot"))

    def max_block_count(self, step: Step) -> int:
        return -(-step.tokens // self.ratio)

    def build_inputs(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]:
        """Build the input arrays for the blocks that a batch completes, by input name."""
        count, cells = self.max_block_count(step), -(-step.context // self.ratio)
        rows = np.zeros((step.sequences, count, self.tokens_per_key), np.int32)
        pos = np.zeros((step.sequences, count), np.int32)
        starts = count_cache_rows_with_spare(cells) * np.arange(step.sequences, dtype=np.int32)
        slot = np.repeat(starts[:, None] + np.int32(cells), count, axis=1)
        for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
            done = np.arange(length // self.ratio, (length + len(new)) // self.ratio)
            first = self.ngram_history_token_count + (done + 1) * self.ratio - self.tokens_per_key - length
            rows[i, : len(done)] = first[:, None] + np.arange(self.tokens_per_key)
            pos[i, : len(done)] = done * self.ratio
            slot[i, : len(done)] = starts[i] + done
        arrays = {"rows": rows.reshape(step.sequences, -1), "pos": pos, "slot": slot.reshape(-1)}
        return {f"block_{kind}.{self.ratio}": array for kind, array in arrays.items()}


@dataclass(frozen=True)
class CompressedAttention:
    """Attention to recent tokens and to one compressed key per block of earlier tokens.

    All heads of ``size`` columns share one key head, which is also the value; its last columns are rotated.
    ``groups`` of heads are projected to fewer columns each before the common output projection.

    States: ``cache_k.N``. With ``blocks`` also ``cache_c.N`` with a cell per block of a context. The tokens that are
    in no complete block are in ``block_kv.N`` and ``block_score.N`` f32[B, history, columns].
    """

    norm: Norm
    heads: int
    size: int
    groups: int
    rope: Rope
    attention_window: AttentionWindow
    blocks: TokenBlocks | None = None

    @classmethod
    def from_keys(
        cls, keys: ArchitectureMetadata, norm: Norm, heads: int, rope: Rope, window: int, layer: int
    ) -> CompressedAttention:
        """Read the compressed attention of a layer from the metadata.

        Only layers with blocks use the scaled ``rope`` of the metadata.

        Args:
            keys: The metadata.
            norm: The norm of keys and of short query vectors.
            heads: Number of heads.
            rope: The rotary embedding of the metadata.
            window: The attention window in tokens.
            layer: Number of the layer.

        Raises:
            ModelError: A value is missing or invalid.
        """
        ratio = keys.read_per_block_counts(
            "attention.compress_ratios", keys.read_block_count_limited_by_tensor_count()
        )[layer]
        if ratio not in BLOCK_RATIOS:
            raise keys.make_key_error(
                "attention.compress_ratios", f"holds {ratio}; need {', '.join(map(str, BLOCK_RATIOS))}"
            )
        groups, size = keys.read_count("attention.output_group_count"), keys.read_count("attention.key_length")
        if heads % groups:
            raise keys.make_key_error(
                "attention.output_group_count", f"is {groups}; need a divisor of head_count {heads}"
            )
        plain = Rope(rope.n_dims, rope.mode, rope.base)
        base = Rope.read_frequency_base_above_1(keys, "attention.compress_rope_freq_base") if ratio else 0.0
        # Cancels the attention factor of YaRN, which `ops.rope` applies.
        magnitude = 1.0 / (1.0 - 0.1 * math.log(rope.freq_scale)) if rope.ext_factor else 1.0
        turning = replace(rope, base=base, attn_factor=magnitude) if ratio else plain
        return cls(norm, heads, size, groups, turning, AttentionWindow(window), TokenBlocks(ratio) if ratio else None)

    @property
    def taps(self) -> int:
        return self.blocks.tokens_per_key if self.blocks else 0

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        return CACHE_INPUTS | ({"conv_rows"} | self.blocks.input_names if self.blocks else frozenset())

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value) -> Value:
        """Return the attention of ``x`` f32[B*T, E] to tokens and blocks: f32[B*T, E]."""
        block, width = f"blk.{layer}", self.heads * self.size
        rank = weights.tensor_shape(f"{block}.attn_q_a.weight")[0]
        short = self.norm(weights, f"{block}.attn_q_a_norm", matmul(weights, f"{block}.attn_q_a", x, rank))
        q = self.norm.apply_without_weights(
            frame.rows_to_sequences(matmul(weights, f"{block}.attn_q_b", short, width), self.heads, self.size)
        )
        q = self.rotate_columns(q, frame.pos, name=f"{block}.q_rope")
        k = self.norm(weights, f"{block}.attn_kv_a_norm", matmul(weights, f"{block}.attn_kv", x, self.size))
        k = self.rotate_columns(frame.rows_to_sequences(k, 1, self.size), frame.pos, name=f"{block}.k_rope")
        cells = frame.write_and_read_cache(f"cache_k.{layer}", k, attention_window=self.attention_window)
        mask = frame.attention_mask(self.attention_window)
        if self.blocks:
            earlier = self.compute_and_read_block_keys(weights, frame, layer, x, self.blocks)
            cells = ops.concat(cells, earlier, axis=1)
            mask = ops.concat(mask, frame.build_mask_of_complete_blocks(self.blocks.ratio), axis=-1)
        sinks = weights.optional_leaf(f"{block}.attn_sinks.weight", (self.heads,))
        scale = 1.0 / math.sqrt(self.size)
        y = ops.attention(q, cells, cells, mask, sinks, scale=scale, name=f"{block}.attn")
        y = self.rotate_columns(y, frame.negative_positions, name=f"{block}.attn_turned_back")
        return self.project_output_by_groups(weights, frame, block, y, x.shape[-1])

    def rotate_columns(self, x: Value, pos: Value, *, name: str) -> Value:
        return self.rope.rotate_by_position(x, pos, name=name, offset=self.size - self.rope.n_dims)

    def compute_and_read_block_keys(
        self, weights: ModelWeights, frame: StepGraphBuilder, layer: int, x: Value, blocks: TokenBlocks
    ) -> Value:
        """Compute the keys of the token blocks that this run completes, and return all block keys of the cache.

        A block key is a mean over the tokens of a block, weighted by a softmax for each column. The result is f32[B,
        blocks, 1, size].
        """
        block, step, ratio, size = f"blk.{layer}", frame.step, blocks.ratio, self.size
        columns = size * (blocks.tokens_per_key // ratio)
        kv = matmul(weights, f"{block}.attn_compressor_kv", x, columns)
        places = weights(f"{block}.attn_compressor_ape.weight", (ratio, columns))
        places = ops.get_rows(places, frame.compute_positions_in_block(ratio))
        score = ops.add(matmul(weights, f"{block}.attn_compressor_gate", x, columns), places)
        count = blocks.max_block_count(step)
        rows = frame.make_shared_integer_input(f"block_rows.{ratio}", step.sequences, count * blocks.tokens_per_key)
        pos = frame.make_shared_integer_input(f"block_pos.{ratio}", step.sequences, count)
        slot = frame.make_shared_integer_input(f"block_slot.{ratio}", step.sequences * count)

        def members(name: str, new: Value) -> Value:
            """Return the tokens of each block that this run completes, f32[B, N, tokens per key, columns]."""
            known = frame.prepend_previous_rows(
                f"{name}.{layer}", frame.rows_to_sequences(new, columns), blocks.ngram_history_token_count
            )
            return ops.reshape(ops.get_rows(known, rows), shape=(step.sequences, count, blocks.tokens_per_key, columns))

        kv, score = members("block_kv", kv), members("block_score", score)
        if blocks.tokens_per_key > ratio:  # first columns of the previous block, last columns of the block itself
            old, own = (0, ratio, 0, size), (ratio, 2 * ratio, size, columns)
            kv = ops.concat(slice_tokens_and_columns(kv, *old), slice_tokens_and_columns(kv, *own), axis=2)
            score = ops.concat(
                ops.add(slice_tokens_and_columns(score, *old), build_mask_of_missing_previous_block(pos)),
                slice_tokens_and_columns(score, *own),
                axis=2,
            )
        shares = ops.softmax(ops.transpose(score))
        mean = ops.sum_rows(ops.mul(ops.transpose(kv), shares))
        mean = ops.reshape(mean, shape=(step.sequences, count, 1, size))
        mean = self.norm(weights, f"{block}.attn_compressor_norm", mean)
        mean = self.rotate_columns(mean, pos, name=f"{block}.block_rope")
        return frame.write_and_read_cache(f"cache_c.{layer}", mean, slot, ratio=ratio)

    def project_output_by_groups(
        self, weights: ModelWeights, frame: StepGraphBuilder, block: str, y: Value, width: int
    ) -> Value:
        """Apply the output projection to the head results ``y``: first by groups of heads, then together.

        The result is f32[B*T, width].
        """
        rows, groups, each = frame.step.padded_token_count, self.groups, self.heads * self.size // self.groups
        name = f"{block}.attn_output_a"
        shape = weights.tensor_shape(f"{name}.weight")
        matrix = weights(f"{name}.weight", shape)
        rank = matrix.spec.size // (groups * each)
        matrix = ops.reshape(matrix, shape=(groups, rank, each)) if len(shape) < 3 else matrix
        grouped = ops.permute(ops.reshape(y, shape=(rows, groups, each)), axes=(1, 0, 2))
        short = ops.permute(ops.mul_mat(matrix, grouped, name=name), axes=(1, 0, 2))
        short = ops.reshape(short, shape=(rows, groups * rank))
        return matmul(weights, f"{block}.attn_output_b", short, width)


def build_mask_of_missing_previous_block(pos: Value) -> Value:
    """Build a mask f32[B, N, 1, 1] that is -inf for the first block of a text, which has no previous block, else 0.

    ``pos`` has the position of the first token of each block.
    """
    before = ops.cast(ops.scale(ops.cast(pos, dtype=DType.F32), scale=1.0, bias=-1.0), dtype=DType.I32)
    return ops.reshape(ops.causal_mask(before, cells=1), shape=(*pos.shape, 1, 1))


def slice_tokens_and_columns(x: Value, start: int, stop: int, left: int, right: int) -> Value:
    """Return the tokens [start, stop) and the columns [left, right) of ``x`` f32[B, N, tokens, columns]."""
    tokens = ops.slice_(x, axis=2, start=start, stop=stop)
    return ops.slice_(tokens, axis=3, start=left, stop=right)
