"""Damaged and hostile folders give one line, and tokenizer files give the ids of HF ``tokenizers``."""

import json
import math
import struct

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import open_gguf
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.open_model import open_model, open_model_file
from hocket.frontends.safetensors import open_folder, write_folder_as_gguf
from hocket.frontends.safetensors.shards import read_shard
from hocket.frontends.safetensors.tokenizer_files import UNKNOWN

from ...given.models.hugging_face import SHAPES, write_folder

NORM = "model.norm.weight"
TEXTS = ["the quick brown fox jumps, I'll say 12345 times", "hello world\n\nhello   there"]
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_a_folder_without_a_tokenizer_becomes_a_gguf_file_of_the_same_model(tmp_path):
    folder, file = write_folder(tmp_path / "tiny"), tmp_path / "tiny.gguf"
    count, size = write_folder_as_gguf(folder, file)
    mapped, written = open_model_file(folder), open_gguf(file)
    assert (count, size) == (len(SHAPES), file.stat().st_size)
    assert dict(written.metadata) == dict(mapped.metadata)
    assert list(written.tensors) == list(mapped.tensors)
    for name, tensor in mapped.tensors.items():
        assert np.array_equal(tensor.stored_elements, written.tensors[name].stored_elements), name
    assert str(written.tensors["output_norm.weight"].dtype) == "f32"
    assert str(written.tensors["blk.0.ffn_down.weight"].dtype) == "bf16"
    rows = read_shard(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].stored_elements
    assert len(np.unique(rows, axis=0)) == 8
    # the rows of a head of 4 go from halves (0, 1 | 2, 3) to pairs (0, 2), (1, 3)
    assert np.array_equal(mapped.tensors["blk.0.attn_q.weight"].stored_elements, rows[[0, 2, 1, 3, 4, 6, 5, 7]])
    assert open_model(folder).vocabulary_size == 400


def test_a_folder_and_its_gguf_file_are_quantised_to_the_same_bytes(tmp_path):
    folder, file = write_folder(tmp_path / "tiny"), tmp_path / "tiny.gguf"
    write_folder_as_gguf(folder, file)
    for number, source in enumerate((folder, file)):
        assert main(["quantize", str(source), str(tmp_path / f"{number}.gguf"), "F16"]) == 0
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_is_not_converted_to_one_of_its_files(name, tmp_path, capsys):
    folder = write_folder(tmp_path / "tiny")
    before = (folder / name).read_bytes()
    assert main(["convert", str(folder), str(folder / name)]) == 2
    assert "would replace a file that is read here" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before
    for _ in range(2):
        assert main(["convert", str(folder), str(folder / "tiny.gguf")]) == 0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "linked"])
def test_a_folder_is_not_quantised_to_one_of_its_files(name, tmp_path, capsys):
    folder = write_folder(tmp_path / "tiny")
    (folder / "linked").symlink_to("config.json")
    before = (folder / name).read_bytes()
    assert main(["quantize", str(folder), str(folder / name), "F16"]) == 2
    assert "would replace a file that is read here" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before


