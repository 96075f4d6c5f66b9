"""A session and the tokens that its sequences have read, from one call of a model to the next."""

from __future__ import annotations

from .microbatches import Microbatches
from .session import Session


class Held:
    """A session, and the tokens of its sequences: those it has read, and perhaps one that it has not."""

    def __init__(self, session: Session | Microbatches) -> None:
        self.session = session
        self.guessing: Session | None = None
        """That of the draft model which guesses ahead of this one."""
        self.tokens: list[list[int]] = [[] for _ in range(session.sequences)]

    @property
    def alone(self) -> Session:
        """That of the only sequence."""
        (session,) = self.session.sessions
        return session

    @property
    def key(self) -> tuple[int, int]:
        return self.session.sequences, self.session.context

    def given(self, ids: list[int]) -> list[int]:
        """What of `ids` sequence 0 still has to read: the rest, if it has read their beginning, or all, anew."""
        read = self.tokens[0][: self.session.lengths[0]]
        if not read or len(ids) <= len(read) or ids[: len(read)] != read:
            self.anew()
            return ids
        self.tokens[0] = read
        return ids[len(read) :]

    def anew(self) -> None:
        """Forget everything."""
        for i in range(self.session.sequences):
            self.session.reset(i)
        self.tokens = [[] for _ in range(self.session.sequences)]
