"""The end of a decode step: tokens are chosen, or candidates are selected, on the device that has the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .... import ops
from ....graph import DType, Graph, Value, input, state
from ....ops.reduction.token_sampling import SAMPLING_NUMBERS
from .graph_builder import NEXT_TOKEN_STATE, StepGraphBuilder
from .step import SAMPLED_KIND, TOKEN_KIND, UNMASKED_KIND

STEP_LOGITS_STATE = "step_logits"
"""The state f32[B, vocabulary] with the logits of the last step of the output kind ``unmasked``."""


def choose_argmax_tokens(frame: StepGraphBuilder, logits: Value) -> dict[str, Value]:
    """Choose the token with the largest logit for each sequence on the device, and store it as its next token.

    Returns the outputs of the step: ``token`` i32[B], and ``logit`` f32[B], the largest logit. ``logits`` is f32[B,
    vocabulary].
    """
    chosen = ops.argmax(logits, name=f"{NEXT_TOKEN_STATE}.new")
    frame.set_state(frame.tokens, chosen)
    largest = ops.gather(logits, ops.reshape(chosen, shape=(*chosen.shape, 1)), name="next_logit")
    return {"token": chosen, "logit": ops.reshape(largest, shape=chosen.shape)}


def _select_candidates(frame: StepGraphBuilder, logits: Value) -> tuple[dict[str, Value], Value]:
    """Select candidates from ``logits`` f32[B, vocabulary]; return outputs, and all their tokens i32[B, n + m].

    - ``token`` i32[B]: the largest logit. A NaN counts as the largest, so this is a NaN if there is one.
    - ``ids`` i32[B, n] and ``logits`` f32[B, n + m]: the n tokens with the largest logits, in descending order.
      Then come the logits of the tokens in the input ``named_ids`` and, in a sampled step, of the token that it reads.
    """
    ids = chosen = ops.top_k(logits, k=frame.step.candidate_count, name="candidate_ids")
    if count := frame.step.named_token_count:
        ids = ops.concat(chosen, input("named_ids", (frame.step.sequences, count), DType.I32), axis=1)
        if frame.step.output_kind == SAMPLED_KIND:
            ids = ops.concat(ids, ops.reshape(frame.tokens, shape=(frame.step.sequences, 1)), axis=1)
    largest, numbers = ops.argmax(logits), ops.gather(logits, ids, name="candidate_logits")
    return {"token": largest, "ids": chosen, "logits": numbers}, ids


def sample_next_tokens(frame: StepGraphBuilder, logits: Value) -> dict[str, Value]:
    """Sample the next token of each sequence, from ``logits`` f32[B, vocabulary]; return the step's outputs.

    The outputs are the outputs of `_select_candidates` and ``sampled`` i32[B], the tokens. The inputs have the names of
    operands of the op `sample_token`.
    """
    outputs, ids = _select_candidates(frame, logits)
    sequences, changed = frame.step.sequences, frame.step.named_token_count + 1
    limit = input("limit", (sequences,), DType.I32)
    numbers = input("numbers", (sequences, len(SAMPLING_NUMBERS)), DType.I64)
    changes = [input("bias", (sequences, changed)), input("occurrences", (sequences, changed), DType.I32)]
    changes = changes if frame.step.named_token_count else []
    sampled = ops.sample_token(outputs["logits"], ids, limit, numbers, *changes, name=f"{NEXT_TOKEN_STATE}.new")
    frame.set_state(frame.tokens, sampled)
    return outputs | {"sampled": sampled}


def store_logits_in_state(frame: StepGraphBuilder, logits: Value) -> dict[str, Value]:
    """Store ``logits`` f32[B, vocabulary] on the device, for a later graph that selects tokens from them.

    This graph is `build_masked_candidate_graph`. There are no outputs. The nodes have the order of a step with the
    output ``logits``. So they are fused as there, with the same rounding.
    """
    frame.set_state_and_place_nodes_first(state(STEP_LOGITS_STATE, logits.shape), logits)
    return {}


def build_masked_candidate_graph(frame: StepGraphBuilder, vocabulary: int) -> Graph:
    """Build the graph that selects the best tokens among stored logits, only from tokens that a grammar allows.

    The input ``token_bits`` is i32[B, w] with a bit for each token of the vocabulary, as the op `mask_bits` reads it.
    """
    sequences = frame.step.sequences
    bits = input("token_bits", (sequences, -(-vocabulary // 32)), DType.I32)
    logits = ops.mask_bits(state(STEP_LOGITS_STATE, (sequences, vocabulary)), bits, name="masked_logits")
    return frame.build_graph(_select_candidates(frame, logits)[0])


SELECTIONS: Mapping[str, Callable[[StepGraphBuilder, Value], dict[str, Value]]] = MappingProxyType(
    {
        TOKEN_KIND: choose_argmax_tokens,
        SAMPLED_KIND: sample_next_tokens,
        UNMASKED_KIND: store_logits_in_state,
    }
)
"""By output kind, the function that maps the logits of a step to its outputs."""
