"""The log of a serving engine: its orders, its clock and its results, from which `replay` repeats every step.

The engine is a state machine: its orders and the times that it reads determine all that it does. The log is a file of
JSON lines. A header begins each run of a server. Every other line is an order or a step, with the times that the
engine has read for it. A step also has its events, and a checksum of the logits of each slot.
"""

from __future__ import annotations

import errno
import json
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, BinaryIO

import numpy as np

from ...graph.validation import describe_exception
from ..errors import ModelError
from ..generation.generate import GenerationParams
from ..generation.grammar import Grammar
from ..generation.lazy_grammar import LazyJsonGrammar
from ..generation.sampling import Sampling
from ..gguf.tokenization.tokenizer import Tokenizer
from ..inference.prefill_chunks import F32
from .engine import Engine
from .prefix_cache import PrefixCache
from .requests import EndEvent, Event, GenerationRequest, PromptProgressEvent, TokenEvent
from .step_runner import StepRunner

LOG_FORMAT = "hocket-log-3"
MAX_READER_WAIT_SECONDS = 1.0
"""Longest wait for the reader of a pipe, per line, and of all lines after `RequestLog.close`; then the log ends."""
MAX_CLOSE_SECONDS = 10.0
"""Longest wait for a file that takes no line when the log is closed, such as a terminal that has no reader."""
MAX_QUEUED_BYTES = 64 << 20
"""Largest number of bytes that wait for the file; the log ends when more wait."""


