"""`hocket bench`: its counts, its output, and its report of kernel times."""

from __future__ import annotations

import csv
import json
import sqlite3
from itertools import cycle

import pytest

from hocket.backends.base import find_device
from hocket.cli import main
from hocket.frontends.commands import bench
from hocket.frontends.commands.bench_batched import BATCHED_TABLE
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.frontends.terminal.bench_rows import format_benchmark_rows

from ...given.commands import Capture
from ...given.models.goldens import TINY


class Known:
    """A bandwidth that takes no gigabyte to measure."""

    def __init__(self, threads: int, nbytes: int) -> None:
        assert 128 << 20 <= nbytes <= 512 << 20, "a gigabyte and more stands out beside a model"
        self.rates = cycle([9e9 * threads, 10e9 * threads, 12e9 * threads])

    def measure_best_bytes_per_second(self) -> float:
        return next(self.rates)


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MemoryBandwidthTest", Known)


@pytest.mark.long
def test_every_test_runs_on_every_number_of_threads(capsys: Capture) -> None:
    assert main(["bench", TINY, "-p", "16,0", "-n", "4", "-d", "0,8", "-t", "1,2", "-r", "3", "-o", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["pp16", "tg4", "pp16 @ d8", "tg4 @ d8"]
    assert [(r["n_threads"], r["test"]) for r in rows] == [(t, n) for t in (1, 2) for n in names]
    for r in rows:
        assert len(r["samples_ts"]) == len(r["samples_ns"]) == 3
        assert min(r["samples_ts"]) <= r["median_ts"] <= max(r["samples_ts"])
        assert r["samples_ts"] == pytest.approx([(r["n_prompt"] + r["n_gen"]) * 1e9 / ns for ns in r["samples_ns"]])
    for r in rows[1::2]:
        read, bandwidth = r["median_ts"] * r["weight_bytes"], 10e9 * r["n_threads"]
        assert (r["bandwidth"], r["share_of_bandwidth"]) == (bandwidth, pytest.approx(read / bandwidth))


@pytest.mark.long
def test_the_table_has_a_line_for_each_test(capsys: Capture) -> None:
    assert main(["bench", TINY, "-p", "8", "-n", "2", "-r", "1", "--devices", "cpu:0,cpu:1", "-t", "1"]) == 0
    head, rule, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | devices | threads | test | tok/s |")
    assert rule.count("|") == head.count("|") == lines[0].count("|")
    assert [line.split(" | ")[3] for line in lines] == ["pp8", "tg2"]


LLAMA_BENCH = {
    *("model_filename", "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads"),
    *("split_mode", "tensor_split", "devices", "n_prompt", "n_gen", "n_depth", "test_time"),
    *("avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
}


def test_every_form_has_the_names_of_llama_bench(capsys: Capture) -> None:
    row = {
        **bench.create_llama_bench_model_columns(open_model(TINY)),
        **dict.fromkeys(("n_batch", "n_ubatch", "n_threads"), 1),
        **{"split_mode": "auto", "devices": "it's", "tensor_split": ""},
        **bench.create_llama_bench_result_row(
            bench.BenchmarkTest(bench.NEW_KIND, 4, 8), [0.5, 0.25], nbytes=8, bandwidth=None
        ),
    }
    assert row.keys() >= LLAMA_BENCH | {"samples_ns", "samples_ts"}
    assert (row["n_prompt"], row["n_gen"], row["n_depth"], row["avg_ns"], row["avg_ts"]) == (0, 4, 8, 375000000, 12)
    (of_csv,) = csv.DictReader(format_benchmark_rows([row], "csv"))
    base = sqlite3.connect(":memory:")
    base.executescript("".join(format_benchmark_rows([row], "sql")))
    base.row_factory = sqlite3.Row
    (of_sql,) = base.execute("SELECT * FROM llama_bench")
    assert of_csv.keys() == set(of_sql.keys()) == row.keys() - {"samples_ns", "samples_ts"}
    assert (of_csv["devices"], of_sql["devices"], of_sql["avg_ts"], of_sql["bandwidth"]) == ("it's", "it's", 12, None)


@pytest.mark.long
def test_several_sequences_are_measured_together_by_the_names_of_llama_batched_bench(capsys: Capture) -> None:
    words = ["bench", TINY, "-np", "3,1", "-p", "4", "-n", "2,0", "-r", "1", "-t", "1", "-b", "6", "-o", "jsonl"]
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["pp"], r["tg"], r["pl"], r["n_kv"]) for r in rows] == [
        (4, 2, 3, 18),
        (4, 2, 1, 6),
        (4, 0, 3, 12),
        (4, 0, 1, 4),
    ]
    for r in rows:
        assert r["t"] == pytest.approx(r["t_pp"] + r["t_tg"])
        assert r["speed_pp"] == pytest.approx(4 * r["pl"] / r["t_pp"])
        assert r["speed_tg"] == (pytest.approx(r["tg"] * r["pl"] / r["t_tg"]) if r["tg"] else 0.0)
        assert r["speed"] == pytest.approx(r["n_kv"] / r["t"])
    head, rule, line = format_benchmark_rows(rows[:1], "md", BATCHED_TABLE)
    assert head == "| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |"
    assert head.count("|") == rule.count("|") == line.count("|")


def test_a_token_reads_the_weights_once_and_one_row_of_the_embedding() -> None:
    """The embedding is tied, so that all of it is read by the output layer."""
    model = open_model(TINY)
    whole = sum(t.nbytes for t in model.gguf.tensors.values())
    row = model.gguf.tensors["token_embd.weight"].row_bytes
    assert whole <= bench.count_weight_bytes_per_token(model) <= whole + 16 * row


@pytest.mark.parametrize("kind", ["numpy", "cpu"])
def test_weights_are_counted_in_the_types_in_which_a_device_reads_them(kind: str) -> None:
    model, (backend, _) = open_model(TINY), find_device(f"{kind}:0")
    specs = [v.spec for v in model.graph(Step(1, 1, 256, 256, 1)).weights]
    growth = sum(backend.storage_spec(spec, "weight").nbytes for spec in specs) / sum(spec.nbytes for spec in specs)
    assert bench.count_weight_bytes_per_token(model, backend) / bench.count_weight_bytes_per_token(
        model
    ) == pytest.approx(growth, rel=0.01)
    assert (growth > 3) == (kind == "numpy")


def test_a_profile_accounts_for_the_whole_run(capsys: Capture) -> None:
    assert main(["bench", TINY, "-p", "0", "-n", "2", "-r", "3", "-t", "2", "--profile"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "tg2, 2 threads, cpu:0"
    assert any("packed_matmul.multiply.q8_0" in line for line in lines)
    assert lines[-1].endswith(bench.OUTSIDE_KERNELS)
    shares = [float(line.split("µs")[1].split("%")[0]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "9999"], "the model was trained for"),
        (["-np", "2", "-p", "0", "-n", "0"], "nothing to measure"),
        (["-np", "0"], "got 0 sequences"),
        (["-np", "2", "-d", "8"], "leave out one of the two"),
        (["-p", "8", "-n", "0", "--profile", "--devices", "null:0"], "cannot time its steps"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words: list[str], problem: str, capsys: Capture) -> None:
    assert main(["bench", TINY, "-r", "1", *words]) == 2
    message = capsys.readouterr().err
    assert problem in message
    assert message.count("\n") == 1
