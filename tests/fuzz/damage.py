"""Damage to bytes, to words and to JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

BITS = (0, 7, 8, 15, 16, 31, 32, 62, 63, 64)
INTEGERS = tuple(sign * (1 << n) + more for n in BITS for sign in (1, -1) for more in (-1, 0, 1))
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "two\nlines", "é" * 300, [], [[]], {}, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), 10**400, "9" * 5000, [0] * 2000, {"": None}, *INTEGERS),
)
WORD = re.compile(r"\s+|[A-Za-z_]\w*|\d+|.", re.DOTALL)


def bytes_damaged(data: bytes, other: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """One piece of the bytes before `end` flipped, cut out, doubled, or taken from another input."""
    end = len(data) if end is None else min(end, len(data))
    at, length = rng.randrange(end + 1), min(rng.choice((1, 1, 2, 4, 8, 64, 1024)), end)
    head, part, tail = data[:at], data[at : at + length], data[at + length :]
    start = rng.randrange(len(other) + 1)
    match rng.randrange(6):
        case 0:
            return head
        case 1:
            return head + tail
        case 2:
            return head + part + part + tail
        case 3:
            return head + other[start : start + length] + tail
        case 4:
            return head + rng.randbytes(len(part)) + tail
        case _:
            return head + bytes(b ^ (1 << rng.randrange(8)) for b in part[:1]) + part[1:] + tail


def words_of(text: str) -> tuple[str, ...]:
    """Words that three blanks part, or a line break."""
    return tuple(re.split("   |\n", text.strip()))


def words_damaged(words: Sequence[str]) -> Callable[[bytes, bytes, random.Random], bytes]:
    """Damage to text, word by word; `words` are known to mean something there."""

    def damage(data: bytes, other: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return bytes_damaged(data, other, rng)
        text, theirs = data.decode("utf-8", "replace"), other.decode("utf-8", "replace")
        if rng.random() < 0.25:
            return _put(text.splitlines(True), theirs.splitlines(True), words, rng).encode("utf-8", "replace")
        return _put(WORD.findall(text), WORD.findall(theirs), words, rng).encode("utf-8", "replace")

    return damage


def _put(mine: list[str], theirs: list[str], words: Sequence[str], rng: random.Random) -> str:
    """A word, or a run of them, left out, said twice, exchanged, or replaced."""
    if not mine:
        return rng.choice(words)
    at, length = rng.randrange(len(mine)), rng.choice((1, 1, 1, 2, 5, 20))
    run = mine[at : at + length]
    match rng.randrange(8):
        case 0:
            mine[at : at + length] = []
        case 1:
            mine[at:at] = run * rng.choice((1, 1, 1, 30))
        case 2:
            to = rng.randrange(len(mine))
            mine[at], mine[to] = mine[to], mine[at]
        case 3 if theirs:
            start = rng.randrange(len(theirs))
            mine[at : at + length] = theirs[start : start + length]
        case 4 if theirs:
            start = rng.randrange(len(theirs))
            mine[at:at] = theirs[start : start + length]
        case 5:
            mine[at] = rng.choice(words)
        case 6:
            mine[at:at] = [rng.choice(words)]
        case _:
            numbers = [i for i, word in enumerate(mine) if word.isdecimal()]
            if numbers:
                mine[rng.choice(numbers)] = str(rng.choice(INTEGERS))
    return "".join(mine)


# -------------------------------------------------------------------------------------------------------------- JSON


class Pairs(list[Any]):
    """An object as [key, value] pairs, which may have a key twice."""


def json_damaged(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Omit, double, replace, nest or exchange a value or key of a document; damage a byte if it is no document."""
    if rng.random() < 0.05:
        return bytes_damaged(data, other, rng)
    try:
        return write_document(_document_damaged(_parse_document(data), rng, lambda: _parse_document(other))).encode(
            "utf-8", "replace"
        )
    except (ValueError, RecursionError):
        return bytes_damaged(data, other, rng)


def _parse_document(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def write_document(value: Any) -> str:
    """A document as text; strings that are not Unicode are escaped."""
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {write_document(v)}" for key, v in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_document, value)) + "]"
    return json.dumps(value)


def _places(document: Any) -> list[tuple[list[Any], int]]:
    """Every value, as the list that holds it and where."""
    places: list[tuple[list[Any], int]] = []
    todo = [document]
    while todo:
        at = todo.pop()
        holders = [(pair, 1) for pair in at] if isinstance(at, Pairs) else [(at, i) for i in range(len(at))]
        places += holders
        todo += [holder[i] for holder, i in holders if isinstance(holder[i], list)]
    return places


def _document_damaged(document: Any, rng: random.Random, other: Callable[[], Any]) -> Any:
    if not isinstance(document, list) or not (places := _places(document)):
        return rng.choice(ODD_VALUES)
    # Of the many numbers in arrays few are tried, so that keys are damaged as often.
    few = [place for place in places if isinstance(place[0][place[1]], list | str) or rng.random() < 0.2] or places
    holder, at = rng.choice(few)
    value = holder[at]
    owners = [p for p in (document, *(h[i] for h, i in places)) if isinstance(p, list) and p]
    owner = rng.choice(owners)
    which = rng.randrange(len(owner))
    match rng.randrange(9):
        case 0:
            del owner[which]
        case 1:
            owner.insert(rng.randrange(len(owner) + 1), _copy_document(owner[which]))
        case 2:
            holder[at] = _copy_document(rng.choice(ODD_VALUES))
        case 3 if isinstance(value, int):
            holder[at] = rng.choice((value + 1, value - 1, 2 * value, -value, rng.choice(INTEGERS), rng.randrange(64)))
        case 4:
            same_type = [p for p in places if type(p[0][p[1]]) is type(value)]
            theirs, there = rng.choice(same_type)
            holder[at] = _copy_document(theirs[there])
        case 5:
            theirs, there = rng.choice(places)
            holder[at] = _copy_document(theirs[there])
        case 6 if isinstance(found := other(), list) and (strangers := _places(found)):
            theirs, there = rng.choice(strangers)
            holder[at] = theirs[there]
        case 7:
            for _ in range(rng.choice((1, 2, 9, 100, 3000))):
                holder[at] = [holder[at]]
        case _ if isinstance(owner, Pairs):
            owner[which][0] = rng.choice([*(pair[0] for pair in owner), "", "x", "two\nlines"])
    return document


def _copy_document(value: Any) -> Any:
    if isinstance(value, Pairs):
        return Pairs([key, _copy_document(v)] for key, v in value)
    if isinstance(value, dict):
        return Pairs([key, _copy_document(v)] for key, v in value.items())
    return [_copy_document(v) for v in value] if isinstance(value, list) else value
