"""Runs of an engine over a pool: requests, and the tokens and the end of each."""

from __future__ import annotations

from functools import cache

import numpy as np

from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.prefix_cache import PrefixCache
from hocket.frontends.serving.requests import EndEvent, GenerationRequest, TokenEvent
from hocket.frontends.serving.slots import SlotPool

from ..models.goldens import path_of
from .fake_pool import END_TOKEN

BASE = tuple(range(1, 31))
"""A text that prompts of tests share."""
MAX_STEPS = 2000
SLOTS, CONTEXT, BATCH = 4, 256, 64
PROMPT_TOKENS = 96


def make_request(name, prompt, limit=4, seed=0, **options):
    params = GenerationParams(limit, Sampling(temperature=0.8), seed, frozenset([END_TOKEN]))
    return GenerationRequest(name, tuple(prompt), params, **options)


def make_engine(pool, queue_size=8, state_bytes=100):
    cache = PrefixCache(pool, state_bytes=state_bytes)
    return Engine(pool, cache, queue_size=queue_size, max_gap_seconds=1e9, clock=lambda: pool.now)


def run_all(engine):
    """Run an engine until nothing is left, and return its events."""
    events = []
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError(f"requests are left after {MAX_STEPS} steps: {engine.status}")


def tokens_of(events, name):
    return [event.token for event in events if isinstance(event, TokenEvent) and event.request == name]


def end_of(events, name):
    (end,) = (event for event in events if isinstance(event, EndEvent) and event.request == name)
    return end


def make_pool(name: str, slots: int = SLOTS, devices: str = "cpu:0", split_mode: str = "layer") -> SlotPool:
    group = DeviceGroup(devices=tuple(devices.split(",")), split_mode=split_mode, threads=1)
    return SlotPool(Session(open_model(path_of(name)), on=group), slots, context=CONTEXT, batch=BATCH)


@cache
def prompt_of(name: str, seed: int = 0) -> tuple[int, ...]:
    vocabulary = open_model(path_of(name)).vocabulary_size
    return tuple(np.random.default_rng(seed).integers(3, vocabulary, PROMPT_TOKENS).tolist())
