"""The generation loop: prompt in, tokens out, text as soon as its characters are complete."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ...graph.validation import ANY, NONE, instance_of, integer_between, list_of, validate_arguments
from ..errors import ModelError
from ..gguf.tokenizer import Tokenizer, Utf8Stream
from ..microbatches import Microbatches, decoding
from ..parts import F32
from ..session import Session
from .drafting import Ahead
from .grammar import Grammar
from .sampling import Sampling


@dataclass(slots=True)
class Timing:
    """How long the parts of a generation took, in seconds; filled while it runs.  What each size of a step needs once,
    plans and kernels, is a part of its own; that time is added to what `planning` holds before.  `load` is the time in
    which weights were read and packed."""

    prompt_tokens: int = 0
    prefill: float = 0.0
    new_tokens: int = 0
    decode: float = 0.0
    planning: float = 0.0
    load: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill + other.prefill,
            self.new_tokens + other.new_tokens,
            self.decode + other.decode,
            self.planning + other.planning,
            self.load + other.load,
        )

    def __str__(self) -> str:
        def rate(tokens: int, seconds: float) -> str:
            count = f"{tokens} token{'s' * (tokens != 1)}"
            return f"{count} {tokens / seconds:.1f} tok/s" if seconds and tokens else f"{count} -"

        load = f"load {self.load:.1f} s, " if self.load else ""
        return (
            f"{load}prefill {rate(self.prompt_tokens, self.prefill)}, decode {rate(self.new_tokens, self.decode)}, "
            f"plans and kernels {self.planning:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn for a sequence, and the logits f32[vocabulary] that it was drawn from."""

    sequence: int
    token: int
    logits: npt.NDArray[np.float32]

    @property
    def logprob(self) -> float:
        """The natural logarithm of the probability that the model gives the token, before any sampling option."""
        most = float(self.logits.max())
        return float(self.logits[self.token]) - most - math.log(float(np.exp(self.logits - most).sum()))


