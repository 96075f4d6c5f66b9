"""N-gram embeddings: a layer that adds rows of a table, chosen by hashes of the last tokens, to all residual streams.

Qwen team, 2026, after Over-tokenized Transformers (Huang et al., 2025); graph: llama.cpp ``qwen4exp.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .... import ops
from ....graph import Value
from ....graph.errors import format_count
from ....graph.lazy_dataclass import dataclass
from ...errors import ModelError
from ...gguf.hyperparameter_keys import MAX_I32, ArchitectureMetadata
from ..inputs.graph_builder import StepGraphBuilder
from ..inputs.step import Batch, Step
from ..inputs.weights import ModelWeights
from .feed_forward import Norm, matmul

NGRAM_TOKEN_LIMIT = 8
"""Maximum tokens of an n-gram."""


@dataclass(frozen=True, slots=True)
class NgramEmbedding:
    """Embeddings of the last few tokens in layer ``layer``: hashes of these n-grams choose rows of a table.

    Each length n from 2 to ``max_ngram_tokens`` tokens has ``heads`` hashes. Hash h is ``(t[0] m[0] xor ... xor t[n-1]
    m[n-1]) mod sizes[h] + starts[h]``, in 64 bits. The token ``end`` replaces tokens before the sequence. If an earlier
    token is ``end``, it also replaces all tokens before it. The result passes a convolution with taps that are
    ``max_ngram_tokens`` tokens apart. Example: up to 3 tokens and 2 heads give 4 hashes per token, 2 of the last 2
    tokens and 2 of the last 3.
    """

    layer: int
    max_ngram_tokens: int
    heads: int
    taps: int
    width: int
    end: int
    multipliers: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def from_keys(cls, keys: ArchitectureMetadata, layers: int) -> NgramEmbedding | None:
        """Read the n-gram embedding from the metadata; return `None` for a model without one.

        Raises:
            ModelError: A value is missing or invalid.
        """
        where = keys.read_integers_or_empty("ple.layers")
        if not where:
            return None
        if len(where) > 1 or where[0] >= layers:
            raise keys.make_key_error("ple.layers", f"is {list(where)}; need one layer below {layers}")
        longest, each = keys.read_count("ple.ngram_size", minimum=2), keys.read_count("ple.heads_per_ngram")
        if longest > NGRAM_TOKEN_LIMIT:
            raise keys.make_key_error("ple.ngram_size", f"is {longest}; need at most {NGRAM_TOKEN_LIMIT}")
        lists = {
            "ple.layer_multipliers": longest,
            "ple.head_offsets": (longest - 1) * each,
            "ple.head_vocab_sizes": (longest - 1) * each,
        }
        multipliers, starts, sizes = (keys.read_integers_or_empty(name, count) for name, count in lists.items())
        if min(sizes) < 1 or max(start + size for start, size in zip(starts, sizes, strict=True)) > MAX_I32:
            raise keys.make_key_error(
                "ple.head_vocab_sizes", f"need sizes of at least 1 that end, with offsets, below {MAX_I32}"
            )
        taps, width = keys.read_count("ple.conv_kernel", minimum=2), keys.read_count("embedding_length_per_layer_input")
        end = keys.read_count("ple.eos_token_id", minimum=0)
        return cls(where[0], longest, each, taps, width, end, multipliers, starts, sizes)

    @property
    def convolution_history_token_count(self) -> int:
        """Number of earlier tokens that the convolution reads."""
        return (self.taps - 1) * self.max_ngram_tokens

    @property
    def hash_history_token_count(self) -> int:
        """Number of earlier tokens that are hashed together with a token."""
        return self.max_ngram_tokens - 1

    def build_inputs(self, step: Step, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]:
        """Return the input ``ngram_rows`` of a batch: the table rows of all hashes of each token, i32[B*T*hashes].

        Raises:
            ModelError: The batch lacks earlier tokens that the hashes need.
        """
        rows = np.zeros((step.sequences, step.tokens, len(self.sizes)), np.int32)
        for i, (new, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
            need = min(length, self.hash_history_token_count)
            before = list(batch.history_tokens[i])[-need:] if need and i < len(batch.history_tokens) else []
            if new and len(before) < need:
                raise ModelError(
                    f"batch: sequence {i} goes on behind {format_count(length, 'token')}, of which this model "
                    f"needs the last {need}; "
                    "give them as `history_tokens`"
                )
            for t in range(len(new)):
                rows[i, t] = self.hash_last_ngrams_to_table_rows([*before, *new[: t + 1]][-self.max_ngram_tokens :])
        return {"ngram_rows": rows.reshape(-1)}

    def hash_last_ngrams_to_table_rows(self, tokens: list[int]) -> list[int]:
        """Hash the n-grams that end with the last of ``tokens``; return their rows in the embedding table."""
        latest = [tokens[-1]]
        for token in reversed(tokens[:-1]):
            if token == self.end:
                break
            latest.append(token)
        latest += [self.end] * (self.max_ngram_tokens - len(latest))
        mixed, rows = latest[0] * self.multipliers[0], []
        for n in range(1, self.max_ngram_tokens):
            mixed = (mixed ^ latest[n] * self.multipliers[n]) & (2**64 - 1)
            span = slice((n - 1) * self.heads, n * self.heads)
            rows += [mixed % size + start for size, start in zip(self.sizes[span], self.starts[span], strict=True)]
        return rows

    def __call__(self, weights: ModelWeights, frame: StepGraphBuilder, norm: Norm, x: Value) -> Value:
        """Add the n-gram embeddings of each token to all residual streams f32[B*T, streams, E].

        The table rows are gated by their similarity to the streams.
        """
        block, (rows, streams, width) = f"blk.{self.layer}", x.shape
        entries = weights.tensor_shape("per_layer_token_embd.weight")[0]  # may exceed the range of the hashes
        table = weights("per_layer_token_embd.weight", (entries, self.width))
        ids = frame.make_shared_integer_input("ngram_rows", rows * len(self.sizes))
        short = ops.reshape(ops.get_rows(table, ids, name="ngrams"), shape=(rows, len(self.sizes) * self.width))
        key = ops.reshape(matmul(weights, f"{block}.ple_key", short, streams * width), shape=x.shape)
        key, query = norm(weights, f"{block}.ple_norm_key", key), norm(weights, f"{block}.ple_norm_query", x)
        likeness = ops.scale(ops.sum_rows(ops.mul(key, query)), scale=1.0 / math.sqrt(width))
        root = ops.sqrt(ops.clamp(ops.abs_(likeness), min=1e-6, max=math.inf))
        gate = ops.sigmoid(ops.mul(ops.sgn(likeness), root))
        value = ops.reshape(matmul(weights, f"{block}.ple_value", short, width), shape=(rows, 1, width))
        value = ops.mul(ops.repeat(value, shape=x.shape), gate, name=f"{block}.ngrams_gated")
        return ops.add(
            x,
            ops.add(value, self.convolve_channels_dilated_and_silu(weights, frame, norm, value)),
            name=f"{block}.ngrams_residual",
        )

    def convolve_channels_dilated_and_silu(
        self, weights: ModelWeights, frame: StepGraphBuilder, norm: Norm, x: Value
    ) -> Value:
        """Apply a dilated convolution to each channel of ``x`` f32[B*T, streams, E], then SiLU.

        The taps are ``max_ngram_tokens`` tokens apart.
        """
        block, columns = f"blk.{self.layer}", x.shape[1] * x.shape[2]
        new = frame.rows_to_sequences(norm(weights, f"{block}.ple_norm_conv", x), columns)
        known = frame.prepend_previous_rows(f"ngram_state.{self.layer}", new, self.convolution_history_token_count)
        kernel = weights(f"{block}.ple_conv1d.weight", (columns, self.taps))
        # Zeros between the taps make one dense kernel.
        taps = ops.reshape(kernel, shape=(columns, self.taps, 1))
        zeros = ops.repeat(ops.fill(taps, value=0.0), shape=(columns, self.taps, self.max_ngram_tokens - 1))
        dense = ops.reshape(ops.concat(zeros, taps, axis=-1), shape=(columns, self.taps * self.max_ngram_tokens))
        dense = ops.slice_(dense, axis=-1, start=self.max_ngram_tokens - 1, stop=self.taps * self.max_ngram_tokens)
        return ops.reshape(ops.silu(ops.ssm_conv(known, dense)), shape=x.shape)
