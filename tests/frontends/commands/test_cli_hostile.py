"""Bad input to the command line: exit code 2 and one line, without a traceback and without much memory."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.backends.base import Backend, Device
from hocket.cli import main
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference import session
from hocket.graph import Graph
from hocket.scheduler import Plan, plan_with_cache

from ...given.models.goldens import path_of

MODELS = ("llama", "llama-rope-freqs", "qwen3", "qwen35", "qwen3-q4_k_m")
SPARE = 1 << 20
"""Bytes of Python objects for the metadata and the graph, beyond twice the size of the file."""
FLIPS = 100
"""Files with flipped bytes in each part of the test of them."""
PARTS = 4


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Run one command first, so that its imports do not count as memory of the second."""
    assert command("logits", path_of("llama"), "--tokens", "1", "--out", os.devnull)[0] == 0


@pytest.fixture(scope="module", autouse=True)
def _planned_once() -> Iterator[None]:
    """Most damage leaves the graph as it was, and the same graph has the same plan."""
    known: dict[object, Plan] = {}

    def plan(graph: Graph, group: Sequence[tuple[Backend, Device]], like: Plan | None = None, **options: Any) -> Plan:
        devices = tuple((backend.name, device) for backend, device in group)
        key = graph.digest(), devices, id(like), repr(options)
        if key not in known:
            known[key] = plan_with_cache(graph, group, like=like, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "plan_with_cache", plan)
        yield


def command(*args: object) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, errors.getvalue()


def read_refusal(*args: object) -> str:
    """The line with which a command refuses its input."""
    code, errors = command(*args)
    assert code == 2, errors
    assert errors.count("\n") == 1, errors
    assert errors.startswith("hocket")
    assert errors.removesuffix("\n").isprintable()
    return errors


def logits(model: Path) -> tuple[int, str]:
    return command("logits", model, "--tokens", "1,2,3", "--out", os.devnull)


def run_damaged_model(model: Path, *, measured: bool) -> int:
    """The exit code of running a file that may be damaged; a refusal must be one line and, if `measured`, cheap."""
    code, errors = logits(model)
    assert code in (0, 2)
    if code == 0:
        assert errors == ""
        return code
    assert errors.count("\n") == 1
    assert errors.startswith("hocket: ")
    if measured:
        tracemalloc.start()
        try:
            assert logits(model) == (code, errors)
            assert tracemalloc.get_traced_memory()[1] <= 2 * model.stat().st_size + SPARE
        finally:
            tracemalloc.stop()
    return code


def header_size(path: Path) -> int:
    return min(tensor.offset for tensor in open_gguf(path).tensors.values())


# ------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.long
def test_a_file_truncated_at_200_places_is_refused(tmp_path: Path) -> None:
    source = path_of("qwen35")
    data, rng, model = source.read_bytes(), random.Random(1), tmp_path / "model.gguf"
    places = [*range(1, 41), *rng.sample(range(41, header_size(source)), 100)]
    places += rng.sample(range(header_size(source), len(data) - 64), 60)
    for number, place in enumerate(places):
        model.write_bytes(data[:place])
        assert run_damaged_model(model, measured=number % 4 == 0) == 2, place


