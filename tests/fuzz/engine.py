"""Runs damaged inputs through a reader, keeps those that reach new code, and judges every one.

An input is judged by what a reader may do with it: raise a `HocketError` of one line, or read it right, within seconds
of processor time and memory in proportion to its size.
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
"""Seconds after which the process ends itself: code that is not Python does not hear the alarm."""
LARGEST = 1 << 19
"""Bytes of an input; what grows past that is not tried."""
DETAIL = re.compile(r"[\"'‘“].*?[\"'’”]|%\S+|\S*/\S+|[-\d.]+")
"""What differs between two messages of one kind."""


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
    """How an input was read: the words of the refusal, what was wrong with the reading, and the most bytes it took."""

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
        self._kept: list[CodeType] = []  # so that no number is given to another

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
            self._kept.append(code)
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
    """Raise `Late` in the block after so much processor time."""

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
    """Read an input; count the bytes that takes if it is `measured`, else watch its `lines` if given.

    Both make it slower, so what seems late then is read again without.
    """
    try:
        with deadline(SECONDS):
            if measured:
                return _read_and_measure(target, data)
            if lines is not None:
                with lines.watch():
                    return _read(target, data)
            return _read(target, data)
    except Late:
        if measured or lines is not None:
            return read_input(target, data, measured=False)
        return Verdict(fault=f"takes more than {SECONDS:g} s")


def _read_and_measure(target: Target, data: bytes) -> Verdict:
    tracemalloc.start()
    try:
        verdict = _read(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    allowed = target.times * len(data) + target.spare
    if verdict.fault is None and peak > allowed:
        return Verdict(fault=f"takes {peak} bytes for {len(data)}, more than {allowed}", peak=peak)
    return Verdict(verdict.refusal, verdict.fault, peak)


def _read(target: Target, data: bytes) -> Verdict:
    try:
        target.read(data)
    except HocketError as why:
        words = str(why)
        if not words or not words.isprintable():
            return Verdict(fault=f"is refused in more than one printable line: {words!r:.200}")
        return Verdict(refusal=words)
    except Exception as why:  # any raw error of the product is what the fuzzer looks for
        at = next((f for f in reversed(traceback.extract_tb(why.__traceback__)) if f.filename.startswith(ROOT)), None)
        where = f" at {Path(at.filename).name}:{at.lineno}" if at else ""
        return Verdict(fault=f"{type(why).__name__}{where}: {' '.join(str(why).split())[:200]}")
    return Verdict()


def kind_of(words: str) -> str:
    """A message without names and numbers, so that two of one kind are equal."""
    return DETAIL.sub("_", words)


@dataclass(slots=True)
class Report:
    """What came of the inputs of a target: how many, how they were refused, the most memory that one took beyond what
    its size allows, and an input for each kind of fault."""

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
        _read(target, data)  # what is imported and compiled once is nobody's memory
        verdict = read_input(target, data)
        assert verdict == Verdict(peak=verdict.peak), f"a seed of {target.name}: {verdict}"
    return seeds


def fuzz(report: Report, seed: int, goes_on: Callable[[], bool], about_to_read: Callable[[bytes], object] = id) -> None:
    """Damage sound inputs and what reaches new lines, as long as `goes_on` says so."""
    rng, lines, corpus = random.Random(f"{report.target.name} {seed}"), Lines(), sound(report.target)
    for data in corpus:
        read_input(report.target, data, measured=False, lines=lines)
    while goes_on():
        data = corpus[-1 - int(len(corpus) * rng.random() ** 1.5)]  # what was kept last, more often
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            data = report.target.damage(data, rng.choice(corpus), rng)
        if len(data) > LARGEST:
            continue
        about_to_read(data)
        if report.take(data, lines):
            corpus.append(data)
