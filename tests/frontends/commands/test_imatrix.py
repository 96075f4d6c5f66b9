"""``hocket imatrix``: sums against llama-imatrix and against a reference run, merged files, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket import ops
from hocket.cli import build_parser_for_command, main
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference.product_inputs import (
    InputEnergyReporter,
    WeightProduct,
    build_input_energy_sums_and_row_counts,
    find_distinct_weight_products,
)
from hocket.frontends.quantisation.importance import (
    ImportanceSums,
    read_gguf_importance_matrix,
    read_importance_sums,
)
from hocket.graph import Graph, constant, input, weight
from hocket.ops.reference_run import evaluate

from ...given.commands import Capture
from ...given.models.goldens import TESTS, TINY, TINY_GOLDENS

GOLDEN = TESTS / "goldens" / "quantisation" / "imatrix.gguf"
"""The file of llama-imatrix b11434 for the tiny model in f32 and 2 chunks of 64 tokens of `text`."""


@pytest.mark.parametrize("words", ["-m A -f B -o C", "A -f B -o C", "A B -o C", "-f B -o C -m A", "-o C A -f=B"])
def test_a_flag_sets_the_text_at_any_place(words):
    args = build_parser_for_command(["imatrix"]).parse_args(["imatrix", *words.split()])
    assert (args.model, args.file, args.output) == ("A", "B", "C")


@pytest.mark.parametrize("words", ["A B -f D", "A -f B -f D"])
def test_two_texts_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        build_parser_for_command(["imatrix"]).parse_args(["imatrix", *words.split()])
    assert "got 'B' and 'D'; give one" in capsys.readouterr().err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((TINY_GOLDENS / "heldout.txt").read_text()[:4000])
    return path


def imatrix(*words: object) -> int:
    return main(["imatrix", *map(str, words)])


def run_refused_call(capsys: Capture, *words: object) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert imatrix(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.long
def test_sums_and_counts_are_the_ones_of_llama_imatrix(text, tmp_path):
    model, out = tmp_path / "model.gguf", tmp_path / "i.gguf"
    assert main(["quantize", TINY, str(model), "f32", "--allow-requantize", "-t", "1"]) == 0
    assert imatrix(model, text, "-o", out, "-c", 64, "--chunks", 2) == 0
    got, want = open_gguf(out), open_gguf(GOLDEN)
    assert got.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        tolerance = 0 if name.endswith(".counts") else 0.005
        ours = got.tensor(name).dequantise()  # ggml leaves out a first axis of size 1
        assert ours.reshape(tensor.shape) == pytest.approx(tensor.dequantise(), rel=tolerance)
    assert (got.metadata["imatrix.chunk_count"], got.metadata["imatrix.chunk_size"]) == (2, 64)
    assert got.metadata["general.type"] == "imatrix"
    assert got.metadata["imatrix.datasets"].strings() == (str(text),)


def run_sums(product: WeightProduct, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    sums, rows = build_input_energy_sums_and_row_counts(product)
    outputs = {"sums": sums} | ({} if isinstance(rows, int) else {"rows": rows})
    got, _ = evaluate(Graph(outputs), arrays)
    return [got[name] for name in outputs]


@pytest.mark.parametrize("inputs", [1, 2, 4])
def test_each_expert_has_the_sums_of_the_tokens_that_chose_it(inputs):
    rng = np.random.default_rng(0)
    tokens, used, experts, columns = 7, 4, 5, 6
    x = rng.standard_normal((tokens, inputs, columns)).astype(np.float32)
    ids = np.array([rng.choice(experts - 1, used, replace=False) for _ in range(tokens)], np.int32)
    x_value, ids_value = input("x", x.shape), input("ids", ids.shape, "i32")
    y = ops.mul_mat_id(weight("w", (experts, 3, columns)), x_value, ids_value)
    (product,) = find_distinct_weight_products(Graph({"y": y}))
    sums, rows = run_sums(product, {"x": x, "ids": ids})
    want, counts = np.zeros((experts, columns)), np.zeros(experts)
    for token in range(tokens):
        for i, expert in enumerate(ids[token]):
            want[expert] += x[token, i % inputs].astype(np.float64) ** 2
            counts[expert] += 1
    assert sums == pytest.approx(want, rel=1e-5)
    assert rows.reshape(-1).tolist() == counts.tolist()
    assert counts[-1] == 0


def test_products_are_found_through_views_and_counted_once():
    x, table = input("x", (4, 8)), weight("w", (6, 8))
    halves = [ops.mul_mat(ops.slice_(table, axis=0, start=s, stop=s + 3), x) for s in (0, 3)]
    heads = ops.mul_mat(weight("heads", (2, 5, 8)), ops.reshape(x, shape=(2, 2, 8)))
    other = ops.mul_mat(ops.transpose(x), input("z", (3, 4)))
    looked_up = ops.get_rows(weight("t", (9, 8)), constant("n", np.array([1], np.int32)))
    products = list(
        find_distinct_weight_products(Graph({str(i): y for i, y in enumerate([*halves, heads, other, looked_up])}))
    )
    assert [(p.name, p.matrices) for p in products] == [("w", 1), ("heads", 2)]
    array = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    (sums,) = run_sums(products[1], {"x": array})
    assert sums == pytest.approx((array.reshape(2, 2, 8).astype(np.float64) ** 2).sum(1), rel=1e-5)


def test_a_model_without_products_is_refused():
    watch = InputEnergyReporter(lambda name: False, lambda *sums: None)
    y = ops.mul_mat(weight("w", (6, 8)), input("x", (4, 8)))
    with pytest.raises(Exception, match="no product that reads a weight of a block"):
        watch.require_watched_values(Graph({"y": y}))


@pytest.mark.long
def test_chunks_in_two_runs_add_up_to_one_run(text, tmp_path):
    whole, first, both = (tmp_path / f"{name}.gguf" for name in ("whole", "first", "both"))
    common = (TINY, text, "-c", 64)
    assert imatrix(*common, "-o", whole, "--chunks", 3, "--output-frequency", 1) == 0
    assert imatrix(*common, "-o", first, "--chunks", 1) == 0
    assert imatrix(*common, "-o", both, "--chunk", 1, "--chunks", 2, "--in-file", first) == 0
    want, got = read_importance_sums(whole), read_importance_sums(both)
    assert got.chunk_count == want.chunk_count == 3
    for name, sums in want.sums.items():
        assert got.sums[name] == pytest.approx(sums, rel=1e-5)
        assert got.counts[name].tolist() == want.counts[name].tolist()
    merged = tmp_path / "merged.gguf"
    assert imatrix("--in-file", whole, "--in-file", first, "-o", merged) == 0
    name = next(iter(want.sums))
    assert read_importance_sums(merged).counts[name].tolist() == (want.counts[name] * 4 / 3).tolist()


@pytest.mark.long
def test_the_matrix_serves_quantize_and_the_output_matrix_is_optional(text, tmp_path, capsys):
    out = tmp_path / "i.gguf"
    assert imatrix(TINY, text, "-o", out, "-c", 64, "--chunks", 1, "--process-output") == 0
    matrix = read_gguf_importance_matrix(out)
    model = open_gguf(TINY)
    assert any("blk." not in name for name in matrix.columns)
    for name in matrix.columns:
        found = matrix.find_importances(model.tensor(name))
        assert found is not None
        assert (found >= 0).all()
    capsys.readouterr()
    words = ["quantize", TINY, tmp_path / "q.gguf", "q4_0", "--imatrix", out, "--allow-requantize", "-t", "1"]
    assert main([*map(str, words)]) == 0


def test_wrong_calls_are_refused_in_one_line(text, tmp_path, capsys):
    assert "needs a MODEL and a TEXT" in run_refused_call(capsys, TINY)
    assert "the text has 1 token" in run_refused_call(
        capsys, TINY, write_short_text(tmp_path, "ab"), "-o", tmp_path / "o.gguf"
    )
    line = run_refused_call(capsys, TINY, text, "-c", 64, "--chunk", 900, "-o", tmp_path / "o.gguf")
    assert "--chunk 900: the text has " in line
    assert "is no importance matrix" in run_refused_call(capsys, "--in-file", TINY, "-o", tmp_path / "o.gguf")
    assert "No such file" in run_refused_call(capsys, TINY, text, "-o", tmp_path / "no" / "o.gguf")
    with pytest.raises(SystemExit):
        imatrix(TINY, text, "-o", tmp_path / "o.gguf", "--watch", "x")
    assert "--watch" in capsys.readouterr().err
    assert not (tmp_path / "o.gguf").exists()


def test_the_model_and_the_text_are_not_replaced(text, tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.write_bytes(Path(TINY).read_bytes())
    for path in (model, text):
        before = path.read_bytes()
        assert "would replace a file that is read here" in run_refused_call(
            capsys, model, text, "-c", 64, "--chunks", 1, "-o", path
        )
        assert path.read_bytes() == before


def test_sums_that_the_format_cannot_hold_leave_no_file(tmp_path):
    out, name = tmp_path / "out.gguf", "blk.0.ffn_up.weight"
    for sums, count, problem in ((3e38, 1, "the sum 6e.38 is too large"), (1, 1e13, "chunks are too many")):
        matrix = ImportanceSums(512)
        for _ in range(2):
            matrix.add_column_sums(name, np.full((1, 8), sums), np.array([count]))
        with pytest.raises(ModelError, match=problem):
            matrix.write(out)
        assert not out.exists()


def write_short_text(folder: Path, text: str) -> Path:
    path = folder / "short.txt"
    path.write_text(text)
    return path
