"""The generation loop: prompts in, sampled tokens out, and text as soon as its characters are complete."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import ANY, NONE, instance_of, integer_between, list_of, validate_arguments
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import Tokenizer, TokenToTextStream
from ..inference.decoding.device_tokens import (
    DeviceArgmaxToken,
    TokenCandidates,
    TokenChoice,
    can_choose_tokens_on_device,
    make_device_sampling_step,
    make_masked_steps,
    make_step_choosing_tokens_on_device,
)
from ..inference.decoding.launch_ahead import DeviceTokenSchedule, MaskedSchedule
from ..inference.micro_batches import DeviceScheduleMaker, MicroBatchedSession, open_decode_schedule
from ..inference.prefill_chunks import F32
from ..inference.session import Session
from ..inference.session_lease import evaluate_and_record_prompts
from ..models import Step
from .grammar import Grammar, GrammarState
from .lazy_grammar import LazyGrammarState, LazyJsonGrammar
from .sampling import Sampling, require_finite_largest_logit
from .speculative import SpeculativeDecoder
from .stop_strings import StopStringFilter
from .timing import GenerationTiming as GenerationTiming

NO_LOGITS = np.zeros(0, np.float32)
"""The logits of a token that the device chose, or for which it selected candidates."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token of a sequence, with the logits f32[vocabulary] from which it was sampled.

    The logits are empty if the device chose the token or selected its candidates.
    """

    sequence: int
    token: int
    logits: npt.NDArray[np.float32]


@validate_arguments(
    ModelError,
    session=instance_of(Session),
    prompt=list_of(ANY, "a sequence of tokens"),
    limit=integer_between(-sys.maxsize),
    sampling=instance_of(Sampling),
    seed=integer_between(0),
    stop=instance_of(frozenset, set),
    timing=instance_of(GenerationTiming) | NONE,
)
def generate_tokens(
    session: Session,
    prompt: Sequence[int],
    *,
    limit: int,
    sampling: Sampling,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    timing: GenerationTiming | None = None,
    before: Sequence[int] = (),
    ahead: SpeculativeDecoder | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `prompt` in sequence 0 of a session.

    The random numbers depend on the seed and the position alone, so a text that is continued later is the same text.
    The last token is not evaluated; with `limit` 0 this is the last token of the prompt. With several processes all
    of them use the token of rank 0.

    Args:
        session: The session that evaluates the tokens.
        prompt: Tokens of the prompt.
        limit: Largest number of new tokens; a negative limit means until the context is full.
        sampling: The choice of tokens from logits.
        seed: Seed of the random numbers.
        stop: End tokens; the text ends before them.
        timing: Receives the token counts and seconds.
        before: Tokens that the sequence has already; penalties count them.
        ahead: Speculative decoding, which changes no token.

    Raises:
        ModelError: The prompt is empty or longer than the context, or the context is full before `limit`.
    """
    idle: list[list[int]] = [[] for _ in range(session.sequences - 1)]
    settings = GenerationParams(limit, sampling, seed, stop)
    known: list[list[int]] = [list(before), *idle]
    for sample in sample_tokens_of_all_sequences(
        session, [prompt, *idle], settings, known=known, timing=timing, ahead=ahead, needs_logits=False
    ):
        yield sample.token


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The parameters of a generation.

    - `limit`: largest number of new tokens; a negative limit means until the context is full.
    - `sampling`, `seed`: the choice of tokens from logits.
    - `end_tokens`: tokens that end the text.
    - `grammar`: the grammar of the text, or None.
    - `pinned_tokens`: enables the context shift. A full context is replaced by its first `pinned_tokens` tokens and by
      its last tokens, half of the context in total. A prompt that is too long is cut in the same way.
    - `token_count`: size of the vocabulary. Further rows of the logits are padding and are never sampled.
    """

    limit: int
    sampling: Sampling
    seed: int = 0
    end_tokens: frozenset[int] = frozenset()
    grammar: Grammar | LazyJsonGrammar | None = None
    pinned_tokens: int | None = None
    token_count: int | None = None

    def select_tokens_after_context_shift(self, tokens: Sequence[int], context: int) -> list[int]:
        """Return the tokens that replace the full context: its first `pinned_tokens` tokens and its last tokens.

        Together they are at most half of `context`.
        """
        assert self.pinned_tokens is not None
        pinned = min(self.pinned_tokens, context // 4)
        return [*tokens[:pinned], *tokens[len(tokens) - (context // 2 - pinned) :]]


EMPTY_PROMPT_ERROR = "the prompt is empty and the model adds no BOS token; give some text to continue"


def sample_tokens_of_all_sequences(
    session: Session | MicroBatchedSession,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    *,
    known: list[list[int]],
    timing: GenerationTiming | None = None,
    active: set[int] | None = None,
    ahead: SpeculativeDecoder | None = None,
    needs_logits: bool = True,
) -> Generator[SampledToken, None, None]:
    """Yield the sampled tokens that continue the prompts of all sequences of a session; the sequences run together.

    Every sequence gets the same tokens as alone. In other respects this works as `generate_tokens`.

    Args:
        session: The session, or the session of several micro-batches.
        prompts: Tokens of the prompt of each sequence; a sequence with an empty prompt is idle.
        params: The parameters of the generation.
        known: Tokens of each sequence so far; prompts and sampled tokens are appended.
        timing: Receives the token counts and seconds.
        active: Receives the indices of the running sequences; the caller may remove an index to end its sequence.
        ahead: Speculative decoding, for sessions of one sequence.
        needs_logits: Whether the caller reads the logits. Without them a device with its own memory may choose tokens.

    Raises:
        ModelError: All prompts are empty, a prompt is too long, or a context is full before the limit.
    """
    timing, active = GenerationTiming() if timing is None else timing, set[int]() if active is None else active
    try:
        grammars = {i: params.grammar.make_state() for i, p in enumerate(prompts) if len(p)} if params.grammar else {}
        on_device = None if needs_logits else _choose_device_schedule(session, params, ahead, known, grammars)
        yield from _sample_sequences(session, prompts, params, known, timing, active, ahead, on_device, grammars)
    finally:
        if ahead is not None:
            ahead.discard_rejected_drafts()


def _sample_sequences(
    session: Session | MicroBatchedSession,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    known: list[list[int]],
    timing: GenerationTiming,
    active: set[int],
    ahead: SpeculativeDecoder | None,
    on_device: DeviceScheduleMaker | None,
    grammar_states: Mapping[int, GrammarState | LazyGrammarState],
) -> Iterator[SampledToken]:
    if params.pinned_tokens is not None:
        prompts = [_shorten_prompt_and_reset_sequence(session, i, p, params, known) for i, p in enumerate(prompts)]
    if not any(map(len, prompts)):
        raise ModelError(EMPTY_PROMPT_ERROR)
    limit, sampling = params.limit, params.sampling
    active |= {i for i, prompt in enumerate(prompts) if len(prompt)}
    unused_rng = np.random.default_rng(0)

    def clock() -> float:
        """Return seconds of a clock that stops while plans are made."""
        return time.perf_counter() - session.planning_seconds

    start, planned = clock(), session.planning_seconds - timing.planning
    rows = evaluate_and_record_prompts(session, prompts if limit else [prompt[:-1] for prompt in prompts], known)
    if not limit:
        for tokens, prompt in zip(known, prompts, strict=True):
            tokens.extend(prompt[-1:])
        return
    timing.prompt_tokens, timing.prefill = sum(map(len, prompts)), clock() - start
    timing.planning = session.planning_seconds - planned
    start = clock()
    free_tokens = [session.context - length for length in session.lengths]
    counts = [0] * len(prompts)

    def choose_token(i: int, answer: F32 | DeviceArgmaxToken | TokenCandidates) -> tuple[int, F32]:
        """Return the next token of sequence `i`, and the logits from which the host chose it."""
        if isinstance(answer, DeviceArgmaxToken):
            require_finite_largest_logit(*answer)
            return answer.token, NO_LOGITS
        rng = np.random.default_rng([params.seed, len(known[i])]) if sampling.temperature else unused_rng  # 20 us
        if isinstance(answer, TokenCandidates):
            return sampling.choose_candidate(answer, rng, known[i]), NO_LOGITS
        logits = answer[-1][: params.token_count]
        masked_logits = grammar_states[i].mask_logits(logits) if grammar_states else logits
        return broadcast_sampled_token(session, sampling.choose_token(masked_logits, rng, known[i])), logits

    def sample_next(
        i: int, answer: F32 | DeviceArgmaxToken | TokenCandidates
    ) -> Generator[SampledToken, None, list[int]]:
        """Sample a token of sequence `i`; return the tokens that it evaluates next, none if it has ended."""
        counts[i] += 1
        token, logits = choose_token(i, answer)
        if token in params.end_tokens:
            active.discard(i)
            return []
        known[i].append(token)
        yield SampledToken(i, token, logits)
        is_full = counts[i] > free_tokens[i]
        if (
            counts[i] == limit
            or (grammar_states and not grammar_states[i].accept_token_and_can_continue(token))
            or (is_full and limit < 0 and params.pinned_tokens is None)
        ):
            active.discard(i)
        if i not in active:
            return []
        if is_full and params.pinned_tokens is not None:
            session.reset(i)
            known[i][:] = params.select_tokens_after_context_shift(known[i], session.context)
            free_tokens[i] = counts[i] + session.context - len(known[i])
            return list(known[i])
        if is_full:
            raise make_full_context_error(session.context, counts[i])
        return [token]

    with open_decode_schedule(session, alone=params.pinned_tokens is not None, on_device=on_device) as steps:
        running_groups: deque[int] = deque()

        def start_next_step(
            group: int, answers: Sequence[F32 | DeviceArgmaxToken | TokenCandidates]
        ) -> Iterator[SampledToken]:
            """Start the next step of a micro-batch, unless all its sequences have ended."""
            new: list[list[int]] = []
            for i, answer in zip(steps.sequence_ranges[group], answers, strict=True):
                new.append((yield from sample_next(i, answer)) if i in active else [])
            if any(new):
                is_last = all(counts[i] + 1 == limit for i in steps.sequence_ranges[group] if i in active)
                steps.begin_step(group, new, is_last=is_last)
                running_groups.append(group)

        for group, place in enumerate(steps.sequence_ranges):
            yield from start_next_step(group, rows[place.start : place.stop])
        while running_groups:
            read = sum(i in active for i in steps.sequence_ranges[running_groups[0]])
            answers = steps.finish_oldest_step() if ahead is None else [ahead.compute_next_logits(known[0])]
            # The first new tokens come from the logits of the prefill; the time of decode starts after it.
            timing.new_tokens += read
            timing.decode, timing.planning = clock() - start, session.planning_seconds - planned
            if isinstance(steps, DeviceTokenSchedule | MaskedSchedule):
                timing.token_path = steps.describe_token_path()
            yield from start_next_step(running_groups.popleft(), answers)


def _choose_device_schedule(
    session: Session | MicroBatchedSession,
    params: GenerationParams,
    ahead: SpeculativeDecoder | None,
    known: Sequence[Sequence[int]],
    grammars: Mapping[int, GrammarState | LazyGrammarState],
) -> DeviceScheduleMaker | None:
    """Choose the schedule of a generation in which the device chooses tokens; None if the host needs logits.

    The device chooses if the choice is the largest logit of the model, or reads few of the largest logits.
    """
    sampling, vocabulary = params.sampling, session.model.vocabulary_size
    token_count = vocabulary if params.token_count is None else min(params.token_count, vocabulary)
    if (
        ahead is not None
        or params.pinned_tokens is not None
        or sampling.largest_logits_needed is None
        or (token_count < vocabulary and not params.grammar)
        or not can_choose_tokens_on_device(session)
    ):
        return None

    def describe(i: int, is_ahead: bool) -> TokenChoice:
        return sampling.describe_choice(params.seed, known[i], len(known[i]) - (not is_ahead))

    if params.grammar:
        return lambda session, _: MaskedSchedule(session, describe, lambda i: grammars[i].compute_mask(token_count))
    if sampling.takes_largest_logit:
        return DeviceTokenSchedule
    return lambda session, around: DeviceTokenSchedule(session, around, describe)


def make_full_context_error(context: int, new_tokens: int) -> ModelError:
    """Return the error for a text that fills the context of `context` tokens before its limit."""
    return ModelError(
        f"the context of {format_count(context, 'token')} is full after {new_tokens} new ones; "
        "give a larger context=N, ask for fewer with max_tokens=N, or go on with context_shift=True"
    )


def broadcast_sampled_token(session: Session | MicroBatchedSession, token: int) -> int:
    """Return the token that rank 0 sampled, so that all ranks continue with the same token.

    Machines of different types may round logits differently and would sample different tokens.
    """
    if session.world.size == 1:
        return token
    return int.from_bytes(session.world.broadcast_from_rank_0(lambda: token.to_bytes(8, "little")), "little")


def _shorten_prompt_and_reset_sequence(
    session: Session | MicroBatchedSession,
    i: int,
    prompt: Sequence[int],
    params: GenerationParams,
    known: list[list[int]],
) -> list[int]:
    """Shorten the prompt of sequence i if it does not fit into the context, and reset the sequence in this case.

    The shortened prompt has the first and the last tokens of the text, as after a context shift.
    """
    if session.lengths[i] + len(prompt) <= session.context:
        return list(prompt)
    shortened = params.select_tokens_after_context_shift([*known[i], *prompt], session.context)
    if len(shortened) < len(prompt) <= session.context:
        shortened = list(prompt)
    session.reset(i)
    known[i].clear()
    return shortened


def compile_generation_plans(
    session: Session, prompt: Sequence[int], params: GenerationParams, ahead: SpeculativeDecoder | None = None
) -> GenerationTiming:
    """Compile the plans and kernels of a generation before its start; return the seconds as a `GenerationTiming`.

    Args:
        session: The session that will generate.
        prompt: Tokens of the prompt.
        params: The parameters of the generation.
        ahead: Speculative decoding, if any.

    Raises:
        ModelError: The sampling options do not fit the vocabulary.
    """
    start, vocabulary = time.perf_counter(), session.model.vocabulary_size
    params.sampling.check_logit_bias_tokens(vocabulary)
    prompt = prompt[: session.context]  # a longer prompt is cut by the context shift, or refused
    replace(params.sampling, bias=()).choose_token(
        np.zeros(vocabulary, np.float32), np.random.default_rng(0)
    )  # compiles the kernel of the sampling
    session.compile_plans_for_tokens(len(prompt))
    if params.limit not in (0, 1):
        length = session.lengths[0] + len(prompt) + 1
        on_device = _choose_device_schedule(session, params, ahead, [prompt], {})
        choices = [params.sampling.describe_choice(params.seed, prompt, len(prompt))] * session.sequences
        steps: Sequence[Step] | None = None
        if on_device is DeviceTokenSchedule:
            steps = [make_step_choosing_tokens_on_device(session, length)]
        elif on_device is not None and params.grammar:
            steps = make_masked_steps(session, length, choices)
        elif on_device is not None and (sampled_step := make_device_sampling_step(session, length, choices)):
            steps = sampled_step[:1]
        for step in steps or [session.make_step(1, length, session.sequences)]:
            session.executor(step)
        if ahead is not None:
            ahead.compile_plans(len(prompt))
    return GenerationTiming(planning=time.perf_counter() - start)


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer, stops: Sequence[str] = ()) -> Iterator[str]:
    """Decode tokens to text as they come: yield pieces of whole characters, until a stop string.

    An incomplete character at the end becomes U+FFFD.
    """
    decoder, stop_filter = TokenToTextStream(tokenizer), StopStringFilter(stops)
    for token in tokens:
        if new_text := stop_filter.feed(decoder.feed(token)):
            yield new_text
        if stop_filter.has_matched:
            return
    if rest := stop_filter.feed(decoder.finish()) + stop_filter.pending_text:
        yield rest


def generate_texts(
    session: Session | MicroBatchedSession,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    stops: Sequence[str],
    *,
    tokenizer: Tokenizer,
    known: list[list[int]],
) -> list[str]:
    """Return the text that continues the prompt of each sequence of a session; the sequences run together.

    Args:
        session: The session, with a sequence for each prompt.
        prompts: The tokens of the prompts.
        params: The parameters of the generation.
        stops: Strings that end a text.
        tokenizer: The tokenizer of the model.
        known: Tokens of each sequence so far; prompts and sampled tokens are appended.
    """
    texts = [""] * len(prompts)
    decoders, filters = [TokenToTextStream(tokenizer) for _ in prompts], [StopStringFilter(stops) for _ in prompts]
    active: set[int] = set()
    with closing(
        sample_tokens_of_all_sequences(session, prompts, params, known=known, active=active, needs_logits=False)
    ) as samples:
        for one in samples:
            i = one.sequence
            texts[i] += filters[i].feed(decoders[i].feed(one.token))
            if filters[i].has_matched:
                active.discard(i)
    return [
        text if stop.has_matched else text + stop.feed(decoder.finish()) + stop.pending_text
        for text, stop, decoder in zip(texts, filters, decoders, strict=True)
    ]
