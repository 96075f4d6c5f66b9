"""Session leases: sessions that a model keeps between calls, with the tokens in the state of each sequence."""

from __future__ import annotations

from .micro_batches import MicroBatchedSession
from .session import Session


class SessionLease:
    """A session that a model lends to one call at a time, with the tokens that each sequence has processed.

    The known tokens may also have one more token, which is not processed yet.
    """

    def __init__(self, session: Session | MicroBatchedSession) -> None:
        self.session = session
        self.draft_session: Session | None = None
        """The session of the draft model that drafts tokens for `session`."""
        self.tokens: list[list[int]] = [[] for _ in range(session.sequences)]

    @property
    def only_session(self) -> Session:
        """The session that has the states of the only sequence."""
        (session,) = self.session.sessions
        return session

    @property
    def lookup_key(self) -> tuple[int, int]:
        """The sequence count and the context in tokens; a model finds an idle lease by this key."""
        return self.session.sequences, self.session.context

    def reuse_prefix(self, ids: list[int]) -> list[int]:
        """Return the tokens of `ids` that sequence 0 must still read, so that a known prefix is not read again.

        If `ids` begins differently, or has no further tokens, all sequences are reset and all of `ids` is returned.
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
