"""Opening GGUF files: sound ones against the ``gguf`` package, hostile ones against one rule.

The rule: a file opens, and every tensor then has the size it claims; or opening raises a ModelError of one line.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import Gguf, LazyMetadataArray, open_gguf
from hocket.graph.dtypes import DType

from ...given.calls import count_calls
from ...given.models.goldens import FIXTURES, path_of

SMALL = path_of("qwen3-q4_0")
UINT32, STRING, ARRAY, FLOAT32, BOOL, INT32 = 4, 8, 9, 6, 7, 5


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def entry(name: str | bytes, ne: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def model(
    pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b"", version: int = 3, align: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % align) + data


def open_bytes(path: Path, content: bytes, **options: bool) -> Gguf:
    path = path / "model.gguf" if path.is_dir() else path
    path.write_bytes(content)
    return open_gguf(path, **options)


def fails(path: Path, content: bytes, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_bytes(path, content)
    assert_one_line(caught.value, *words)


def assert_one_line(error: ModelError, *words: str) -> None:
    message = str(error)
    assert message.isprintable(), message
    assert len(message) < 1200, message
    assert "; " in message
    for word in words:
        assert word in message


# Sound files


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/model.gguf")), ids=lambda p: p.parent.name)
def test_every_fixture_reads_as_the_gguf_package_reads_it(path: Path) -> None:
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        got, want = ours.tensors[tensor.name].dequantise(), gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert got.shape == want.shape == ours.tensors[tensor.name].shape
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {k: list(v) if isinstance(v, LazyMetadataArray) else v for k, v in ours.metadata.items()} == fields


def make_writer(path: Path, **options: Any) -> gguf.GGUFWriter:
    return gguf.GGUFWriter(path, "llama", **options)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_metadata_type_arrives_as_its_python_type(tmp_path: Path) -> None:
    path, writer = tmp_path / "m.gguf", make_writer(tmp_path / "m.gguf")
    value: Any
    values: Any
    for name, value in {"uint8": 255, "int8": -5, "uint16": 65535, "int16": -9, "uint64": 2**64 - 1}.items():
        getattr(writer, f"add_{name}")(name, value)
    for name, value in {"uint32": 7, "int32": -7, "int64": -(2**63), "bool": True, "string": "naïve\n"}.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    for name, values in {"ints": [1, -2], "floats": [0.5, 1.5], "bools": [True, False], "words": ["a", "日"]}.items():
        writer.add_array(name, values)
    writer.add_array("nested", [[1, 2], [3]])
    finish(writer)
    metadata = open_gguf(path).metadata
    want: dict[str, Any] = {"uint8": 255, "int8": -5, "uint16": 65535, "int16": -9, "uint64": 2**64 - 1}
    want |= {
        "uint32": 7,
        "int32": -7,
        "int64": -(2**63),
        "bool": True,
        "string": "naïve\n",
        "float32": 0.5,
        "float64": 0.1,
    }
    assert {k: metadata[k] for k in want} == want
    assert all(type(metadata[k]) is type(v) for k, v in want.items())
    lists: dict[str, Any] = {k: list(v) for k, v in metadata.items() if isinstance(v, LazyMetadataArray)}
    assert lists.pop("words") == ["a", "日"]
    assert [list(a) for a in lists.pop("nested")] == [[1, 2], [3]]
    assert lists == {"ints": [1, -2], "floats": [0.5, 1.5], "bools": [True, False]}


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    data = SMALL.read_bytes()
    old = open_bytes(tmp_path, data[:4] + u32(2) + data[8:])
    assert old.version == 2
    assert repr(dict(old.metadata)) == repr(dict(open_gguf(SMALL).metadata))
    assert repr(dict(old.tensors)) == repr(dict(open_gguf(SMALL).tensors))


def test_numbers_are_a_read_only_view_and_bytes_of_bools_are_normalised(tmp_path: Path) -> None:
    body = (pair("n", ARRAY, array(INT32, 2, struct.pack("<ii", 4, -4))), pair("b", ARRAY, array(BOOL, 3, b"\0\1\7")))
    file = open_bytes(tmp_path, model(body))
    numbers = file.numbers("n")
    assert numbers.tolist() == [4, -4]
    assert not numbers.flags.writeable
    assert not numbers.flags.owndata
    assert file.numbers("b").tolist() == list(file.require("b", LazyMetadataArray)) == [False, True, True]


def test_an_empty_array_at_the_end_of_the_file_is_empty(tmp_path: Path) -> None:
    for kind in (INT32, BOOL, STRING, ARRAY):
        empty = open_bytes(tmp_path, model((pair("a", ARRAY, array(kind, 0)),), align=1)).require(
            "a", LazyMetadataArray
        )
        assert (len(empty), empty[:]) == (0, ())


def test_a_token_that_is_not_utf8_is_readable_and_can_be_encoded_again(tmp_path: Path) -> None:
    body = pair("t", ARRAY, array(STRING, 2, text(b"\xff\xfe") + text("ok"))), pair("s", STRING, text(b"\xe6"))
    file = open_bytes(tmp_path, model(body))
    assert file.strings("t") == ("\ufffd\ufffd", "ok")
    assert "".join((*file.strings("t"), file.require("s", str))).encode()


def test_a_long_text_is_read_whole(tmp_path: Path) -> None:
    template = "日本🙂" * 5000
    assert open_bytes(tmp_path, model((pair("t", STRING, text(template)),))).require("t", str) == template


def test_tensors_are_read_only_views_of_the_file() -> None:
    for tensor in open_gguf(SMALL).tensors.values():
        assert not tensor.stored_elements.flags.writeable
        assert not tensor.stored_elements.flags.owndata
        assert tensor.stored_elements.nbytes == tensor.nbytes
        assert tensor.stored_elements.dtype == tensor.dtype.storage
    matrix = open_gguf(SMALL).tensor("token_embd.weight")
    assert repr(matrix) == f"%token_embd.weight : {matrix.dtype}[96×256]"


def test_four_axes_and_a_scalar_have_numpy_shapes(tmp_path: Path) -> None:
    data = np.arange(24, dtype="<f4").tobytes() + bytes(32)
    tensors = open_bytes(tmp_path, model(tensors=(entry("x", (4, 3, 2, 1)), entry("s", (), 0, 96)), data=data)).tensors
    assert tensors["x"].shape == (1, 2, 3, 4)
    assert tensors["x"].dequantise()[0, 1, 2, 3] == 23
    assert tensors["s"].shape == (1,)


def test_a_header_without_data_opens_only_when_asked_for(tmp_path: Path) -> None:
    content = model(tensors=(entry("x", (1 << 20, 1 << 10), DType.Q4_0.ggml),), align=1)
    fails(tmp_path, content, "tensor x", "ends at byte")
    tensor = open_bytes(tmp_path, content, header_only=True).tensor("x")
    assert (tensor.shape, tensor.nbytes) == ((1 << 10, 1 << 20), (1 << 30) // 32 * 18)
    with pytest.raises(ModelError) as caught:
        tensor.dequantise()
    assert_one_line(caught.value, "tensor x", "only a header")


def test_importing_the_reader_does_not_import_the_gguf_package() -> None:
    code = "import sys, hocket.frontends.gguf.reader; sys.exit('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_opening_a_file_touches_no_word_of_a_vocabulary(tmp_path: Path) -> None:
    def calls(count: int) -> int:  # words are looked through in large pieces
        words = array(STRING, count, b"".join(text(f"▁token{i}") for i in range(count)))
        file, number = count_calls(lambda: open_bytes(tmp_path, model((pair("tokens", ARRAY, words),))))
        assert file.strings("tokens")[-1] == f"▁token{count - 1}"
        return number

    assert calls(1 << 18) < calls(2) + 1000


# Models in several files


def write_parts(folder: Path) -> list[Path]:
    writer = make_writer(folder / "m.gguf", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"x{i}", np.full((2, 8), i, np.float32))
    finish(writer)
    return sorted(folder.glob("m-*-of-00003.gguf"))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_part_opens_the_whole_model(tmp_path: Path, number: int) -> None:
    parts = write_parts(tmp_path)
    whole = open_gguf(parts[number])
    assert whole.part_paths == tuple(parts)
    assert whole.require("general.architecture", str) == "llama"
    assert [t.dequantise()[1, 7] for t in whole.tensors.values()] == [0, 1, 2, 3, 4]


def test_damage_to_a_set_of_parts_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    contents = [p.read_bytes() for p in parts]

    def check_damage(part: int, content: bytes | None, *words: str) -> None:
        parts[part].unlink()
        if content is not None:
            parts[part].write_bytes(content)
        with pytest.raises(ModelError) as caught:
            open_gguf(parts[2 if part == 0 else 0])
        assert_one_line(caught.value, *words)
        parts[part].write_bytes(contents[part])

    check_damage(1, None, "m-00002-of-00003.gguf", "missing")
    check_damage(1, contents[2], "says it is part 3", "its name says 2")
    check_damage(1, contents[1].replace(b"x2", b"x0"), "x0", "already in m-00001")
    check_damage(0, contents[0].replace(b"count\5\0\0\0\5", b"count\5\0\0\0\6"), "hold 5 tensors", "is 6")
    check_damage(1, contents[1][:-40], "m-00002-of-00003.gguf", "x3")
    (tmp_path / "renamed.gguf").write_bytes(contents[0])
    with pytest.raises(ModelError, match="its name does not say which"):
        open_gguf(tmp_path / "renamed.gguf")


# Typed access


def open_typed_file(tmp_path: Path) -> Gguf:
    body = (
        pair("i", UINT32, u32(3)),
        pair("f", FLOAT32, struct.pack("<f", 0.5)),
        pair("b", BOOL, b"\1"),
        pair("s", STRING, text("line\nbreak")),
        pair("a", ARRAY, array(INT32, 3, struct.pack("<iii", 1, 2, 3))),
    )
    return open_bytes(tmp_path, model(body))


def test_values_are_had_by_key_and_kind(tmp_path: Path) -> None:
    m = open_typed_file(tmp_path)
    assert (m.get("i", int), m.require("f", float), m.get("b", bool), m.get("none", str, "x")) == (3, 0.5, True, "x")
    assert type(m.get("i", float)) is float
    assert m.get("none", int) is None
    assert m.read_per_layer("i", int, 2) == (3, 3)
    assert m.read_per_layer("a", int, 2) == (1, 2)
    assert m.read_per_layer("none", float, 2, 1.5) == (1.5, 1.5)


def test_a_wrong_or_missing_value_says_key_got_and_need(tmp_path: Path) -> None:
    m = open_typed_file(tmp_path)
    wrong: list[tuple[Any, ...]] = [
        (m.require, ("none\n", int), "'none\\n'", "missing", "an integer"),
        (m.get, ("b", int), "b is bool True", "need an integer"),
        (m.get, ("s", float), "s is str 'line\\nbreak'", "need a number"),
        (m.get, ("i", LazyMetadataArray), "i is int 3", "need an array"),
        (m.get, ("a", str), "a is array int32[3]", "need a string"),
        (m.strings, ("a",), "int32[3]", "strings"),
        (m.read_per_layer, ("a", int, 4), "int32[3]", "4 layers"),
        (m.read_per_layer, ("a", bool, 2), "a is int 1", "need a boolean"),
        (m.read_per_layer, ("none", int, 2), "none is missing"),
        (open_gguf(SMALL).numbers, ("tokenizer.ggml.tokens",), "string[96]", "numbers"),
        (open_gguf(SMALL).tensor, ("token_embed.weight",), "did you mean token_embd.weight"),
    ]
    for call, arguments, *words in wrong:
        with pytest.raises(ModelError) as caught:
            call(*arguments)
        assert_one_line(caught.value, "model.gguf", *words)


# Hostile files


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    fails(tmp_path, b"", "is empty")
    fails(tmp_path, b"GG", "is no GGUF file")
    fails(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer", "git lfs pull")
    fails(tmp_path, b"Once upon a time\nthere was a text file", "is no GGUF file", "b'Once'")
    fails(tmp_path, model(version=1), "version 1", "need version 2 or 3")
    fails(tmp_path, model(version=4), "version 4")
    fails(tmp_path, model(version=3 << 24), "big-endian")
    os.mkfifo(tmp_path / "pipe")
    for path, word in [(tmp_path, "a directory"), (tmp_path / "no", "No such file"), (tmp_path / "pipe", "no regular")]:
        with pytest.raises(ModelError) as caught:
            open_gguf(path)
        assert_one_line(caught.value, word)
    with pytest.raises(ModelError) as caught:
        open_gguf("a\0b\nc.gguf")
    assert_one_line(caught.value)


def test_a_file_written_big_endian_is_named(tmp_path: Path) -> None:
    finish(make_writer(tmp_path / "m.gguf", endianess=gguf.GGUFEndian.BIG))
    with pytest.raises(ModelError, match="big-endian"):
        open_gguf(tmp_path / "m.gguf")


def deep(levels: int) -> bytes:
    return array(INT32, 0) if levels == 1 else array(ARRAY, 1, deep(levels - 1))


HUGE = 1 << 63
BAD_METADATA = {
    "twice": ((pair("k\n", BOOL, b"\1"),) * 2, "'k\\n' appears twice"),
    "kind": ((pair("k", 13, b"    "),), "unknown value type 13"),
    "element kind": ((pair("k", ARRAY, array(99, 1, b"    ")),), "unknown value type 99"),
    "key not utf-8": ((pair(b"\xff", BOOL, b"\1"),), "not UTF-8"),
    "empty key": ((pair("", BOOL, b"\1"),), "name of 0 bytes"),
    "long key": ((pair("k" * 70_000, BOOL, b"\1"),), "name of 70000 bytes"),
    "lying string": ((pair("k" * 999, STRING, struct.pack("<Q", HUGE)),), "needs 9223372036854775808 bytes"),
    "lying array": ((pair("k", ARRAY, array(INT32, HUGE)),), "announces 9223372036854775808 int32s"),
    "lying strings": ((pair("k", ARRAY, array(STRING, HUGE)),), "announces 9223372036854775808 strings"),
    "lying token": ((pair("k", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE))),), "last string"),
    "lying tokens": ((pair("k", ARRAY, array(STRING, 2, struct.pack("<QQ", HUGE, 0))),), "string 1 of 2"),
    "long string not utf-8": ((pair("k", STRING, text(b"\xff" * 9999)),), "string of 9999 bytes that is not UTF-8"),
    "deep": ((pair("k", ARRAY, deep(5)),), "nests arrays more than 4 deep"),
    "alignment 0": ((pair("general.alignment", UINT32, u32(0)),), "general.alignment is 0"),
    "alignment 48": ((pair("general.alignment", UINT32, u32(48)),), "need a power of two"),
    "alignment text": ((pair("general.alignment", STRING, text("\n")),), "general.alignment is '\\n'"),
    "split": ((pair("split.count", STRING, text("3")),), "split.count is '3'"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_contradictory_metadata_is_named(tmp_path: Path, case: str) -> None:
    pairs, words = BAD_METADATA[case]
    fails(tmp_path, model(pairs), words)


BAD_TENSORS = {
    "twice": ((entry("x", (8,)), entry("x", (8,), 0, 32)), "tensor x appears twice"),
    "type": ((entry("x\n", (8,), 77),), "tensor 'x\\n' has the unknown ggml type 77"),
    "axes": ((entry("x", (1,) * 5),), "tensor x has 5 axes"),
    "zero": ((entry("x", (8, 0)),), "tensor x has shape [0, 8]"),
    "block": ((entry("x", (48,), DType.Q4_0.ggml),), "rows of 48 elements, but q4_0 needs a multiple of 32"),
    "unaligned": ((entry("x", (8,), 0, 4),), "data offset 4, no multiple of the alignment 32"),
    "offset": ((entry("x", (8,), 0, 96),), "tensor x (f32[8]) needs 32 bytes at byte"),
    "offset overflow": ((entry("x", (8,), 0, 2**64 - 32),), "tensor x"),
    "size": ((entry("x", (25,)),), "tensor x (f32[25]) needs 100 bytes"),
    "size overflow": ((entry("x", (1 << 32, 1 << 32, 4)),), "tensor x (f32[4, 4294967296, 4294967296])"),
    "every axis": ((entry("x", (2**64 - 1,) * 4),), "tensor x"),
    "overlap": ((entry("x", (16,)), entry("y", (8,), 0, 32)), "tensor y overlaps tensor x"),
    "name not utf-8": ((entry(b"\xff", (8,)),), "tensor 1 of 1 has a name that is not UTF-8"),
    "long name": ((entry("n\n" * 3000, (8,), 77),), "unknown ggml type 77"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_contradictory_tensors_are_named(tmp_path: Path, case: str) -> None:
    tensors, words = BAD_TENSORS[case]
    fails(tmp_path, model(tensors=tensors, data=bytes(96)), words)


def test_overflowing_sizes_fail_for_a_header_alone_too(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        open_bytes(tmp_path, model(tensors=(entry("x", (2**64 - 1,) * 4),)), header_only=True)


@pytest.mark.parametrize("counts", [(0, 1 << 60), (1 << 60, 0), (0, 1 << 16), (1 << 16, 0)])
def test_contradictory_counts_are_named_and_not_allocated(tmp_path: Path, counts: tuple[int, int]) -> None:
    fails(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))


def outcome(path: Path) -> bool:
    """Whether the file opens; the rule of this file is checked either way, memory included."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    file = None
    try:
        file = open_gguf(path)
    except ModelError as error:
        assert_one_line(error)
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < 2 * path.stat().st_size + (1 << 16)
    if file is not None:
        for tensor in list(file.tensors.values())[::4]:
            assert tensor.dequantise().shape == tensor.shape
        for value in file.metadata.values():
            assert not isinstance(value, LazyMetadataArray) or len(value[:]) == len(value)
    return file is not None


