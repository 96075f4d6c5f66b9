"""Rewinding of a session: to a checkpoint, or by the last tokens of a reversible step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_count
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from ..models import SNAPSHOTS, WINDOWS
from .session import Session


@dataclass(frozen=True, slots=True)
class SessionCheckpoint:
    """A copy of a session's lengths, recent tokens and states (except KV caches), to restore the session later."""

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


def keep_first_tokens_of_last_step(session: Session, token_count: int) -> None:
    """Keep only the first `token_count` tokens of the last call of `Session.evaluate` in sequence 0; undo the rest.

    The call must have been `reversible`: it has then saved the recurrent states after each token. So nothing is
    computed again.

    Raises:
        ModelError: The last call was not reversible, or has fewer tokens.
    """
    with session.store.device_lock:
        before = session.reversible_step
        if before is None or not 1 <= token_count <= len(before.chunk[0]):
            raise ModelError(
                f"keep_first_tokens_of_last_step: there are no {format_count(token_count, 'token')} of a "
                "reversible step; "
                "evaluate them with reversible=True"
            )
        rewind_states(session, before.step.tokens, {0: token_count})
        session.lengths, session.recent = list(before.lengths), list(before.recent)
        session.record_evaluated_chunk([before.chunk[0][:token_count], *before.chunk[1:]])
        session.mtp_rows[:1] = [rows[:token_count] for rows in session.mtp_rows[:1]]
        session.reversible_step = None


def rewind_states(session: Session, step_tokens: int, token_counts: Mapping[int, int]) -> None:
    """Set the recurrent states of some sequences to those after their first tokens of the last reversible step.

    Other runs of the session may follow that step, but no further reversible step of as many tokens.

    Args:
        session: The session; its lengths are unchanged.
        step_tokens: The tokens of the step, padding included.
        token_counts: The number of tokens to keep, by sequence.
    """
    store = session.store
    with store.device_lock:
        for name in session.state_names:
            old = store.state(name)
            if (kind := f"{name}.{step_tokens}{SNAPSHOTS}") in store.states:
                saved = np.asarray(store.state(kind))
                for i, retained in token_counts.items():
                    old[i] = saved[i, step_tokens - retained]
            elif (kind := f"{name}.{step_tokens}{WINDOWS}") in store.states:
                saved = np.asarray(store.state(kind))
                for i, retained in token_counts.items():
                    old[i] = saved[i, retained : retained + old.shape[1]]
