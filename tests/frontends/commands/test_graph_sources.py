"""Graphs and texts come from files, from Hugging Face folders and from stdin."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.cli import main
from hocket.frontends.graph_file import is_gguf_or_hf_folder, is_torch_or_onnx_program

from ...given.commands import Capture
from ...given.models.goldens import TINY
from ...given.models.hugging_face import write_folder


@pytest.fixture
def graph_text() -> str:
    """A graph with a float, a 16-bit and a quantised weight, and token ids as an input."""
    ids = hocket.input("ids", (3,), "i32")
    rows = ops.get_rows(hocket.weight("table", (8, 64), "q8_0"), ids)
    hidden = ops.silu(ops.mul_mat(hocket.weight("up", (32, 64), "f16"), rows))
    return hocket.dump(hocket.Graph({"y": ops.mul_mat(hocket.weight("down", (64, 32)), hidden)}))


@pytest.fixture
def write_stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a text on stdin."""

    def write(text: str) -> None:
        stdin = SimpleNamespace(buffer=io.BytesIO(text.encode()), read=lambda: text, isatty=lambda: False)
        monkeypatch.setattr("sys.stdin", stdin)

    return write


def test_plan_dump_and_view_read_a_graph_from_stdin(
    graph_text: str, write_stdin: Callable[[str], None], tmp_path: Path, capsys: Capture
) -> None:
    write_stdin(graph_text)
    assert main(["dump", "-"]) == 0
    assert hocket.parse(capsys.readouterr().out).digest() == hocket.parse(graph_text).digest()
    write_stdin(graph_text)
    assert main(["plan", "-", "--devices", "numpy:0"]) == 0
    assert capsys.readouterr().out.startswith("fits: ")
    write_stdin(graph_text)
    assert main(["view", "-", "--graph", "-o", str(tmp_path / "page.html")]) == 0
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")


def test_the_plan_of_a_graph_is_measured_with_constant_weights(
    graph_text: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(graph_text)
    assert main(["plan", str(path), "--devices", "numpy:0", "--measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["predicted", "measured", "error", "of"]
    measured_ops = {line.split()[-1] for line in lines[3:]}
    assert {"get_rows", "mul_mat", "silu"} <= measured_ops


def test_a_graph_that_does_not_fit_is_not_measured(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "graph.txt"
    rows = ops.get_rows(hocket.weight("table", (1 << 40, 64)), hocket.input("ids", (3,), "i32"))
    path.write_text(hocket.dump(hocket.Graph({"rows": rows})))
    assert main(["plan", str(path), "--devices", "cpu:0", "--measure"]) == 2
    assert "does not fit: cpu:0: needs 262144.00 GiB" in capsys.readouterr().err


def test_commands_read_a_folder_like_its_file(tmp_path: Path, capsys: Capture) -> None:
    folder, file = str(write_folder(tmp_path / "tiny")), str(tmp_path / "tiny.gguf")
    assert main(["convert", folder, file]) == 0
    printed = []
    for source in (folder, file):
        for command in ("dump", "plan --devices numpy:0", "check --list --from-graph"):
            name, *flags = command.split()
            assert main([name, *flags, source]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert main(["view", folder, "--devices", "numpy:0", "-o", str(tmp_path / "page.html")]) == 0
    assert is_gguf_or_hf_folder(folder)
    assert not is_torch_or_onnx_program(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("trace.json", json.dumps({"displayTimeUnit": "ns", "traceEvents": []}), "is a trace; give the model, and the"),
        ("model.safetensors", "\x10\0\0\0\0\0\0\0{}", "is a safetensors file; give its folder"),
        ("folder", None, "no folder with config.json"),
    ],
)
def test_a_path_of_another_kind_is_named(
    name: str, content: str | None, words: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    command = ["logits", str(path), "--tokens", "1", "--out", str(tmp_path / "x.npy")]
    assert main(command if name.endswith("tensors") else ["view", str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert words in capsys.readouterr().err


def test_tokenize_reads_stdin(write_stdin: Callable[[str], None], capsys: Capture) -> None:
    assert main(["tokenize", TINY, "-p", "Emma\ncame", "--json"]) == 0
    expected = capsys.readouterr().out
    write_stdin("Emma\ncame")
    assert main(["tokenize", TINY, "--json"]) == 0
    assert capsys.readouterr().out == expected


def test_run_names_devices_that_it_leaves_free(capsys: Capture) -> None:
    flags = [TINY, "-p", "It", "-n", "1", "--temp", "0", "-t", "1"]
    assert main(["run", *flags, "--devices", "numpy:0,numpy:1", "--split-mode", "none"]) == 0
    assert capsys.readouterr().err.rstrip().endswith("; numpy:1 left free")
    assert main(["run", *flags, "--devices", "numpy:0"]) == 0
    assert "left free" not in capsys.readouterr().err


@pytest.mark.long
def test_integer_arrays_are_prompts_and_other_arrays_are_refused() -> None:
    with hocket.Model(context=64, threads=1) as model:
        ids = model.tokenize("It is a")
        assert np.array_equal(model.logits(np.array(ids)), model.logits(ids))
        for array in (np.array([1.5, 2.0]), np.array([[1, 2]])):
            with pytest.raises(hocket.ModelError, match="need integers in one dimension"):
                model.logits(array)


def test_a_text_that_is_being_generated_ends_when_the_model_is_closed() -> None:
    model = hocket.Model(context=64, threads=1)
    pieces = model.generate("It is a truth", max_tokens=8, temperature=0)
    next(pieces)
    model.close()
    with pytest.raises(hocket.ModelError, match="the model is closed"):
        list(pieces)
