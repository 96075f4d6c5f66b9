"""The decoder of all families: embedding, then mixers and FFN of each block on a residual stream, then logits.

A block is one layer of the model. A mixer is a part that lets tokens read each other, such as attention. The traits
of the family (`FamilyTraits`) and the `Layer` select the parts of a block. Details of a part follow from the tensors
in the file. Module `residuals` has the decoders with other residual streams. Shapes use B for sequences, T for new
tokens per sequence, n for rows (tokens), and E for the model width.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ... import ops
from ...graph import Graph, Value
from .hyperparameters import Hyperparameters, Layer, TokenMixer
from .inputs.graph_builder import StepGraphBuilder
from .inputs.token_choice import SELECTIONS
from .inputs.weights import ModelWeights
from .layers.feed_forward import Norm, apply_feed_forward, linear, matmul, soft_cap_logits
from .layers.moe import run_expert_layer, run_routed_experts
from .picture_tokens import suppress_token_logits


class Decoder:
    """Builds the graph of one step of a decoder-only model: token embedding, blocks, last norm and logits.

    The output is ``logits`` f32[outputs, vocabulary], and the new states. After the last token mixer, only the rows
    of tokens with requested logits are computed further.
    """

    def __init__(self, hyper: Hyperparameters, weights: ModelWeights, frame: StepGraphBuilder) -> None:
        self.hyper, self.weights, self.frame = hyper, weights, frame
        self.family, self.norm = hyper.family, hyper.norm
        eps = hyper.family.post_eps
        self.post_norm = hyper.norm if eps is None else Norm(eps)

    def build_graph(self) -> Graph:
        """Build the graph of all blocks, the last norm and the output matrix.

        The output is ``logits``. Encoders, and steps with the output kind ``hidden``, return ``hidden`` rows instead.
        Steps with the output kind ``token`` or ``sampled`` return the tokens that they choose.
        """
        x = self.apply_output_norm(self.embed_and_run_all_blocks())
        if self.family.run_mode == "encoder":
            for name in filter(lambda name: self.weights.has_used_tensor(f"{name}.weight"), ("dense_2", "dense_3")):
                x = linear(self.weights, name, x, self.weights.tensor_shape(f"{name}.weight")[0])
        elif self.frame.step.output_kind != "hidden":
            logits = self.compute_logits(x)
            select = SELECTIONS.get(self.frame.step.output_kind)
            return self.frame.build_graph(select(self.frame, logits) if select else {"logits": logits})
        return self.frame.build_graph({"hidden": x})

    def embed_and_run_all_blocks(self) -> Value:
        """Embed the tokens, run all blocks, and return the residual after the last one.

        The result is f32[n, E] and has only the rows of tokens with requested logits.
        """
        x = self.embed_tokens()
        for i, layer in enumerate(self.hyper.blocks):
            x = self.frame.steered(i, self.run_block(i, layer, x))
        return x

    def apply_output_norm(self, x: Value, mtp_prefix: str = "") -> Value:
        """Apply the last norm of the model to the residual ``x`` f32[n, E].

        ``mtp_prefix`` is the weight prefix of an MTP block, which may have its own norm.
        """
        if mtp_prefix and self.weights.has_used_tensor(f"{mtp_prefix}.shared_head_norm.weight"):
            return replace(self.norm, is_centred=self.family.draft_norm == "layer" or self.norm.is_centred)(
                self.weights, f"{mtp_prefix}.shared_head_norm", x
            )
        return self.norm(self.weights, self.family.output_norm, x) if self.family.output_norm else x

    def is_last_block(self, i: int) -> bool:
        return i == self.hyper.layers - 1

    def embed_tokens(self) -> Value:
        """Return the embeddings of the tokens, f32[B*T, E], scaled and normalised as the model needs.

        Embeddings of positions and token types are added if the file has them.
        """
        hyper, weights, frame = self.hyper, self.weights, self.frame
        table = weights("token_embd.weight", (hyper.vocabulary_size, hyper.width))
        x = ops.get_rows(table, frame.tokens, name="embed")
        if hyper.embedding != 1.0:
            x = ops.scale(x, scale=hyper.embedding, name="embed_scaled")
        if weights.has_used_tensor("position_embd.weight"):
            rows = weights.tensor_shape("position_embd.weight")[0]
            where = ops.reshape(frame.pos, shape=(frame.step.padded_token_count,))
            x = ops.add(x, ops.get_rows(weights("position_embd.weight", (rows, hyper.width)), where, name="places"))
        if weights.has_used_tensor("token_types.weight"):  # all tokens have the first type
            types = weights("token_types.weight", weights.tensor_shape("token_types.weight"))
            x = ops.add(x, ops.slice_(types, axis=0, start=0, stop=1) if len(types.shape) > 1 else types)
        if self.family.embedding_norm == "bare":
            x = self.norm.apply_without_weights(x)
        elif self.family.embedding_norm:
            x = self.norm(weights, self.family.embedding_norm, x)
        return x

    def run_block(self, i: int, layer: Layer, x: Value) -> Value:
        """Run block i: add the results of its mixers and its FFN to the residual ``x``, and return the sum.

        The result is f32[n, E]; after the last block it has the output rows only.
        """
        family, block, before = self.family, f"blk.{i}", x
        h = self.apply_block_norm_if_present(i, family.attn_norm, x)
        if layer.mixers:
            mixed = self.run_mixers_and_sum_results(i, layer, x, h)
            x = self.apply_residual_scale(h) if family.residual_after_norm else x
            added = ops.add(x, mixed, name=f"{block}.attn_residual")
        else:
            added = x
        if self.is_last_block(i):
            added = self.frame.select_output_rows_unless_mtp(added)
        if not layer.has_feed_forward:
            return added
        if layer.parallel or family.mixer == "single":
            h = self.apply_block_norm_if_present(i, family.ffn_norm, before) if layer.has_two_norms else h
            h = self.frame.select_output_rows_unless_mtp(h) if self.is_last_block(i) else h
        else:
            h = self.apply_block_norm_if_present(i, family.ffn_norm, added)
        if self.is_last_block(i) and family.needs_block_input_in_ffn:
            before = self.frame.select_output_rows_unless_mtp(before)
        y = self.compute_feed_forward_without_residual(i, layer, h, added, before)
        added = self.apply_residual_scale(h) if family.residual_after_norm else added
        return ops.add(added, y, name=f"{block}.ffn_residual")

    def apply_block_norm_if_present(self, i: int, name: str, x: Value) -> Value:
        """Apply the norm `name` of block i to ``x``; return ``x`` itself if the block has no such norm."""
        stem = f"blk.{i}.{name.removesuffix('?')}"
        absent = not name or (name.endswith("?") and not self.weights.has_used_tensor(f"{stem}.weight"))
        return x if absent else self.norm(self.weights, stem, x)

    def apply_residual_scale(self, x: Value) -> Value:
        """Multiply a block result ``x`` by the residual factor of the model, before it is added to the residual."""
        return x if self.hyper.residual == 1.0 else ops.scale(x, scale=self.hyper.residual)

    def run_mixers_and_sum_results(self, i: int, layer: Layer, x: Value, h: Value) -> Value:
        """Run all mixers of block i, such as attention, and return the sum of their results: f32[B*T, E].

        Args:
            i: Number of the block.
            layer: The hyperparameters of the block.
            x: The residual, f32[B*T, E]. It is not added to the result. A parallel block with the weight
                ``attn_norm_2`` gives its mixers this norm of `x` in place of `h`.
            h: The norm of the residual, f32[B*T, E], which the mixers read.
        """
        name = "attn_norm_2"
        if self.family.parallel and f"blk.{i}.{name}.weight" in self.weights.gguf.tensors:
            h = self.apply_block_norm_if_present(i, name, x)
        first, *others = (self.run_mixer(mixer, i, h) for mixer in layer.mixers)
        for other in others:
            first = ops.add(first, other)
        if self.family.attn_post:
            first = self.post_norm(self.weights, f"blk.{i}.{self.family.attn_post}", first)
        return first if self.family.residual_after_norm else self.apply_residual_scale(first)

    def run_mixer(self, mixer: TokenMixer, i: int, h: Value) -> Value:
        """Run a token mixer of block i on the normalised residual ``h`` f32[B*T, E]; return f32[B*T, E]."""
        return self.frame.run_mixer_by_segment(
            lambda frame, x: mixer(self.weights, frame, i, x), h, is_recurrent=mixer.taps > 0
        )

    def compute_feed_forward_without_residual(
        self, i: int, layer: Layer, h: Value, added: Value, before: Value
    ) -> Value:
        """Return the result of the feed-forward part of block i (dense or experts), without the residual: f32[n, E].

        Args:
            i: Number of the block.
            layer: The hyperparameters of the block.
            h: The norm of `added`: the operand of the FFN, f32[n, E].
            added: The residual after the mixers, f32[n, E].
            before: The residual before the block, f32[n, E].
        """
        block = f"blk.{i}"
        y = (
            self.run_dense_ffn(i, layer, h)
            if layer.experts is None
            else self.sum_experts_and_optional_dense_ffn(i, layer, h, added, before)
        )
        if self.family.ffn_post:
            y = self.post_norm(self.weights, f"{block}.{self.family.ffn_post}", y)
        return y if self.family.residual_after_norm else self.apply_residual_scale(y)

    def run_dense_ffn(self, i: int, layer: Layer, h: Value) -> Value:
        """Return the result of the dense FFN of block i for ``h`` f32[n, E].

        A block without a dense FFN applies only the activation, as in llama.cpp.
        """
        if not layer.dense:  # as in llama.cpp, which does not read the experts of this block
            return layer.activation.apply(h)
        return apply_feed_forward(self.weights, f"blk.{i}", h, layer.activation, self.norm)

    def sum_experts_and_optional_dense_ffn(self, i: int, layer: Layer, h: Value, added: Value, before: Value) -> Value:
        """Return the result of the experts of block i, plus the result of a parallel dense FFN if the block has one.

        Args:
            i: Number of the block.
            layer: The hyperparameters of the block.
            h: The norm of `added`: the operand of the experts, f32[n, E].
            added: The residual after the mixers, f32[n, E].
            before: The residual before the block, f32[n, E].
        """
        weights, block, experts = self.weights, f"blk.{i}", layer.experts
        assert experts is not None
        if not layer.dense:
            return run_expert_layer(
                weights, block, h, experts, before if experts.family.special_routing == "early router" else None
            )
        if self.family.parallel_dense_ffn == "normed":
            return self.run_separately_normed_experts_and_ffn(i, layer, h, added)
        y = run_expert_layer(
            weights,
            block,
            self.apply_block_norm_if_present(i, "ffn_norm_exps", before)
            if self.family.parallel_dense_ffn == "residual"
            else h,
            experts,
        )
        y = ops.add(y, self.run_dense_ffn(i, layer, h))
        return ops.scale(y, scale=math.sqrt(0.5)) if self.family.parallel_dense_ffn == "mean" else y

    def run_separately_normed_experts_and_ffn(self, i: int, layer: Layer, h: Value, added: Value) -> Value:
        """Return the sum of the results of experts and dense FFN of block i, each with norms of its own, f32[n, E].

        The operand of the router has a third norm. Gemma team, Gemma 4, 2026; graph: llama.cpp ``gemma4.cpp``.

        Args:
            i: Number of the block.
            layer: The hyperparameters of the block.
            h: The operand of the dense FFN, f32[n, E].
            added: The residual after the mixers, f32[n, E].
        """
        weights, block, experts, width = self.weights, f"blk.{i}", layer.experts, self.hyper.width
        assert experts is not None
        y = self.apply_block_norm_if_present(i, "post_ffw_norm_1", self.run_dense_ffn(i, layer, h))
        seen = ops.scale(self.norm.apply_without_weights(added), scale=1.0 / math.sqrt(width))
        seen = ops.mul(seen, weights(f"{block}.ffn_gate_inp.scale", (width,)))
        scores = matmul(weights, f"{block}.ffn_gate_inp", seen, experts.count)
        z = run_routed_experts(
            weights, block, self.apply_block_norm_if_present(i, "pre_ffw_norm_2", added), experts, scores
        )
        return ops.add(y, self.apply_block_norm_if_present(i, "post_ffw_norm_2", z))

    def compute_logits(self, x: Value, matrix: Value | None = None) -> Value:
        """Compute the logits f32[n, vocabulary] of ``x`` f32[n, E].

        They are the product with ``matrix``, or else with the output matrix. A file without an output matrix uses the
        token embedding. Bias, scale and soft cap follow if the model has them.
        """
        hyper, weights = self.hyper, self.weights
        shape = (hyper.vocabulary_size, hyper.width)
        if matrix is None:
            matrix = weights.optional_leaf("output.weight", shape)
        if matrix is None:
            matrix = weights("token_embd.weight", shape)
        y = ops.mul_mat(matrix, x, name="logits")
        bias = weights.optional_leaf("output.bias", (hyper.vocabulary_size,))
        y = y if bias is None else ops.add(y, bias)
        if hyper.logits != 1.0:
            y = ops.scale(y, scale=hyper.logits)
        y = soft_cap_logits(y, hyper.softcap) if hyper.softcap else y
        return suppress_token_logits(y, hyper.hidden_tokens) if hyper.hidden_tokens else y