class TimeAndChecksumTape:
    """Records the numbers that a replay of an engine needs: its clock readings, and the checksums of its logits.

    Each line of the log takes the numbers that were recorded since the line before.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: list[float] = []
        self._checksums: list[str] = []

    def read_clock(self) -> float:
        """Return the present time of the clock, and record it."""
        return self.record_or_replay_seconds(self._clock)

    def record_or_replay_seconds(self, measure: Callable[[], float]) -> float:
        """Return the seconds that `measure` returns, and record them; a replay returns the recorded seconds instead."""
        self._times.append(measure())
        return self._times[-1]

    def record_logits_checksum(self, slot: int, logits: F32) -> None:
        """Record the checksum of the logits of a slot."""
        self._checksums.append(f"{slot}:{compute_sum_and_xor_of_logits(logits)}")

    def take_line_fields(self) -> dict[str, object]:
        """Return the recorded times and checksums as fields of the next line of the log, and forget them."""
        fields: dict[str, object] = {"times": self._times}
        if self._checksums:
            fields["logits"] = self._checksums
        self._times, self._checksums = [], []
        return fields


def compute_sum_and_xor_of_logits(logits: F32) -> str:
    """Compute a checksum of the bits of logits f32[n]: the sum and the exclusive or of their words, as hexadecimals."""
    words = np.ascontiguousarray(logits, np.float32).view(np.uint32)
    return f"{int(words.sum(dtype=np.uint64)) & 0xFFFFFFFF:08x}{int(np.bitwise_xor.reduce(words)):08x}"


class TapedPool:
    """A slot pool that passes its predictions and logits to a tape; see `StepRunner` for the methods."""

    def __init__(self, pool: StepRunner, tape: TimeAndChecksumTape) -> None:
        self._pool, self._tape = pool, tape
        self.slots, self.context, self.batch = pool.slots, pool.context, pool.batch

    def read_prompt(self, slot: int, tokens: Sequence[int], before: Sequence[int]) -> F32:
        """Read prompt tokens into a slot, record the checksum of the logits, and return the logits."""
        logits = self._pool.read_prompt(slot, tokens, before)
        self._tape.record_logits_checksum(slot, logits)
        return logits

    def decode(self, tokens: dict[int, int], before: dict[int, Sequence[int]]) -> dict[int, F32]:
        """Append one token to each given slot, record the checksums of the logits, and return the logits by slot."""
        rows = self._pool.decode(tokens, before)
        for slot, logits in rows.items():
            self._tape.record_logits_checksum(slot, logits)
        return rows

    def list_evaluated_draft_tokens(self, slot: int) -> Sequence[int]:
        """Return the draft tokens that a slot has evaluated."""
        return self._pool.list_evaluated_draft_tokens(slot)

    def decode_to_candidates(self, *_: object) -> None:
        """Return None, so that the engine reads all logits: the tape records their checksums."""

    @property
    def planning_seconds(self) -> float:
        """The seconds that the pool has spent on plans and kernels since its start, as the tape has them."""
        return self._tape.record_or_replay_seconds(lambda: self._pool.planning_seconds)

    def predict_prompt_seconds(self, size: int) -> float:
        """Return the predicted seconds of a prompt chunk of `size` tokens, and record them."""
        return self._tape.record_or_replay_seconds(lambda: self._pool.predict_prompt_seconds(size))

    def predict_seconds_saved_by_mixing(self, slots: Collection[int], slot: int, size: int, length: int) -> float:
        """Predict the seconds that a mixed step saves, and record them."""
        predict = self._pool.predict_seconds_saved_by_mixing
        return self._tape.record_or_replay_seconds(lambda: predict(slots, slot, size, length))

    def read_prompt_and_decode(
        self, slot: int, prompt: Sequence[int], tokens: Mapping[int, int], before: Mapping[int, Sequence[int]]
    ) -> dict[int, F32]:
        """Run a mixed step, record the checksums of the logits, and return the logits by slot."""
        rows = self._pool.read_prompt_and_decode(slot, prompt, tokens, before)
        for each, logits in rows.items():
            self._tape.record_logits_checksum(each, logits)
        return rows

    def rebind_plans_and_zero_states(self) -> None:
        """Bind all plans anew and zero all states."""
        self._pool.rebind_plans_and_zero_states()


class RequestLog:
    """Writes the lines of a request log to a file or a pipe, in a thread of its own: the engine never waits for it.

    After an error, or when more than `MAX_QUEUED_BYTES` wait, the log takes no further line. It never leaves out a line
    before a later one, so `replay` can repeat all that it has. A line that could be written in part only is the last
    one; `replay` leaves it out.

    Args:
        file: The file, from `open_log`.
        on_error: Receives the reason when the file cannot be written, in the thread that finds it.
        model_options: The arguments of `Model`, as JSON values, with its file under ``model``.
    """

    def __init__(self, file: BinaryIO, on_error: Callable[[str], None], model_options: Mapping[str, object]) -> None:
        self._file, self._on_error, self.model_options = file, on_error, model_options
        self._lines, self._queued_bytes = deque[bytes](), 0
        self._changed = threading.Condition()
        self._has_ended, self._error = False, ""
        """Whether no further line is taken, and the reported reason for this; an empty text after `close`."""
        self._write_until = math.inf
        """The moment after which no line waits for the reader of a pipe."""
        self._thread = threading.Thread(target=self._write_queued_lines, name="hocket-log", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record as one line, which the thread of the log writes."""
        if self._has_ended:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._changed:
            is_full = bool(self._lines) and self._queued_bytes + len(line) > MAX_QUEUED_BYTES
            if not is_full:
                self._lines.append(line)
                self._queued_bytes += len(line)
            self._changed.notify()
        if is_full:
            self._end(f"its reader is {MAX_QUEUED_BYTES:,} bytes behind")

    def close(self) -> None:
        """Write the waiting lines, and close the file. Some file systems report only now that they could not write."""
        with self._changed:
            self._has_ended, self._write_until = True, time.monotonic() + MAX_READER_WAIT_SECONDS
            self._changed.notify()
        self._thread.join(MAX_CLOSE_SECONDS)
        if self._thread.is_alive():  # it ends with the process
            self._end("it took no line for too long, so its last lines are missing")

    def _end(self, why: str) -> None:
        """Take no further line, and report the reason, if it is the first one."""
        with self._changed:
            is_first, self._has_ended, self._error = not self._error, True, self._error or why
            self._changed.notify()
        if is_first:
            self._on_error(why)

    def _write_queued_lines(self) -> None:
        """Write lines until the log has ended, then close the file."""
        why = ""
        try:
            while line := self._wait_for_line():
                _write_whole_line(self._file, line, min(self._write_until, time.monotonic() + MAX_READER_WAIT_SECONDS))
        except OSError as error:
            why = error.strerror or type(error).__name__
            with self._changed:
                self._lines.clear()
        try:
            self._file.close()
        except OSError as error:
            why = why or error.strerror or type(error).__name__
        if why:
            self._end(why)

    def _wait_for_line(self) -> bytes:
        """Return the next line, or nothing after the end of the log."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._has_ended)
            line = self._lines.popleft() if self._lines else b""
            self._queued_bytes -= len(line)
            return line


def _write_whole_line(file: BinaryIO, line: bytes, until: float) -> None:
    """Write a line to an unbuffered file, in parts if the file takes only a part of it at once.

    Args:
        file: The file.
        line: The line.
        until: The moment until which the reader of a pipe is waited for.

    Raises:
        OSError: The file cannot be written, or the reader of a pipe does not take the line in time.
    """
    size = len(line)
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    while line:
        count: int | None = file.write(line)
        if count is None:  # a full pipe
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                why = f"its reader does not take a line of {size} bytes within {MAX_READER_WAIT_SECONDS:g} s"
                raise TimeoutError(errno.ETIMEDOUT, why)
        line = line[count or 0 :]


class LoggedEngine(Engine):
    """An engine that writes a line for each of its orders and steps; see `Engine` for the other arguments.

    Args:
        log: Receives the lines.
    """

    def __init__(
        self,
        pool: StepRunner,
        cache: PrefixCache,
        *,
        log: RequestLog,
        queue_size: int,
        max_gap_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._log, self._tape = log, TimeAndChecksumTape(clock)
        self._was_idle = False
        options: dict[str, Any] = {"queue_size": queue_size, "max_gap_seconds": max_gap_seconds}
        super().__init__(TapedPool(pool, self._tape), cache, clock=self._tape.read_clock, **options)

    def submit(self, request: GenerationRequest) -> None:
        """Submit a request, and log it if it was accepted."""
        super().submit(request)
        self._log.write({"order": "submit", "request": describe_request(request), **self._tape.take_line_fields()})

    def cancel(self, request: str) -> list[Event]:
        """Cancel a request, and log the order."""
        events = super().cancel(request)
        self._log.write({"order": "cancel", "id": request, **self._tape.take_line_fields()})
        return events

    def restart_and_requeue_requests(self, failed_requests: Collection[str], message: str) -> list[Event]:
        """Restart the engine as `Engine.restart_and_requeue_requests` does, and log the order."""
        events = super().restart_and_requeue_requests(failed_requests, message)
        fields = {"order": "restart", "failed": sorted(failed_requests), "message": message}
        self._log.write({**fields, "events": describe_events(events), **self._tape.take_line_fields()})
        return events

    def step(self, paused: Container[str] = ()) -> list[Event]:
        """Run a step, and log it with its events. Of several steps without work only the first is logged."""
        has_work = self.has_work
        try:
            events = super().step(paused)
        except Exception as error:  # logged, so that a replay can compare it, and raised again
            self._log.write({"failure": f"{type(error).__name__}: {error}", **self._tape.take_line_fields()})
            raise
        if has_work or not self._was_idle:
            self._log.write({"events": describe_events(events), **self._tape.take_line_fields()})
        self._was_idle = not has_work
        return events

    def restore_and_log(self, restore: Callable[[], int], slot: int, path: str) -> int:
        """Restore a slot from a file, and return its number of tokens. Log it, or the reason why it was not restored.

        Args:
            restore: Restores the slot, and returns its number of tokens.
            slot: Number of the slot.
            path: The file.

        Raises:
            Exception: As `restore`.
        """
        tokens, failure = 0, ""
        try:
            tokens = restore()
        except Exception as error:  # a backend may raise anything; logged, so that a replay can compare it
            failure = describe_exception(error)
            raise
        finally:
            self._log.write({"order": "restore", "slot": slot, "path": path, "tokens": tokens, "failure": failure})
        return tokens

    def log_erased_slot(self, slot: int) -> None:
        """Log that a slot was erased."""
        self._log.write({"order": "erase", "slot": slot})


def describe_events(events: Sequence[Event]) -> list[list[object]]:
    """Describe events as JSON. Logprobs and seconds are left out."""
    found: list[list[object]] = []
    for event in events:
        match event:
            case TokenEvent():
                found.append(["token", event.request, event.token])
            case PromptProgressEvent():
                found.append(["read", event.request, event.read_tokens])
            case EndEvent():
                found.append(["end", event.request, event.reason, event.message, event.timing.new_tokens])
    return found


def describe_request(request: GenerationRequest) -> dict[str, object]:
    """Describe a request as JSON, from which `read_request` restores it."""
    params = request.params
    return {
        "id": request.id,
        "prompt": list(request.prompt),
        "limit": params.limit,
        "sampling": {**asdict(params.sampling), "bias": _describe_bias(params.sampling)},
        "seed": params.seed,
        "end_tokens": sorted(params.end_tokens),
        "grammar": _describe_grammar(params.grammar),
        "token_count": params.token_count,
        "top_logprobs": request.top_logprobs,
        "uses_cache": request.uses_cache,
        "slot": request.slot,
    }


def _describe_bias(sampling: Sampling) -> list[tuple[int, float | None]]:
    """Describe the logit bias; None bans a token, because JSON has no infinity."""
    return [(token, None if value == -np.inf else value) for token, value in sampling.bias]


def _describe_grammar(grammar: Grammar | LazyJsonGrammar | None) -> dict[str, object] | None:
    if isinstance(grammar, Grammar):
        return {"rules": grammar.compiled_rules}
    if isinstance(grammar, LazyJsonGrammar):
        names = ("trigger", "open_thought", "close_thought", "begins_in_thought")
        return {"rules": grammar.grammar.compiled_rules, **{name: getattr(grammar, name) for name in names}}
    return None


def read_request(record: Mapping[str, Any], tokenizer: Tokenizer | None) -> GenerationRequest:
    """Restore a request from its description in a log.

    Args:
        record: The description.
        tokenizer: The tokenizer of the model, for grammars.

    Raises:
        ModelError: A field is missing or has another type.
    """
    try:
        sampling = Sampling(**{**record["sampling"], "bias": ()})
        bias = tuple((token, -np.inf if value is None else value) for token, value in record["sampling"]["bias"])
        params = GenerationParams(
            record["limit"],
            replace(sampling, bias=bias),
            record["seed"],
            frozenset(record["end_tokens"]),
            _read_grammar(record["grammar"], tokenizer),
            None,
            record["token_count"],
        )
        top, uses_cache, slot = record["top_logprobs"], record["uses_cache"], record["slot"]
        return GenerationRequest(record["id"], tuple(record["prompt"]), params, top, uses_cache, slot)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"a request of the log has wrong fields: {error!r:.80}; choose a log of this version"
        ) from None


def _read_grammar(record: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> Grammar | LazyJsonGrammar | None:
    if record is None:
        return None
    if tokenizer is None:
        raise ModelError("the log has a grammar, but the model has no vocabulary; choose the model of the log")
    grammar = Grammar.from_compiled_rules(tokenizer, record["rules"])
    rest = {name: value for name, value in record.items() if name != "rules"}
    return LazyJsonGrammar(tokenizer, grammar, **rest) if rest else grammar
