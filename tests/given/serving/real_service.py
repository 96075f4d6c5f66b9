"""A server in the process of a test, with the engine of the embedded model, which has recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from hocket import Model
from hocket.frontends.serving.thread import EngineOptions, EngineThread
from hocket.server.app import create_app
from hocket.server.options import ServerOptions

TEXT_TOKENS = list(range(5, 45))
BODY = {"prompt": TEXT_TOKENS, "n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@contextmanager
def open_client(
    folder: Path | None,
    *,
    model: str | None = None,
    draft: str | None = None,
    draft_max: int | None = None,
    **options: Any,
) -> Iterator[TestClient]:
    with Model(model, context=128, batch=32, draft=draft, draft_max=draft_max) as served:
        service = EngineThread(served, EngineOptions(2, 4), name="m", version="0")
        settings = ServerOptions(slot_save_path="" if folder is None else str(folder), **options)
        app = create_app(service, settings)
        try:
            with TestClient(app, base_url="http://127.0.0.1") as client:
                yield client
        finally:
            app.state.serving.builder.close()
            service.close(0)


def complete(client: TestClient, **options: object) -> dict[str, Any]:
    answer = client.post("/completion", json={**BODY, **options})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
