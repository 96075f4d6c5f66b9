"""The replay of a request log: it repeats every step of an engine, and finds the first difference of its results."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import Tokenizer
from ..inference.saved_state import read_state
from ..inference.session import Session
from .blocks.make_pool import make_prefix_cache, make_slot_pool
from .engine import Engine
from .request_log import LOG_FORMAT, TapedPool, TimeAndChecksumTape, describe_events, read_request
from .slot_files import MAX_HEADER_BYTES, SlotFiles

MAX_LINE_BYTES = 256 << 20
"""Maximum bytes of a line in a log."""
LogLine = tuple[int, Mapping[str, Any]]
"""The number of a line, and its record."""


class ReplayDifferenceError(Exception):
    """The first difference between a log and its replay; it is no `HocketError`, so that the engine does not catch it.

    Args:
        line: The line of the log.
        message: The difference.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


@dataclass(slots=True)
class ReplayedTotals:
    """The total numbers of requests, steps and tokens that a replay has repeated."""

    requests: int = 0
    steps: int = 0
    tokens: int = 0


class ReplayTape(TimeAndChecksumTape):
    """The tape of a replay: it returns the times of the log, and collects the checksums of logits."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self._left: deque[float] = deque()
        self._line = 0

    def load_line_times(self, line: int, times: list[float]) -> None:
        """Load the recorded times of a line of the log, which the engine then reads."""
        self._line, self._left = line, deque(times)

    def record_or_replay_seconds(self, measure: Callable[[], float]) -> float:
        """Return the next time of the log, without measuring anything.

        Raises:
            ReplayDifferenceError: The log has no further time for this line.
        """
        if not self._left:
            raise ReplayDifferenceError(self._line, "the engine has read the clock more often than in the log")
        return self._left.popleft()

    @property
    def unread_times_of_line(self) -> int:
        """The number of times of the line that the engine has not read."""
        return len(self._left)


def read_complete_log_lines(path: str | Path) -> Iterator[LogLine]:
    """Read the lines of a log. A last line without an end, which a crash has cut, is left out.

    Raises:
        ModelError: A line is no JSON object, or the file is no log.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES):
            number += 1
            if not text.endswith(b"\n"):
                if len(text) < MAX_LINE_BYTES:
                    return
                raise ModelError(f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes; give a log of hocket")
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and record.get("log", LOG_FORMAT) != LOG_FORMAT:
                raise ModelError(
                    f"{path}: line {number} begins a log of {record['log']!r:.40}, and this hocket replays "
                    f"{LOG_FORMAT}; replay it with the hocket that wrote it, and give each version its own file"
                )
            if not isinstance(record, dict) or (number == 1 and record.get("log") != LOG_FORMAT):
                if record is None and number > 1:
                    continue  # a line that was cut by a crash, and ended by the next server
                raise ModelError(f"{path}: line {number} is no record of {LOG_FORMAT}; give a file of --log-requests")
            yield number, record


class LogReplay:
    """The replay of one run of a server, over a session with the weights of its model.

    Args:
        root: The session, with the context and the batch of the server.
        header: The header of the run.
        tokenizer: The tokenizer of the model, for grammars; `None` without a vocabulary.
    """

    def __init__(self, root: Session, header: Mapping[str, Any], tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pool = make_slot_pool(root, int(header["slots"]), int(header.get("pool_tokens", 0)))
        whole, state_bytes = bool(header.get("reserves_whole_texts", False)), int(header["state_bytes"])
        keeps = bool(header.get("retains_contents", False))
        cache = make_prefix_cache(
            self._pool, state_bytes=state_bytes, reserves_whole_texts=whole, retains_contents=keeps
        )
        self._tape = ReplayTape()
        self._engine = Engine(
            TapedPool(self._pool, self._tape),
            cache,
            queue_size=int(header["queue_size"]),
            max_gap_seconds=float(header["max_gap_seconds"]),
            clock=self._tape.read_clock,
        )
        self._slot_files = SlotFiles(self._pool, cache)
        self.counts = ReplayedTotals()

    def repeat_line_and_compare(self, line: int, record: Mapping[str, Any]) -> None:
        """Repeat an order or a step of the log on the engine, and compare the result with the log.

        Args:
            line: The number of the line.
            record: The record.

        Raises:
            ReplayDifferenceError: The result differs from the log.
            ModelError: The record has another form, or a slot file is missing.
        """
        try:
            self._tape.load_line_times(line, [float(each) for each in record.get("times", ())])
            if "order" in record:
                self._repeat_order(line, record)
            else:
                self._repeat_step(line, record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise ModelError(f"line {line} of the log has wrong fields ({error!r:.80}); give another log") from error
        if unread := self._tape.unread_times_of_line:
            raise ReplayDifferenceError(line, f"the engine has read the clock {unread} times less than in the log")

    def _repeat_order(self, line: int, record: Mapping[str, Any]) -> None:
        match record["order"]:
            case "submit":
                self._engine.submit(read_request(record["request"], self._tokenizer))
                self.counts.requests += 1
            case "cancel":
                self._engine.cancel(record["id"])
            case "restart":
                events = self._engine.restart_and_requeue_requests(record["failed"], record["message"])
                self._require_equal_events(line, record["events"], describe_events(events))
            case "erase":
                self._slot_files.erase(record["slot"])
            case "restore":
                self._repeat_restore(line, record)
            case other:
                raise ValueError(other)

    def _repeat_restore(self, line: int, record: Mapping[str, Any]) -> None:
        path, logged, count, failure = record["path"], record.get("failure", ""), 0, ""
        try:
            state = read_state(path, self._pool.compute_slot_bytes_in_float32() + MAX_HEADER_BYTES)
            count = self._slot_files.restore(record["slot"], state, path)
        except ModelError as error:
            if not logged:
                raise
            failure = str(error)
        if failure != logged:
            raise ReplayDifferenceError(
                line, f"the restore {_say_failure(logged)} in the log, and {_say_failure(failure)} now"
            )
        if count != record["tokens"]:
            raise ReplayDifferenceError(line, f"{path} has {format_count(count, 'token')}; it had {record['tokens']}")

    def _repeat_step(self, line: int, record: Mapping[str, Any]) -> None:
        failure, logged = "", record.get("failure", "")
        try:
            events = describe_events(self._engine.step())
        except ReplayDifferenceError as error:
            if logged:  # the step has gone on behind the failure
                raise ReplayDifferenceError(line, f"the step {_say_failure(logged)} in the log, and not now") from error
            raise
        except Exception as error:  # a step may fail with any error; it is compared with the failure in the log
            failure, events = f"{type(error).__name__}: {error}", []
        if failure != logged:
            raise ReplayDifferenceError(
                line, f"the step {_say_failure(logged)} in the log, and {_say_failure(failure)} now"
            )
        self.counts.steps += 1
        self.counts.tokens += sum(event[0] == "token" for event in events)
        checksums = self._tape.take_line_fields().get("logits", [])
        if checksums != record.get("logits", []):
            raise ReplayDifferenceError(
                line, f"the logits differ: {record.get('logits', [])} in the log, {checksums} now"
            )
        if not failure:
            self._require_equal_events(line, record["events"], events)

    def _require_equal_events(self, line: int, logged: list[list[Any]], found: list[list[object]]) -> None:
        """Require equal events; raise `ReplayDifferenceError` with the first pair that differs."""
        for i in range(max(len(logged), len(found))):
            old, new = (events[i] if i < len(events) else "nothing" for events in (logged, found))
            if old != new:
                raise ReplayDifferenceError(line, f"event {i} differs: {old} in the log, {new} now")


def _say_failure(failure: str) -> str:
    return f"has failed ({failure[:200]})" if failure else "has not failed"