def test_a_file_truncated_at_200_places_never_opens(tmp_path: Path) -> None:
    content, truncated = SMALL.read_bytes(), tmp_path / "cut.gguf"
    tensors = open_gguf(SMALL).tensors.values()
    header, used = min(t.offset for t in tensors), max(t.offset + t.nbytes for t in tensors)
    places = {*np.linspace(0, header, 100, dtype=int).tolist(), *np.linspace(header + 1, used - 1, 100, dtype=int)}
    assert len(places) == 200
    tracemalloc.start()
    try:
        for place in places:
            truncated.write_bytes(content[:place])
            assert not outcome(truncated), place
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_flipped_bytes_in_the_header_open_or_fail_in_one_line(tmp_path: Path) -> None:
    content, flipped, random = SMALL.read_bytes(), tmp_path / "flipped.gguf", np.random.default_rng(11)
    header, results = min(t.offset for t in open_gguf(SMALL).tensors.values()), []
    tracemalloc.start()
    try:
        for _ in range(2000):
            bad = bytearray(content)
            bad[random.integers(header)] ^= random.integers(1, 256)
            flipped.write_bytes(bad)
            results.append(outcome(flipped))
    finally:
        tracemalloc.stop()
    assert 200 < sum(results) < 1800  # flips inside names and numbers are harmless, elsewhere they are caught
