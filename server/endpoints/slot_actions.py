"""``POST /slots/ID?action=save|restore|erase`` of llama-server: the states of a slot as files in one folder."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.errors import ModelError
from ...frontends.inference.saved_state import read_state, write_state_atomically
from ...graph.errors import HocketError
from ..bodies.schemas import SlotFileBody
from ..errors import LOGGER, ApiError, make_bad_request_error
from ..responses import JsonResponse, read_body, run_until_disconnect
from ..state import ServingState, get_serving_state

FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
ACTIONS = ("save", "restore", "erase")
ActionResult = TypeVar("ActionResult")


async def run_slot_action(request: Request) -> Response:
    """Handle ``POST /slots/ID``: save the slot to a file, restore it from a file, or erase it."""
    state = get_serving_state(request)
    if not state.options.slot_save_path:
        raise ApiError(501, "this server has no slot files; start it with --slot-save-path FOLDER")
    state.require_ready()
    number, action = request.path_params["slot"], request.query_params.get("action", "")
    slots = state.service.status.slots
    if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) < slots):
        raise make_bad_request_error(f"there is no slot {number!a:.40}; need 0 to {slots - 1}", "id_slot")
    if action not in ACTIONS:
        raise make_bad_request_error(f"action is {action!a:.40}; need one of {', '.join(ACTIONS)}", "action")
    slot = int(number)
    if action == "erase":
        count = await run_until_disconnect(request, _wait_for_slot(state, state.service.erase_slot(slot)))
        return JsonResponse({"id_slot": slot, "n_erased": count})
    body, headers = await read_body(request, SlotFileBody)
    path = _find_slot_file(state.options.slot_save_path, body.filename)
    start = time.perf_counter()
    function = _save_slot if action == "save" else _restore_slot
    result = await run_until_disconnect(request, function(state, slot, path))
    milliseconds = (time.perf_counter() - start) * 1e3
    timings = {f"{action}_ms": milliseconds}
    return JsonResponse({"id_slot": slot, "filename": body.filename, **result, "timings": timings}, headers=headers)


def _find_slot_file(folder: str, name: str) -> Path:
    """Return the absolute path of a slot file; a name cannot leave the folder.

    Raises:
        ApiError: The name has other characters than letters, digits, ``.``, ``_`` and ``-``, or begins with ``.``.
    """
    if not FILE_NAME_PATTERN.fullmatch(name):
        raise make_bad_request_error(
            f"filename is {name!a:.60}; need 1 to 128 letters, digits, '.', '_' or '-', and no '.' at the beginning",
            "filename",
        )
    return Path(folder).absolute() / name


@asynccontextmanager
async def _serialise_slot_file_actions(state: ServingState, slot: int) -> AsyncIterator[None]:
    """Wait for earlier saves and restores of a slot, so that they run one at a time and memory holds one file of it.

    Raises:
        ApiError: They took `ServerOptions.queue_seconds`.
    """
    try:
        await asyncio.wait_for(state.slot_locks[slot].acquire(), state.options.queue_seconds)
    except TimeoutError:
        raise _make_busy_error(state) from None
    try:
        yield
    finally:
        state.slot_locks[slot].release()


async def _save_slot(state: ServingState, slot: int, path: Path) -> dict[str, int]:
    try:
        async with _serialise_slot_file_actions(state, slot):
            captured = await _wait_for_slot(state, state.service.capture_slot(slot))
            await state.builder.run_in_thread(partial(write_state_atomically, captured, path))
            size = path.stat().st_size
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ApiError(507, f"slot {slot} was not saved: {path.name}: {reason}") from None
    lengths = captured.header["lengths"]
    assert isinstance(lengths, list)
    return {"n_saved": lengths[0], "n_written": size}


async def _restore_slot(state: ServingState, slot: int, path: Path) -> dict[str, int]:
    try:
        async with _serialise_slot_file_actions(state, slot):
            read = partial(read_state, path, state.service.max_slot_file_bytes)
            saved, size = await state.builder.run_in_thread(read), path.stat().st_size
            count = await _wait_for_slot(state, state.service.restore_slot(slot, saved, path))
    except (OSError, HocketError) as error:
        reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
        LOGGER.warning("slot %d was not restored: %s", slot, reason if str(path) in reason else f"{path}: {reason}")
        if isinstance(error, OSError):
            reason = f"slot {slot} was not restored: {path.name}: {reason}"
        elif not isinstance(error, ModelError):
            raise
        raise make_bad_request_error(reason.replace(str(path), path.name), "filename") from None
    return {"n_restored": count, "n_read": size}


async def _wait_for_slot(state: ServingState, future: Future[ActionResult]) -> ActionResult:
    """Return the result of a slot action, which waits while the slot runs a request.

    Raises:
        ApiError: The slot was busy for `ServerOptions.queue_seconds`.
        HocketError: The action has failed.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), state.options.queue_seconds)
    except TimeoutError:
        raise _make_busy_error(state) from None
    except HocketError as error:
        raise error from None


def _make_busy_error(state: ServingState) -> ApiError:
    return ApiError(503, f"the slot was busy for {state.options.queue_seconds:.0f} s", retry_seconds=10)


def build_slot_action_route() -> list[Route]:
    """Return the route of the slot actions."""
    return [Route("/slots/{slot}", run_slot_action, methods=["POST"])]
