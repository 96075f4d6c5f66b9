"""Texts, templates and files that newcomers give to `hocket run` and its relatives."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hocket.cli import main

from ...given.commands import Capture, hocket_process, main_ids
from ...given.models.spelled import write_other


def test_the_command_bans_a_token(capsys: Capture) -> None:
    assert main(["run", "--temp", "0", "-n", "1", "-p", "It is"]) == 0
    word = capsys.readouterr().out.removeprefix("It is").rstrip("\n")
    (token,) = main_ids(capsys, word)
    for spelled in (f"{token}=-inf", f"{token}-inf"):
        assert main(["run", "--temp", "0", "-n", "1", "-p", "It is", "--logit-bias", spelled]) == 0
        assert capsys.readouterr().out != f"It is{word}\n"
    assert main(["run", "-p", "It is", "--logit-bias", f"{token}=inf"]) == 2
    assert "-inf to ban the token" in capsys.readouterr().err


def test_a_context_that_shifts_takes_the_end_of_a_long_prompt(capsys: Capture) -> None:
    words = ["run", "--temp", "0", "-n", "4", "-c", "32", "-p", "It is a truth " * 20]
    assert main(words) == 2
    assert "give a larger --ctx-size N" in capsys.readouterr().err
    assert main([*words, "--context-shift"]) == 0
    assert capsys.readouterr().out.startswith("It is a truth It is")


@pytest.mark.parametrize(
    ("architecture", "keys", "use"),
    [
        ("clip", {"general_type": "mmproj"}, "mmproj"),
        ("clip", {}, "mmproj"),
        ("llama", {"general_type": "adapter"}, "--lora"),
        ("llama", {"adapter_type": "lora"}, "--lora"),
        ("llama", {"general_type": "imatrix"}, "importance matrix"),
        ("controlvector", {}, "--control-vector"),
    ],
)
def test_a_file_that_is_no_model_is_named_with_its_use(
    capsys: Capture, tmp_path: Path, architecture: str, keys: dict[str, str], use: str
) -> None:
    path = write_other(tmp_path / "other.gguf", architecture, **keys)
    for command in (["run", "-p", "a"], ["plan"], ["embed", "-p", "a"]):
        assert main([*command, str(path)]) == 2
        error = capsys.readouterr().err
        assert use in error
        assert error.count("\n") == 1


@pytest.mark.long
def test_a_talk_has_a_template_tools_and_variables_of_its_own(capsys: Capture, tmp_path: Path) -> None:
    template, tools = tmp_path / "template.jinja", tmp_path / "tools.json"
    template.write_text("{{ tools[0].name }} {{ thinking }} {{ messages[0].content }}")
    tools.write_text('[{"name": "It"}]')
    words = ["run", "--temp", "0", "-n", "4", "--chat", "-p", "a truth", "--chat-template", str(template)]
    flags = ["--tools", str(tools), "--chat-template-kwargs", '{"thinking": "is"}']
    assert main([*words, *flags]) == 0
    answer = capsys.readouterr().out
    assert main(["run", "--temp", "0", "-n", "4", "-p", "It is a truth"]) == 0
    assert capsys.readouterr().out == f"It is a truth{answer}"
    for wrong, message in (
        (["--tools", str(template)], "is no JSON"),
        (["--tools", str(tmp_path / "none")], "No such file"),
        (["--chat-template-kwargs", "[]"], "need a JSON object"),
        (["--chat-template-kwargs", '{"bos": 1}'], "'bos' is set by hocket"),
    ):
        process = hocket_process(*words, *wrong)
        assert process.returncode == 2
        assert message.encode() in process.stderr
    assert main(["run", "-p", "a", *flags]) == 2
    assert "add --chat" in capsys.readouterr().err


def test_an_empty_input_is_no_message(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    words = ["run", "--chat", "--chat-template", str(tmp_path / "template")]
    for text in (b"", b"\n\n", b" "):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main(words) == 2
        assert "the message is empty" in capsys.readouterr().err
