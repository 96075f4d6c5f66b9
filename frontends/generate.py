"""The generation loop: prompt in, tokens out, text as soon as its characters are complete."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..graph.arguments import ANY, NONE, a, list_of, needs, whole
from .errors import ModelError
from .gguf.tokenizer import Tokenizer, Utf8Stream
from .sampling import Sampling
from .session import Session


@dataclass(slots=True)
class Timing:
    """How long the parts of a generation took, in seconds; filled while it runs.  What each size of a step needs once,
    plans and kernels, is a part of its own."""

    prompt_tokens: int = 0
    prefill: float = 0.0
    new_tokens: int = 0
    decode: float = 0.0
    planning: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill + other.prefill,
            self.new_tokens + other.new_tokens,
            self.decode + other.decode,
            self.planning + other.planning,
        )

    def __str__(self) -> str:
        def rate(tokens: int, seconds: float) -> str:
            return f"{tokens / seconds:.1f} tok/s" if seconds and tokens else "-"

        return (
            f"prefill {self.prompt_tokens} tokens {rate(self.prompt_tokens, self.prefill)}, "
            f"decode {self.new_tokens} tokens {rate(self.new_tokens, self.decode)}, "
            f"plans and kernels {self.planning:.1f} s"
        )


@needs(
    ModelError,
    session=a(Session),
    prompt=list_of(ANY, "a sequence of tokens"),
    limit=whole(-sys.maxsize),
    sampling=a(Sampling),
    seed=whole(0),
    stop=a(frozenset, set),
    timing=a(Timing) | NONE,
)
def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    limit: int,
    sampling: Sampling,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    timing: Timing | None = None,
    before: Sequence[int] = (),
) -> Iterator[int]:
    """Tokens that continue `prompt` in sequence 0, at most `limit` (or until the context is full, if negative).

    `before` are the tokens that the sequence has already: penalties count them.  What is drawn depends on the seed and
    on the position alone, so a text that is continued later goes on as it would have.  The last token given out is not
    evaluated; with `limit` 0 that is the last of the prompt.  Ends before a token of `stop`, which is not given out.
    Raises `ModelError` if the prompt is empty or longer than the context, or if the context fills up before `limit`.
    """
    if not len(prompt):
        raise ModelError("the prompt is empty and the model adds no BOS token; give some text to continue")
    timing = Timing() if timing is None else timing
    known, same = [*before, *prompt], np.random.default_rng(0)

    def clock() -> float:
        """Stands still while plans are made."""
        return time.perf_counter() - session.planning

    if limit == 0:
        session.evaluate([list(prompt[:-1])] + [[]] * (session.sequences - 1))
        return
    start, planned = clock(), session.planning
    logits = session.evaluate([list(prompt)] + [[]] * (session.sequences - 1))[0][-1]
    timing.prompt_tokens, timing.prefill, timing.planning = len(prompt), clock() - start, session.planning - planned
    start = clock()
    room = session.context - session.lengths[0]
    count = 0
    while limit < 0 or count < limit:
        rng = np.random.default_rng([seed, len(known)]) if sampling.temperature else same  # 20 us
        token = sampling.choose(logits, rng, known)
        if token in stop:
            return
        yield token
        known.append(token)
        count += 1
        if count == limit or (limit < 0 and count > room):
            return
        if count > room:
            raise ModelError(
                f"the context of {session.context} tokens is full after {count} new ones; "
                "raise --ctx-size or ask for fewer with -n (the context is not shifted)"
            )
        logits = session.evaluate([[token]] + [[]] * (session.sequences - 1))[0][-1]
        # The first new token came from the prefill's logits; what is timed here are the runs after it.
        timing.new_tokens, timing.decode, timing.planning = count, clock() - start, session.planning - planned


def prepare(session: Session, prompt: Sequence[int], limit: int) -> None:
    """Make the plans and kernels of a generation before it begins, so that nothing holds up its text."""
    session.prepare(len(prompt))
    if limit not in (0, 1):
        length = session.lengths[0] + len(prompt) + 1
        session.executor(session.step(1, length, session.sequences))


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens piece by piece, never cut inside a character; what stays broken at the end becomes U+FFFD."""
    decoder = Utf8Stream(tokenizer)
    for token in tokens:
        if piece := decoder.feed(token):
            yield piece
    if rest := decoder.finish():
        yield rest
