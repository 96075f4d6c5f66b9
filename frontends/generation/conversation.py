"""A conversation: messages through the model's chat template, evaluated only where they are new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ModelError
from ..gguf.chat import ChatFormat, choose_chat_format
from ..gguf.tokenization.tokenizer import Tokenizer
from ..saved_state import load_state, save_state, saved_talk
from ..session import Session
from .generate import GenerationParams, Timing, sample_tokens, stream_text
from .speculative import SpeculativeDecoder


class Conversation:
    """Answers messages in sequence 0 of a session, which remembers what was said.

    Messages become a prompt by `format`, the model's chat template unless given. Raises `ModelError` if it has none.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        drawing: GenerationParams,
        *,
        stops: Sequence[str] = (),
        system: str | None = None,
        ahead: SpeculativeDecoder | None = None,
        format: ChatFormat | None = None,
    ) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.params, self.stop_strings = drawing, stops
        self.format = format or choose_chat_format(session.model.gguf.metadata)
        self.system, self.decoder = system, ahead
        self.timing = Timing()
        self.restart()

    def restart(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.rendered_text = ""
        """The text of the conversation so far: as the template wrote it, and the answers as they were given."""
        self.tokens: list[int] = []
        """Its tokens: those that the session has read, and perhaps the last of an answer cut short."""

    def reply(self, said: str) -> Iterator[str]:
        """The answer to a message of the user, piece by piece; an answer that is cut short counts as far as it went.

        Raises `ModelError` when the context cannot hold the message; the talk is then as if it had not been said.
        """
        message = {"role": "user", "content": said}
        eos, bos = self.tokenizer.eos_text, self.tokenizer.bos_text
        prompt = self.format.render([*self.messages, message], bos=bos, eos=eos)
        new = self._encode_new_text(prompt)
        length, timing = self.session.lengths[0], Timing()
        known = [self.tokens[:length]]
        turn = sample_tokens(
            self.session,
            [self.tokens[length:] + new],
            self.params,
            known=known,
            timing=timing,
            ahead=self.decoder,
        )
        pieces: list[str] = []
        try:
            for piece in stream_text((one.token for one in turn), self.tokenizer, self.stop_strings):
                pieces.append(piece)
                yield piece
        finally:
            turn.close()
            if known[0] != self.tokens[:length]:  # else the message was too long, and nothing has changed
                self.tokens, self.rendered_text = known[0], prompt + "".join(pieces)
                self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]
                self.timing = self.timing + timing

    def _encode_new_text(self, prompt: str) -> list[int]:
        """The tokens of ``prompt`` that nobody has seen; all of them if the template rewrote the past."""
        if self.rendered_text and self.tokens and prompt.startswith(self.rendered_text):
            return self.tokenizer.encode_further(prompt[len(self.rendered_text) :], self.tokens[-1])
        self.session.reset(0)
        self.tokens = []
        return self.tokenizer.encode_chat(prompt)

    def save(self, path: str | Path) -> None:
        """Keep the talk: the session's state, and what was said.  Raises `OSError`."""
        save_state(self.session, [self.tokens], path, talk={"messages": self.messages, "seen": self.rendered_text})

    def load(self, path: str | Path) -> None:
        """Go on with a talk that was kept.  Raises `ModelError` for any other file; the talk is then as before."""
        talk = saved_talk(self.session, path)
        messages, seen = talk.get("messages"), talk.get("seen")
        if not isinstance(seen, str) or not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ModelError(f"{path}: its talk is damaged; save it anew")
        (self.tokens,) = load_state(self.session, path)
        self.messages, self.rendered_text = messages, seen


def _is_message(entry: object) -> bool:
    """Whether it is what a template takes: a role and what it said."""
    if not isinstance(entry, dict) or entry.keys() != {"role", "content"}:
        return False
    return all(isinstance(text, str) for text in entry.values())
