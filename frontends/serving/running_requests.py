"""The requests inside an engine, which wait for a slot or have one."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...backends.cpu.top_k import find_top_k
from ..generation.grammar import GrammarState
from ..generation.lazy_grammar import LazyGrammarState
from ..inference.decoding.device_tokens import TokenCandidates, TokenChoice
from ..inference.prefill_chunks import next_power_of_two
from .prefix_cache import PrefixCache, count_common_prefix_tokens
from .requests import EngineStatus, EngineTotals, GenerationRequest, RequestTiming, TokenEvent
from .step_runner import CandidateNeeds, StepOutput, StepRunner, choose_smallest_aligned_slot_window

MIN_AWAITED_TOKENS = 64
"""A request waits for a prompt that another slot is reading if it shares at least this many more tokens with it."""


@dataclass(slots=True)
class QueuedRequest:
    """A request that waits for a slot.

    A request that has lost its slot, by a restart of the engine or to an older request, waits again. The other fields
    say how far it was:

    - `started`, `first_token`: the moments of its first start and of its first new token, if any.
    - `sent_tokens`: the new tokens that its client has.
    - `reported_tokens`: the prompt tokens that were reported as read.
    - `cached_tokens`: the prompt tokens that the prefix cache had at the first start.
    - `drafted_tokens`, `accepted_tokens`: as in `RunningRequest`.
    """

    request: GenerationRequest
    submitted: float
    started: float | None = None
    first_token: float | None = None
    sent_tokens: tuple[int, ...] = ()
    reported_tokens: int = -1
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def measure_timing_and_token_counts(self, now: float) -> RequestTiming:
        """Return the token counts and the seconds of this request, which ends at the moment `now` without a slot."""
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return RequestTiming(
            len(self.request.prompt),
            self.cached_tokens,
            len(self.sent_tokens),
            started - self.submitted,
            first - started,
            now - first,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A running request in a slot.

    `tokens` are the tokens that the slot has; `next_token` is sampled, but not evaluated. `context_tokens` are the
    prompt and the sampled tokens, for penalties and seeds. `repeated_tokens` are the tokens that its client has
    already, which are taken in place of sampled ones after the loss of a slot. `drafted_tokens` counts the draft
    tokens that its steps have evaluated, and `accepted_tokens` the sampled ones of them.
    """

    request: GenerationRequest
    slot: int
    submitted: float
    started: float
    tokens: list[int]
    cached_tokens: int
    next_token: int | None = None
    new_tokens: int = 0
    first_token: float | None = None
    grammar: GrammarState | LazyGrammarState | None = None
    context_tokens: list[int] = field(default_factory=list)
    repeated_tokens: deque[int] = field(default_factory=deque)
    reported_tokens: int = -1
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def unread_tokens(self) -> int:
        """Number of prompt tokens that the slot has not read yet."""
        return max(0, len(self.request.prompt) - len(self.tokens))

    def requeue_with_sent_tokens(self) -> QueuedRequest:
        """Return this request as one that waits for a slot, and that keeps the tokens that its client has."""
        sent = (*self.context_tokens[len(self.request.prompt) :], *self.repeated_tokens)
        return QueuedRequest(
            self.request,
            self.submitted,
            self.started,
            self.first_token,
            sent,
            self.reported_tokens,
            self.cached_tokens,
            self.drafted_tokens,
            self.accepted_tokens,
        )

    def measure_timing_and_token_counts(self, now: float) -> RequestTiming:
        """Return the token counts and the seconds of this request, which ends at the moment `now`."""
        first = now if self.first_token is None else self.first_token
        return RequestTiming(
            len(self.request.prompt),
            self.cached_tokens,
            self.new_tokens,
            self.started - self.submitted,
            first - self.started,
            now - first,
            self.slot,
            self.drafted_tokens,
            self.accepted_tokens,
        )


