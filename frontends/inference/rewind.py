"""Rewinding of a session: to a checkpoint, or by the last tokens of a reversible step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..models import SNAPSHOTS, WINDOWS
from .session import Session


@dataclass(frozen=True, slots=True)
class SessionCheckpoint:
    """A copy of all that a session needs to go back: lengths, recent tokens, and the states that are not KV caches."""

    lengths: tuple[int, ...]
    recent: tuple[list[int], ...]
    states: Mapping[str, npt.NDArray[np.float32]]


def make_checkpoint(session: Session) -> SessionCheckpoint:
    """Copy the present state of a session, so that `restore_checkpoint` can return to it.

    KV caches need no copy: later tokens only write cells after the end of a sequence, which are not read.
    """
    with session.store.device_lock:
        states = {n: np.array(session.store.state(n)) for n in session.state_names if not session.is_per_cell_cache(n)}
        return SessionCheckpoint(tuple(session.lengths), tuple(session.recent), states)


def restore_checkpoint(session: Session, checkpoint: SessionCheckpoint) -> None:
    """Reset a session to one of its checkpoints."""
    with session.store.device_lock:
        for name, array in checkpoint.states.items():
            session.store.state(name)[...] = array
        session.lengths, session.recent = list(checkpoint.lengths), list(checkpoint.recent)


def rewind_last_step(session: Session, token_count: int) -> None:
    """Undo a part of the last call of `Session.evaluate`: keep only its first `token_count` tokens of sequence 0.

    The call must have been `reversible`: it has then saved the recurrent states after each token. So nothing is
    computed again.

    Raises:
        ModelError: The last call was not reversible, or has fewer tokens.
    """
    with session.store.device_lock:
        before = session.reversible_step
        if before is None or not 1 <= token_count <= len(before.chunk[0]):
            raise ModelError(
                f"rewind_last_step: there are no {token_count} tokens of a reversible step; "
                "evaluate them with reversible=True"
            )
        store, count = session.store, before.step.tokens
        for name in session.state_names:
            old = store.state(name)
            if (kind := f"{name}.{count}{SNAPSHOTS}") in store.states:
                old[0] = store.state(kind)[0, count - token_count]
            elif (kind := f"{name}.{count}{WINDOWS}") in store.states:
                old[0] = store.state(kind)[0, token_count : token_count + old.shape[1]]
        session.lengths, session.recent = list(before.lengths), list(before.recent)
        session.advance_by([before.chunk[0][:token_count], *before.chunk[1:]])
        session.mtp_rows[:1] = [rows[:token_count] for rows in session.mtp_rows[:1]]
        session.reversible_step = None
