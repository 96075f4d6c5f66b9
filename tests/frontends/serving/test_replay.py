"""The log of a server and its replay: a day is repeated bit by bit, and the first difference is named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
import pytest

from hocket import Model
from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.grammar import Grammar
from hocket.frontends.generation.lazy_grammar import LazyJsonGrammar
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from hocket.frontends.inference.saved_state import write_state_atomically
from hocket.frontends.serving import request_log
from hocket.frontends.serving.replay import read_complete_log_lines
from hocket.frontends.serving.request_log import (
    LoggedEngine,
    RequestLog,
    compute_sum_and_xor_of_logits,
    describe_request,
    read_request,
)
from hocket.frontends.serving.requests import EndEvent, Event, GenerationRequest
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.thread import EngineOptions, EngineThread
from hocket.graph.storage.files import open_log

from ...given.fakes.fake_service import build_metadata
from ...given.waits import WAIT_SECONDS, wait_until

MODEL_OPTIONS: dict[str, Any] = {"context": 128, "batch": 32, "devices": "cpu:0", "threads": 2}


def make_request(name: str, prompt: tuple[int, ...], limit: int = 8, **options: Any) -> GenerationRequest:
    params = GenerationParams(limit, Sampling(temperature=0.9, top_k=0), 7, frozenset([0]))
    request = GenerationRequest(name, prompt, params)
    return replace(request, **options)


def record_day(path: Path, send: Callable[[EngineThread, Model, list[Event]], None]) -> None:
    """Write the log of a server with the embedded model, over the orders of `send`."""
    with Model(None, **MODEL_OPTIONS) as model:
        log = RequestLog(open_log(path), pytest.fail, {**MODEL_OPTIONS, "model": None})
        events: list[Event] = []
        service = EngineThread(model, EngineOptions(3, 8), name="m", version="0", log=log)
        try:
            send(service, model, events)
            wait_until(lambda: service.status.running + service.status.queued == 0)
        finally:
            service.close(0)


def count_ends(events: list[Event]) -> int:
    return sum(isinstance(event, EndEvent) for event in events)


def serve_day(service: EngineThread, model: Model, events: list[Event]) -> None:
    """Requests of all kinds: together, in turn, cancelled, with a grammar, with a slot file, and with an own slot."""
    long = tuple(range(3, 70))
    for i in range(5):
        service.submit(make_request(f"a{i}", long[: 20 + 9 * i], top_logprobs=2), events.append)
    service.submit(make_request("cancelled", long, 40), events.append)
    service.cancel("cancelled")
    wait_until(lambda: count_ends(events) == 6)
    schema = Grammar(model.tokenizer, json_schema='{"enum": ["Emma", "Elinor"]}')
    params = GenerationParams(20, Sampling(bias=((5, -np.inf),)), 1, model.tokenizer.eos_ids, schema)
    service.submit(GenerationRequest("grammar", (1, 9, 8), params, slot=1), events.append)
    service.submit(make_request("b", (*long, 8, 9)), events.append)
    wait_until(lambda: count_ends(events) == 8)


def write_day(tmp_path: Path) -> Path:
    record_day(tmp_path / "log", serve_day)
    return tmp_path / "log"


@pytest.fixture(name="log", scope="module")
def logged_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_day(tmp_path_factory.mktemp("day"))


@pytest.mark.long
def test_a_day_is_repeated_bit_by_bit(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert log.stat().st_mode & 0o777 == 0o600  # it has the texts of clients
    assert main(["replay", str(log)]) == 0
    out = capsys.readouterr().out
    assert "8 requests" in out
    assert "are equal to the log, bit by bit" in out


def rewrite(log: Path, target: Path, change: Callable[[dict[str, object]], bool]) -> int:
    """Write a copy of a log in which `change` has changed one record, and return the number of its line."""
    lines, changed = [], 0
    for number, text in enumerate(log.read_text().splitlines(), 1):
        record = json.loads(text)
        if not changed and change(record):
            changed = number
        lines.append(json.dumps(record))
    target.write_text("\n".join(lines) + "\n")
    assert changed
    return changed


def change_token(record: dict[str, Any]) -> bool:
    for event in record.get("events", ()):
        if event[0] == "token" and event[1] == "b":
            event[2] += 1
            return True
    return False


def change_logits(record: dict[str, Any]) -> bool:
    if len(record.get("logits", ())) < 2:
        return False
    record["logits"][1] = "0:0"
    return True


def drop_time(record: dict[str, Any]) -> bool:
    return bool(record.get("logits") and record["times"].pop())


def add_time(record: dict[str, Any]) -> bool:
    return bool(record.get("logits") and not record["times"].append(1.0))


def plant_failure(record: dict[str, Any]) -> bool:
    return bool(record.get("logits") and record.setdefault("failure", "RuntimeError: gone"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_token, "differs: ['token', 'b',"),
        (change_logits, "the logits differ"),
        (drop_time, "has read the clock more often than in the log"),
        (add_time, "has read the clock 1 times less than in the log"),
        (plant_failure, "the step has failed (RuntimeError: gone) in the log, and has not failed now"),
    ],
)
def test_the_first_difference_is_named(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, object]], bool],
    reason: str,
) -> None:
    line = rewrite(log, tmp_path / "log", change)
    assert main(["replay", str(tmp_path / "log")]) == 1
    out = capsys.readouterr().out
    assert f"line {line}: " in out
    assert reason in out


@pytest.mark.long
def test_a_log_of_a_crash_is_repeated_to_its_end(log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "log"
    broken.write_bytes(log.read_bytes()[:-30])
    assert main(["replay", str(broken)]) == 0
    open_log(broken).close()  # the next server
    with open(broken, "ab") as file:
        file.write(log.read_bytes())
    assert sum("log" in record for _, record in read_complete_log_lines(broken)) == 2
    assert main(["replay", str(broken)]) == 0


@pytest.mark.long
def test_a_failure_and_its_restart_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault lies in a token, so that the replay meets it, too."""
    decode = SlotPool.decode

    def fail(pool: SlotPool, tokens: dict[int, int], before: dict[int, tuple[int, ...]]) -> object:
        if any(len(before[slot]) == 30 for slot in tokens):
            raise RuntimeError("planted")
        return decode(pool, tokens, before)

    monkeypatch.setattr(SlotPool, "decode", fail)

    def send(service: EngineThread, model: Model, events: list[Event]) -> None:
        service.submit(make_request("bad", tuple(range(3, 30)), 20), events.append)
        wait_until(lambda: count_ends(events) == 1)
        assert isinstance(events[-1], EndEvent)
        assert events[-1].message == "RuntimeError: planted"
        service.submit(make_request("good", tuple(range(3, 10)), 5), events.append)
        wait_until(lambda: count_ends(events) == 2)

    record_day(tmp_path / "log", send)
    assert main(["replay", str(tmp_path / "log")]) == 0
    monkeypatch.setattr(SlotPool, "decode", decode)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "log")]) == 1
    assert "the step has failed (RuntimeError: planted) in the log, and not now" in capsys.readouterr().out


