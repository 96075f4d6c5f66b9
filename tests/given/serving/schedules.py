"""Random schedules of requests on a real model, and the digests of all logits that the engine sees."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.prefill_chunks import F32
from hocket.frontends.serving.blocks.block_cache import BlockPrefixCache
from hocket.frontends.serving.blocks.slot_pool import BlockSlotPool
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent, Event, GenerationRequest, TokenEvent
from hocket.frontends.serving.slots import SlotPool

STATE_BYTES = 1 << 22
MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 32, 150


class RecordingPool:
    """A slot pool that keeps a digest of the logits after each sequence of tokens; its other members are the pool's.

    A sequence has two kinds of logits: of a prompt that ends there, and of a token that was generated there.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.digests: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self.decoded_counts: list[int] = []
        """The number of slots of each decode step."""
        self.prefers_mixed_steps, self.mixed_counts = True, list[int]()
        """The number of slots of each mixed step."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        logits = self._pool.read_prompt(slot, tokens, before)
        self._keep("prompt", (*before, *tokens), logits)
        return logits

    def decode(self, tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]) -> dict[int, F32]:
        rows = self._pool.decode(tokens, before)
        self.decoded_counts.append(len(rows))
        for slot, logits in rows.items():
            self._keep("token", (*before[slot], tokens[slot]), logits)
        return rows

    def predict_seconds_saved_by_mixing(self, slots: Collection[int], slot: int, size: int, length: int) -> float:
        """Prefer mixed steps wherever they can run, so that random schedules have many of them."""
        predicted = self._pool.predict_seconds_saved_by_mixing(slots, slot, size, length)
        return abs(predicted) if self.prefers_mixed_steps else 0.0

    def read_prompt_and_decode(
        self, slot: int, prompt: Sequence[int], tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]
    ) -> dict[int, F32]:
        rows = self._pool.read_prompt_and_decode(slot, prompt, tokens, before)
        self.mixed_counts.append(len(rows))
        self._keep("prompt", (*before[slot], *prompt), rows[slot])
        for each, token in tokens.items():
            self._keep("token", (*before[each], token), rows[each])
        return rows

    def _keep(self, kind: str, tokens: tuple[int, ...], logits: F32) -> None:
        self.digests[kind, tokens] = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).digest()


def make_schedule_engine(pool: SlotPool) -> tuple[Engine, RecordingPool]:
    recording = RecordingPool(pool)
    cache = (
        BlockPrefixCache(pool, state_bytes=STATE_BYTES)
        if isinstance(pool, BlockSlotPool)
        else PrefixCache(pool, state_bytes=STATE_BYTES)
    )
    engine = Engine(recording, cache, queue_size=1 << 20, max_gap_seconds=0.01, clock=lambda: 0.0)
    return engine, recording


def draw_requests(count: int, vocabulary: int, rng: np.random.Generator) -> list[GenerationRequest]:
    """Draw requests of random lengths; most prompts begin as an earlier prompt does, so they hit the cache."""
    requests: list[GenerationRequest] = []
    for number in range(count):
        prompt = tuple(rng.integers(3, vocabulary, int(rng.integers(1, 80))).tolist())
        if requests and rng.random() < 0.7:
            other = requests[rng.integers(len(requests))].prompt
            prompt = (*other[: rng.integers(1, len(other) + 1)], *prompt)[:MAX_PROMPT_TOKENS]
        sampling = Sampling(temperature=float(rng.choice([0.0, 1.2])))
        params = GenerationParams(int(rng.integers(1, MAX_NEW_TOKENS)), sampling, number, frozenset())
        requests.append(GenerationRequest(f"r{number}", prompt, params, uses_cache=bool(rng.random() < 0.9)))
    return requests


def run_schedule(engine: Engine, requests: Sequence[GenerationRequest], rng: np.random.Generator) -> list[Event]:
    """Run requests that come at random steps, several at once. About a tenth is cancelled at random steps."""
    events, waiting = list[Event](), list(requests)[::-1]
    cancelled = [one.id for one in requests if rng.random() < 0.1]
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
            engine.submit(waiting.pop())
        events += engine.step(paused={one.id for one in requests if rng.random() < 0.02})
        if cancelled and rng.random() < 0.2:
            events += engine.cancel(cancelled.pop(rng.integers(len(cancelled))))
    return events


def run_alone(engine: Engine, request: GenerationRequest) -> list[int]:
    """Run one request alone without the prefix cache, and return its tokens."""
    engine.submit(GenerationRequest(request.id, request.prompt, request.params, uses_cache=False))
    events = list[Event]()
    while engine.has_work:
        events += engine.step()
    return list_tokens(events, request.id)


def list_tokens(events: Sequence[Event], request: str) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent) and event.request == request]


def count_ends(events: Sequence[Event], reason: str) -> int:
    return sum(isinstance(event, EndEvent) and event.reason == reason for event in events)
