"""A folder with ``tokenizer.model`` has the ids of HF ``tokenizers``; damaged files give one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, processors, trainers

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.safetensors import open_folder

from ...given.models.hugging_face import write_folder

TEXTS = ["the quick brown fox jumps, I'll say 12345 times", "hello world\n\nhello   there"]
BPE, UNIGRAM = 2, 1


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=390, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def encode_varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + encode_varint(number >> 7)


def encode_field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value
    if isinstance(value, float):
        return encode_varint(number << 3 | 5) + struct.pack("<f", value)
    return encode_varint(number << 3) + encode_varint(value % (1 << 64))


def encode_model(tokenizer: Tokenizer, kind: int = BPE) -> bytes:
    """The protocol buffer of SentencePiece: a piece has a text, a score and a kind."""
    model = json.loads(tokenizer.to_str())["model"]
    ranks = {"".join(merge): i for i, merge in reversed([*enumerate(model["merges"])])}
    pieces = []
    for text in sorted(model["vocab"], key=model["vocab"].__getitem__):
        form = 2 if text == "<unk>" else 3 if text in ("<s>", "</s>") else 6 if text.startswith("<0x") else 1
        score = -float(ranks.get(text, len(ranks)))
        fields = encode_field(1, text.encode()) + encode_field(2, score) + encode_field(3, form)
        pieces.append(encode_field(1, fields))
    trainer = encode_field(3, kind) + encode_field(43, -1)
    return b"".join(pieces) + encode_field(2, trainer) + encode_field(3, encode_field(3, 1))


def test_a_model_file_has_the_ids_of_hf_tokenizers(tmp_path: Path) -> None:
    golden, folder = make_tokenizer(), write_folder(tmp_path / "tiny")
    (folder / "tokenizer.model").write_bytes(encode_model(golden))
    added = {"395": {"content": "<|end|>", "special": True}, "396": {"content": "<word>", "special": False}}
    settings = {"eos_token": "<|end|>", "chat_template": "{{ x }}", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    metadata = open_folder(folder).metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.chat_template"] == "{{ x }}"
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    assert ids == {"bos": 1, "eos": 395, "unknown": 0, "padding": None}
    assert [*metadata["tokenizer.ggml.token_type"]][394:397] == [5, 3, 4]
    tokenizer = tokenizer_from_metadata(metadata)
    for text in [*TEXTS, "hello fox 99 é\n\n"]:
        assert list(tokenizer.encode(text, add_special=True)) == golden.encode(text).ids
    assert list(tokenizer.encode("fox<word>", add_special=False))[-1] == 396


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no SentencePiece model of kind BPE"),
        (encode_model(make_tokenizer(), UNIGRAM), "holds no SentencePiece model of kind BPE"),
        (encode_model(make_tokenizer())[:-3], "ends inside a number"),
        (b"\x0a\xff\xff\xff\xff\x0f", "ends inside a field of 4294967295 bytes"),
        (b"\x80" * 11, "has a number of more than 64 bits"),
        (b"\x08", "ends inside a number"),
        (b"\x0b", "is no protocol buffer (wire type 3)"),
        (encode_field(1, encode_field(1, b"\xff")), "has a token that is no UTF-8"),
        (encode_field(1, encode_field(2, 1.0)), "need a text and a kind of 1 to 6"),
        (encode_field(1, encode_field(1, b"a")) * 401 + encode_field(2, encode_field(3, BPE)), "has 401 tokens, but"),
    ],
)
def test_a_damaged_model_file_is_refused_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bad")
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
