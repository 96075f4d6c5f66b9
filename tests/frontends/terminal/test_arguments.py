"""Wrong command lines are answered with the nearest right word, and texts end where they are asked to."""

from __future__ import annotations

import json
import re

import pytest

import hocket
from hocket.cli import main
from hocket.frontends.terminal.arguments import list_flags_by_argument, replace_arguments_by_flag_names
from hocket.scheduler.serialisation.plan_json import plan_to_json

from ...given.models.goldens import FIXTURES, TINY
from ...given.plans.faults import decoder

ONE = ("-p", "It is a truth", "--temp", "0", "-n", "8", "-c", "64")
TEXT = "It is a truth which I am not at all in love"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --prmpt a", "hocket run: there is no flag '--prmpt'; did you mean --prompt; see hocket run --help"),
        ("plan m.gguf --slpit-mode=tensor", "there is no flag '--slpit-mode'; did you mean --split-mode"),
        ("check --bakend cpu", "hocket check: there is no flag '--bakend'; did you mean --backend"),
        ("rnu", "hocket: there is no command 'rnu'; did you mean run; see hocket --help"),
        ("run a b c", "hocket run: there is no place for the argument 'b'"),
        ("--vrsion", "hocket: there is no flag '--vrsion'; did you mean --version"),
        ("run --zzz", "hocket run: there is no flag '--zzz'; see hocket run --help"),
        ("sing", "hocket: there is no command 'sing'; commands: run, serve, replay, "),
        ("run -n -5", "argument -n/--predict/--n-predict: got '-5'; need an integer of at least -1"),
        ("run --top-k 1.5", "argument --top-k: got '1.5'; need an integer of at least -1"),
        ("run --temp hot", "argument --temp/--temperature: got 'hot'; need a number"),
        ("run --logit-bias 5:1", "argument -l/--logit-bias: got '5:1'; need a token id and a number, as 15043=-2.5"),
        ("bench m.gguf -t 0", "argument -t/--threads: got '0'; need an integer of at least 1"),
        ("-p hi", "hocket: got '-p' before a command; need the command first, as in: hocket run -p; see hocket --help"),
        ("dump --format jsonn", "argument --format: got 'jsonn'; need one of text, json, dot; did you mean json"),
        ("bench -o yaml", "argument -o/--output: got 'yaml'; need one of md, json, jsonl, csv, sql; see hocket bench"),
        ("check -j 0", "argument -j/--jobs: got '0'; need an integer of at least 1"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run -p x -n 1 --save-state nowhere/s.bin", "nowhere/s.bin: No such file or directory; check its name"),
        ("run -p x -n 1 --save-state .", "hocket: .: Is a directory; name a file in it"),
        (f"run -p x -n 1 --save-state {'n' * 300}", "nnn: File name too long; give a shorter one"),
        ("run -p x -n 1 --save-state /dev/null/x", "/dev/null/x: Not a directory; correct its folder, which is a file"),
        ("run -p x -n 1 -sys hi", "-sys is the system prompt of a chat; add --chat"),
        ("run -p x -n 1 --devices cpu:0,", "--devices is ('cpu:0', ''); it must be names of devices, as cpu:0,cpu:1"),
        ("run -p x -n 1 -c 99999999999999999999", "it must be an integer from 0 to 9223372036854775807 or None"),
        (
            "bench MODEL -p 600 -n 8",
            "hocket: the context of pp600 is 600, but the model was trained for 512; choose less",
        ),
        ("bench MODEL -n 9 -d 600", "hocket: the context of pp512 @ d600 is 1112, but the model was trained for 512"),
        ("bench MODEL -p 600 -n 8 -np 2", "hocket: the context of -p 600 and -n 8 is 608, but the model was trained"),
        ("run -p x -n 1 --devices cpu0", "there is no backend for device kind 'cpu0'; did you mean cpu"),
        ("run -p x -n 1 --devices cpu:0 --tensor-split 1,2", "--tensor-split 1,2: need at most 1 share"),
        (
            "run -p x -n 1 --devices cpu:0,cpu:1 --tensor-split 1",
            "--tensor-split has 1 share for 2 devices; give each",
        ),
        (
            "run -p x --logit-bias 999999=1",
            "--logit-bias is for token 999999; need 0 to 2047, as hocket tokenize prints",
        ),
        ("run -f empty.txt", "the prompt is empty and the model adds no BOS token; give some text to continue"),
        ("plan GRAPH --json --show factors", "--show factors prints one pass alone; leave it out, or --json"),
        ("check --op silu --html nowhere/x.html", "nowhere/x.html: No such file or directory; check its name"),
        ("check --case sliu(x=f32[3])", "there is no op 'sliu'; did you mean silu"),
        ("check --case silu(x=f32[3)", "case 'silu(x=f32[3)': line 1, column 8: expected ]"),
        ("check --from-graph nothing.gguf", "nothing.gguf: No such file or directory; check its name"),
    ],
)
def test_impossible_arguments_are_reported_in_one_line_before_the_work(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert main([TINY if word == "MODEL" else word for word in words.split()]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert message in line
    assert printed.out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), TEXT),
        (("-r", " at all"), TEXT[: TEXT.index(" at all")]),
        (("-r", "zzz", "-r", "I am"), "It is a truth which "),
        (("-r", "e"), TEXT[:-1]),
    ],
)
def test_a_text_ends_before_a_stop_string(more, text, capsys):
    assert main(["run", *ONE, *more]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_a_full_context_ends_in_one_line_or_shifts(capsys):
    long = ("run", "-p", "It is a truth", "--temp", "0", "-n", "40", "-c", "16", "--ignore-eos")
    assert main(long) == 2
    output = capsys.readouterr()
    assert "is full after 13 new ones" in output.err
    assert "--context-shift" in output.err
    assert main([*long, "--context-shift"]) == 0
    shifted = capsys.readouterr()
    assert shifted.out.startswith(output.out.rstrip("\n"))
    assert "decode 39 tokens" in shifted.err


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("give a larger context=N, or context_shift=True", "give a larger --ctx-size N, or --context-shift"),
        ("use context=64 or less", "use --ctx-size 64 or less"),
        ("use split_mode='tensor'; place='a.b=cpu:1': none", "use --split-mode tensor; --place a.b=cpu:1: none"),
        ("the context holds 4; context: 5", "the context holds 4; context: 5"),
    ],
)
def test_arguments_in_a_message_become_flags(message, line):
    assert replace_arguments_by_flag_names(message) == line
    assert not any(flag in message for flag in list_flags_by_argument().values())


