"""Rewind a session: to a checkpoint, or by the last tokens of a reversible step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..graph.lazy_dataclass import dataclass
from .errors import ModelError
from .models import SNAPSHOTS, WINDOWS
from .session import Session


@dataclass(frozen=True, slots=True)
class Mark:
    """A point to which a session can be reset: lengths, recent tokens, and the states that are not caches."""

    lengths: tuple[int, ...]
    recent: tuple[list[int], ...]
    states: Mapping[str, npt.NDArray[np.float32]]


def mark(session: Session) -> Mark:
    """Return a checkpoint of the present state of a session.

    KV caches are not copied, because cells after the end of a sequence are not read.
    """
    with session.store.turn:
        states = {n: np.array(session.store.state(n)) for n in session.states if not session.is_cache(n)}
        return Mark(tuple(session.lengths), tuple(session.recent), states)


def back(session: Session, mark: Mark) -> None:
    """Reset a session to one of its checkpoints and restore the states that are not caches."""
    with session.store.turn:
        for name, array in mark.states.items():
            session.store.state(name)[...] = array
        session.lengths, session.recent = list(mark.lengths), list(mark.recent)


def take_back(session: Session, kept: int) -> None:
    """Keep only the first `kept` tokens that sequence 0 read in the last call of `Session.evaluate`.

    That call must have been `reversible`. Nothing is computed again: the step has saved the recurrent states after each
    token.

    Raises:
        ModelError: The last call was not reversible, or has fewer tokens.
    """
    with session.store.turn:
        before = session.reversible
        if before is None or not 1 <= kept <= len(before.part[0]):
            raise ModelError(
                f"take_back: there are no {kept} tokens of a reversible step; evaluate them with reversible=True"
            )
        store, count = session.store, before.step.tokens
        for name in session.states:
            old = store.state(name)
            if (kind := f"{name}.{count}{SNAPSHOTS}") in store.states:
                old[0] = store.state(kind)[0, count - kept]
            elif (kind := f"{name}.{count}{WINDOWS}") in store.states:
                old[0] = store.state(kind)[0, kept : kept + old.shape[1]]
        session.lengths, session.recent = list(before.lengths), list(before.recent)
        session.advance([before.part[0][:kept], *before.part[1:]])
        session.seen[:1] = [rows[:kept] for rows in session.seen[:1]]
        session.reversible = None
