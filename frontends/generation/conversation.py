"""A conversation: messages in the chat template of the model; each answer evaluates the new tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ModelError
from ..gguf.chat import ChatTemplateWithVariables, choose_chat_template_and_variables
from ..gguf.tokenization.tokenizer import Tokenizer
from ..inference.saved_state import load_state, read_saved_conversation, save_state
from ..inference.session import Session
from .generate import GenerationParams, GenerationTiming, sample_tokens_of_all_sequences, stream_text
from .speculative import SpeculativeDecoder


class Conversation:
    """A chat that answers messages in sequence 0 of a session; the KV cache has the earlier messages.

    Args:
        session: The session that generates the answers.
        tokenizer: The tokenizer of the model.
        params: Limits and sampling of an answer.
        stops: Strings that end an answer.
        system: The system prompt, or None.
        decoder: Speculative decoding, or None.
        format: The chat template; the template of the model by default.

    Raises:
        ModelError: There is no chat template.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        params: GenerationParams,
        *,
        stops: Sequence[str] = (),
        system: str | None = None,
        decoder: SpeculativeDecoder | None = None,
        format: ChatTemplateWithVariables | None = None,
    ) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.params, self.stop_strings = params, stops
        self.format = format or choose_chat_template_and_variables(session.model.gguf.metadata)
        self.system, self.decoder = system, decoder
        self.timing = GenerationTiming()
        self.restart_with_system_prompt()

    def restart_with_system_prompt(self) -> None:
        """Restart the conversation: remove all messages except the system prompt."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.rendered_text = ""
        """The text of the conversation so far: the output of the template, and the answers as generated."""
        self.tokens: list[int] = []
        """The tokens of the conversation: all that the session has read, and possibly one more of a stopped answer."""

    def reply(self, text: str) -> Iterator[str]:
        """Answer a user message: yield the answer in pieces as they are generated.

        If an answer is interrupted, the conversation keeps the part that was written.

        Raises:
            ModelError: The message does not fit into the context. The conversation is then unchanged.
        """
        message = {"role": "user", "content": text}
        eos, bos = self.tokenizer.eos_text, self.tokenizer.bos_text
        prompt = self.format.render([*self.messages, message], bos=bos, eos=eos)
        new_tokens = self._encode_new_text(prompt)
        length, timing = self.session.lengths[0], GenerationTiming()
        tokens = [self.tokens[:length]]
        samples = sample_tokens_of_all_sequences(
            self.session,
            [self.tokens[length:] + new_tokens],
            self.params,
            known=tokens,
            timing=timing,
            ahead=self.decoder,
            needs_logits=False,
        )
        texts: list[str] = []
        try:
            for new_text in stream_text((one.token for one in samples), self.tokenizer, self.stop_strings):
                texts.append(new_text)
                yield new_text
        finally:
            samples.close()
            if tokens[0] != self.tokens[:length]:  # false if the message was too long
                self.tokens, self.rendered_text = tokens[0], prompt + "".join(texts)
                self.messages += [message, {"role": "assistant", "content": "".join(texts)}]
                self.timing = self.timing + timing

    answer = reply
    """The old name of `reply`, until 0.3."""

    known = property(lambda self: self.tokens, doc="The old name of `tokens`, until 0.3.")

    def _encode_new_text(self, prompt: str) -> list[int]:
        """Encode only the part of the rendered chat `prompt` that the session has not read yet.

        If the template has changed earlier text, the session is reset, and all of `prompt` is encoded.
        """
        if self.rendered_text and self.tokens and prompt.startswith(self.rendered_text):
            return self.tokenizer.encode_chat_continuation(prompt[len(self.rendered_text) :], self.tokens[-1])
        self.session.reset(0)
        self.tokens = []
        return self.tokenizer.encode_chat(prompt)

    def save(self, path: str | Path) -> None:
        """Save the messages and the state of the session to a file; raise `OSError` if it cannot be written."""
        save_state(self.session, [self.tokens], path, talk={"messages": self.messages, "seen": self.rendered_text})

    def load(self, path: str | Path) -> None:
        """Load a conversation that `save` has written: its messages and the state of the session.

        Raises:
            ModelError: The file is no saved conversation. This conversation is then unchanged.
        """
        saved = read_saved_conversation(self.session, path)
        messages, seen = saved.get("messages"), saved.get("seen")
        if not isinstance(seen, str) or not isinstance(messages, list) or not all(map(_is_chat_message, messages)):
            raise ModelError(f"{path}: its conversation is damaged; save it again")
        (self.tokens,) = load_state(self.session, path)
        self.messages, self.rendered_text = messages, seen


def _is_chat_message(entry: object) -> bool:
    """Return whether a value is a chat message: a mapping of texts with exactly the keys ``role`` and ``content``."""
    if not isinstance(entry, dict) or entry.keys() != {"role", "content"}:
        return False
    return all(isinstance(text, str) for text in entry.values())