class DecodeBlockRotation:
    """Lets blocks of adjacent slots decode in turn, if a step has fewer slots than the pool.

    Args:
        size: Slots of a block, a power of two; `None` if all slots decode together.
    """

    def __init__(self, size: int | None) -> None:
        self._size, self._last_block = size, -1

    def select_next(self, decoding: list[RunningRequest]) -> list[RunningRequest]:
        """Select the requests of one block of slots; the blocks that have requests take turns."""
        if self._size is None or len(blocks := {one.slot // self._size for one in decoding}) <= 1:
            return decoding
        self._last_block = min((block for block in blocks if block > self._last_block), default=min(blocks))
        return [one for one in decoding if one.slot // self._size == self._last_block]


def build_engine_status(
    pool: StepRunner, cache: PrefixCache, running: Mapping[int, RunningRequest], queued: int, sums: EngineTotals
) -> EngineStatus:
    """Build the status of an engine from its running requests by slot and the number of queued ones."""
    slots = [running.get(slot) for slot in range(pool.slots)]
    requests = tuple("" if one is None else one.request.id for one in slots)
    tokens = tuple(
        cache.count_cached_slot_tokens(slot) if one is None else len(one.tokens) for slot, one in enumerate(slots)
    )
    return EngineStatus(pool.slots, pool.context, len(running), queued, requests, tokens, replace(sums))


def start_request(queued: QueuedRequest, slot: int, now: float, cached_tokens: int) -> RunningRequest:
    """Start a request in a slot that has the first `cached_tokens` tokens of its prompt.

    Args:
        queued: The request.
        slot: Number of the slot.
        now: The moment of the start.
        cached_tokens: Prompt tokens in the slot.

    Raises:
        HocketError: The grammar of the request fails.
    """
    request = queued.request
    return RunningRequest(
        request,
        slot,
        queued.submitted,
        now if queued.started is None else queued.started,
        list(request.prompt[:cached_tokens]),
        cached_tokens if queued.started is None else queued.cached_tokens,
        first_token=queued.first_token,
        grammar=request.params.grammar.make_state() if request.params.grammar else None,
        context_tokens=list(request.prompt),
        repeated_tokens=deque(queued.sent_tokens),
        reported_tokens=queued.reported_tokens,
        drafted_tokens=queued.drafted_tokens,
        accepted_tokens=queued.accepted_tokens,
    )


def is_prefix_being_read(prompt: tuple[int, ...], available: int, running: Iterable[RunningRequest]) -> bool:
    """Whether another slot is reading a prompt that shares with `prompt` many more tokens than the `available` ones."""
    return any(
        one.unread_tokens and count_common_prefix_tokens(one.request.prompt, prompt) >= available + MIN_AWAITED_TOKENS
        for one in running
    )


def choose_move_to_shrink_window(
    decoding: Sequence[RunningRequest], used_slots: Container[int], slots: int
) -> tuple[RunningRequest, int] | None:
    """Choose a decoding request and a free slot, so that the window of the requests can become smaller.

    Requests move only if the window is at least twice as large as needed. A request that names its slot stays there.

    Args:
        decoding: The decoding requests.
        used_slots: The slots that have a request.
        slots: Number of all slots.
    """
    size = next_power_of_two(len(decoding))
    if choose_smallest_aligned_slot_window([one.slot for one in decoding])[1] < 2 * size:
        return None
    blocks = Counter(one.slot // size for one in decoding)
    block = max(blocks, key=lambda number: blocks[number])
    free = (slot for slot in range(block * size, min((block + 1) * size, slots)) if slot not in used_slots)
    outside = (one for one in decoding if one.slot // size != block and one.request.slot is None)
    target, one = next(free, None), next(outside, None)
    return None if target is None or one is None else (one, target)


def reserve_cells_and_select_preempted(
    cache: PrefixCache, running: Mapping[int, RunningRequest], decoding: Sequence[RunningRequest]
) -> list[RunningRequest]:
    """Reserve a cell for the next token of each decoding request; without free cells, preempt the youngest requests.

    Args:
        cache: The cells of the slots.
        running: All running requests by slot.
        decoding: The requests that have a next token.

    Returns:
        The requests that have lost their cells, the youngest first. The oldest request is never among them.
    """
    staying, preempted = sorted(running.values(), key=lambda one: (one.submitted, one.slot)), list[RunningRequest]()
    slots = {one.slot for one in decoding}
    for one in [one for one in staying if one.slot in slots]:
        while one in staying and not cache.reserve_cells(one.slot, len(one.tokens) + 1):
            preempted.append(youngest := staying.pop())
            cache.forget_slot_tokens_and_states(youngest.slot)
    return preempted


def gather_next_and_known_tokens(
    decoding: Sequence[RunningRequest], running: Mapping[int, RunningRequest]
) -> tuple[dict[int, int], dict[int, Sequence[int]]]:
    """Return the next token of each decoding request, and the tokens of each running request, by slot."""
    tokens = {one.slot: one.next_token for one in decoding if one.next_token is not None}
    return tokens, {slot: one.tokens for slot, one in running.items()}


def decode_to_logits_or_candidates(
    pool: StepRunner,
    decoding: Sequence[RunningRequest],
    running: Mapping[int, RunningRequest],
    *,
    is_followed: bool = False,
) -> Mapping[int, StepOutput]:
    """Append the next token of each decoding request, and return the logits or the candidates by slot.

    The candidates are enough if no request of the step reads all logits.

    Args:
        pool: Runs the step.
        decoding: The requests that have a next token.
        running: All running requests by slot.
        is_followed: Whether the next step is expected to decode the same requests.
    """
    tokens, before = gather_next_and_known_tokens(decoding, running)
    needs = {one.slot: own for one in decoding if (own := _find_candidate_needs_after_next_token(one)) is not None}
    is_enough = needs.keys() == tokens.keys()
    candidates = pool.decode_to_candidates(tokens, before, needs, is_followed) if is_enough else None
    return pool.decode(tokens, before) if candidates is None else candidates


def will_repeat_decode_step(
    decoding: Sequence[RunningRequest], running: Mapping[int, RunningRequest], max_tokens: int
) -> bool:
    """Whether all running requests decode in this step, and are expected to decode in the next step, too.

    Args:
        decoding: The requests of this step.
        running: All running requests by slot.
        max_tokens: Largest number of tokens of a request, with its prompt.
    """
    return len(decoding) == len(running) and all(
        one.new_tokens + 1 != one.request.params.limit and len(one.context_tokens) + 1 < max_tokens for one in decoding
    )


def _find_candidate_needs_after_next_token(one: RunningRequest) -> CandidateNeeds | None:
    """Return the candidates that a request needs for the token after its next one; None if it needs all logits."""
    request, sampling = one.request, one.request.params.sampling
    if request.top_logprobs is not None or sampling.largest_logits_needed is None:
        return None

    def describe(is_ahead: bool) -> TokenChoice:
        known = one.context_tokens
        return sampling.describe_choice(request.params.seed, known, len(known) - (not is_ahead))

    return CandidateNeeds(
        request.id,
        describe,
        None if one.grammar is None else one.grammar.compute_mask,
        request.params.token_count,
    )


def make_token_event(request: GenerationRequest, token: int, logits: StepOutput) -> TokenEvent:
    """Make the event of a new token, with the logprobs that its request asks for, from logits f32[vocabulary]."""
    if request.top_logprobs is None:
        return TokenEvent(request.id, token)
    assert not isinstance(logits, TokenCandidates), "a request with logprobs reads all logits"
    logits = logits[: request.params.token_count]
    count = min(request.top_logprobs, len(logits))
    ids = [token, *(find_top_k(logits, count) if count else ())]
    max_logit = float(logits.max())
    log_sum = max_logit + math.log(float(np.exp(logits.astype(np.float64) - max_logit).sum()))
    logprobs = [(int(i), float(logits[i]) - log_sum) for i in ids]
    return TokenEvent(request.id, token, logprobs[0][1], tuple(logprobs[1:]))


def choose_token(one: RunningRequest, logits: StepOutput) -> int:
    """Choose the next token of a request from its logits or candidates, by its grammar and its sampling options.

    The random numbers depend on the seed and the position alone.
    """
    params = one.request.params
    rng = np.random.default_rng([params.seed, len(one.context_tokens)]) if params.sampling.temperature else _UNUSED_RNG
    if isinstance(logits, TokenCandidates):
        return params.sampling.choose_candidate(logits, rng, one.context_tokens)
    logits = logits[: params.token_count]
    masked = logits if one.grammar is None else one.grammar.mask_logits(logits)
    return params.sampling.choose_token(masked, rng, one.context_tokens)


_UNUSED_RNG = np.random.default_rng(0)
"""The argument of `Sampling.choose_token` at temperature 0, which draws no number."""
