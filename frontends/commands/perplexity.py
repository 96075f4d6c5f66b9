"""``hocket perplexity``: measures how well a model predicts a text, as ``llama-perplexity`` does.

The text is split into chunks of the context length, and the second half of each chunk is scored.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...backends.progress_bar import open_progress_bar
from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import tokenizer_from_metadata
from ..inference.session import F32, Session
from ..open_model import choose_context, open_adapted_model, read_text_without_bom_and_newline
from ..terminal.arguments import PositionalAliasAction
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_to_stdout_unless_closed
from .shared_flags import (
    add_model_file_argument,
    add_session_flags,
    broadcast_text_from_rank_0,
    config_from_flags,
    open_session_from_flags,
    trace_to_file,
)

DEFAULT_CONTEXT_TOKENS = 512
CHUNK_OPTION = {
    "help": f"tokens of a chunk ({DEFAULT_CONTEXT_TOKENS}, or fewer if the model allows fewer); "
    "0: as many as the model allows"
}
"""The changes to the flag `-c` in commands that read a text in chunks."""
"""Default tokens of context."""
F64 = npt.NDArray[np.float64]
ROWS_PER_WIDENING = 64
"""Rows of logits that are converted to float64 at a time."""
MIN_CHUNK_TOKENS = 3
"""Tokens of the smallest chunk with a scored token."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub)
    sub.add_argument("file", metavar="FILE", help="text in UTF-8; - is stdin")
    sub.add_argument("-f", "--file", action=PositionalAliasAction, dest="file", metavar="FILE", help="as FILE")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    add_session_flags(sub, context=CHUNK_OPTION)


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    model = open_adapted_model(config_from_flags(args))
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    tokens = tokenizer.encode(broadcast_text_from_rank_0(args, lambda: read_text_without_bom_and_newline(args.file)))
    context = choose_context(model, 0, args.context, default=DEFAULT_CONTEXT_TOKENS)
    total = count_complete_chunks(len(tokens), context)
    session = open_session_from_flags(args, model, context)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    chunks = compute_second_half_nll_per_chunk(session, tokens, bos=bos)
    progress = open_progress_bar(chunks, total=total, desc="perplexity", unit="chunk")
    with trace_to_file(session, args.trace):
        score = PerplexityScore.from_chunks(list(progress))
    row: dict[str, float] = {
        "chunks": score.chunk_count,
        "context": context,
        "tokens": len(tokens),
        "scored": score.scored_tokens,
    }
    row |= {"nll": score.nll, "nll_error": score.nll_error, "perplexity": score.perplexity}
    if args.json:
        write_to_stdout_unless_closed(
            json.dumps({k: v if abs(v) < float("inf") else None for k, v in row.items()}) + "\n"
        )
    else:
        write_to_stdout_unless_closed(
            f"{format_count(score.chunk_count, 'chunk')} of {format_count(context, 'token')}, "
            f"{format_count(score.scored_tokens, 'token')} scored\n"
        )
        write_to_stdout_unless_closed(
            f"mean NLL {score.nll:.4f} ± {score.nll_error:.4f}, perplexity {score.perplexity:.4f}\n"
        )
    return 0


@dataclass(frozen=True, slots=True)
class PerplexityScore:
    """The score of a text: the mean negative log likelihood (NLL) of the scored tokens, and its standard error."""

    chunk_count: int
    scored_tokens: int
    nll: float
    nll_error: float

    @classmethod
    def from_chunks(cls, chunks: Sequence[F64]) -> PerplexityScore:
        """Compute the score from the NLL of the scored tokens of each chunk."""
        nll = np.concatenate(chunks)
        error = nll.std(ddof=1) / math.sqrt(len(nll)) if len(nll) > 1 else math.nan
        return cls(len(chunks), len(nll), float(nll.mean()), float(error))

    @property
    def perplexity(self) -> float:
        # A damaged model can be so wrong that exp overflows.
        return math.exp(self.nll) if self.nll < 700 else math.inf


def count_complete_chunks(tokens: int, context: int) -> int:
    """Count the complete chunks of `context` tokens in a text of `tokens` tokens; the rest is dropped.

    Raises:
        ModelError: There is no complete chunk, or a chunk is too short for a scored token.
    """
    if context < MIN_CHUNK_TOKENS:
        raise ModelError(f"--ctx-size is {context}; a chunk needs at least {MIN_CHUNK_TOKENS} tokens to score one")
    if tokens < context:
        raise ModelError(
            f"the text has {format_count(tokens, 'token')}; one chunk needs {context}; give more text or a smaller -c"
        )
    return tokens // context


def compute_second_half_nll_per_chunk(session: Session, tokens: Sequence[int], *, bos: int | None) -> Iterator[F64]:
    """Yield the negative log likelihood (NLL) of the tokens in the second half of each chunk, float64[tokens]."""
    for logits, targets in compute_second_half_logits_per_chunk(session, tokens, bos=bos):
        yield compute_token_nll(logits, targets)


def compute_second_half_logits_per_chunk(
    session: Session, tokens: Sequence[int], *, bos: int | None
) -> Iterator[tuple[F32, Sequence[int]]]:
    """Yield the logits in the second half of each chunk, and the tokens that they predict.

    The logits f32[tokens, vocabulary] begin after position ``context / 2``. Row i predicts token i of the second
    result, from all tokens before it in the chunk. The last token of a chunk predicts nothing.

    Args:
        session: The session; its context is the chunk length.
        tokens: The tokens of the text.
        bos: The BOS token, which replaces the first token of each chunk; None keeps this token.
    """
    size, first = session.context, session.context // 2
    for start in range(0, count_complete_chunks(len(tokens), size) * size, size):
        chunk = list(tokens[start : start + size])
        if bos is not None:
            chunk[0] = bos
        session.reset(0)
        session.evaluate([chunk[:first]])
        yield session.evaluate([chunk[first:-1]], every_position=True)[0], chunk[first + 1 :]


def compute_token_nll(logits: F32, targets: Sequence[int]) -> F64:
    """Compute the negative log likelihood of the target token of each row of logits, float64[rows]."""
    losses = np.empty(len(targets))
    for start in range(0, len(targets), ROWS_PER_WIDENING):
        x = logits[start : start + ROWS_PER_WIDENING].astype(np.float64)
        x -= x.max(-1, keepdims=True)
        chosen = x[np.arange(len(x)), targets[start : start + ROWS_PER_WIDENING]]
        losses[start : start + ROWS_PER_WIDENING] = np.log(np.exp(x).sum(-1)) - chosen
    return losses
