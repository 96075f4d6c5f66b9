"""The tokenizer of a model folder as GGUF metadata: ``tokenizer.json`` or ``tokenizer.model``, settings, chat template.

Three kinds are read: BPE over bytes, SentencePiece BPE with byte tokens, and unigrams. The regular expressions of a
pre-tokenizer decide its name. The score of a SentencePiece token is the negated rank of its first merge.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.mapped_file import format_name_for_message
from ..gguf.tokenization.pretokenizers import PRE_TOKENIZERS
from .json_files import GGUF_REMEDY, MAX_JSON_BYTES, MAX_NUMBER, JsonObject, read_json
from .sentencepiece_model import read_sentencepiece_model
from .write_gguf import Pair

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of ``tokenizer.ggml.token_type``."""
GPT2_PATTERN = PRE_TOKENIZERS["gpt-2"].patterns[0]
"""The pattern of the pre-tokenizer ByteLevel with ``use_regex``."""
MISSING_SCORE = -1e3
"""Score of an id without a token."""
SPACE_MARK = "▁"
SENTENCEPIECE_NAME = "tokenizer.model"
KEY = "tokenizer.ggml."
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Prefixes of the keys in ``tokenizer_config.json`` and of the keys in GGUF."""


def read_tokenizer_pairs(folder: Path, config: JsonObject, vocabulary: int) -> dict[str, Pair]:
    """Return the ``tokenizer.*`` metadata pairs of a folder; without a tokenizer they state no vocabulary.

    Args:
        folder: The model folder.
        config: The contents of ``config.json``, for ids of special tokens.
        vocabulary: Rows of the token embedding. Ids without a token get the texts ``[PAD<id>]``.

    Raises:
        ModelError: The tokenizer is damaged or of another kind.
    """
    path = folder / "tokenizer.json"
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else JsonObject(settings_path, {})
    if not path.exists():
        if (folder / SENTENCEPIECE_NAME).exists():
            return _read_sentencepiece_pairs(folder, config, settings, vocabulary) | _read_chat_template(
                folder, settings
            )
        return {f"{KEY}model": "no_vocab"}
    whole = read_json(path)
    model = whole.get_object_or_empty("model")
    kind = model.get_text("type", "BPE")
    if kind == "Unigram":
        return _read_unigram_pairs(whole, model, settings, config, vocabulary) | _read_chat_template(folder, settings)
    if kind != "BPE":
        raise whole.make_error(
            f"model.type is {format_name_for_message(kind)!r}, which is not supported; need BPE or Unigram", GGUF_REMEDY
        )
    is_sentencepiece = model.get_boolean("byte_fallback", False)
    numbers = model.get_object_or_empty("vocab").pairs
    tokens, types = _read_tokens(whole, numbers, vocabulary, is_sentencepiece, model.get_text("unk_token", ""))
    merges = _read_merges(model)
    pairs: dict[str, Pair] = {f"{KEY}model": "llama" if is_sentencepiece else "gpt2"}
    pairs[f"{KEY}pre"] = "default" if is_sentencepiece else _find_pre_tokenizer_by_patterns(whole, model)
    pairs[f"{KEY}tokens"] = tokens
    if is_sentencepiece:
        pairs[f"{KEY}scores"] = _compute_scores(tokens, merges)
    pairs[f"{KEY}token_type"] = types
    if not is_sentencepiece:
        pairs[f"{KEY}merges"] = [" ".join(part.replace(" ", "Ġ") for part in merge) for merge in merges]
    ids = {text: i for i, text in enumerate(tokens)}
    pairs |= _read_special_tokens(settings, config, ids)
    pairs |= _read_bos_eos_addition_pairs(whole, settings)
    if is_sentencepiece:
        pairs[f"{KEY}add_space_prefix"] = _has_space_prefix(whole)
    return pairs | _read_chat_template(folder, settings)


def _read_sentencepiece_pairs(
    folder: Path, config: JsonObject, settings: JsonObject, vocabulary: int
) -> dict[str, Pair]:
    """Read the GGUF metadata pairs of ``tokenizer.model``, with the tokens that ``tokenizer_config.json`` adds."""
    path = folder / SENTENCEPIECE_NAME
    model = read_sentencepiece_model(path)
    if len(model.texts) > vocabulary:
        raise ModelError(
            f"{format_name_for_message(str(path))}: has {format_count(len(model.texts), 'token')}, but the "
            f"embedding has {vocabulary} "
            "rows; download the folder again"
        )
    padding = range(len(model.texts), vocabulary)
    tokens = [*model.texts, *(f"[PAD{i}]" for i in padding)]
    scores, types = [*model.scores, *(MISSING_SCORE for _ in padding)], [*model.kinds, *(UNUSED for _ in padding)]
    for number, entry in settings.get_object_or_empty("added_tokens_decoder").pairs.items():
        if not isinstance(entry, dict):
            raise settings.make_error("added_tokens_decoder has an element that is no object")
        token = JsonObject(settings.path, entry)
        text = token.get_text("content", "")
        i = _require_id(settings, text, int(number) if number.isdecimal() else number, vocabulary)
        is_special = token.get_boolean("special", False)
        tokens[i] = text
        if i >= len(model.texts):
            types[i] = CONTROL if is_special else USER_DEFINED
    stated = {f"{KEY}{SPECIAL_TOKENS[name]}_token_id": number for name, number in model.special_ids.items()}
    return {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}tokens": tokens,
        f"{KEY}scores": scores,
        f"{KEY}token_type": types,
        **stated,
        **_read_special_tokens(settings, config, {text: i for i, text in enumerate(tokens)}),
        f"{KEY}add_bos_token": settings.get_boolean("add_bos_token", True),
        f"{KEY}add_eos_token": settings.get_boolean("add_eos_token", False),
        f"{KEY}add_space_prefix": model.adds_prefix,
    }


def _read_unigram_pairs(
    whole: JsonObject, model: JsonObject, settings: JsonObject, config: JsonObject, vocabulary: int
) -> dict[str, Pair]:
    """Read the GGUF metadata pairs of a unigram tokenizer: tokens with scores, and the SentencePiece character map."""
    entries = model.get_list_or_empty("vocab")
    scores = [MISSING_SCORE] * vocabulary
    numbers: dict[str, object] = {}
    for i, entry in enumerate(entries):
        text, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(score, int | float) or not abs(score) <= MAX_NUMBER:
            raise whole.make_error(f"model.vocab has the entry {entry!a:.60}; need a text with a score")
        if not isinstance(text, str) or text in numbers or i >= vocabulary:
            raise whole.make_error(f"model.vocab has the entry {entry!a:.60}; need {vocabulary} texts with scores")
        numbers[text], scores[i] = i, float(score)
    unknown = model.get_nonnegative_integer("unk_id")
    tokens, types = _read_tokens(whole, numbers, vocabulary, model.get_boolean("byte_fallback", False), "")
    if unknown is not None:
        types[_require_id(whole, "unk_id", unknown, vocabulary)] = UNKNOWN
    pairs: dict[str, Pair] = {
        f"{KEY}model": "t5",
        f"{KEY}pre": "default",
        f"{KEY}tokens": tokens,
        f"{KEY}scores": scores,
        f"{KEY}token_type": types,
    }
    pairs |= _read_special_tokens(settings, config, {text: i for i, text in enumerate(tokens)})
    if unknown is not None:
        pairs[f"{KEY}unknown_token_id"] = unknown
    pairs |= _read_bos_eos_addition_pairs(whole, settings)
    pairs[f"{KEY}add_space_prefix"] = _has_space_prefix(whole)
    steps = _list_normalizers(whole)
    pairs[f"{KEY}remove_extra_whitespaces"] = any(_collapses_spaces(step) for step in steps)
    for step in steps:
        if step.get_text("type", "") == "Precompiled":
            pairs[f"{KEY}precompiled_charsmap"] = _decode_character_map(step)
        elif step.get_text("type", "") not in ("Replace", "Strip", "Prepend"):
            raise whole.make_error(f"the normalizer {step.get_text('type', '')[:40]!r} is not supported", GGUF_REMEDY)
    return pairs


def _list_normalizers(whole: JsonObject) -> list[JsonObject]:
    normalizer = whole.get_object_or_empty("normalizer")
    parts = normalizer.get_list_or_empty("normalizers")
    if not parts:
        return [normalizer] if normalizer.pairs else []
    return [JsonObject(whole.path, part) for part in parts if isinstance(part, dict)]


def _collapses_spaces(step: JsonObject) -> bool:
    """Return whether a normalizer step of a tokenizer file replaces several spaces by one."""
    pattern = step.get_object_or_empty("pattern").pairs.get("Regex") if step.get_text("type", "") == "Replace" else None
    return pattern in (" {2,}", r"\s{2,}")


def _decode_character_map(step: JsonObject) -> bytes:
    try:
        return b64decode(step.get_text("precompiled_charsmap", ""), validate=True)
    except ValueError:
        raise step.make_error("precompiled_charsmap is no base64") from None


def _read_tokens(
    whole: JsonObject, numbers: Mapping[str, object], vocabulary: int, is_sentencepiece: bool, unknown: str
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [UNUSED] * vocabulary
    for text, number in numbers.items():
        i = _require_id(whole, text, number, vocabulary)
        if types[i] != UNUSED:
            raise whole.make_error(f"tokens {tokens[i]!a:.50} and {text!a:.50} both have the id {i}")
        is_byte = is_sentencepiece and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        tokens[i], types[i] = text, BYTE if is_byte else NORMAL
    for entry in whole.get_list_or_empty("added_tokens"):
        if type(entry) is not dict:
            raise whole.make_error("added_tokens has an element that is no object")
        token = JsonObject(whole.path, entry)
        text = token.get_text("content", "")
        i = _require_id(whole, text, entry.get("id"), vocabulary)
        is_special = token.get_boolean("special", False)
        tokens[i] = text if is_special else text.replace(SPACE_MARK, " ")
        types[i] = CONTROL if is_special else USER_DEFINED
    if is_sentencepiece and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _require_id(whole: JsonObject, text: str, number: object, vocabulary: int) -> int:
    if type(number) is not int or not 0 <= number < vocabulary:
        raise whole.make_error(f"token {text!a:.50} has the id {number!s:.30}; need 0 to {vocabulary - 1}")
    return number


def _read_merges(model: JsonObject) -> list[tuple[str, str]]:
    """Return the merges in order of priority; older files have ``"a b"`` and newer ones ``["a", "b"]``."""
    merges = []
    for merge in model.get_list_or_empty("merges"):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise model.make_error(f"model.merges has {merge!a:.60}; need two texts")
        merges.append((parts[0], parts[1]))
    return merges


def _compute_scores(tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(text, len(merges))) for text in tokens]


def _find_pre_tokenizer_by_patterns(whole: JsonObject, model: JsonObject) -> str:
    """Return the name of the pre-tokenizer of llama.cpp that has the same split patterns as this tokenizer file."""
    patterns = tuple(_list_patterns(whole.get_object_or_empty("pre_tokenizer")))
    ignores_merges = model.get_boolean("ignore_merges", False)
    known = [name for name, rule in PRE_TOKENIZERS.items() if rule.patterns == patterns and rule.uses_byte_letters]
    fitting = [name for name in known if PRE_TOKENIZERS[name].ignore_merges == ignores_merges]
    if not fitting:
        pattern_list = ", ".join(map(ascii, patterns)) or "none"
        raise whole.make_error(
            f"the pre-tokenizer has unknown patterns ({format_name_for_message(pattern_list, 200)}); "
            f"need one of {len(PRE_TOKENIZERS)} known rules"
        )
    return fitting[0]


def _list_patterns(rule: JsonObject) -> list[str]:
    kind = rule.get_text("type", "")
    if kind == "Sequence":
        parts = [
            JsonObject(rule.path, part) for part in rule.get_list_or_empty("pretokenizers") if isinstance(part, dict)
        ]
        if any(part.get_text("type", "") == "Sequence" for part in parts):
            raise rule.make_error("pre_tokenizer nests sequences; need one sequence")
        return [pattern for part in parts for pattern in _list_patterns(part)]
    if kind == "Split":
        return [rule.get_object_or_empty("pattern").get_text("Regex", "")]
    if kind == "Digits":
        return [r"\p{N}" if rule.get_boolean("individual_digits", False) else r"\p{N}+"]
    if kind == "ByteLevel":
        return [GPT2_PATTERN] if rule.get_boolean("use_regex", True) else []
    raise rule.make_error(f"the pre-tokenizer {kind[:40]!r} is not supported; need Split, Digits or ByteLevel")


def _read_special_tokens(settings: JsonObject, config: JsonObject, ids: Mapping[str, int]) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    for source, name in SPECIAL_TOKENS.items():
        token = settings.pairs.get(f"{source}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = ids.get(text) if isinstance(text, str) else None
        if number is None:
            stored = config.pairs.get(f"{source}_token_id")
            number = stored[0] if isinstance(stored, list) and stored else stored  # type: ignore[assignment]
        if type(number) is int and 0 <= number < len(ids):
            pairs[f"{KEY}{name}_token_id"] = number
    return pairs


def _read_bos_eos_addition_pairs(whole: JsonObject, settings: JsonObject) -> dict[str, Pair]:
    """Return the metadata pairs that state whether BOS and EOS are added to a text.

    The template of the post-processor decides; without one, the settings do.
    """
    processors = [whole.get_object_or_empty("post_processor")]
    processors += [
        JsonObject(whole.path, p) for p in processors[0].get_list_or_empty("processors") if isinstance(p, dict)
    ]
    for processor in processors:
        if processor.get_text("type", "") == "TemplateProcessing" and (single := processor.get_list_or_empty("single")):
            first, last = (isinstance(item, dict) and "SpecialToken" in item for item in (single[0], single[-1]))
            return {f"{KEY}add_bos_token": first, f"{KEY}add_eos_token": last and len(single) > 1}
    return {f"{KEY}add_{end}_token": settings.get_boolean(f"add_{end}_token", False) for end in ("bos", "eos")}


def _has_space_prefix(whole: JsonObject) -> bool:
    """Return whether the tokenizer puts a space mark before a text.

    It does so with a Prepend normalizer, or with Metaspace and a prefix.
    """
    rule = whole.get_object_or_empty("pre_tokenizer")
    return any(step.get_text("type", "") == "Prepend" for step in _list_normalizers(whole)) or (
        rule.get_text("type", "") == "Metaspace" and rule.get_text("prepend_scheme", "always") != "never"
    )


def _read_chat_template(folder: Path, settings: JsonObject) -> dict[str, Pair]:
    path = folder / "chat_template.jinja"
    if path.exists():
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(
                f"{format_name_for_message(str(path))}: is larger than {MAX_JSON_BYTES} bytes; need a template"
            )
        try:
            return {"tokenizer.chat_template": path.read_text("utf-8")}
        except (OSError, UnicodeDecodeError):
            raise ModelError(
                f"{format_name_for_message(str(path))}: is no readable UTF-8 text; download it again"
            ) from None
    template = settings.pairs.get("chat_template")
    if template is None and (folder / "chat_template.json").exists():  # of models of pictures and texts
        template = read_json(folder / "chat_template.json").pairs.get("chat_template")
    pairs: dict[str, Pair] = {}
    if isinstance(template, str):
        pairs["tokenizer.chat_template"] = template
    for entry in template if isinstance(template, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str) and isinstance(entry.get("name"), str):
            suffix = "" if entry["name"] == "default" else f".{entry['name']}"
            pairs[f"tokenizer.chat_template{suffix}"] = entry["template"]
    return pairs