@validate_arguments(
    ModelError,
    session=instance_of(Session),
    prompt=list_of(ANY, "a sequence of tokens"),
    limit=integer_between(-sys.maxsize),
    sampling=instance_of(Sampling),
    seed=integer_between(0),
    stop=instance_of(frozenset, set),
    timing=instance_of(Timing) | NONE,
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
    ahead: Ahead | None = None,
) -> Iterator[int]:
    """Tokens that continue `prompt` in sequence 0, at most `limit` (or until the context is full, if negative).

    `before` are the tokens that the sequence has already: penalties count them.  What is drawn depends on the seed and
    on the position alone, so a text that is continued later goes on as it would have.  The last token given out is not
    evaluated; with `limit` 0 that is the last of the prompt.  Ends before a token of `stop`, which is not given out.
    In several processes all take the token that rank 0 draws.  A draft may look `ahead`, which changes no token.

    Raises `ModelError` if the prompt is empty or longer than the context, or if the context fills up before `limit`.
    """
    idle: list[list[int]] = [[] for _ in range(session.sequences - 1)]
    settings = Drawing(limit, sampling, seed, stop)
    known: list[list[int]] = [list(before), *idle]
    for drawn in draw(session, [prompt, *idle], settings, known=known, timing=timing, ahead=ahead):
        yield drawn.token


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a generation draws: at most `limit` tokens (negative: until the context is full), until one of `stop`, along
    a `grammar`.  Where the context is full and `kept` is given, it goes on with the first `kept` tokens and as many of
    the last as fill half of the context, which are read anew. A prompt that is longer than the context begins so.

    `token_count` is the size of the vocabulary: a model may have more output rows, which are padding, never drawn.
    """

    limit: int
    sampling: Sampling
    seed: int = 0
    stop: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    kept: int | None = None
    token_count: int | None = None

    def shifted(self, tokens: Sequence[int], context: int) -> list[int]:
        """What a full context goes on with."""
        assert self.kept is not None
        kept = min(self.kept, context // 4)
        return [*tokens[:kept], *tokens[len(tokens) - (context // 2 - kept) :]]


EMPTY = "the prompt is empty and the model adds no BOS token; give some text to continue"


def draw(
    session: Session | Microbatches,
    prompts: Sequence[Sequence[int]],
    drawing: Drawing,
    *,
    known: list[list[int]],
    timing: Timing | None = None,
    active: set[int] | None = None,
    ahead: Ahead | None = None,
) -> Generator[Drawn, None, None]:
    """What continues the prompts of a session's sequences, which run together; those with an empty one idle.

    Each gets the tokens that it would get alone.  `known` are the tokens of each sequence so far; prompts and what is
    drawn are appended.  A sequence whose number a caller takes out of `active` ends.  Otherwise as `generate`.
    """
    timing, active = Timing() if timing is None else timing, set[int]() if active is None else active
    try:
        yield from _drawn(session, prompts, drawing, known, timing, active, ahead)
    finally:
        if ahead is not None:
            ahead.settle()


def _drawn(
    session: Session | Microbatches,
    prompts: Sequence[Sequence[int]],
    drawing: Drawing,
    known: list[list[int]],
    timing: Timing,
    active: set[int],
    ahead: Ahead | None,
) -> Iterator[Drawn]:
    if drawing.kept is not None:
        prompts = [_made_room(session, i, p, drawing, known) for i, p in enumerate(prompts)]
    if not any(map(len, prompts)):
        raise ModelError(EMPTY)
    limit, sampling = drawing.limit, drawing.sampling
    active |= {i for i, prompt in enumerate(prompts) if len(prompt)}
    same = np.random.default_rng(0)

    def clock() -> float:
        """Stands still while plans are made."""
        return time.perf_counter() - session.planning

    if limit == 0:
        session.evaluate([list(prompt[:-1]) for prompt in prompts])
    start, planned = clock(), session.planning - timing.planning
    rows = session.evaluate([list(prompt) for prompt in prompts]) if limit else []
    for tokens, prompt in zip(known, prompts, strict=True):
        tokens.extend(prompt)
    if not limit:
        return
    timing.prompt_tokens, timing.prefill = sum(map(len, prompts)), clock() - start
    timing.planning = session.planning - planned
    start = clock()
    room = [session.context - length for length in session.lengths]
    counts = [0] * len(prompts)
    followers = {i: drawing.grammar.begin() for i in active} if drawing.grammar else {}

    def chosen(i: int, logits: F32) -> Generator[Drawn, None, list[int]]:
        """What sequence `i` is to read next: nothing if it has ended."""
        counts[i] += 1
        logits = logits[: drawing.token_count]
        rng = np.random.default_rng([drawing.seed, len(known[i])]) if sampling.temperature else same  # 20 us
        seen = followers[i].allowed(logits) if followers else logits
        token = agreed(session, sampling.choose(seen, rng, known[i]))
        if token in drawing.stop:
            active.discard(i)
            return []
        known[i].append(token)
        yield Drawn(i, token, logits)
        is_full = counts[i] > room[i]
        if (
            counts[i] == limit
            or (followers and not followers[i].take(token))
            or (is_full and limit < 0 and drawing.kept is None)
        ):
            active.discard(i)
        if i not in active:
            return []
        if is_full and drawing.kept is not None:
            session.reset(i)
            known[i][:] = drawing.shifted(known[i], session.context)
            room[i] = counts[i] + session.context - len(known[i])
            return list(known[i])
        if is_full:
            raise ModelError(
                f"the context of {session.context} tokens is full after {counts[i]} new ones; "
                "give a larger context=N, ask for fewer with max_tokens=N, or go on with context_shift=True"
            )
        return [token]

    with decoding(session, alone=drawing.kept is not None) as steps:
        begun: deque[int] = deque()

        def go_on(group: int, answers: Sequence[F32]) -> Iterator[Drawn]:
            """Let a group begin its next step, unless all of its sequences have ended."""
            new: list[list[int]] = []
            for i, logits in zip(steps.places[group], answers, strict=True):
                new.append((yield from chosen(i, logits[-1])) if i in active else [])
            if any(new):
                steps.begin(group, new)
                begun.append(group)

        for group, place in enumerate(steps.places):
            yield from go_on(group, rows[place.start : place.stop])
        while begun:
            read = sum(i in active for i in steps.places[begun[0]])
            answers = steps.ended() if ahead is None else [ahead.rows(known[0])]
            # The first new tokens came from the prefill's logits; what is timed here are the runs after it.
            timing.new_tokens += read
            timing.decode, timing.planning = clock() - start, session.planning - planned
            yield from go_on(begun.popleft(), answers)


def agreed(session: Session | Microbatches, token: int) -> int:
    """The token of rank 0: machines that are not alike may round differently, and draw another one."""
    if session.world.size == 1:
        return token
    return int.from_bytes(session.world.broadcast_from_first(lambda: token.to_bytes(8, "little")), "little")


def _made_room(
    session: Session | Microbatches, i: int, prompt: Sequence[int], drawing: Drawing, known: list[list[int]]
) -> list[int]:
    """The prompt of a sequence; where it no longer fits behind what is there, all anew from a part of that."""
    if session.lengths[i] + len(prompt) <= session.context:
        return list(prompt)
    whole = drawing.shifted([*known[i], *prompt], session.context)
    if len(whole) < len(prompt) <= session.context:
        whole = list(prompt)
    session.reset(i)
    known[i].clear()
    return whole


def prepare(session: Session, prompt: Sequence[int], drawing: Drawing, ahead: Ahead | None = None) -> Timing:
    """Make the plans and kernels of a generation before it begins, so that nothing holds up its text; how long that
    took.  Raises `ModelError` if its tokens could not be chosen."""
    start, vocabulary = time.perf_counter(), session.model.vocabulary_size
    drawing.sampling.check(vocabulary)
    prompt = prompt[: session.context]  # a longer one is cut if the context shifts, else refused
    replace(drawing.sampling, bias=()).choose(
        np.zeros(vocabulary, np.float32), np.random.default_rng(0)
    )  # that has a kernel, too
    session.prepare(len(prompt))
    if drawing.limit not in (0, 1):
        length = session.lengths[0] + len(prompt) + 1
        session.executor(session.step(1, length, session.sequences))
        if ahead is not None:
            ahead.prepare(len(prompt))
    return Timing(planning=time.perf_counter() - start)


class Stops:
    """Text piece by piece until a stop string, which is not given out; what may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.met = tuple(filter(None, stops)), "", False

    def feed(self, piece: str) -> str:
        """What is sure to stand before any stop string."""
        text = self.held + piece
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.met = bool(ends)
        sure = min(ends) if ends else len(text) - max((_begun(text, stop) for stop in self.stops), default=0)
        self.held = "" if ends else text[sure:]
        return text[:sure]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer, stops: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens piece by piece, never cut inside a character, until a stop string; what stays broken at the
    end becomes U+FFFD."""
    decoder, until = Utf8Stream(tokenizer), Stops(stops)
    for token in tokens:
        if piece := until.feed(decoder.feed(token)):
            yield piece
        if until.met:
            return
    if rest := until.feed(decoder.finish()) + until.held:
        yield rest
