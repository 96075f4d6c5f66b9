"""Run damaged inputs through a reader, keep the inputs that reach new code, and check every one.

A reader may raise a `HocketError` of one line, or read the input right. It may take seconds of processor time, and
memory in proportion to the size of the input.
"""

from __future__ import annotations

import faulthandler
import random
import re
import signal
import sys
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hocket
from hocket.graph.errors import HocketError

ROOT = str(Path(hocket.__file__).parent)
HERE = str(Path(__file__).parent)
SECONDS = 5.0
"""Processor time that one input may take."""
STUCK = 3600.0
"""Seconds until the process ends itself: code outside Python does not get the alarm."""
LARGEST = 1 << 19
"""The size limit of an input in bytes; larger ones are not tried."""
DETAIL = re.compile(r"[\"'‘“].*?[\"'’”]|%\S+|\S*/\S+|[-\d.]+")
"""The details in which two messages of one kind differ."""


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of hostile input.

    `read` raises `HocketError` to refuse an input and AssertionError where it was read wrong; `damage` makes an input
    out of one, and perhaps parts of another.  Reading may take `times` the bytes of the input (text becomes Python
    objects, which are larger) and `spare` more.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    damage: Callable[[bytes, bytes, random.Random], bytes]
    read: Callable[[bytes], None]
    times: int
    spare: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a read: the words of the refusal, the fault of the reading, and its peak memory in bytes."""

    refusal: str | None = None
    fault: str | None = None
    peak: int = 0


class Late(BaseException):
    """The input took too long; no reader catches it."""


class Lines:
    """The lines of hocket that were reached so far."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self._left: dict[int, set[int]] = {}
        self._retained_code: list[CodeType] = []  # so that no number is given to another

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = self._left.get(id(code))
        if left is None:
            self._retained_code.append(code)
            ours = code.co_filename.startswith(ROOT) and not code.co_filename.startswith(HERE)
            left = {line for *_, line in code.co_lines() if line} - {code.co_firstlineno} if ours else set()
            self._left[id(code)] = left
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            left = self._left[id(frame.f_code)]
            if frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self.seen.add((id(frame.f_code), frame.f_lineno))
        return self._line


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Late` in the block after this processor time."""

    def ring(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGPROF, ring)
    faulthandler.dump_traceback_later(STUCK, exit=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        faulthandler.cancel_dump_traceback_later()


def read_input(target: Target, data: bytes, *, measured: bool = True, lines: Lines | None = None) -> Verdict:
    """Read an input; count its memory if `measured`, else trace its `lines` if they are present.

    Both are slow, so an input that seems late is read again without them.
    """
    try:
        with deadline(SECONDS):
            if measured:
                return _read_and_measure(target, data)
            if lines is not None:
                with lines.watch():
                    return _read_target(target, data)
            return _read_target(target, data)
    except Late:
        if measured or lines is not None:
            return read_input(target, data, measured=False)
        return Verdict(fault=f"takes more than {SECONDS:g} s")


def _read_and_measure(target: Target, data: bytes) -> Verdict:
    tracemalloc.start()
    try:
        verdict = _read_target(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    allowed = target.times * len(data) + target.spare
    if verdict.fault is None and peak > allowed:
        return Verdict(fault=f"takes {peak} bytes for {len(data)}, more than {allowed}", peak=peak)
    return Verdict(verdict.refusal, verdict.fault, peak)


def _read_target(target: Target, data: bytes) -> Verdict:
    try:
        target.read(data)
    except HocketError as why:
        words = str(why)
        if not words or not words.isprintable():
            return Verdict(fault=f"is refused in more than one printable line: {words!r:.200}")
        return Verdict(refusal=words)
    except Exception as why:  # the fuzzer looks for any raw error of the product
        at = next((f for f in reversed(traceback.extract_tb(why.__traceback__)) if f.filename.startswith(ROOT)), None)
        where = f" at {Path(at.filename).name}:{at.lineno}" if at else ""
        return Verdict(fault=f"{type(why).__name__}{where}: {' '.join(str(why).split())[:200]}")
    return Verdict()


def kind_of(words: str) -> str:
    """A message without names and numbers, so that two of one kind are equal."""
    return DETAIL.sub("_", words)


@dataclass(slots=True)
class Report:
    """The results for the inputs of a target.

    They are the number of inputs, the refusals, the largest excess memory of an input, and an input for each kind of
    fault.
    """

    target: Target
    cases: int = 0
    measured: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    spare: int = 0
    faults: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def take(self, data: bytes, lines: Lines | None = None) -> bool:
        """Judge an input; whether it is of a new kind.  Memory is measured of those, and of every eighth."""
        reached = len(lines.seen) if lines is not None else 0
        verdict = read_input(self.target, data, measured=False, lines=lines)
        self.cases += 1
        end = kind_of(verdict.fault or verdict.refusal or "")
        is_new = end not in self.kinds or (lines is not None and len(lines.seen) > reached)
        self.kinds[end] += 1
        if verdict.fault is None and (is_new or self.cases % 8 == 0):
            verdict = read_input(self.target, data)
            self.measured += 1
            self.spare = max(self.spare, verdict.peak - self.target.times * len(data))
        if verdict.fault is not None:
            self.faults.setdefault(kind_of(verdict.fault), (verdict.fault, data))
        return is_new

    def __str__(self) -> str:
        refused = self.cases - self.kinds[""]
        return (
            f"{self.target.name}: {self.cases} cases, {refused} refused in {len(self.kinds)} ways, "
            f"at most {self.spare / 2**20:.1f} MiB beyond {self.target.times} times the input "
            f"({self.measured} measured), {len(self.faults)} faults"
        )


def sound(target: Target) -> list[bytes]:
    """The inputs from which damage begins; none is refused."""
    seeds = list(target.seeds())
    for data in seeds:
        _read_target(target, data)  # imports and compiled patterns count for no input
        verdict = read_input(target, data)
        assert verdict == Verdict(peak=verdict.peak), f"a seed of {target.name}: {verdict}"
    return seeds


def fuzz(report: Report, seed: int, goes_on: Callable[[], bool], about_to_read: Callable[[bytes], object] = id) -> None:
    """Damage sound inputs and inputs that reach new lines, while `goes_on` returns true."""
    rng, lines, corpus = random.Random(f"{report.target.name} {seed}"), Lines(), sound(report.target)
    for data in corpus:
        read_input(report.target, data, measured=False, lines=lines)
    while goes_on():
        data = corpus[-1 - int(len(corpus) * rng.random() ** 1.5)]  # later inputs more often
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            data = report.target.damage(data, rng.choice(corpus), rng)
        if len(data) > LARGEST:
            continue
        about_to_read(data)
        if report.take(data, lines):
            corpus.append(data)
