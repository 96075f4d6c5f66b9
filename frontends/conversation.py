"""A conversation: messages through the model's chat template, evaluated only where they are new."""

from __future__ import annotations

from collections.abc import Iterator

from .drafting import Ahead
from .generate import Timing, generate, stream_text
from .gguf.chat import chat_template, render_chat
from .gguf.tokenizer import Tokenizer
from .sampling import Sampling
from .session import Session


class Conversation:
    """Answers messages in sequence 0 of a session, which remembers what was said.

    Raises `ModelError` if the model has no chat template.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        limit: int,
        sampling: Sampling,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
        system: str | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.limit, self.sampling, self.seed, self.stop = limit, sampling, seed, stop
        self.template = chat_template(session.model.gguf.metadata)
        self.system, self.ahead = system, ahead
        self.timing = Timing()
        self.restart()

    def restart(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._seen = ""
        """The text of the conversation so far: as the template wrote it, and the answers as they were given."""
        self._unread: list[int] = []
        """The last token of an answer cut short, which nobody has evaluated yet."""

    def answer(self, said: str) -> Iterator[str]:
        """The answer to a message of the user, piece by piece; an answer that is cut short counts as far as it went.

        Raises `ModelError` when the context cannot hold the message; the talk is then as if it had not been said.
        """
        message = {"role": "user", "content": said}
        eos, bos = self.tokenizer.eos_text, self.tokenizer.bos_text
        prompt = render_chat(self.template, [*self.messages, message], bos=bos, eos=eos)
        tokens = self._new_tokens(prompt)
        before, given, timing = self.session.lengths[0], list[int](), Timing()

        def kept() -> Iterator[int]:
            turn = generate(
                self.session,
                tokens,
                limit=self.limit,
                sampling=self.sampling,
                seed=self.seed,
                stop=self.stop,
                timing=timing,
                ahead=self.ahead,
            )
            for token in turn:
                given.append(token)
                yield token

        pieces: list[str] = []
        try:
            for piece in stream_text(kept(), self.tokenizer):
                pieces.append(piece)
                yield piece
        finally:
            read = self.session.lengths[0] - before - len(tokens)
            if read >= 0:  # else the message was too long, and nothing has changed
                self._unread = given[read:]
                self._seen = prompt + "".join(pieces)
                self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]
                self.timing = self.timing + timing

    def _new_tokens(self, prompt: str) -> list[int]:
        """The tokens of ``prompt`` that the session has not seen; all of them if the template rewrote the past."""
        if self._seen and prompt.startswith(self._seen):
            new = self.tokenizer.encode(prompt[len(self._seen) :], add_special=False, parse_special=True)
            return self._unread + new
        self.session.reset(0)
        return self.tokenizer.encode_chat(prompt)
