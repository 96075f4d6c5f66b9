"""The actions of ``/slots/ID``, with a real engine: save, restore, erase, and a full disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hocket.frontends.inference.saved_state import SavedSessionState, read_state
from hocket.server.endpoints import slot_actions

from ..given.serving.real_service import BODY, TEXT_TOKENS, complete, open_client


@pytest.fixture(name="folder", scope="module")
def slot_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(name="client", scope="module")
def slot_client(folder: Path) -> Iterator[TestClient]:
    with open_client(folder) as client:
        yield client


def send_action(client: TestClient, slot: object, action: str, **body: object) -> Any:
    return client.post(f"/slots/{slot}?action={action}", json=body)


@pytest.mark.long
def test_a_slot_is_saved_restored_and_erased(client: TestClient, folder: Path) -> None:
    first = complete(client, id_slot=1)
    assert first["id_slot"] == 1
    saved = send_action(client, 1, "save", filename="talk.bin").json()
    count = len(TEXT_TOKENS) + 5  # the last token is not evaluated
    size = (folder / "talk.bin").stat().st_size
    assert (saved["id_slot"], saved["filename"], saved["n_saved"], saved["n_written"]) == (1, "talk.bin", count, size)
    assert saved["timings"]["save_ms"] > 0
    assert (folder / "talk.bin").stat().st_mode & 0o777 == 0o600
    for slot in (0, 1):
        assert send_action(client, slot, "erase").json()["id_slot"] == slot
    assert complete(client, id_slot=0, prompt=[*TEXT_TOKENS, 7])["timings"]["cache_n"] == 0
    restored = send_action(client, 0, "restore", filename="talk.bin").json()
    assert (restored["n_restored"], restored["n_read"]) == (count, size)
    assert restored["timings"]["restore_ms"] > 0
    talk = [*TEXT_TOKENS, *first["tokens"], 9, 8]
    again = complete(client, prompt=talk)
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (count, 3)
    assert send_action(client, 0, "erase").json()["n_erased"] > count


@pytest.mark.parametrize(
    ("slot", "action", "body", "param", "reason"),
    [
        (7, "save", {"filename": "a"}, "id_slot", "there is no slot '7'; need 0 to 1"),
        ("x", "save", {"filename": "a"}, "id_slot", "there is no slot"),
        (0, "copy", {"filename": "a"}, "action", "need one of save, restore, erase"),
        (0, "save", {}, "filename", "missing required field"),
        (0, "save", {"filename": "../a"}, "filename", "and no '.' at the beginning"),
        (0, "save", {"filename": ".hidden"}, "filename", "and no '.' at the beginning"),
        (0, "restore", {"filename": "/etc/passwd"}, "filename", "and no '.' at the beginning"),
        (0, "restore", {"filename": "absent"}, "filename", "absent: No such file"),
        (0, "restore", {"filename": "damaged"}, "filename", "damaged: not a saved state of this model"),
        (1, "save", {"filename": "a", "more": 1}, "more", "there is no field"),
    ],
)
def test_wrong_actions_are_refused(
    client: TestClient, folder: Path, slot: object, action: str, body: dict[str, object], param: str, reason: str
) -> None:
    (folder / "damaged").write_bytes(b"PK\3\4 no archive")
    answer = send_action(client, slot, action, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param or reason in error["message"], error
    assert reason in error["message"], error
    assert str(folder) not in error["message"]


def test_a_failed_restore_is_logged_with_its_reason(
    client: TestClient, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    complete(client, id_slot=1)
    send_action(client, 1, "save", filename="talk")
    (folder / "cut").write_bytes((folder / "talk").read_bytes()[:-1])
    for name in ("cut", "absent"):
        answer = send_action(client, 1, "restore", filename=name)
        assert (answer.status_code, str(folder) in answer.text) == (400, False)
        assert caplog.messages[-1].startswith(f"slot 1 was not restored: {folder / name}: ")
    assert caplog.messages[-1].endswith("No such file or directory")
    assert send_action(client, 1, "restore", filename="talk").json()["n_restored"] == len(TEXT_TOKENS) + 5


def test_a_path_does_not_depend_on_the_folder_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path in a message was not the one that a replay has, so it could not be hidden from clients."""
    monkeypatch.chdir(tmp_path)
    assert slot_actions._find_slot_file("slots", "talk") == tmp_path / "slots" / "talk"


def test_an_empty_slot_has_nothing_to_save(client: TestClient) -> None:
    send_action(client, 1, "erase")
    answer = send_action(client, 1, "save", filename="empty")
    assert (answer.status_code, "slot 1 has no tokens" in answer.text) == (400, True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_save_alone(client: TestClient, folder: Path) -> None:
    os.symlink("/dev/full", folder / "full")
    complete(client, id_slot=1)
    answer = send_action(client, 1, "save", filename="full")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        507,
        "slot 1 was not saved: full: No space left on device",
    )
    assert send_action(client, 1, "save", filename="other").status_code == 200
    assert complete(client)["tokens_predicted"] == 6
    assert not [name for name in os.listdir(folder) if name.endswith(".part")]


@pytest.mark.long
def test_actions_need_a_folder() -> None:
    with open_client(None) as client:
        answer = send_action(client, 0, "save", filename="a")
        assert (answer.status_code, "--slot-save-path" in answer.text) == (501, True)


def test_an_action_waits_for_the_end_of_its_request(client: TestClient) -> None:
    answers: list[Any] = []
    busy = threading.Thread(target=lambda: answers.append(complete(client, id_slot=0, n_predict=60)))
    busy.start()
    while not client.get("/slots").json()[0]["is_processing"] and busy.is_alive():
        pass
    saved = send_action(client, 0, "save", filename="late").json()
    busy.join()
    assert saved["n_saved"] == len(TEXT_TOKENS) + 59


@pytest.mark.long
def test_restores_of_a_busy_slot_hold_one_file_in_memory(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(client, id_slot=0)
    send_action(client, 0, "save", filename="talk.bin")
    begun, may_go_on, reads = threading.Event(), threading.Event(), list[Path]()

    def stop_engine() -> list[object]:
        begun.set()
        assert may_go_on.wait(20)
        return []

    def read_and_record(path: Path, max_bytes: int) -> SavedSessionState:
        reads.append(path)
        return read_state(path, max_bytes)

    monkeypatch.setattr(slot_actions, "read_state", read_and_record)
    client.app.state.serving.service._orders.put(stop_engine)  # type: ignore[attr-defined]
    assert begun.wait(20)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(send_action, client, 0, "restore", filename="talk.bin") for _ in range(3)]
        try:
            until = time.monotonic() + 1
            while len(reads) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            assert reads == [folder / "talk.bin"]
        finally:
            may_go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3


def test_a_wrong_slot_of_a_request_is_refused(client: TestClient) -> None:
    answer = client.post("/completion", json={**BODY, "id_slot": 2})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "id_slot is 2; need 0 to 1, or -1 for any slot",
    )