@pytest.mark.long
def test_slot_files_are_a_part_of_the_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "slot"
    monkeypatch.chdir(tmp_path)

    def send(service: EngineThread, model: Model, events: list[Event]) -> None:
        service.submit(make_request("first", tuple(range(3, 40)), slot=0), events.append)
        wait_until(lambda: count_ends(events) == 1)
        state = service.capture_slot(0).result()
        write_state_atomically(state, file)
        service.erase_slot(0).result()
        short = type(state)({**state.header, "tokens": [[1, 2]]}, state.arrays)
        write_state_atomically(short, tmp_path / "short")
        with pytest.raises(ModelError, match="has 2 of"):
            service.restore_slot(2, short, "short").result()
        count = service.restore_slot(2, state, file).result()
        tokens = state.header["tokens"][0]
        service.submit(make_request("second", (*tokens, 5, 6)), events.append)
        wait_until(lambda: count_ends(events) == 2)
        assert isinstance(events[-1], EndEvent)
        assert events[-1].timing.cached_tokens == count

    record_day(tmp_path / "log", send)
    assert main(["replay", str(tmp_path / "log")]) == 0
    restores = [
        line for line in map(json.loads, (tmp_path / "log").read_text().splitlines()) if line.get("order") == "restore"
    ]
    assert [bool(line["tokens"]) for line in restores] == [False, True]
    assert restores[0]["failure"].startswith(f"{tmp_path / 'short'}: has 2 of ")
    os.unlink(file)
    assert main(["replay", str(tmp_path / "log")]) == 2
    assert "slot: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("no log\n", "line 1 is no record of hocket-log-3"),
        (
            '{"log": "hocket-log-1", "options": {"model": null}}\n',
            "line 1 begins a log of 'hocket-log-1', and this hocket replays hocket-log-3; "
            "replay it with the hocket that wrote it, and give each version its own file",
        ),
        ('{"log": "hocket-log-3"}\n', "line 1 is no header (KeyError('options'))"),
        ('{"log": "hocket-log-3", "options": {"model": 3}}\n', "model is 3; it must be the path of a file or None"),
        ('{"log": "hocket-log-3", "options": {"model": null, "draft": "x"}}\n', "has unknown options"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "log").write_text(text)
    assert main(["replay", str(tmp_path / "log")]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "record",
    [
        {"order": "submit"},
        {"order": "submit", "request": {"id": 3}},
        {"log": "hocket-log-3", "options": {"model": None}, "model_digest": "x", "version": 3, "fingerprint": 4},
        {"order": "dance"},
        {"times": 3, "events": []},
        {"times": [], "order": "erase", "slot": "x"},
        {"times": [], "order": "restore", "slot": 0, "path": 3},
        {"events": 3, "times": []},
    ],
)
def test_damaged_records_are_one_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]
) -> None:
    header = log.read_text().splitlines()[0]
    (tmp_path / "log").write_text(f"{header}\n{json.dumps(record)}\n")
    assert main(["replay", str(tmp_path / "log")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) <= 2
    assert "log" in err


@pytest.mark.parametrize("value", ["x", None, 0, -1, 1e308, [3]])
@pytest.mark.parametrize("field", ["slots", "queue_size", "max_gap_seconds", "state_bytes"])
def test_a_damaged_header_is_one_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    header, *rest = log.read_text().splitlines()
    (tmp_path / "log").write_text("\n".join([json.dumps({**json.loads(header), field: value}), *rest[:4]]) + "\n")
    assert main(["replay", str(tmp_path / "log")]) in (0, 1, 2)  # a size of the cache need not matter
    assert len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.long
def test_a_log_on_a_full_disk_ends_and_the_server_goes_on() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    errors: list[str] = []
    log = RequestLog(open("/dev/full", "ab", buffering=0), errors.append, {})  # noqa: SIM115
    with Model(None, **MODEL_OPTIONS) as model:
        service = EngineThread(model, EngineOptions(1, 1), name="m", version="0", log=log)
        events: list[Event] = []
        try:
            service.submit(make_request("a", (1, 2, 3)), events.append)
            wait_until(lambda: count_ends(events) == 1)
        finally:
            service.close(0)
    assert errors == ["No space left on device"]


def test_a_slow_reader_of_a_log_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the engine had written the log, and had waited a second for each line."""
    monkeypatch.setattr(request_log, "MAX_READER_WAIT_SECONDS", WAIT_SECONDS)
    os.mkfifo(tmp_path / "pipe")
    log = RequestLog(open_log(tmp_path / "pipe"), pytest.fail, {})
    records = [{"text": f"{n}" * 50_000} for n in range(8)]
    with open(tmp_path / "pipe", "rb") as reader:
        for record in records:
            log.write(record)  # a pipe takes only the first one
        assert [json.loads(reader.readline()) for _ in records] == records
        log.close()
        assert not reader.read()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MAX_READER_WAIT_SECONDS", 0.01, "its reader does not take a line of 50012 bytes within 0.01 s"),
        ("MAX_QUEUED_BYTES", 120_000, "its reader is 120,000 bytes behind"),
    ],
)
def test_a_log_whose_reader_is_too_slow_ends_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float, error: str
) -> None:
    """A write to a full pipe had been repeated for ever, and no request went on."""
    monkeypatch.setattr(request_log, name, value)
    os.mkfifo(tmp_path / "pipe")
    errors: list[str] = []
    log = RequestLog(open_log(tmp_path / "pipe"), errors.append, {})
    records = [{"text": f"{n}" * 50_000} for n in range(8)]
    with open(tmp_path / "pipe", "rb") as reader:
        for record in records:
            log.write(record)
        wait_until(lambda: bool(errors))
        *whole, last = reader.read().split(b"\n")  # until the log closes the pipe
        log.write(records[0])
        log.close()
    assert errors == [error]
    assert [json.loads(line) for line in whole] == records[: len(whole)]
    assert 1 <= len(whole) <= 4
    assert last == b"" or name == "MAX_READER_WAIT_SECONDS"  # a part of a line, which a replay leaves out


def test_a_terminal_without_a_reader_delays_the_end_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no pipe may block each write for ever; closing the log waited for it."""
    monkeypatch.setattr(request_log, "MAX_CLOSE_SECONDS", 0.1)
    reader, terminal = os.openpty()
    errors: list[str] = []
    log = RequestLog(open_log(os.ttyname(terminal)), errors.append, {})
    for number in range(2000):
        log.write({"order": "x" * 100, "number": number})
    log.close()
    assert errors == ["it took no line for too long, so its last lines are missing"]
    os.close(reader)  # the write fails now, so the thread of the log ends
    os.close(terminal)


def test_a_log_that_cannot_be_written_is_reported_when_it_is_closed() -> None:
    """The error of some network file systems comes late, and had ended the thread of the engine."""

    def fail() -> NoReturn:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    errors: list[str] = []
    RequestLog(cast(BinaryIO, SimpleNamespace(close=fail)), errors.append, {}).close()
    assert errors == ["Disk quota exceeded"]


def mask_first_token(grammar: Grammar | LazyJsonGrammar | None) -> object:
    assert grammar is not None
    return grammar.make_state().mask_logits(np.zeros(300, np.float32))


def test_a_request_is_the_same_after_its_description() -> None:
    tokenizer = tokenizer_from_metadata(build_metadata())
    grammar = Grammar(tokenizer, json_schema={"type": "boolean"})
    lazy = LazyJsonGrammar(tokenizer, grammar, "<tool_call>", begins_in_thought=True)
    for rules in (None, grammar, lazy):
        sampling = Sampling(0.5, 3, 0.9, 0.1, 1.1, 5, 0.2, 0.3, ((4, -np.inf), (5, 1.5)))
        params = GenerationParams(9, sampling, 3, frozenset([1, 2]), rules, None, 50)
        request = GenerationRequest("x", (1, 2), params, 4, False, 2)
        text = json.dumps(describe_request(request))
        again = read_request(json.loads(text), tokenizer)
        assert json.dumps(describe_request(again)) == text
        assert replace(again, params=params) == request
        assert again.params.sampling == sampling
        assert again.params.end_tokens == params.end_tokens
        if rules is not None:
            assert np.array_equal(mask_first_token(rules), mask_first_token(again.params.grammar))
    with pytest.raises(ModelError, match="has no vocabulary"):
        read_request(json.loads(text), None)


def test_a_checksum_sees_one_bit() -> None:
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    other = logits.copy()
    other.view(np.uint32)[77] ^= 1
    assert compute_sum_and_xor_of_logits(logits) == compute_sum_and_xor_of_logits(logits.copy())
    assert compute_sum_and_xor_of_logits(logits) != compute_sum_and_xor_of_logits(other)


def test_a_restore_that_ends_with_an_error_of_python_has_failed(tmp_path: Path) -> None:
    """It had been logged as a restore of no tokens."""
    engine = LoggedEngine.__new__(LoggedEngine)
    engine._log = RequestLog(open_log(tmp_path / "log"), pytest.fail, {})
    with pytest.raises(ZeroDivisionError):
        engine.restore_and_log(lambda: 1 // 0, 3, "file")
    engine._log.close()
    assert json.loads((tmp_path / "log").read_text())["failure"].startswith("ZeroDivisionError: ")
