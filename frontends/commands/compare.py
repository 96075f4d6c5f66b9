"""``hocket compare``: the difference of two models with one vocabulary on a text, as after a quantisation.

Both models predict the same tokens in the chunks of ``hocket perplexity``. The Kullback-Leibler divergence of model B
from model A is the mean of ``sum(p_A (log p_A - log p_B))`` over the positions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...backends.progress_bar import open_progress_bar
from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message
from ..gguf.metadata import LazyMetadataArray
from ..gguf.tokenization.tokenizer import tokenizer_from_metadata
from ..inference.session import F32, Session
from ..models import Model
from ..open_model import choose_context, open_adapted_model, open_model, read_text_without_bom_and_newline
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_to_stdout_unless_closed
from .perplexity import (
    CHUNK_OPTION,
    DEFAULT_CONTEXT_TOKENS,
    F64,
    ROWS_PER_WIDENING,
    PerplexityScore,
    compute_second_half_logits_per_chunk,
    compute_token_nll,
    count_complete_chunks,
)
from .shared_flags import add_session_flags, broadcast_text_from_rank_0, config_from_flags, open_session_from_flags

TOKENS_KEY = "tokenizer.ggml.tokens"


def add_flags(sub: argparse.ArgumentParser) -> None:
    reference = "GGUF file or Hugging Face folder of the reference, as the model before quantisation"
    sub.add_argument("model", metavar="A", help=reference)
    sub.add_argument("other", metavar="B", help="GGUF file or Hugging Face folder that is compared with it")
    sub.add_argument("-f", "--file", required=True, metavar="FILE", help="text in UTF-8; - is stdin")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    add_session_flags(sub, trace=False, context=CHUNK_OPTION)


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    model, other = open_adapted_model(config_from_flags(args)), open_model(args.other)
    require_same_vocabulary(model, other)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    tokens = tokenizer.encode(broadcast_text_from_rank_0(args, lambda: read_text_without_bom_and_newline(args.file)))
    context = choose_context(model, 0, args.context, default=DEFAULT_CONTEXT_TOKENS)
    total = count_complete_chunks(len(tokens), context)
    sessions = [open_session_from_flags(args, m, context) for m in (model, other)]
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    chunks = compare_chunks(sessions[0], sessions[1], tokens, bos=bos)
    comparison = ModelComparison.summarise_chunks(
        list(open_progress_bar(chunks, total=total, desc="compare", unit="chunk"))
    )
    if args.json:
        row = {k: v if math.isfinite(v) else None for k, v in comparison.as_json_row().items()}
        write_to_stdout_unless_closed(json.dumps({"chunks": total, "context": context} | row) + "\n")
    else:
        write_to_stdout_unless_closed("".join(f"{line}\n" for line in comparison.format_lines()))
    return 0


def require_same_vocabulary(model: Model, other: Model) -> None:
    """Raise `ModelError` unless both models have the same tokens."""
    names = [format_name_for_message(str(m.gguf.path)) for m in (model, other)]
    lists = [m.gguf.metadata.get(TOKENS_KEY) for m in (model, other)]
    for name, known in zip(names, lists, strict=True):
        if not isinstance(known, LazyMetadataArray):
            raise ModelError(f"{name}: has no vocabulary; compare models with one")
    first, second = lists
    if isinstance(first, LazyMetadataArray) and isinstance(second, LazyMetadataArray) and tuple(first) != tuple(second):
        raise ModelError(
            f"{names[1]}: has other tokens than {names[0]}, {len(second)} and {len(first)}; compare files of one model"
        )


@dataclass(frozen=True, slots=True)
class PositionScores:
    """Scores of the positions of a chunk, float64[positions] each; `agrees` is 1 where both models prefer one token."""

    nll: F64
    other_nll: F64
    divergence: F64
    agrees: F64


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """A comparison of two models on one text: perplexities, KL divergence and agreement, over all scored positions."""

    score: PerplexityScore
    other_score: PerplexityScore
    divergence: float
    divergence_error: float
    max_divergence: float
    agreement: float

    @classmethod
    def summarise_chunks(cls, chunks: Sequence[PositionScores]) -> ModelComparison:
        """Summarise the scores of all chunks: means over their positions, and the largest KL divergence."""
        divergence = np.concatenate([c.divergence for c in chunks])
        error = divergence.std(ddof=1) / math.sqrt(len(divergence)) if len(divergence) > 1 else math.nan
        return cls(
            PerplexityScore.from_chunks([c.nll for c in chunks]),
            PerplexityScore.from_chunks([c.other_nll for c in chunks]),
            float(divergence.mean()),
            float(error),
            float(divergence.max()),
            float(np.concatenate([c.agrees for c in chunks]).mean()),
        )

    def as_json_row(self) -> dict[str, float]:
        """Return the numbers of the comparison by their names in JSON."""
        return {
            "positions": self.score.scored_tokens,
            "kl_divergence": self.divergence,
            "kl_divergence_error": self.divergence_error,
            "max_kl_divergence": self.max_divergence,
            "same_top_token": self.agreement,
            "perplexity_a": self.score.perplexity,
            "perplexity_b": self.other_score.perplexity,
        }

    def format_lines(self) -> list[str]:
        """Format the comparison as the lines of a report."""
        count = self.score.scored_tokens
        return [
            f"{format_count(self.score.chunk_count, 'chunk')}, {format_count(count, 'position')}",
            f"KL divergence of B from A: {self.divergence:.6f} ± {self.divergence_error:.6f}, "
            f"maximum {self.max_divergence:.4f}",
            f"same top token: {self.agreement:.2%}",
            f"perplexity: A {self.score.perplexity:.4f}, B {self.other_score.perplexity:.4f}",
        ]


def compare_chunks(
    session: Session, other: Session, tokens: Sequence[int], *, bos: int | None
) -> Iterator[PositionScores]:
    """Yield the scores of each chunk; the sessions have contexts of the same size."""
    pairs = zip(
        compute_second_half_logits_per_chunk(session, tokens, bos=bos),
        compute_second_half_logits_per_chunk(other, tokens, bos=bos),
        strict=True,
    )
    for (logits, targets), (other_logits, _) in pairs:
        yield PositionScores(
            compute_token_nll(logits, targets),
            compute_token_nll(other_logits, targets),
            compute_kl_divergence_per_row(logits, other_logits),
            (logits.argmax(-1) == other_logits.argmax(-1)).astype(np.float64),
        )


def compute_kl_divergence_per_row(logits: F32, other_logits: F32) -> F64:
    """Return the KL divergence of the second distribution from the first for each row, float64[rows]."""
    out = np.empty(len(logits))
    for start in range(0, len(out), ROWS_PER_WIDENING):
        end = start + ROWS_PER_WIDENING
        log_p, log_q = (_compute_log_softmax(x[start:end]) for x in (logits, other_logits))
        out[start:end] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return out


def _compute_log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x