@pytest.mark.long
@pytest.mark.nightly(cases=len(MODELS))
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", MODELS)
def test_random_flips_in_header_and_metadata_are_refused_or_harmless(name: str, part: int, tmp_path: Path) -> None:
    source = path_of(name)
    data, size, model = source.read_bytes(), header_size(source), tmp_path / "model.gguf"
    codes = []
    for seed in range(part * FLIPS, (part + 1) * FLIPS):
        rng, damaged = random.Random(seed), bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 3))):
            at = rng.randrange(size)
            damaged[at] = rng.choice((damaged[at] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
        model.write_bytes(damaged)
        codes.append(run_damaged_model(model, measured=seed % 8 == 0))
    assert codes.count(2) > len(codes) // 3


EXTREMES = (0, 1, 3, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0x7FC00000, 0x00800000)
"""As integers, and as float32: infinity, NaN, and the smallest normal number."""


@pytest.mark.long(cases=1)
@pytest.mark.nightly(cases=8)
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_absurd_hyperparameters_are_refused_or_harmless(name: str, value: int, tmp_path: Path) -> None:
    source = path_of(name)
    data, model = source.read_bytes(), tmp_path / "model.gguf"
    keys = [key for key, value in open_gguf(source).metadata.items() if type(value) in (int, float)]
    assert len(keys) >= 8
    for key in keys:
        at = value_at(data, key)
        model.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
        run_damaged_model(model, measured=True)


def value_at(data: bytes, key: str) -> int:
    """Where the value of a metadata pair begins, behind its type."""
    name = key.encode()
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4


def tensor_at(data: bytes, name: str) -> int:
    """Where the number of axes of a tensor stands."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize("sizes", [(2**62, 2**62), (2**63, 2), (2**32, 2**32), (2**64 - 1, 2**64 - 1)])
def test_a_tensor_whose_size_overflows_is_refused(sizes: tuple[int, int], tmp_path: Path) -> None:
    data, model = (path_of("llama")).read_bytes(), tmp_path / "model.gguf"
    at = tensor_at(data, "blk.0.attn_q.weight") + 4
    model.write_bytes(data[:at] + struct.pack("<QQ", *sizes) + data[at + 16 :])
    assert run_damaged_model(model, measured=True) == 2
    assert "blk.0.attn_q.weight" in read_refusal("run", model, "-p", "x")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    data, model = (path_of("qwen3")).read_bytes(), tmp_path / "model.gguf"
    model.write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_un.weight"))
    line = read_refusal("logits", model, "--tokens", "1", "--out", os.devnull)
    assert "blk.0.ffn_up.weight is missing" in line
    assert run_damaged_model(model, measured=True) == 2


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    data, model = (path_of("llama")).read_bytes(), tmp_path / "model.gguf"
    model.write_bytes(data.replace(b"llama", b"lemur", 1))
    line = read_refusal("logits", model, "--tokens", "1", "--out", os.devnull)
    assert re.search(r"'lemur' is unknown; need one of the \d+ in docs/models.md", line)


def test_nothing_of_a_name_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    data, model = (path_of("llama")).read_bytes(), tmp_path / "mo\ndel\x1b[31m.gguf"
    model.write_bytes(data.replace(b"llama", b"\x1b[2J\n", 1))
    read_refusal("logits", model, "--tokens", "1", "--out", os.devnull)
    read_refusal("logits", model, "--tokens", "\x1b[2J\n", "--out", os.devnull)


# --------------------------------------------------------------------------------------------------- no models

COMMANDS = (
    ("run", "MODEL", "-p", "x"),
    ("logits", "MODEL", "--tokens", "1", "--out", os.devnull),
    ("tokenize", "MODEL", "-p", "x"),
    ("perplexity", "MODEL", os.devnull),
    ("quantize", "MODEL", os.devnull, "q8_0"),
    ("compare", "MODEL", "MODEL", "-f", os.devnull),
    ("dump", "MODEL"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_what_is_no_model_file_is_refused_by_every_command(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("It is a truth universally acknowledged\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("text", "empty", "folder", "pipe", "nothing", "text/below"):
        path = str(tmp_path / name)
        line = read_refusal(*(path if word == "MODEL" else word for word in words))
        assert path in line


# ------------------------------------------------------------------------------------------------ tokens, texts

LLAMA = path_of("llama")


@pytest.mark.parametrize("token", [-1, 128, 2**31, 2**64])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    line = read_refusal("logits", LLAMA, f"--tokens=3,{token}", "--out", os.devnull)
    assert f"token {token} at position 1" in line
    assert "0 to 127" in line


@pytest.mark.parametrize("tokens", ["", "x", "1,,2", "1.5", "1 2", "9" * 5000])
def test_tokens_that_are_no_numbers_are_refused(tokens: str) -> None:
    assert "--tokens" in read_refusal("logits", LLAMA, f"--tokens={tokens}", "--out", os.devnull)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    tokens = ",".join(["1"] * 9)
    assert "has 9 tokens" in read_refusal("logits", LLAMA, "--tokens", tokens, "-c", "8", "--out", os.devnull)
    assert "context holds 8" in read_refusal("run", "-c", "8", "-p", "It is a truth " * 4)
    assert "context holds 512; shorten it" in read_refusal("run", "-p", "It is a truth " * 400)
    assert "trained for 512" in read_refusal("run", "-c", "100000")
    code, errors = command("run", "-c", "16", "-n", "10")
    assert (code, errors.count("\n")) == (2, 1)
    assert "context of 16 tokens is full after 4 new ones" in errors


def npy(shape: tuple[int, ...], descr: str = "<i8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1,2,3",
        b"PK\x03\x04",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff{",
        b"\x93NUMPY\x01\x00\x00\x10" + b"(" * 4096,
        b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16,
        pickle.dumps([1, 2]),
        npy((3,)),
        npy((2**60,)),
        npy((-1,)),
        npy((2**40, 2**40)),
        npy((1, 1)) + bytes(8),
        npy((), "<i8") + bytes(8),
        npy((1,), "<f8") + bytes(8),
        npy((1,), "|O") + bytes(8),
        npy((0,)),
    ],
)
def test_a_file_that_holds_no_tokens_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_refusal("logits", LLAMA, "--tokens-file", path, "--out", os.devnull)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * SPARE


def test_tokens_come_from_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing"):
        assert str(path) in read_refusal("logits", LLAMA, "--tokens-file", path, "--out", os.devnull)


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "nowhere" / "logits.npy", LLAMA / "logits.npy"):
        read_refusal("logits", LLAMA, "--tokens", "1", "--out", out)
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"It is \xff")
    assert "not UTF-8 at byte 6" in read_refusal("run", "-f", tmp_path / "text")
    read_refusal("run", "-p", "It is \udcff")
    assert str(tmp_path / "no") in read_refusal("run", "-f", tmp_path / "no")


def test_an_empty_prompt_is_refused() -> None:
    code, errors = command("run", "-p", "")
    assert (code, errors.count("\n")) == (2, 1)
    assert "prompt is empty" in errors


# -------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    "words",
    [
        "",
        "fly",
        "run --swift",
        "run --devices cpu:0,cpu:0",
        "run --devices cpu:0,cpu:1 --split-mode rows",
        "run --devices cpu:0,cpu:1 --tensor-split 1,x",
        "run --devices cpu:0,cpu:1 --tensor-split 1,2,3",
        "run --devices cpu:0,cpu:1 --place",
        "run --devices cpu:0,cpu:1 --place ffn",
        "run --devices cpu:0,cpu:1 --place =cpu:1",
        "run --devices cpu:0,cpu:1 --place ffn=",
        "run --devices cpu:0,cpu:1 --place ffn=cpu:2",
        "run --devices cpu:0,cpu:1 --place (=cpu:1",
        "run --devices cpu:0,cpu:1 --place [[=cpu:1",
        "run --devices cpu:0,cpu:1 --place a{9999999999999999}=cpu:1",
        "run --devices cpu:0,cpu:1 --place nobody=cpu:1",
        "run --devices cpu:0,cpu:1 --place ffn=[31m",
        "run --place ffn=cpu:1",
        "logits MODEL --tokens 1 --out x --place nobody=cpu:0",
        "plan MODEL --simulate h200:2 --place ffn=cpu:0",
        "plan MODEL --place ffn=h200:0",
        "run --devices gpu:0",
        "run --devices cpu:x",
        "run --devices=",
        "run -c x",
        "run -b 0",
        "run -b -3",
        "run -t 0",
        "run --seed -2",
        "run --seed 1.5",
        "run -n x",
        "run --temp hot",
        "run --temp nan",
        "run --temp -1",
        "run --top-p 0",
        "run --top-p 2",
        "run --min-p 1",
        "run -p x -f y",
        "run MODEL -c 1000000000000000000000",
        "logits MODEL --tokens 1",
        "logits MODEL --out x",
        "logits MODEL --tokens 1 -p x --out x",
        "tokenize MODEL",
        "perplexity MODEL",
        "quantize MODEL out.gguf",
        "compare MODEL MODEL",
        "dump MODEL --format pdf",
        "dump MODEL --layer -1",
        "dump MODEL --layer x",
        "dump MODEL -c 99999999",
        "dump MODEL -b 100000000000",
        "devices --all",
    ],
)
def test_wrong_usage_costs_one_line(words: str) -> None:
    read_refusal(*(str(LLAMA) if word == "MODEL" else word for word in words.split()))
