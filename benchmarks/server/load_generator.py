"""Generate load for model servers: workloads with fixed seeds, and clients that cost little CPU time.

Requests go to ``/completion`` of llama-server (API ``native``) or to ``/v1/completions`` of OpenAI (API ``openai``).
Answers are stored with the times of their arrival. JSON is parsed after the load, except where the next request depends
on the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import httptools

CPU_POLL_SECONDS = 0.005
"""Interval at which workload I looks whether all clients decode."""
DEFAULT_VOCABULARY = 8000
"""Vocabulary size of a server that does not tell it."""
EMPTY_EVENTS = (b"[DONE]", b"")


# ----------------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Workload:
    """The token counts of the requests of a workload.

    - `shared`: tokens at the beginning of all prompts.
    - `own`: mean further tokens of a prompt; `spread`: their largest deviation.
    - `answer`: tokens of an answer; 0 asks for the embedding of the prompt.
    - `turns`: further requests of a talk; `turn`: tokens that each of them adds after the answer.
    """

    own: int
    answer: int
    shared: int = 0
    spread: int = 0
    turns: int = 0
    turn: int = 0

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt with its answer."""
        first = self.shared + self.own + self.spread + self.answer
        return first + self.turns * (self.turn + self.answer)


WORKLOADS = {
    "S": Workload(32, 64),
    "M": Workload(128, 128, spread=64),
    "L": Workload(1024, 128, spread=512),
    "P": Workload(50, 64, shared=1000),
    "T": Workload(60, 80, shared=1000, turns=5, turn=60),
    "I": Workload(32, 192),
    "E": Workload(256, 0, spread=128),
}
"""Short, medium, long, shared prefix, talks, the decoding that a prompt of `LONG` interrupts, and embeddings."""
LONG = Workload(1500, 16)
"""The request of workload I that arrives while other clients decode."""


@dataclass(frozen=True)
class Job:
    """The requests that a client sends one after another: a prompt, and the tokens that follow each answer."""

    prompt: list[int]
    answer: int
    turns: tuple[list[int], ...] = ()


