"""Session leases: sessions that a model keeps between calls, with the tokens in the state of each sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import ModelError
from .micro_batches import MicroBatchedSession, make_session_micro_batched_if_faster
from .prefill_chunks import F32
from .session import Session

MAX_IDLE_SESSIONS = 4
"""Maximum idle sessions that are kept for later calls."""


class SessionLease:
    """A session that a model lends to one call at a time.

    It knows the tokens that each sequence has processed. The known tokens may also have one more token, which is not
    processed yet.
    """

    def __init__(self, session: Session | MicroBatchedSession) -> None:
        self.session = session
        self.draft_session: Session | None = None
        """The session of the draft model that drafts tokens for `session`."""
        self.tokens: list[list[int]] = [[] for _ in range(session.sequences)]
        self.has_saved_state = False
        """Whether the states of the only sequence were loaded from a file, and continued since."""

    @property
    def session_of_only_sequence(self) -> Session:
        """The session that has the states of the only sequence."""
        (session,) = self.session.sessions
        return session

    @property
    def sequence_count_and_context(self) -> tuple[int, int]:
        """The sequence count and the context in tokens; a model finds an idle lease by this key."""
        return self.session.sequences, self.session.context

    def reuse_prefix_or_reset(self, ids: list[int]) -> list[int]:
        """Return the tokens of `ids` that sequence 0 must still read, so that a known prefix is not read again.

        If `ids` begins differently, or has no further tokens, all sequences are reset and all of `ids` is returned.
        """
        read = self.tokens[0][: self.session.lengths[0]]
        if not self.is_prefix_known(ids):
            self.reset_all_sequences()
            return ids
        self.tokens[0] = read
        return ids[len(read) :]

    def is_prefix_known(self, ids: Sequence[int]) -> bool:
        """Whether sequence 0 has processed some of the first tokens of `ids`, and nothing else; no states are lost."""
        if any(one.store.lost_states.reason for one in self.session.sessions):
            return False
        read = self.tokens[0][: self.session.lengths[0]]
        return 0 < len(read) < len(ids) and ids[: len(read)] == read

    def reset_all_sequences(self) -> None:
        """Reset all sequences and forget their tokens."""
        for i in range(self.session.sequences):
            self.session.reset(i)
        self.tokens, self.has_saved_state = [[] for _ in range(self.session.sequences)], False


def evaluate_and_record_prompts(
    session: Session | MicroBatchedSession, prompts: Sequence[Sequence[int]], known: list[list[int]]
) -> list[F32]:
    """Evaluate the prompts, append their tokens to the `known` ones, and return the logits.

    After an interrupt, the tokens that the session has evaluated are known.
    """
    starts = list(session.lengths)
    try:
        return session.evaluate([list(prompt) for prompt in prompts])
    finally:
        for tokens, prompt, start, end in zip(known, prompts, starts, session.lengths, strict=True):
            tokens.extend(prompt[: end - start])


class IdleSessions:
    """The sessions of a model that no call uses, all over the same weights; any thread may use them.

    Args:
        first: The session that has loaded the weights; it is idle at first.
    """

    def __init__(self, first: Session) -> None:
        self._first: Session | None = first
        self._lock = threading.Lock()
        self._leases = [SessionLease(first)]
        self.lease_count = 0
        """Number of calls that had a session of one sequence."""

    @property
    def weight_loading_session(self) -> Session:
        """The first session of the model, which loaded the weights. Raises `ModelError` after `close`."""
        if self._first is None:
            raise ModelError("the model is closed; open it anew with hocket.Model")
        return self._first

    @property
    def is_closed(self) -> bool:
        return self._first is None

    @property
    def idle_leases(self) -> list[SessionLease]:
        """The idle sessions."""
        with self._lock:
            return list(self._leases)

    @contextmanager
    def lease(self, sequences: int = 1, longest: int | None = None) -> Iterator[SessionLease]:
        """Lease an idle session, or a new one, for one call.

        Args:
            sequences: Number of sequences.
            longest: Tokens of a sequence; by default the context of the model.
        """
        first = self.weight_loading_session
        key = sequences, min(first.context, longest or first.context)
        with self._lock:
            if (
                lease := next((lease for lease in self._leases if lease.sequence_count_and_context == key), None)
            ) is not None:
                self._leases.remove(lease)
        if lease is None:
            lease = SessionLease(
                make_session_micro_batched_if_faster(first, sequences, context=key[1], batch=min(first.batch, key[1]))
            )
        try:
            yield lease
        finally:
            with self._lock:
                self.lease_count += sequences == 1
                if self._first is not None:
                    others = [other for other in self._leases if other.sequence_count_and_context != key]
                    self._leases = [lease, *others][:MAX_IDLE_SESSIONS]

    def withdraw_first_if_unused(self) -> bool:
        """Withdraw the first session for another use; return False if a call uses it, or it has a saved state."""
        with self._lock:
            lease = next((lease for lease in self._leases if lease.session is self._first), None)
            if lease is None or lease.has_saved_state:
                return False
            self._leases.remove(lease)
            return True

    def close(self) -> None:
        """Forget all sessions. Later calls raise `ModelError`."""
        with self._lock:
            self._first = None
            self._leases.clear()


def sum_bytes_by_device_and_kind(models: Sequence[tuple[Session, Sequence[Session]]]) -> dict[str, dict[str, int]]:
    """Sum the bytes of sessions by device and kind: ``weight``, ``state`` and ``arena``.

    Each pair has the session that loaded the weights of a model, and further sessions over these weights.
    """
    sums = {str(device): dict.fromkeys(("weight", "state", "arena"), 0) for _, device in models[0][0].group}
    for root, sessions in models:
        for session in dict.fromkeys((root, *sessions)):
            for (_, device), byte_counts in zip(session.group, session.store.count_bytes_by_kind(), strict=True):
                for kind, count in byte_counts.items():
                    sums[str(device)][kind] += count if kind != "weight" or session is root else 0
    return sums
