"""Decoders with a residual stream that is not one plain sum.

- Several residual streams.
- A weighted mix of earlier residuals.
- The token embedding, added again in every block.
- Two stacks of blocks that run in turn.
- A further embedding vector for each block.

Shapes use n for tokens (rows), and E for the model width. A block is one layer of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ... import ops
from ...graph import Value
from .decoder import Decoder
from .hyperparameters import Layer
from .layers.feed_forward import PLAIN_ACTIVATIONS, linear, matmul, split_columns


class EmbeddingSkipDecoder(Decoder):
    """A decoder in which every block adds the token embedding once more, times a factor of the block (Talkie)."""

    def embed_and_run_all_blocks(self) -> Value:
        x = first = self.embed_tokens()
        for i, layer in enumerate(self.hyper.blocks):
            first = self.frame.select_output_rows_unless_mtp(first) if self.is_last_block(i) else first
            x = self.run_block(i, layer, x)
            x = ops.add(x, ops.mul(first, self.weights(f"blk.{i}.layer_output_scale.weight", (1,))))
            x = self.frame.steered(i, x)
        return x


class PerLayerEmbeddingDecoder(Decoder):
    """A decoder with per-layer embeddings: every block also reads a short vector per token that belongs to this block.

    The block gates this vector by the residual, projects it, adds it to the residual, and scales its output. Gemma
    team, Gemma 3n and Gemma 4; graph: llama.cpp ``gemma4.cpp``.
    """

    def embed_tokens(self) -> Value:
        x = super().embed_tokens()
        self.per_layer_vectors = (
            self.compute_per_layer_embeddings(x)
            if self.weights.has_used_tensor("per_layer_token_embd.weight")
            else None
        )
        return x

    def compute_per_layer_embeddings(self, x: Value) -> Value:
        """Compute the per-layer embeddings of all blocks, f32[B*T, layers * P], from the token embeddings ``x``.

        They are the sum of a projection of ``x`` and of rows of an embedding table, with P columns for each block.
        """
        hyper, weights = self.hyper, self.weights
        columns = weights.tensor_shape("per_layer_token_embd.weight", 2)[1]
        each = columns // hyper.layers
        rows = ops.get_rows(
            weights("per_layer_token_embd.weight", (hyper.vocabulary_size, columns)), self.frame.tokens, name="places"
        )
        y = ops.scale(matmul(weights, "per_layer_model_proj", x, columns), scale=1.0 / math.sqrt(hyper.width))
        y = ops.reshape(y, shape=(x.shape[0], hyper.layers, each))
        y = ops.reshape(self.norm(weights, "per_layer_proj_norm", y), shape=(x.shape[0], columns))
        return ops.scale(ops.add(y, ops.scale(rows, scale=math.sqrt(each))), scale=math.sqrt(0.5), name="short")

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        block, x = f"blk.{i}", super().run_block(i, layer, x)
        if self.per_layer_vectors is not None:
            short = (
                self.frame.select_output_rows_unless_mtp(self.per_layer_vectors)
                if self.is_last_block(i)
                else self.per_layer_vectors
            )
            x = ops.add(x, self.gate_and_project_layer_embedding(i, x, short), name=f"{block}.short_residual")
        factor = self.weights.optional_leaf(f"{block}.layer_output_scale.weight", (1,))
        return x if factor is None else ops.mul(x, factor)

    def gate_and_project_layer_embedding(
        self, i: int, x: Value, layer_vectors: Value, gelu: Callable[[Value], Value] = ops.gelu
    ) -> Value:
        """Gate the per-layer embedding of block i by the residual, and project it to the model width: f32[n, E].

        Args:
            i: Number of the block.
            x: The residual, f32[n, E].
            layer_vectors: The per-layer embeddings of all blocks, f32[n, layers * P].
            gelu: The activation of the gate.
        """
        each = layer_vectors.shape[-1] // self.hyper.layers
        own = ops.slice_(layer_vectors, axis=-1, start=i * each, stop=(i + 1) * each)
        y = ops.mul(gelu(matmul(self.weights, f"blk.{i}.inp_gate", x, each)), own)
        return self.apply_block_norm_if_present(i, "post_norm", matmul(self.weights, f"blk.{i}.proj", y, x.shape[-1]))


class AlternatingUpdateDecoder(PerLayerEmbeddingDecoder):
    """A decoder with alternating updates (AltUp): a block computes one residual stream and predicts the others.

    The streams are f32[n, streams, E], and a block computes the first one. It also adds a low-rank product to the
    result of its attention. Baykal et al., Alternating updates, 2023; Gemma team, Gemma 3n, 2025; graph: llama.cpp
    ``gemma3n.cpp``.
    """

    def embed_and_run_all_blocks(self) -> Value:
        first = self.embed_tokens()
        rows, width = first.shape
        if self.per_layer_vectors is None:
            self.per_layer_vectors = self.compute_per_layer_embeddings(first)  # raises for the missing tensor
        count = self.weights.tensor_shape("altup_proj.weight")[0]
        matrices = self.weights("altup_proj.weight", (count, width, width))
        others = ops.mul_mat(ops.reshape(matrices, shape=(count * width, width)), first)
        first = ops.reshape(first, shape=(rows, 1, width))
        x = ops.concat(first, match_row_norms(ops.reshape(others, shape=(rows, count, width)), first), axis=1)
        for i, layer in enumerate(self.hyper.blocks):
            x = self.frame.steered(i, self.run_block(i, layer, x))
        x = self.frame.select_output_rows_unless_mtp(ops.reshape(x, shape=(rows, (count + 1) * width)))
        return self.merge_streams(ops.reshape(x, shape=(x.shape[0], count + 1, width)))

    def is_last_block(self, i: int) -> bool:
        return False  # predicted streams need all rows

    def merge_streams(self, x: Value) -> Value:
        """Merge the residual streams f32[n, streams, E] into their mean f32[n, E].

        Each stream except the first is multiplied by its own matrix before.
        """
        rows, streams, width = x.shape
        first, others = split_off_first_stream(x)
        matrices = self.weights("altup_unembd_proj.weight", (streams - 1, width, width))
        others = ops.permute(ops.mul_mat(matrices, ops.permute(others, axes=(1, 0, 2))), axes=(1, 0, 2))
        both = ops.concat(first, match_row_norms(others, first), axis=1)
        return ops.scale(ops.reshape(ops.sum_rows(ops.transpose(both)), shape=(rows, width)), scale=1.0 / streams)

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        block, short = f"blk.{i}", self.per_layer_vectors
        assert short is not None
        predictions = self.predict_streams(i, x)
        first = take_first_stream(predictions)
        h = self.apply_block_norm_if_present(i, self.family.attn_norm, first)
        added = ops.add(self.run_mixers_and_sum_results(i, layer, first, h), first, name=f"{block}.attn_residual")
        added = ops.scale(ops.add(added, self.add_low_rank_product(i, h)), scale=math.sqrt(0.5))
        y = self.compute_feed_forward_without_residual(
            i, layer, self.apply_block_norm_if_present(i, self.family.ffn_norm, added), added, first
        )
        y = ops.add(y, added, name=f"{block}.ffn_residual")
        x = self.correct_streams(i, predictions, first, y)
        scale = self.weights(f"{block}.altup_correct_scale.weight", (self.hyper.width,))
        y = self.gate_and_project_layer_embedding(
            i, ops.mul(take_first_stream(x), scale), short, PLAIN_ACTIVATIONS[self.family.activation]
        )
        first, others = split_off_first_stream(x)
        others = ops.add(others, ops.reshape(y, shape=first.shape))
        return ops.concat(first, others, axis=1, name=f"{block}.short_residual")

    def add_low_rank_product(self, i: int, h: Value) -> Value:
        """Add to ``h`` f32[n, E] its product with two low-rank matrices, after a norm (LAuReL)."""
        rank = self.weights.tensor_shape(f"blk.{i}.laurel_l.weight")[0]
        y = linear(self.weights, f"blk.{i}.laurel_l", h, rank)
        y = linear(self.weights, f"blk.{i}.laurel_r", y, h.shape[-1])
        return ops.add(self.apply_block_norm_if_present(i, "laurel_post_norm", y), h)

    def compute_stream_coefficients(self, i: int, x: Value, streams: int) -> Value:
        """Compute coefficients between -1 and 1 for the residual streams: f32[n, streams].

        They depend on one stream ``x`` f32[n, E]. Both `predict_streams` and `correct_streams` use them.

        Args:
            i: Number of the block.
            x: The stream.
            streams: Number of streams.
        """
        h = ops.scale(self.apply_block_norm_if_present(i, "altup_router_norm", x), scale=1.0 / x.shape[-1])
        return ops.tanh(linear(self.weights, f"blk.{i}.altup_router", h, streams))

    def predict_streams(self, i: int, x: Value) -> Value:
        """Predict all residual streams after the block: the streams ``x`` f32[n, streams, E] plus a mix of them.

        The coefficients of the mix depend on the first stream.
        """
        rows, streams, _ = x.shape
        shares = self.compute_stream_coefficients(i, take_first_stream(x), streams)
        mix = linear(self.weights, f"blk.{i}.altup_predict_coef", shares, streams * streams)
        mixed = ops.mul_mat(ops.transpose(x), ops.reshape(mix, shape=(rows, streams, streams)))
        return ops.add(mixed, x, name=f"blk.{i}.predictions")

    def correct_streams(self, i: int, predictions: Value, first: Value, y: Value) -> Value:
        """Correct the predicted streams by the error of the prediction of the first stream.

        Args:
            i: Number of the block.
            predictions: The predicted streams, f32[n, streams, E].
            first: The predicted first stream, f32[n, E].
            y: The first stream that the block computed, f32[n, E].
        """
        streams = predictions.shape[1]
        shares = linear(
            self.weights, f"blk.{i}.altup_correct_coef", self.compute_stream_coefficients(i, y, streams), streams
        )
        shares = ops.scale(shares, scale=1.0, bias=1.0)
        return ops.dsv4_hc_post(ops.sub(y, first), predictions, shares, None, name=f"blk.{i}.corrected")


def take_first_stream(x: Value) -> Value:
    """Return the first residual stream of ``x`` f32[n, streams, E]: f32[n, E]."""
    return ops.reshape(split_off_first_stream(x)[0], shape=(x.shape[0], x.shape[2]))


def split_off_first_stream(x: Value) -> tuple[Value, Value]:
    """Split the residual streams into the first one f32[n, 1, E] and the others f32[n, streams - 1, E]."""
    first = ops.slice_(x, axis=1, start=0, stop=1)
    return first, ops.slice_(x, axis=1, start=1, stop=x.shape[1])


def match_row_norms(x: Value, like: Value) -> Value:
    """Scale each row of ``x`` f32[n, k, E] to the length (L2 norm) of the row of ``like`` f32[n, 1, E]."""
    own, target = (ops.sqrt(ops.sum_rows(ops.sqr(y))) for y in (x, like))
    return ops.div(ops.mul(x, target), own)


class PostNormDecoder(Decoder):
    """A decoder with post-norm blocks: a norm follows each residual sum.

    Each part of a block then reads a normalised residual. Devlin et al., BERT, 2018. A second such norm after
    attention: Günther et al., Jina embeddings 2, 2023.
    """

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        h = self.run_mixers_and_sum_results(i, layer, x, x)
        h, x = (
            (self.frame.select_output_rows_unless_mtp(h), self.frame.select_output_rows_unless_mtp(x))
            if self.is_last_block(i)
            else (h, x)
        )
        added = self.apply_block_norm_if_present(i, "attn_output_norm", ops.add(x, h))
        if self.weights.has_used_tensor(f"blk.{i}.attn_norm_2.weight"):
            added = self.apply_block_norm_if_present(i, "attn_norm_2", ops.add(added, x))
        y = self.compute_feed_forward_without_residual(i, layer, added, added, x)
        return self.apply_block_norm_if_present(i, "layer_output_norm", ops.add(added, y, name=f"blk.{i}.ffn_residual"))


class HyperConnectionDecoder(Decoder):
    """A decoder with hyper-connections: several residual streams f32[n, streams, E].

    The mixer and the FFN of a block each read a weighted mix of the streams, and add their result to all streams by
    weights. Streams are also mixed among each other if the file has logits for this. Zhu et al., Hyper-connections,
    2024; Xie et al., mHC, 2025.
    """

    def embed_and_run_all_blocks(self) -> Value:
        x = self.embed_tokens()
        rows, width, streams = self.frame.step.padded_token_count, self.hyper.width, self.hyper.streams.count
        x = ops.repeat(ops.reshape(x, shape=(rows, 1, width)), shape=(rows, streams, width))
        for i, layer in enumerate(self.hyper.blocks):
            x = self.frame.steered(i, self.run_block(i, layer, x))
        x = self.frame.select_output_rows_unless_mtp(ops.reshape(x, shape=(rows, streams * width)))
        return ops.reshape(x, shape=(x.shape[0], streams, width))

    def apply_output_norm(self, x: Value, mtp_prefix: str = "") -> Value:
        return super().apply_output_norm(self.merge_streams(x, f"{mtp_prefix}.hc_head"), mtp_prefix)

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        before, post, comb = self.compute_stream_mix_and_write_weights(f"blk.{i}.hc_attn", x)
        h = self.apply_block_norm_if_present(i, self.family.attn_norm, before)
        x = ops.dsv4_hc_post(
            self.run_mixers_and_sum_results(i, layer, before, h), x, post, comb, name=f"blk.{i}.attn_residual"
        )
        added, post, comb = self.compute_stream_mix_and_write_weights(f"blk.{i}.hc_ffn", x)
        y = self.compute_feed_forward_without_residual(
            i, layer, self.apply_block_norm_if_present(i, self.family.ffn_norm, added), added, before
        )
        return ops.dsv4_hc_post(y, x, post, comb, name=f"blk.{i}.ffn_residual")

    def compute_stream_mix_and_write_weights(self, name: str, x: Value) -> tuple[Value, Value, Value | None]:
        """Compute the mix of streams that a mixer or FFN reads, and the weights with which it writes its result.

        Args:
            name: The prefix of weight names.
            x: The streams, f32[n, streams, E].

        Returns:
            The mix f32[n, E], the write weights f32[n, streams], and the weights of a mix among the streams. The last
            one is `None` without such a mix.
        """
        traits, n = self.hyper.streams, self.hyper.streams.count
        mixes, scale, base = self.compute_mix_logits_scale_and_offset(name, x)
        logits = zip(split_columns(mixes, n, n), split_columns(scale, 1, 1), split_columns(base, n, n), strict=True)
        pre, post = (ops.sigmoid(ops.add(ops.mul(y, factor), offset)) for y, factor, offset in logits)
        pre = ops.scale(pre, scale=1.0, bias=traits.eps)
        comb = None
        if mixes.shape[-1] > 2 * n:
            post = ops.scale(post, scale=2.0)
            comb = ops.dsv4_hc_comb(mixes, scale, base, n_iter=traits.iterations, eps=traits.eps)
        else:
            post = ops.scale(post, scale=traits.magnitude, bias=traits.eps)
        return ops.dsv4_hc_pre(x, pre), post, comb

    def compute_mix_logits_scale_and_offset(self, name: str, x: Value) -> tuple[Value, Value, Value]:
        """Compute the logits from which the weights of all streams follow, from the streams ``x``.

        Returns:
            The logits; the factors of the logits; the offsets of the logits.
        """
        rows, streams, width = x.shape
        flat = self.norm.apply_without_weights(ops.reshape(x, shape=(rows, streams * width)))
        weights = self.weights
        columns = weights.tensor_shape(f"{name}_fn.weight")[0]
        matrix = weights(f"{name}_fn.weight", (columns, streams * width))
        scale = weights(f"{name}_scale.weight", weights.tensor_shape(f"{name}_scale.weight"))
        return ops.mul_mat(matrix, flat, name=name), scale, weights(f"{name}_base.weight", (columns,))

    def merge_streams(self, x: Value, head_prefix: str) -> Value:
        """Merge the residual streams ``x`` f32[n, streams, E] into one, f32[n, E].

        The result is a weighted sum if the file has weights for it, else the mean.
        """
        if not self.weights.has_used_tensor("output_hc_fn.weight"):
            count = self.hyper.streams.count
            return ops.scale(
                ops.reshape(ops.sum_rows(ops.transpose(x)), shape=(x.shape[0], x.shape[2])), scale=1.0 / count
            )
        mixes, scale, base = self.compute_mix_logits_scale_and_offset("output_hc", x)
        pre = ops.sigmoid(ops.add(ops.mul(mixes, scale), base))
        return ops.dsv4_hc_pre(x, ops.scale(pre, scale=1.0, bias=self.hyper.streams.eps))


class GatedMeanStreamDecoder(HyperConnectionDecoder):
    """A hyper-connection decoder in which a mixer or FFN reads a gated mean of the streams.

    A low-rank projection of all streams gives the gate of each entry. One layer may add n-gram embeddings. Graph:
    llama.cpp ``qwen4exp.cpp``.
    """

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        ngrams = self.hyper.ngrams
        if ngrams is not None and ngrams.layer == i:
            x = ngrams(self.weights, self.frame, self.norm, x)
        return super().run_block(i, layer, x)

    def compute_stream_mix_and_write_weights(self, name: str, x: Value) -> tuple[Value, Value, Value | None]:
        """Compute the gated stream mean that a mixer or FFN reads, f32[n, E], and its write weights f32[n, streams].

        The third result is `None`: streams are not mixed among each other.
        """
        mean, flat = self.compute_gated_stream_mean(name, x)
        weight = ops.scale(matmul(self.weights, f"{name}_inject", flat, x.shape[1]), scale=1.0 / x.shape[1])
        return mean, ops.scale(ops.sigmoid(weight), scale=2.0), None

    def compute_gated_stream_mean(self, name: str, x: Value) -> tuple[Value, Value]:
        """Compute the gated stream mean f32[n, E], and the normalised streams side by side f32[n, streams * E]."""
        rows, streams, width = x.shape
        normed = self.norm(self.weights, f"{name}_norm", x)
        flat = ops.reshape(normed, shape=(rows, streams * width))
        rank = self.weights.tensor_shape(f"{name}_down.weight")[0]
        short = ops.scale(matmul(self.weights, f"{name}_down", flat, rank), scale=1.0 / streams)
        gate = matmul(self.weights, f"{name}_up", ops.silu(short), streams * width)
        gate = ops.reshape(gate, shape=x.shape)
        return ops.dsv4_hc_pre(normed, gate, gated=True, scale=1.0 / streams, name=f"{name}.mix"), flat

    def merge_streams(self, x: Value, head_prefix: str) -> Value:
        return self.compute_gated_stream_mean(
            head_prefix if self.weights.has_used_tensor(f"{head_prefix}_norm.weight") else "output_hc", x
        )[0]


class AttentionResidualsDecoder(Decoder):
    """A decoder in which each mixer and each FFN reads a softmax-weighted mix of earlier residuals.

    The mix contains the present residual, and the residuals that were saved at the start of each span of blocks. Kimi
    team, Attention residuals, 2026; graph: llama.cpp ``kimi-k3.cpp``.
    """

    def embed_and_run_all_blocks(self) -> Value:
        x, bank = self.embed_tokens(), list[Value]()
        for i, layer in enumerate(self.hyper.blocks):
            h = self.apply_block_norm_if_present(
                i, self.family.attn_norm, self.mix_saved_residuals(f"blk.{i}.attn_res_score", x, bank)
            )
            starts = i % self.hyper.span == 0
            if starts:
                bank.append(x)
            y = self.run_mixers_and_sum_results(i, layer, x, h)
            x = y if starts else ops.add(x, y, name=f"blk.{i}.attn_residual")
            h = self.apply_block_norm_if_present(
                i, self.family.ffn_norm, self.mix_saved_residuals(f"blk.{i}.ffn_res_score", x, bank)
            )
            x = ops.add(x, self.compute_feed_forward_without_residual(i, layer, h, x, x), name=f"blk.{i}.ffn_residual")
            x = self.frame.steered(i, x)
        return self.frame.select_output_rows_unless_mtp(self.mix_saved_residuals("output_res_score", x, bank))

    def mix_saved_residuals(self, name: str, x: Value, bank: list[Value]) -> Value:
        """Mix the saved residuals and the present one: the sum weighted by a softmax over their scores, f32[n, E].

        Args:
            name: The prefix of the weight that gives the scores.
            x: The present residual, f32[n, E].
            bank: The saved residuals; without any, the result is ``x``.
        """
        if not bank:
            return x
        rows, width = x.shape
        sums = ops.reshape(bank[0], shape=(rows, 1, width))
        for other in (*bank[1:], x):
            sums = ops.concat(sums, ops.reshape(other, shape=(rows, 1, width)), axis=1)
        scores = ops.sum_rows(ops.mul(self.norm.apply_without_weights(sums), self.weights(f"{name}.weight", (width,))))
        shares = ops.softmax(ops.reshape(scores, shape=(rows, 1, len(bank) + 1)))
        return ops.dsv4_hc_pre(sums, ops.reshape(shares, shape=(rows, len(bank) + 1)), name=f"{name}.mix")


class AlternatingStacksDecoder(Decoder):
    """A decoder with two stacks of blocks that run in turn; each pass of a stack reads the sum of the results of both.

    Each pass has its own KV caches. Wang et al., Hierarchical reasoning model, 2025; graph: llama.cpp ``hrm-text.cpp``.
    """

    def embed_and_run_all_blocks(self) -> Value:
        high, low = self.embed_tokens(), self.weights("hrm.z_l_init", (self.hyper.width,))
        span, passes = self.hyper.span, self.hyper.cycles
        for start in range(0, self.hyper.layers, span):
            both = ops.add(high, low)
            for i in range(start, start + span):
                both = self.frame.steered(i, Decoder.run_block(self, i, self.hyper.blocks[i], both))
            both = self.norm.apply_without_weights(both)
            if (start // span + 1) % (passes + 1):
                low = both
            else:
                high = both
        return self.frame.select_output_rows_unless_mtp(high)

    def is_last_block(self, i: int) -> bool:
        return False
