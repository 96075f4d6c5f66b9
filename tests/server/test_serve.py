"""The flags of ``hocket serve``, and its sockets."""

from __future__ import annotations

import argparse
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from hocket.distributed import SINGLE_PROCESS
from hocket.distributed.rank_calls import RankCalls
from hocket.frontends.commands import serve as command
from hocket.frontends.errors import ModelError
from hocket.server import lifecycle
from hocket.server.lifecycle import DrainingServer
from hocket.server.options import ServerOptions

from ..given.fakes.fake_service import FakeService


def read_options(*words: str):
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    return command.read_server_options_and_files(parser.parse_args(["folder/tiny.gguf", *words]))


def test_flags_become_options_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    words = ["--temp", "0.5", "--seed", "42", "--no-metrics", "--no-slots", "--verbose", "--alias", "a", "--alias", "b"]
    words += ["--chat-template", str(tmp_path / "template"), "--chat-template-kwargs", '{"enable_thinking": false}']
    options = read_options(*words)
    assert (options.sampling.temperature, options.seed, options.model_file) == (0.5, 42, "tiny.gguf")
    assert (options.has_metrics, options.has_slots, options.shows_prompts) == (False, False, True)
    assert (options.aliases, options.chat_template) == (("a", "b"), "{{ messages }}")
    assert options.template_variables == {"enable_thinking": False}
    default = read_options()
    assert (default.sampling.temperature, default.seed, default.template_variables) == (0.8, -1, {})
    assert (default.has_metrics, default.has_slots, default.shows_prompts) == (True, True, False)


def test_flags_of_files_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--slot-save-path: '.*none' is no folder; create it"):
        read_options("--slot-save-path", str(tmp_path / "none"))
    assert read_options("--slot-save-path", str(tmp_path)).slot_save_path == str(tmp_path)
    assert not read_options().slot_save_path


def test_the_port_is_bound_once_and_before_the_model_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    args = parser.parse_args(["tiny.gguf", "--port", "0"])
    args.world, args.debug = SINGLE_PROCESS, False
    bound: list[int] = []
    served: list[int] = []
    bind = lifecycle.bind_sockets

    def bind_and_count(options: ServerOptions) -> list[socket.socket]:
        listeners = bind(options)
        bound.extend(listener.getsockname()[1] for listener in listeners)
        return listeners

    def open_model(args: argparse.Namespace) -> tuple[object, str]:
        socket.create_connection(("127.0.0.1", bound[0])).close()  # the port accepts while the model is opened
        return nullcontext(), "tiny"

    def run(server: DrainingServer, sockets: list[socket.socket]) -> None:
        served.extend(listener.getsockname()[1] for listener in sockets)

    service = FakeService()
    monkeypatch.setattr(service, "error", None, raising=False)
    monkeypatch.setattr(service, "rank_calls", RankCalls(SINGLE_PROCESS), raising=False)
    monkeypatch.setattr(lifecycle, "bind_sockets", bind_and_count)
    monkeypatch.setattr(DrainingServer, "run", run)
    monkeypatch.setattr(command, "open_served_model", open_model)
    monkeypatch.setattr(command, "run_cyclic_gc_more_often", lambda: None)
    monkeypatch.setattr("hocket.frontends.serving.served_model.is_non_generative", lambda model: False)
    monkeypatch.setattr("hocket.frontends.serving.thread.EngineThread", lambda *args, **options: service)
    assert command.run(args) == 0
    assert len(bound) == 1
    assert served == bound
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", bound[0]))