@pytest.mark.long
def test_plans_in_json_and_pages_name_flags(tmp_path, capsys):
    page, plan = tmp_path / "page.html", tmp_path / "plan.json"
    devices = ("--devices", "cpu:0,cpu:1", "--split-mode", "tensor")
    assert main(["view", TINY, *devices, "-o", str(page)]) == 0
    assert "--place 'token_embd" in page.read_text("utf-8")
    placed = hocket.plan(decoder(), ("numpy:0", "numpy:1"), split_mode="tensor", place=[("head", "numpy:1")])
    assert "place='head=numpy:1'" in placed.view().html
    plan.write_text(plan_to_json(placed), "utf-8")
    assert main(["view", str(plan), "-o", str(page)]) == 0
    assert "--place head=numpy:1" in page.read_text("utf-8")
    assert not re.search(r"\bplace='", page.read_text("utf-8"))
    assert main(["plan", TINY, *devices, "--place", "output=cpu:1", "--json"]) == 0
    assert {row["because"] for row in json.loads(capsys.readouterr().out)["placed"]} == {"--place output=cpu:1"}


@pytest.mark.long
def test_python_names_arguments_where_the_command_line_names_flags(capsys):
    with hocket.Model(context=16) as model:
        with pytest.raises(hocket.ModelError, match=r"^the text would have .*context=N.*context_shift=True$"):
            list(model.generate([1] * 17))
        with pytest.raises(hocket.ModelError, match=r"is full after .*context=N.*max_tokens=N.*context_shift=True$"):
            list(model.generate([1] * 15, max_tokens=8, ignore_eos=True))
    assert main(["run", "-p", "It is", "-c", "8", "-n", "20", "--ignore-eos"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("give a larger --ctx-size N, ask for fewer with -n N, or go on with --context-shift")
    assert main(["run", "-p", "It is " * 9, "-c", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("shorten it or give a larger --ctx-size N")


def test_a_model_without_a_vocabulary_names_the_command_or_the_method_for_token_ids(capsys):
    path = FIXTURES / "llama/model.gguf"
    assert main(["tokenize", str(path), "-p", "a"]) == 2
    assert "has no vocabulary (tokenizer.ggml.model is 'test'); give token ids to hocket logits --tokens\n" in (
        capsys.readouterr().err
    )
    with (
        hocket.Model(path, devices="numpy:0", context=8) as model,
        pytest.raises(hocket.ModelError, match=r"has no vocabulary .*; give token ids to Model\.tokens$"),
    ):
        next(model.generate([1]))