def test_computed_tensors_of_a_folder_join_the_first_file_of_several(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = write_folder(
        tmp_path / "tiny", config={"rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}
    )
    whole, split = tmp_path / "whole.gguf", tmp_path / "split.gguf"
    assert main(["quantize", str(folder), str(whole), "F16"]) == 0
    assert main(["quantize", str(folder), str(split), "F16", "--keep-split"]) == 0
    names = [set(open_gguf(path).tensors) for path in (whole, split)]
    assert names[0] == names[1]
    assert "rope_freqs.weight" in names[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header": b"[]"}, "holds a list; need a JSON object"),
        ({"header": b"{"}, "is no valid JSON"),
        ({"header": b"[" * 100_000}, "is no valid JSON"),
        ({"header": b'{"a": {}, "a": {}}'}, "a key appears twice"),
        ({"entries": {NORM: {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}}, "has the dtype 'F8_E4M3'"),
        ({"entries": {NORM: {"dtype": "BF16", "shape": [-8], "data_offsets": [0, 16]}}}, "has the shape [-8]"),
        ({"entries": {NORM: {"dtype": "BF16", "shape": [8], "data_offsets": [0, 18]}}}, "needs 16 bytes, but has"),
        ({"entries": {NORM: {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}}, "overlaps tensor"),
        ({"entries": {NORM: {"dtype": "BF16", "shape": [8], "data_offsets": [1 << 40, (1 << 40) + 16]}}}, "needs 16"),
        ({"entries": {NORM: {"dtype": "BF16", "shape": [8], "data_offsets": [True, 16]}}}, "has the offsets"),
        ({"entries": {NORM: 3}}, "is 3; need an object"),
        ({"entries": {"model.what": {"dtype": "BF16", "shape": [8], "data_offsets": [6400, 6416]}}}, "model.what"),
        (
            {"config": {"model_type": "bloom"}},
            "need llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_next",
        ),
        ({"config": {"num_attention_heads": True}}, "num_attention_heads is True; need an integer"),
        ({"config": {"num_attention_heads": 3}}, "need 3 heads"),
        ({"config": {"hidden_act": "relu"}}, "hidden_act is 'relu'"),
        ({"config": {"rope_scaling": {"type": "proportional"}}}, "rope_type 'proportional' is not supported"),
        ({"config": {"tie_word_embeddings": False}}, "lm_head.weight is missing"),
        ({"config": {"num_hidden_layers": 2}}, "layer 1 has no tensor"),
        ({"config": {"num_hidden_layers": 2**31 - 1}}, "num_hidden_layers is 2147483647, but layer 1 has no tensors"),
        ({"config": {"rms_norm_eps": 1e300}}, "rms_norm_eps is 1e+300; need a finite number of float32"),
        ({"config": {"rope_theta": 10**400}}, "need a finite number of float32"),
        (
            {"config": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [10**400, 1]}}},
            "long_factor has 2 entries; need 2 positive numbers",
        ),
        (
            {"config": {"rope_scaling": {"type": "yarn", "factor": math.e, "mscale": 1, "mscale_all_dim": -10}}},
            "mscale and mscale_all_dim are [1.0, -10.0]; need numbers of 0",
        ),
        ({"config": {"vocab_size": 401}}, "vocab_size is 401, but tensor token_embd.weight has the shape [400, 8]"),
        ({"config": {"intermediate_size": 13}}, "intermediate_size is 13, but tensor blk.0.ffn_gate.weight"),
        (
            {"config": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}}},
            "short_factor has 1 entry; need 2 positive numbers",
        ),
        (
            {"entries": {"vision_tower.a": {"dtype": "I64", "shape": [1], "data_offsets": [6400, 1 << 40]}}},
            "before the end of tensor vision_tower.a",
        ),
        ({"config": {"quantization_config": {"quant_method": "gptq"}}}, "quant_method 'gptq' is not supported"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(changes, message, tmp_path):
    with pytest.raises(ModelError) as caught:
        open_folder(write_folder(tmp_path / "bad", **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    folder = write_folder(tmp_path / "bad")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ModelError, match="announces a header of 4611686018427387904 bytes"):
        open_folder(folder)


def test_a_layer_without_a_tensor_that_other_layers_have_is_refused(tmp_path):
    folder = write_folder(tmp_path / "bad")
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    del header["model.layers.0.mlp.gate_proj.weight"]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    with pytest.raises(ModelError, match="layer 0 has up_proj, but no gate_proj"):
        open_folder(folder)


def test_an_index_names_only_files_of_its_folder(tmp_path):
    folder = write_folder(tmp_path / "bad")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "../other.safetensors"}}))
    with pytest.raises(ModelError, match=r"need NAME\.safetensors"):
        open_folder(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*SHAPES, "absent"], "model.safetensors")}))
    with pytest.raises(ModelError, match="tensor absent is in no file"):
        open_folder(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "model.safetensors")}))
    assert len(open_folder(folder).tensors) == len(SHAPES)


def make_byte_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>"], initial_alphabet=letters.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


def make_sentencepiece_tokenizer():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=390, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def make_unigram_tokenizer():
    letters = [(letter, -3.0 - 0.01 * i) for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz▁,'1")]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *letters, ("▁the", -4.0), ("he", -4.5), ("ll", -4.2), ("▁hello", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_byte_tokenizer, ("gpt2", "qwen2")),
        (make_sentencepiece_tokenizer, ("llama", "default")),
        (make_unigram_tokenizer, ("t5", "default")),
    ],
)
def test_a_tokenizer_file_has_the_ids_of_hf_tokenizers(make, kind, tmp_path):
    folder, golden = write_folder(tmp_path / "tiny"), make()
    golden.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "{{ x }}"}))
    metadata = open_folder(folder).metadata
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == kind
    assert metadata["tokenizer.chat_template"] == "{{ x }}"
    assert metadata["tokenizer.ggml.bos_token_id"] == golden.token_to_id("<s>")
    tokenizer = tokenizer_from_metadata(metadata)
    for text in [*TEXTS, "hello fox 99 é\n\n"]:
        assert list(tokenizer.encode(text, add_special=True)) == golden.encode(text).ids


def test_an_added_token_may_replace_the_unknown_token_of_unigrams(tmp_path):
    folder = write_folder(tmp_path / "tiny")
    pairs = json.loads(make_unigram_tokenizer().to_str())
    unknown = pairs["model"]["unk_id"]
    pairs["added_tokens"] = [{"id": unknown, "content": "<other>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps(pairs))
    metadata = open_folder(folder).metadata
    assert metadata["tokenizer.ggml.tokens"][unknown] == "<other>"
    assert metadata["tokenizer.ggml.token_type"][unknown] == UNKNOWN


@pytest.mark.parametrize(("key", "value"), [("unk_id", 400), ("vocab", [["a", 10**400]])])
def test_a_damaged_unigram_model_is_refused_in_one_line(key, value, tmp_path):
    folder = write_folder(tmp_path / "tiny")
    pairs = json.loads(make_unigram_tokenizer().to_str())
    pairs["model"][key] = value
    (folder / "tokenizer.json").write_text(json.dumps(pairs))
    with pytest.raises(ModelError, match=r"unk_id.*has the id 400|model.vocab has the entry") as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    folder, tokenizer = write_folder(tmp_path / "tiny"), make_byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[abc]+"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="the pre-tokenizer has unknown patterns"):
        open_folder(folder)
