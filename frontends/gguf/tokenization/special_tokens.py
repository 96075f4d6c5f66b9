"""Which tokens are special, and which end a generation: by id, by type, and by text where files say neither.

The texts are those llama.cpp's ``llama-vocab.cpp`` knows.  Files often name one end token and use another, so the
set of ends is wider than ``eos_token_id``; and converters sometimes leave a control token marked as normal text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of ``tokenizer.ggml.token_type``."""

# fmt: off
END_TOKEN_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>",
)
# fmt: on
"""Tokens that end a generation wherever they are in the vocabulary."""

FILL_IN_TOKEN_TEXTS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "<|code_prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "<|code_suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "<|code_middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of fill-in-the-middle prompts; of these the last three also end a generation."""
_END_TOKEN_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

HARMONY_TOKEN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Control tokens of gpt-oss that are part of the text one reads."""

_TOOL_CALL_ENDS = tuple({other, call} for other in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))
FALSE_END_TEXTS: tuple[tuple[str, tuple[set[str], ...], int], ...] = (
    ("<|end|>", _TOOL_CALL_ENDS, USER),
    ("</s>", ({"<|tool_response>"},), NORMAL),
)
"""A text that looks like an end but is not beside any of these sets of ends, and what type it has then.

In gpt-oss and solar-open ``<|end|>`` ends one message of several; in gemma4 ``</s>`` is plain text.
"""


def classify_special_tokens(
    where: Mapping[str, int], tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """The corrected type of each token, and the ids that end a generation.

    ``where`` gives the id of each text; ``ids`` holds the ids the file names (eos, eot, eom, fim_pad, fim_rep,
    fim_sep), None where it names none.
    """
    final = list(types)
    ends = {ids[name] for name in _END_TOKEN_NAMES if ids.get(name) is not None}
    for name, texts in FILL_IN_TOKEN_TEXTS.items():
        numbers = [where[text] for text in texts if text in where and ids.get(name) is None]
        for i in numbers:
            final[i] = CONTROL
        if name in _END_TOKEN_NAMES:
            ends.update(numbers)
    for text in END_TOKEN_TEXTS:
        if text in where:
            final[where[text]] = CONTROL
            ends.add(where[text])
    for text in HARMONY_TOKEN_TEXTS:
        if text in where:
            final[where[text]] = USER
    for text, beside, type_ in FALSE_END_TEXTS:
        present = {tokens[i] for i in ends if i is not None}
        if text in present and any(others <= present for others in beside):
            final[where[text]] = type_
            ends.discard(where[text])
    return tuple(final), frozenset(i for i in ends if i is not None)


def find_space_stripping_tokens(model_name: str, tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """The special tokens that swallow the white space after them: those of phi-3, known only by the model's name."""
    if not any(name in model_name.lower() for name in ("phi-3", "phi3")):
        return frozenset()
    keep = ("<unk>", "<s>", "<|endoftext|>")
    special = (CONTROL, UNKNOWN, USER)
    return frozenset(i for i, text in enumerate(tokens) if text == "</s>" or (types[i] in special and text not in keep))
