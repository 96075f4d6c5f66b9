"""The command line: every subcommand against goldens of llama.cpp, and how it behaves at its edges."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hocket
from hocket.cli import main
from hocket.frontends.commands import COMMAND_HELP, devices, logits, run
from hocket.frontends.commands.perplexity import compute_token_nll
from hocket.frontends.gguf import open_gguf
from hocket.frontends.models import ARCHITECTURES, load_model
from hocket.frontends.open_model import open_model
from hocket.frontends.terminal import blas_threads
from hocket.graph.errors import BackendError

from ...given.commands import Capture, hocket_process, main_ids
from ...given.models.goldens import FIXTURES, INDEX, TINY, TINY_GOLDENS, nmse, path_of

LLAMA = str(path_of("llama"))


# ---------------------------------------------------------------------------------------------------------- run


@pytest.mark.long
def test_the_embedded_model_writes_what_llama_cpp_writes(capsys: Capture) -> None:
    prompts = json.loads((TINY_GOLDENS / "prompts.json").read_text())
    greedy = json.loads((TINY_GOLDENS / "greedy_dequantized.json").read_text())
    for prompt, golden in zip(prompts, greedy, strict=True):
        assert main(["run", "--temp", "0", "-p", prompt["text"], "-n", "32", "--exact"]) == 0
        assert capsys.readouterr().out == prompt["text"] + golden["greedy_text"] + "\n"


@pytest.mark.long
def test_run_needs_no_arguments_and_tells_its_speed_in_one_line_on_stderr() -> None:
    done = hocket_process("run", "--temp", "0", "-n", "8")
    assert done.returncode == 0
    assert done.stdout.decode().startswith(run.DEFAULT_PROMPT + " she could not be")
    (line,) = done.stderr.decode().splitlines()
    assert re.match(r"load \d+\.\d s, prefill 13 tokens [\d.]+ tok/s, ", line)
    assert "decode 7 tokens" in line
    assert "cpu:0: weight " in line


@pytest.mark.long
def test_a_prompt_comes_from_a_file_or_from_stdin_without_its_last_line_break(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["run", "--temp", "0", "-n", "4", "-p", "Elizabeth – she"])
    want = capsys.readouterr().out
    (tmp_path / "prompt.txt").write_text("Elizabeth – she\n", encoding="utf-8")
    assert main(["run", "--temp", "0", "-n", "4", "-f", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out == want
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Elizabeth – she\n".encode())))
    assert main(["run", "--temp", "0", TINY, "-n", "4"]) == 0
    assert capsys.readouterr().out == want
    (tmp_path / "marked.txt").write_text("\ufeffElizabeth – she\n", encoding="utf-8")
    assert main(["run", "--temp", "0", "-n", "4", "-f", str(tmp_path / "marked.txt")]) == 0
    assert capsys.readouterr().out == want


def test_a_seed_repeats_a_text_and_another_changes_it(capsys: Capture) -> None:
    def text(seed: str) -> str:
        assert main(["run", "-n", "16", "--temp", "0.9", "--top-k", "0", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert text("1") == text("1") != text("2")


def test_the_text_ends_at_an_end_token_unless_a_flag_ignores_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = frozenset({main_ids(capsys, run.DEFAULT_PROMPT + " she could not be")[-1]})
    build = run.tokenizer_from_metadata

    def ending(metadata: dict[str, object]) -> object:
        tokenizer = build(metadata)
        object.__setattr__(tokenizer, "eos_ids", end)
        return tokenizer

    monkeypatch.setattr(run, "tokenizer_from_metadata", ending)
    main(["run", "--temp", "0", "-n", "8"])
    ended = capsys.readouterr().out
    main(["run", "--temp", "0", "-n", "8", "--ignore-eos"])
    whole = capsys.readouterr().out
    assert ended == run.DEFAULT_PROMPT + " she could not\n"
    assert whole.startswith(run.DEFAULT_PROMPT + " she could not be")


@pytest.mark.long
def test_every_device_writes_the_same(capsys: Capture) -> None:
    written = []
    for device in ("cpu:0", "cpu:3", "reference:0"):
        assert main(["run", "--temp", "0", "-n", "2", "-p", "It is", "-c", "16", "--devices", device]) == 0
        captured = capsys.readouterr()
        written.append(captured.out)
        assert f"{device}: weight" in captured.err
    assert len(set(written)) == 1


def test_chat_answers_one_message_or_many(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace
    from types import MappingProxyType

    model = open_model(None)
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    metadata = MappingProxyType({**model.gguf.metadata, "tokenizer.chat_template": template})
    templated = load_model(replace(model.gguf, metadata=metadata))
    monkeypatch.setattr("hocket.frontends.open_model.open_model", lambda path, **_: templated)
    assert main(["run", "--temp", "0", "--chat", "-p", "How do you do?", "-n", "6"]) == 0
    one = capsys.readouterr().out
    typed = iter(["How do you do?", "", "And you?", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(run, "is_stdin_terminal_or_closed", lambda: True)
    assert main(["run", "--temp", "0", "--chat", "-n", "6"]) == 0
    two = capsys.readouterr().out
    assert two.startswith(one)
    assert two.count("\n") > one.count("\n")
    assert next(typed) == "never"


def test_a_model_without_a_chat_template_says_so_before_it_loads(capsys: Capture) -> None:
    assert main(["run", "--temp", "0", "--chat", "-p", "Hello"]) == 2
    assert "no chat template" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("step", [[], ["--step"]], ids=["batch", "step"])
@pytest.mark.parametrize("name", INDEX)
def test_logits_equal_those_of_llama_cpp(name: str, step: list[str], tmp_path: Path) -> None:
    model, tokens = path_of(name), FIXTURES / name / "tokens.npy"
    out = tmp_path / "logits.npy"
    assert main(["logits", str(model), "--tokens-file", str(tokens), "--out", str(out), "--exact", *step]) == 0
    assert nmse(np.load(out), np.load(FIXTURES / name / "logits.npy")) <= INDEX[name]["tol_f32"]


def test_every_fixture_is_compared_with_llama_cpp_and_of_a_known_architecture() -> None:
    assert {row["arch"] for row in INDEX.values()} <= set(ARCHITECTURES)
    assert {path.parent.name for path in FIXTURES.glob("*/model.gguf")} == set(INDEX)


@pytest.mark.parametrize(
    "flags", [[], ["--step"], ["-b", "8"], ["-t", str(os.cpu_count() or 1)], ["-c", "400"]], ids=" ".join
)
def test_the_embedded_model_has_the_logits_of_llama_cpp(flags: list[str], tmp_path: Path) -> None:
    out, text = tmp_path / "logits.npy", (TINY_GOLDENS / "text60.txt").read_text(encoding="utf-8")
    assert main(["logits", TINY, "-p", text, "--out", str(out), "--exact", *flags]) == 0
    assert nmse(np.load(out), np.load(TINY_GOLDENS / "logits60_q8_0_dequantized.npy")) <= 1e-8


def test_tokens_may_be_listed(tmp_path: Path) -> None:
    out, tokens = tmp_path / "logits.npy", np.load(TINY_GOLDENS / "tokens60.npy")
    assert main(["logits", TINY, "--tokens", ",".join(map(str, tokens)), "--out", str(out), "--exact"]) == 0
    assert nmse(np.load(out), np.load(TINY_GOLDENS / "logits60_q8_0_dequantized.npy")) <= 1e-8


def test_the_output_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    out, link = tmp_path / "logits.npy", tmp_path / "link.npy"
    out.write_bytes(b"old")
    link.symlink_to(out)
    assert main(["logits", LLAMA, "--tokens", "1,2", "--out", str(link)]) == 0
    assert link.is_symlink()
    assert np.load(out).shape == (2, 128)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.npy", "logits.npy"]


def test_a_full_disk_costs_one_line_and_keeps_the_old_file(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "logits.npy"
    out.write_bytes(b"old")
    monkeypatch.setattr(logits.np.lib.format, "write_array_header_1_0", full)
    assert main(["logits", LLAMA, "--tokens", "1,2", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"hocket: {out}: No space left on device; free some space\n"
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("logits.npy", b"old")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_device_is_written_to_and_never_replaced(capsys: Capture) -> None:
    assert main(["logits", LLAMA, "--tokens", "1,2", "--out", "/dev/full"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert not Path("/dev/full").is_file()


# ------------------------------------------------------------------------------------------ tokenize, perplexity


def test_tokenize_prints_ids_as_llama_cpp_gives_them(capsys: Capture) -> None:
    for case in json.loads((TINY_GOLDENS / "prompts.json").read_text()):
        assert main_ids(capsys, case["text"]) == case["ids"]


def test_tokenize_adds_and_reads_special_tokens_only_if_asked(capsys: Capture) -> None:
    def ids(*flags: str) -> list[int]:
        main(["tokenize", TINY, "-p", "a<|endoftext|>", "--json", *flags])
        return list(json.loads(capsys.readouterr().out))

    assert ids("--parse-special")[1:] == [2047]
    assert 2047 not in ids()
    main(["tokenize", TINY, "-p", "It is", "--add-special"])
    assert [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()] == ["'It'", "' is'"]


@pytest.mark.long
def test_perplexity_of_the_evaluation_text_equals_the_one_of_llama_cpp(capsys: Capture) -> None:
    assert main(["perplexity", TINY, str(TINY_GOLDENS / "heldout.txt"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows["chunks"], rows["context"], rows["scored"]) == (45, 512, 45 * 255)
    # llama.cpp and the code that trained the model give 29.4359 with float32 weights.
    assert rows["perplexity"] == pytest.approx(29.43, rel=0.005)
    assert rows["nll"] == pytest.approx(math.log(rows["perplexity"]))


@pytest.mark.long
def test_perplexity_scores_the_second_half_of_each_chunk(capsys: Capture, tmp_path: Path) -> None:
    text = (TINY_GOLDENS / "heldout.txt").read_text(encoding="utf-8")[:300]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokens = main_ids(capsys, text)
    size, nll = 15, []
    for start in range(0, len(tokens) - size + 1, size):
        chunk = tokens[start : start + size]
        main(["logits", TINY, "--tokens", ",".join(map(str, chunk)), "--exact", "--out", str(tmp_path / "logits.npy")])
        nll.append(compute_token_nll(np.load(tmp_path / "logits.npy")[7:14], chunk[8:]))
    assert main(["perplexity", TINY, str(tmp_path / "text.txt"), "-c", str(size), "--exact"]) == 0
    out = capsys.readouterr().out
    assert f"{len(nll)} chunks of 15 tokens, {7 * len(nll)} tokens scored" in out
    assert f"perplexity {math.exp(np.mean(nll)):.3f}" in out


def test_likelihoods_are_those_of_a_softmax_in_float64() -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((150, 40)) * 30).astype(np.float32)
    targets = rng.integers(0, 40, 150).tolist()
    p = np.exp(x.astype(np.longdouble))
    want = -np.log(p[np.arange(150), targets] / p.sum(-1))
    np.testing.assert_allclose(compute_token_nll(x, targets), want.astype(float), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("context", "words"), [("512", "tokens; one chunk needs 512"), ("2", "at least 3")])
def test_a_text_too_short_for_a_chunk_is_refused(context: str, words: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("It is a truth")
    assert main(["perplexity", TINY, str(tmp_path / "text.txt"), "-c", context]) == 2
    assert words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ dump, devices


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_dumped_graph_is_read_back_and_dumped_the_same(format: str, capsys: Capture, tmp_path: Path) -> None:
    assert main(["dump", TINY, "--format", format]) == 0
    text = capsys.readouterr().out
    (tmp_path / "graph").write_text(text, encoding="utf-8")
    assert main(["dump", str(tmp_path / "graph"), "--format", format]) == 0
    assert capsys.readouterr().out == text
    graph = hocket.parse(text) if format == "text" else hocket.from_json(text)
    hocket.verify(graph)
    assert graph.outputs["logits"].shape == (1, 2048)


def test_dump_as_dot_names_every_node(capsys: Capture) -> None:
    assert main(["dump", TINY, "--format", "dot"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digraph")
    assert "blk.7.ffn_down" in out


def test_dump_reads_only_the_header(tmp_path: Path, capsys: Capture) -> None:
    start = min(t.offset for t in open_gguf(TINY).tensors.values())
    (tmp_path / "header.gguf").write_bytes(Path(TINY).read_bytes()[:start])
    main(["dump", TINY, "-b", "4", "-c", "300"])
    whole = capsys.readouterr().out
    assert "%tokens = input() : i32[4]" in whole
    assert main(["dump", str(tmp_path / "header.gguf"), "-b", "4", "-c", "300"]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"hello", "neither a GGUF model nor a graph"), (b"\xff\xfe", "not UTF-8"), (b"{", "neither"), (b"", "neither")],
)
def test_a_file_that_is_no_graph_is_refused(content: bytes, words: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_bytes(content)
    assert main(["dump", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_devices_lists_every_backend_and_why_one_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    load = devices.load_backend

    def load_backend(kind: str) -> object:
        if kind == "reference":
            raise BackendError("backend 'reference' does not load: no such library")
        return load(kind)

    monkeypatch.setattr(devices, "load_backend", load_backend)
    monkeypatch.setattr(devices, "measure_host_bandwidth_and_flops", lambda: devices.HostSpeed(2e10, 1e11))
    assert main(["devices", "--json", "--measure"]) == 0
    rows = {row["device"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cpu:0"]["read_bytes_per_second"] == 2e10
    assert "no such library" in rows["reference"]["description"]
    assert main(["devices", "--measure"]) == 0
    assert "reads 20.0 GB/s, 100.0 GFLOP/s" in capsys.readouterr().out


def test_measuring_gives_plausible_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MATRIX_ROWS", 256), ("SQUARE_SIZE", 128), ("MEASURED_RUNS", 2)):
        monkeypatch.setattr(devices, name, value)
    measured = devices.measure_host_bandwidth_and_flops()
    assert 1e7 < measured.bandwidth < 1e14
    assert 1e7 < measured.flops < 1e15


# ------------------------------------------------------------------------------------------------- as a process


def test_help_names_every_subcommand_and_loads_none() -> None:
    done = hocket_process("--help")
    assert done.returncode == 0
    assert set(COMMAND_HELP) <= set(done.stdout.decode().split())
    code = (
        "import contextlib, io, sys, hocket.cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    hocket.cli.main(['--help'])\n"
        "heavy = {'tokenizers', 'jinja2', 'tqdm', 'networkx', 'cupy', 'numba', 'hocket.scheduler'} & set(sys.modules)\n"
        "print(*heavy, *[name for name in sys.modules if name.startswith('hocket.frontends.commands.')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


@pytest.mark.parametrize("name", COMMAND_HELP)
def test_every_subcommand_has_its_help(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"usage: hocket {name} ")


def test_the_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hocket {hocket.__version__}\n"


def test_a_reader_that_stops_reading_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "hocket", "dump", TINY, "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_text_is_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    (tmp_path / "prompt").write_text("naïve", encoding="utf-8")
    done = hocket_process("run", "--temp", "0", "-f", str(tmp_path / "prompt"), "-n", "2", env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith("naïve".encode())


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["run", "--temp", "0", "-n", "1"]) == 0
    assert capsys.readouterr().out == ""


def test_threads_are_set_where_the_blas_can(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(blas_threads, "THREAD_SETTERS", ("no_such_function",))
    assert main(["run", "--temp", "0", "-n", "1", "-t", "1"]) == 2
    assert "BLAS of this NumPy" in capsys.readouterr().err


def test_an_interrupt_ends_with_its_own_code(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hocket.frontends.open_model.open_model", interrupt)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == "\n"


def test_memory_that_is_out_costs_one_line_and_debug_shows_where(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hocket.frontends.open_model.open_model", out)
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "hocket: memory is out; use a smaller context, batch or model\n"
    assert main(["run", "--debug"]) == 2
    assert "raise MemoryError" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--simulate", "cpu:2", "--split-mode", "tensor"], ["--graph"], []])
def test_view_writes_a_page(tmp_path, capsys, more):
    out = tmp_path / "page.html"
    assert main(["view", LLAMA, "-o", str(out), *more]) == 0
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert "open it in a browser" in capsys.readouterr().err


def test_view_shows_a_plan_in_json_and_another_beside_it(tmp_path, capsys):
    before, after, out = (str(tmp_path / name) for name in ("before.json", "after.json", "page.html"))
    assert main(["plan", LLAMA, "--simulate", "cpu:2", "--split-mode", "layer", "-o", before]) == 0
    assert main(["plan", LLAMA, "--simulate", "cpu:2", "--split-mode", "tensor", "-o", after]) == 0
    assert main(["view", after, "--diff", before, "-o", out]) == 0
    assert main(["view", after, "--diff", LLAMA, "-o", out]) == 2
    assert "is no plan in JSON" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tokenize", "embed"])
def test_stdin_that_is_no_utf_8_is_refused_in_one_line_in_any_locale(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors="strict"))
    assert main([command, str(TINY)]) == 2
    assert capsys.readouterr().err == "hocket: the text is not valid Unicode at character 1; need UTF-8 text\n"
