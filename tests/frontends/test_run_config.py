"""The table of the options of a model run: flags, arguments of `hocket.Model` and messages follow from it."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields
from typing import Any

import pytest

import hocket
from hocket.cli import build_parser_for_command
from hocket.distributed import SINGLE_PROCESS
from hocket.frontends.commands.run import sampling_from_flags
from hocket.frontends.commands.serve import model_arguments_from_flags
from hocket.frontends.commands.shared_flags import config_from_flags
from hocket.frontends.config_options import list_options
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.run_config import RUN_OPTIONS, DeviceGroup, RunConfig

from ..given.models.goldens import TINY

EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "devices": (["cpu:0,cpu:1"], ("cpu:0", "cpu:1")),
    "split_mode": (["tensor"], "tensor"),
    "tensor_split": (["3,1"], (3.0, 1.0)),
    "place": (["ffn_up=cpu:0"], (("ffn_up", "cpu:0"),)),
    "threads": (["2"], 2),
    "exact": ([], True),
    "wire": (["bf16"], "bf16"),
    "fast": ([], True),
    "cache_type_k": (["q8_0"], "q8_0"),
    "cache_type_v": (["bf16"], "bf16"),
    "keep_packed": ([], True),
    "context": (["64"], 64),
    "batch": (["16"], 16),
    "lora": (["tone.gguf:0.5"], (("tone.gguf", 0.5),)),
    "control_vectors": (["mood.gguf"], (("mood.gguf", 1.0),)),
    "control_layers": (["1", "3"], (1, 3)),
    "draft": (["small.gguf"], "small.gguf"),
    "draft_max": (["3"], 3),
}
"""Words after a flag, and the value of the field that they give."""


def parse_flags(command: str, *words: str) -> argparse.Namespace:
    """Parse the flags of a command with the embedded model."""
    args: argparse.Namespace = build_parser_for_command([command]).parse_args([command, TINY, *words])
    args.world = SINGLE_PROCESS
    return args


def test_every_field_of_a_configuration_has_an_example():
    assert EXAMPLES.keys() == RUN_OPTIONS.keys() == {f.name for f in fields(RunConfig)} - {"path"}


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, row in RUN_OPTIONS.items() for flag in row.flags])
def test_each_spelling_of_a_flag_gives_the_field_as_the_argument_of_python_does(name, flag):
    words, value = EXAMPLES[name]
    more = ["--devices", "cpu:0,cpu:1"] if name == "tensor_split" else []
    found = config_from_flags(parse_flags("run", *more, flag, *words))
    assert getattr(found, name) == value != RUN_OPTIONS[name].default
    assert found == RunConfig(TINY, **({"devices": "cpu:0,cpu:1"} if more else {}), **{name: value})


@pytest.mark.parametrize("command", ["run", "serve", "bench", "plan", "view", "embed"])
def test_a_command_without_flags_has_the_defaults_of_python(command):
    assert config_from_flags(parse_flags(command)) == RunConfig(TINY)


@pytest.mark.parametrize("name", RUN_OPTIONS)
def test_a_wrong_argument_is_named_by_the_model_before_its_file_is_read(name):
    wrong: Any = {RUN_OPTIONS[name].kind.description: object()}
    with pytest.raises(hocket.ModelError, match=rf"^Model: {name} is .*; it must be "):
        hocket.Model("no file", **{name: wrong})


def test_the_signature_of_a_model_has_all_fields():
    visible, table = (inspect.signature(f).parameters for f in (hocket.Model, RunConfig))
    assert [*visible] == [*table]
    assert all(row.help.split(maxsplit=1)[0] in str(hocket.Model.__doc__) for row in RUN_OPTIONS.values())


def test_lists_become_tuples_and_a_session_reads_only_its_own_fields():
    lists: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "place": [["a", "cpu:1"]], "lora": [["x", 2.0]]}
    config = RunConfig(TINY, exact=True, **lists)
    assert hash(config) == hash(
        RunConfig(TINY, exact=True, devices="cpu:0,cpu:1", place=(("a", "cpu:1"),), lora=(("x", 2.0),))
    )
    assert config.group == DeviceGroup(devices=("cpu:0", "cpu:1"), place=(("a", "cpu:1"),), exact=True)


def test_a_server_with_a_context_of_0_has_the_context_of_the_model():
    assert model_arguments_from_flags(parse_flags("serve", "-c", "0"))["context"] == 512
    assert model_arguments_from_flags(parse_flags("serve"))["context"] is None


SAMPLING_EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "temperature": (["0.5"], 0.5),
    "top_k": (["7"], 7),
    "top_p": (["0.5"], 0.5),
    "min_p": (["0.25"], 0.25),
    "repeat_penalty": (["1.5"], 1.5),
    "repeat_last_n": (["-1"], -1),
    "presence_penalty": (["0.5"], 0.5),
    "frequency_penalty": (["-0.5"], -0.5),
    "bias": (["7=-2.5"], ((7, -2.5),)),
}


@pytest.mark.parametrize("name", list_options(Sampling))
def test_each_flag_of_sampling_gives_the_option_of_python(name):
    words, value = SAMPLING_EXAMPLES[name]
    for flag in list_options(Sampling)[name].flags:
        assert sampling_from_flags(parse_flags("run", flag, *words)) == Sampling(**{"temperature": 0.8, name: value})


def test_a_top_k_of_minus_one_keeps_all_tokens():
    assert sampling_from_flags(parse_flags("run", "--top-k", "-1")) == Sampling(temperature=0.8, top_k=0)
