"""Finds the special tokens of a vocabulary and the tokens that end a generation: by id, by type and by text.

The texts come from ``llama-vocab.cpp`` of llama.cpp. Files often name one end token and use another, so there are
more end tokens than ``eos_token_id``. Some converters mark a control token as normal text, which is corrected here.
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
"""Texts of tokens that end a generation in every vocabulary."""

FILL_IN_TOKEN_TEXTS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "<|code_prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "<|code_suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "<|code_middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of the tokens of fill-in-the-middle prompts; the tokens of the last three rows also end a generation."""
_END_TOKEN_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

HARMONY_TOKEN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Texts of control tokens of gpt-oss that appear in the generated text."""

_TOOL_CALL_ENDS = tuple({other, call} for other in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))
FALSE_END_TEXTS: tuple[tuple[str, tuple[set[str], ...], int], ...] = (
    ("<|end|>", _TOOL_CALL_ENDS, USER),
    ("</s>", ({"<|tool_response>"},), NORMAL),
)
"""Rows (text, sets of end texts, type): a text that is no end token if one of the sets is among the end tokens.

The token then has the given type. In gpt-oss and solar-open ``<|end|>`` ends one message of several. In gemma4
``</s>`` is plain text.
"""


def correct_types_and_find_end_tokens(
    token_ids: Mapping[str, int], tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Correct the token types that files often get wrong, and find the tokens that end a generation.

    Args:
        token_ids: Token ids by text.
        tokens: Token texts by id.
        types: Token types of the file by id.
        ids: Ids that the file names for eos, eot, eom and the ``fim_`` tokens; None for an absent one.

    Returns:
        The corrected types by token id, and the ids of the end tokens.
    """
    corrected_types = list(types)
    ends = {ids[name] for name in _END_TOKEN_NAMES if ids.get(name) is not None}
    for name, texts in FILL_IN_TOKEN_TEXTS.items():
        found_ids = [token_ids[text] for text in texts if text in token_ids and ids.get(name) is None]
        for i in found_ids:
            corrected_types[i] = CONTROL
        if name in _END_TOKEN_NAMES:
            ends.update(found_ids)
    for text in END_TOKEN_TEXTS:
        if text in token_ids:
            corrected_types[token_ids[text]] = CONTROL
            ends.add(token_ids[text])
    for text in HARMONY_TOKEN_TEXTS:
        if text in token_ids:
            corrected_types[token_ids[text]] = USER
    for text, exceptions, type_ in FALSE_END_TEXTS:
        present = {tokens[i] for i in ends if i is not None}
        if text in present and any(others <= present for others in exceptions):
            corrected_types[token_ids[text]] = type_
            ends.discard(token_ids[text])
    return tuple(corrected_types), frozenset(i for i in ends if i is not None)


def find_phi3_space_stripping_tokens(model_name: str, tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """Find the special tokens after which white space is removed.

    Only phi-3 models have such tokens. They are recognised by the model name; the result is empty for other models.
    """
    if not any(name in model_name.lower() for name in ("phi-3", "phi3")):
        return frozenset()
    keep = ("<unk>", "<s>", "<|endoftext|>")
    special = (CONTROL, UNKNOWN, USER)
    return frozenset(i for i, text in enumerate(tokens) if text == "</s>" or (types[i] in special and text not in keep))