def make_jobs(workload: Workload, count: int, seed: str, vocabulary: int) -> list[Job]:
    """Make `count` random jobs of a workload; equal seeds give equal jobs.

    Args:
        workload: The token counts.
        count: Number of jobs.
        seed: Seed of token counts and tokens.
        vocabulary: Number of tokens; ids at both ends are left out, because control tokens are there.
    """
    rng, ids = random.Random(seed), range(vocabulary // 8, max(vocabulary // 8 + 1, vocabulary * 3 // 4))
    shared, jobs = rng.choices(ids, k=workload.shared), []
    for _ in range(count):
        own = workload.own + rng.randint(-workload.spread, workload.spread)
        turns = tuple(rng.choices(ids, k=workload.turn) for _ in range(workload.turns))
        jobs.append(Job(shared + rng.choices(ids, k=own), workload.answer, turns))
    return jobs


# ---------------------------------------------------------------------------------------------------------------- HTTP


@dataclass
class Exchange:
    """One request and its streamed answer. The bytes of the answer are parsed after the load."""

    client: int = 0
    sent: float = 0.0
    status: int = 0
    failure: str = ""
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """The time of each read, and its bytes."""

    @cached_property
    def events(self) -> list[tuple[float, dict[str, object]]]:
        """The server-sent events with their times."""
        events, rest = [], b""
        for at, data in self.reads:
            *whole, rest = (rest + data).split(b"\n\n")
            bodies = (block.removeprefix(b"data: ") for block in whole if block.startswith(b"data: "))
            events += [(at, json.loads(body)) for body in bodies if body not in EMPTY_EVENTS]
        return [(at, json.loads(rest))] if self.reads and rest.startswith(b"{") else events

    @property
    def error(self) -> str:
        """The reason why the answer is incomplete, or the empty text."""
        if self.failure or self.status != 200:
            return self.failure or f"status {self.status}: {b''.join(data for _, data in self.reads)[:200]!r}"
        found = [event["error"] for _, event in self.events if "error" in event]
        return str(found[0])[:200] if found else "" if self.token_times else "no token"

    @cached_property
    def token_times(self) -> list[float]:
        """The times of the events with text or tokens."""
        return [at for at, event in self.events if _read_text(event) or event.get("tokens") or event.get("data")]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the answer, if the server sends them."""
        return [token for _, event in self.events for token in event.get("tokens") or ()]

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of prompt tokens, cached prompt tokens and new tokens that the server reports."""
        last: dict[str, dict[str, int]] = {"timings": {}, "usage": {}}
        for _, event in self.events[-3:]:
            last.update({name: event[name] for name in last if event.get(name)})
        timings, usage = last["timings"], last["usage"]
        details = usage.get("prompt_tokens_details") or {}
        cached = timings.get("cache_n", details.get("cached_tokens", 0))
        prompt = usage.get("prompt_tokens", cached + timings.get("prompt_n", 0))
        generated = sum("data" not in event for _, event in self.events) and len(self.token_times)
        return prompt, cached, usage.get("completion_tokens", timings.get("predicted_n", generated))


def _read_text(event: Mapping[str, object]) -> object:
    choices = event.get("choices")
    return choices[0].get("text") if choices else event.get("content")


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time and stores its answer. It reconnects if the server closed it."""

    def __init__(self, address: tuple[str, int], path: str) -> None:
        self._address, self._path = address, path
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange, self._now = Exchange(), 0.0
        self._end: asyncio.Future[None] | None = None

    async def send(self, body: Mapping[str, object], exchange: Exchange) -> None:
        """Send a request and store its answer in `exchange`; errors are stored, too. An `input` is embedded."""
        payload, loop = json.dumps(body, separators=(",", ":")).encode(), asyncio.get_running_loop()
        path = "/v1/embeddings" if "input" in body else self._path
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._exchange = exchange
        for is_reused in (self._transport is not None and not self._transport.is_closing(), False):
            self._parser, self._end = httptools.HttpResponseParser(self), loop.create_future()
            try:
                if not is_reused:
                    await loop.create_connection(lambda: self, *self._address)
                exchange.sent = time.perf_counter()
                self._transport.write(head.encode() + payload)
                return await self._end
            except OSError as error:  # a server may close an idle connection at the moment of a new request
                if not is_reused or exchange.status:
                    exchange.failure = f"{type(error).__name__}: {error}"
                    return None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """End the request with an error, if there is one."""
        self._transport = None
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionError(f"the server has closed the connection: {error}"))

    def data_received(self, data: bytes) -> None:
        """Parse HTTP; the parser calls the methods below."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._exchange.failure = f"no HTTP: {error}"
            self._transport.close()

    def on_headers_complete(self) -> None:
        """Store the status."""
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Store a part of the body with the time of its arrival."""
        self._exchange.reads.append((self._now, data))

    def on_message_complete(self) -> None:
        """End the request."""
        if not self._parser.should_keep_alive():
            self._transport.close()
        if not self._end.done():
            self._end.set_result(None)


# ---------------------------------------------------------------------------------------------------------------- load


@dataclass(frozen=True)
class Target:
    """A server under load: its name, address and API, the size of its vocabulary, and its process if it is known."""

    name: str
    address: tuple[str, int]
    api: str = "native"
    vocabulary: int = DEFAULT_VOCABULARY
    pid: int | None = None

    def connect(self) -> Connection:
        """Return a connection; it connects with its first request."""
        return Connection(self.address, {"native": "/completion", "openai": "/v1/completions"}[self.api])

    def make_body(self, prompt: Sequence[int], answer: int) -> dict[str, object]:
        """Return the body of a request for exactly `answer` tokens, or with 0 for the embedding of the prompt."""
        if not answer:
            return {"input": [prompt], "model": "any"}
        body: dict[str, object] = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True}
        if self.api == "openai":
            return body | {"max_tokens": answer, "stream_options": {"include_usage": True}}
        return body | {"n_predict": answer, "return_tokens": True}


async def run_job(target: Target, connection: Connection, job: Job, exchanges: list[Exchange], client: int = 0) -> None:
    """Send the requests of a job one after another, and append their exchanges at the start of each."""
    prompt = job.prompt
    for turn in (*job.turns, None):
        exchange = Exchange(client)
        exchanges.append(exchange)
        await connection.send(target.make_body(prompt, job.answer), exchange)
        if turn is None or exchange.error:
            return
        answer = exchange.tokens or prompt[: job.answer]  # a server without token ids gets other tokens
        prompt = [*prompt, *answer, *turn]


async def run_closed_loop(target: Target, jobs: Sequence[Job], clients: int, exchanges: list[Exchange]) -> None:
    """Run jobs by clients that each take the next job when they have ended one."""
    pending = iter(jobs)

    async def run_client(client: int) -> None:
        connection = target.connect()
        for job in pending:
            await run_job(target, connection, job, exchanges, client)
        connection.close()

    await asyncio.gather(*map(run_client, range(clients)))


async def run_open_loop(target: Target, jobs: Sequence[Job], rate: float, exchanges: list[Exchange]) -> None:
    """Run jobs that start at random times, `rate` jobs per second on average."""
    rng, tasks = random.Random(len(jobs)), []
    for job in jobs:
        await asyncio.sleep(rng.expovariate(rate))
        tasks.append(asyncio.create_task(run_closed_loop(target, [job], 1, exchanges)))
    await asyncio.gather(*tasks)


async def run_interruption(target: Target, jobs: Sequence[Job], long: Job, exchanges: list[Exchange]) -> None:
    """Run all of `jobs` at once, and `long` as soon as all of them decode; its exchange becomes the last one."""
    load = asyncio.create_task(run_closed_loop(target, jobs, len(jobs), exchanges))
    while not load.done() and not (len(exchanges) == len(jobs) and all(one.reads for one in exchanges)):
        await asyncio.sleep(CPU_POLL_SECONDS)
    late: list[Exchange] = []
    await asyncio.gather(load, run_closed_loop(target, [long], 1, late))
    exchanges += late
