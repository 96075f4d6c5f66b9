"""The requests of a serving engine, and the events that answer them."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.errors import HocketError, format_count
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError, NonFiniteLogitError
from ..generation.generate import GenerationParams


class QueueFullError(HocketError):
    """Raised when the queue of the engine is full. `retry_seconds` is the predicted time until a place is free."""

    def __init__(self, queued: int, retry_seconds: float) -> None:
        waiting = f"{queued} requests wait already" if queued else "all slots are busy"
        super().__init__(f"{waiting}; try again in {retry_seconds:.0f} s")
        self.retry_seconds = retry_seconds


class ContextExceededError(HocketError):
    """Raised when the prompt of a request does not fit into the context; both sizes are in tokens."""

    def __init__(self, prompt_tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {format_count(prompt_tokens, 'token')}, but the context holds {context} with one "
            "more token; "
            "shorten the prompt or give a larger context=N"
        )
        self.prompt_tokens, self.context = prompt_tokens, context


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to generate text: a prompt with its generation parameters.

    - `id`: unique among the requests of an engine.
    - `prompt`: token ids, at least one.
    - `params`: `GenerationParams.limit` counts new tokens: 0 reads the prompt only, -1 is until the context is full.
    - `top_logprobs`: the number of most probable tokens to report for each new token; `None` reports no
      probabilities.
    - `uses_cache`: whether cells of earlier requests may be reused.
    - `slot`: the number of the only slot that may run the request; `None` lets the engine choose.
    """

    id: str
    prompt: tuple[int, ...]
    params: GenerationParams
    top_logprobs: int | None = None
    uses_cache: bool = True
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The event of a new token of a request.

    `logprob` is the natural logarithm of its probability in the model, before sampling options; `top` has the most
    probable tokens with their logarithms. Both are empty without `GenerationRequest.top_logprobs`.
    """

    request: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Token counts and seconds of a request.

    - `prompt_tokens`: tokens of the prompt; `cached_tokens`: the part that came from the prefix cache.
    - `new_tokens`: sampled tokens.
    - `queue_seconds`: from the submission to the first step; `prompt_seconds`: from there to the first token;
      `decode_seconds`: from the first to the last token.
    - `slot`: the number of the slot; -1 for a request that had none.
    - `drafted_tokens`: draft tokens that were evaluated; `accepted_tokens`: the sampled ones of them.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    slot: int = -1
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgressEvent:
    """The event of progress in the prompt of a request: it has been read up to token `read_tokens`.

    Cached tokens count as read. The first event comes when the request gets a slot.
    """

    request: str
    read_tokens: int


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The last event of a request, with the reason of its end and its timing.

    `reason` is ``stop`` (an end token, or a complete grammar), ``length`` (the limit or the context), ``cancelled``
    or ``error``; `message` describes an error. `is_fault_of_request`: the error comes from the options of the request,
    such as a grammar that allows no further token.
    """

    request: str
    reason: str
    timing: RequestTiming
    message: str = ""
    is_fault_of_request: bool = False


@dataclass(frozen=True, slots=True)
class RetainedSlotSequence:
    """The sequence of an ended request, which its slot retains until another request starts there.

    - `tokens`: the evaluated tokens that the slot holds.
    - `context_tokens`: the same tokens, perhaps with one more that was sampled, but not evaluated.
    """

    slot: int
    tokens: Sequence[int]
    context_tokens: Sequence[int]


Event = TokenEvent | PromptProgressEvent | EndEvent


def is_fault_of_request(error: HocketError) -> bool:
    """Whether a request that ends with this error has wrong options."""
    return isinstance(error, ModelError) and not isinstance(error, NonFiniteLogitError)


@dataclass(slots=True)
class EngineTotals:
    """Total token counts and seconds of an engine since its start.

    The engine adds to its own record; `EngineStatus` has a copy.

    - `prompt_tokens`: tokens of the prompts that got a slot; `cached_tokens`: the part from the prefix cache.
    - `new_tokens`: sampled tokens; `finished_requests`: requests that have ended in a slot.
    - `prompt_seconds`, `decode_seconds`: seconds of the steps of each kind; `decode_steps`: number of decode steps.
    - `drafts`: how often a request had drafts; `drafted_tokens`: draft tokens that were evaluated; `accepted_tokens`:
      the sampled ones of them.
    - `restarts`: how often the engine was built anew after a failure.
    - `preemptions`: how often a running request had to give its cache blocks to an older one.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    finished_requests: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restarts: int = 0
    preemptions: int = 0

    def add_decode_step(self, seconds: float) -> None:
        """Add a step that has decoded tokens."""
        self.decode_seconds += seconds
        self.decode_steps += 1

    def add_evaluated_draft_tokens(self, count: int) -> None:
        """Add the draft tokens that a step has evaluated for a request; 0 for a request without drafts."""
        self.drafts += count > 0
        self.drafted_tokens += count


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of an engine at one moment: counts of slots, requests and tokens.

    - `slots`: sequences that can run at once; `running`, `queued`: requests.
    - `context`: tokens of a slot.
    - `slot_requests`: the id of the request in each slot; empty text for a free slot.
    - `slot_tokens`: the tokens that each slot holds, tokens of the prefix cache included.
    - `sums`: totals since the start.
    """

    slots: int
    context: int
    running: int
    queued: int
    slot_requests: tuple[str, ...]
    slot_tokens: tuple[int, ...]
    sums: EngineTotals
