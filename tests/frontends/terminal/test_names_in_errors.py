"""An error of the command line names the flag, an error of Python the argument, for every flag and every argument."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest

import hocket
from hocket.cli import build_parser_for_command, main
from hocket.frontends.generation.options import OPTION_KINDS
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.run_config import RUN_OPTIONS

from ...given.models.goldens import TINY

COMMANDS = {
    "run": [TINY, "-n", "1", "-p", "hi"],
    "plan": [TINY],
    "serve": [TINY, "--dry-run"],
}
"""Words of a command that succeeds."""
WRONG_WORDS = ("", "(", "nan", "-7", "1,nan", "9" * 30)
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    -7,
    2**70,
    1.5,
    math.nan,
    "",
    "(",
    [None],
    ["", "a"],
    [(1, 2)],
    {},
    object(),
)
TEXTS = (
    "--prompt",
    "--file",
    "--grammar",
    "--grammar-file",
    "--json-schema",
    "--json-schema-file",
    "--model",
    "--cache-dir",
)
"""Flags of texts and of the cache folder. A message about a text names the prompt, the grammar or the schema."""


def list_flags_with_values(command: str) -> list[Any]:
    """Return the options of a command that take a value and may be wrong."""
    commands = build_parser_for_command([command])._subparsers
    (sub,) = (action.choices[command] for action in commands._group_actions)
    return [a for a in sub._actions if a.option_strings and a.nargs != 0 and a.option_strings[-1] not in TEXTS]


FLAGS = [(command, action) for command in COMMANDS for action in list_flags_with_values(command)]


@pytest.mark.long
@pytest.mark.parametrize(("command", "action"), FLAGS, ids=lambda v: v if isinstance(v, str) else v.option_strings[-1])
def test_an_error_of_a_command_names_the_flag_or_the_file(command, action, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flag = action.option_strings[-1]
    for word in WRONG_WORDS:
        words = [f"{flag}={word}"] if action.nargs is None else [flag, *[word] * int(action.nargs)]
        try:
            code = main([command, *COMMANDS[command], *words])
        except SystemExit as ended:
            code = ended.code
        lines = capsys.readouterr().err.splitlines()
        assert code in (0, 1, 2), word
        if code == 2:
            named = (*action.option_strings, f"hocket: {word or '.'}:", f"cannot {flag[2:]} {word!r}")
            assert any(name in lines[-1] for name in named), lines[-1]
            assert "Traceback" not in "".join(lines)
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("name", [*RUN_OPTIONS, "path"])
def test_an_error_of_a_model_names_the_argument(name, value):
    check_python_error(lambda: hocket.Model(**{name: value}).close(), name, path=str(value))


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("name", inspect.signature(Sampling).parameters)
def test_an_error_of_a_sampling_names_the_argument(name, value):
    check_python_error(lambda: Sampling(**{name: value}), name)


@pytest.fixture(scope="module")
def model():
    with hocket.Model(context=16) as loaded_model:
        yield loaded_model


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("name", OPTION_KINDS)
def test_an_error_of_a_generation_names_the_argument(name, value, model):
    words = {"grammar": "grammar", "json_schema": "JSON schema"}
    options = {"max_tokens": 1, name: value}
    check_python_error(lambda: [*model.generate("hi", **options)], rf"{name}|{words.get(name, name)}")


def check_python_error(call, pattern, path=""):
    """Check that a call succeeds, or raises an error of one line that names the argument, or `path`, and no flag."""
    message = ""
    try:
        call()
    except hocket.HocketError as error:
        message = str(error)
    is_of_file = path and message.startswith(f"{path}: ")
    assert not message or is_of_file or re.search(rf"\b({pattern})\b", message), message
    assert "\n" not in message
    assert not re.search(r"(?<![\w'])--[a-z]{2,}", message), message


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize("path", ["", 5, None])
def test_the_file_of_a_state_is_an_argument(method, path, model):
    with pytest.raises(hocket.ModelError, match=rf"^Model.{method}: path is .*; it must be the path of a file$"):
        getattr(model, method)(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exact": True, "fast": True}, "exact=True excludes fast=True, which"),
        ({"exact": True, "wire": "bf16"}, "exact=True excludes wire='bf16', which"),
        ({"control_layers": (5, 2)}, r"control_layers=\(5, 2\) is for control vectors; give control_vectors=FILE"),
        ({"path": ""}, "Model: path is ''; it must be the path of a file or None"),
        ({"batch": 0}, "Model: batch is 0; it must be an integer from 1 to 9223372036854775807"),
        ({"devices": "cpu:0,"}, "Model: devices is 'cpu:0,'; it must be names of devices"),
        ({"split_mode": "rows"}, "split_mode is 'rows'; need one of"),
        ({"context": 10**6}, "context is 1000000, but the model was trained for 512"),
    ],
)
def test_arguments_of_a_model_that_contradict_are_named(arguments, message):
    with pytest.raises(hocket.HocketError, match=f"^{message}"):
        hocket.Model(**arguments)


@pytest.mark.parametrize("tokens", [["a"], [1.5], [-1], [10], [None], [[1]], [[1], [1, 2]], [2**70], None, "ab", 5])
def test_a_choice_refuses_wrong_tokens(tokens):
    sampling, rng = Sampling(repeat_penalty=1.5), np.random.default_rng(0)
    with pytest.raises(hocket.ModelError, match=r"^Sampling.choose_token: before "):
        sampling.choose_token(np.zeros(10, np.float32), rng, tokens)


@pytest.mark.parametrize("logits", [None, "x", [1.0], np.zeros(0, np.float32), np.zeros((2, 2)), np.zeros(3, np.int32)])
def test_a_choice_refuses_wrong_logits_and_generators(logits):
    rng = np.random.default_rng(0)
    with pytest.raises(hocket.ModelError, match=r"^Sampling.choose_token: logits is "):
        Sampling().choose_token(logits, rng)
    with pytest.raises(hocket.ModelError, match=r"^Sampling.choose_token: rng is "):
        Sampling().choose_token(np.zeros(3, np.float32), None)


@pytest.mark.parametrize("debug", [False, True])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(debug, capsys):
    assert main(["run", "nothing.gguf", *["--debug"] * debug]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("hocket: nothing.gguf: cannot be opened")
    assert ("Traceback" in lines[0]) == debug
    assert (len(lines) > 1) == debug


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exact", "--fast"], "--exact excludes --fast"),
        (["--port", "99999"], "--port is 99999; need at most 65535"),
        (["--api-key-file", "nothing"], "nothing: No such file"),
        (["--chat-template", "nothing"], "nothing: No such file"),
        (["--slot-save-path", "nothing"], "--slot-save-path: 'nothing' is no folder"),
        (["--log-requests", "nothing/log"], "nothing/log: No such file"),
        (["--lora", "nothing"], "nothing: cannot be opened"),
        (["--control-vector", "nothing"], "nothing: cannot be opened"),
        (["--control-vector-layer-range", "1", "2"], "--control-vector-layer-range 1 2 is for control vectors"),
        (["--ssl-cert-file", "a"], "HTTPS needs both"),
        (["--ssl-cert-file", "a", "--ssl-key-file", "b"], "HTTPS cannot use a with b"),
        (["--host", "0.0.0.0"], "give an API key, or --insecure"),
        (["--temp", "-1"], "--temperature is -1.0"),
        (["-c", "100000"], "--ctx-size is 100000"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_dry_run_of_a_server_refuses_what_the_start_refuses(words, message, dry, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", TINY, *words, *["--dry-run"] * dry]) == 2
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1]
    assert not printed.out
