"""The lease of a session: a session with the tokens that its sequences have read, kept between calls of a model."""

from __future__ import annotations

from .micro_batches import MicroBatchedSession
from .session import Session


class SessionLease:
    """A session and the known tokens per sequence: the tokens that it has read, and perhaps one more."""

    def __init__(self, session: Session | MicroBatchedSession) -> None:
        self.session = session
        self.draft_session: Session | None = None
        """The session of the draft model that drafts tokens for `session`."""
        self.tokens: list[list[int]] = [[] for _ in range(session.sequences)]

    @property
    def only_session(self) -> Session:
        """The session of the only sequence."""
        (session,) = self.session.sessions
        return session

    @property
    def key(self) -> tuple[int, int]:
        """The sequence count and the context in tokens: the key of idle leases."""
        return self.session.sequences, self.session.context

    def reuse_prefix(self, ids: list[int]) -> list[int]:
        """Return the tokens of `ids` that sequence 0 has still to read.

        If sequence 0 has read the beginning of `ids`, these are the rest; else all of `ids`, and all sequences are
        reset.
        """
        read = self.tokens[0][: self.session.lengths[0]]
        if not read or len(ids) <= len(read) or ids[: len(read)] != read:
            self.reset_all_sequences()
            return ids
        self.tokens[0] = read
        return ids[len(read) :]

    def reset_all_sequences(self) -> None:
        """Reset all sequences and forget their tokens."""
        for i in range(self.session.sequences):
            self.session.reset(i)
        self.tokens = [[] for _ in range(self.session.sequences)]
