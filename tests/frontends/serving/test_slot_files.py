"""Slots as files: a restored talk goes on without a token that is read again, on any devices."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.generation.generate import GenerationParams
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference import saved_state
from hocket.frontends.inference.saved_state import load_state, read_state, save_state, write_state_atomically
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.blocks.make_pool import make_prefix_cache
from hocket.frontends.serving.blocks.slot_pool import BlockSlotPool
from hocket.frontends.serving.engine import Engine
from hocket.frontends.serving.requests import GenerationRequest, TokenEvent
from hocket.frontends.serving.slot_files import MAX_HEADER_BYTES, SlotFiles
from hocket.frontends.serving.slots import SlotPool

from ...given.models.goldens import path_of
from ...given.serving.engine_runs import BATCH, CONTEXT, end_of, make_pool, prompt_of, run_all, tokens_of

MODELS = ("llama", "qwen35", "gemma3")
"""Attention, a hybrid with recurrent states, and ring caches."""
NEW_TOKENS = 5
QUESTION = (5, 9, 12, 33, 8, 21, 4)


class Server:
    """An engine over a pool, with its slot files."""

    def __init__(self, pool: SlotPool, state_bytes: int = 1 << 30) -> None:
        self.pool = pool
        cache = make_prefix_cache(pool, state_bytes=state_bytes, reserves_whole_texts=False, retains_contents=True)
        self.engine = Engine(pool, cache, queue_size=8, max_gap_seconds=1.0, clock=lambda: 0.0)
        self.files = SlotFiles(pool, cache)
        self._count = 0

    def generate(self, prompt: tuple[int, ...], slot: int | None = None) -> tuple[list[TokenEvent], int]:
        """Return the new tokens of a prompt, with the number of cached tokens."""
        self._count += 1
        params = GenerationParams(NEW_TOKENS, Sampling(), 1, frozenset())
        request = GenerationRequest(str(self._count), prompt, params, top_logprobs=3, slot=slot)
        self.engine.submit(request)
        events = run_all(self.engine)
        end = end_of(events, request.id)
        assert slot in (None, end.timing.slot)
        return [event for event in events if isinstance(event, TokenEvent)], end.timing.cached_tokens

    def save(self, slot: int, path: Path) -> list[int]:
        """Save a slot, and return its tokens."""
        state = self.files.capture(slot)
        write_state_atomically(state, path)
        tokens = state.header["tokens"]
        assert isinstance(tokens, list)
        return list(tokens[0])

    def restore(self, slot: int, path: Path) -> int:
        return self.files.restore(
            slot, read_state(path, self.pool.compute_slot_bytes_in_float32() + MAX_HEADER_BYTES), path
        )


def continue_in_place(pool: SlotPool, slot: int, tokens: list[int], rest: list[int]) -> np.ndarray:
    """Return the logits after `rest` in a slot that was never saved and has all but the last of `tokens`."""
    return np.array(pool.read_prompt(slot, [tokens[-1], *rest], tokens[:-1]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "split_mode"), [("cpu:0", "layer"), ("cpu:0,cpu:1,cpu:2", "layer"), ("cpu:0,cpu:1", "tensor")]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_talk_reads_no_token_again(name: str, devices: str, split_mode: str, tmp_path: Path) -> None:
    first, prompt = Server(make_pool(name)), prompt_of(name)
    first.generate(prompt_of(name, 5), slot=0)
    answer = [event.token for event in first.generate(prompt, slot=1)[0]]
    tokens = first.save(1, tmp_path / "talk")
    assert tokens == [*prompt, *answer]
    second = Server(make_pool(name, devices=devices, split_mode=split_mode))
    second.generate(prompt_of(name, 6), slot=2)  # the slot has had another text
    assert second.restore(2, tmp_path / "talk") == len(tokens) - 1  # the last token was sampled, but not evaluated
    events, cached = second.generate((*tokens, *QUESTION))
    assert cached == len(tokens) - 1
    logits = continue_in_place(first.pool, 1, tokens, list(QUESTION)).astype(np.float64)
    logprob = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert events[0].token == int(logits.argmax())
    tolerance = 0.0 if devices == "cpu:0" else 0.05
    assert events[0].logprob == pytest.approx(float(logprob[events[0].token]), rel=0, abs=1e-6 + tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_slot_is_copied_and_shortened_only_where_it_is_whole(name: str, tmp_path: Path) -> None:
    """Another slot may copy the restored tokens; a shorter beginning of a ring or a recurrent state is read again."""
    first = Server(make_pool(name))
    first.generate(prompt_of(name), slot=0)
    tokens = first.save(0, tmp_path / "talk")
    second = Server(make_pool(name))
    second.restore(3, tmp_path / "talk")
    copied, cached = second.generate((*tokens, *QUESTION), slot=1)
    assert cached == len(tokens) - 1
    again, cached = second.generate((*tokens, *QUESTION), slot=3)
    assert cached in (len(tokens) - 1, 96, 112, len(tokens) + len(QUESTION) - 1)  # recurrent states: multiples of 16
    assert [event.token for event in again] == [event.token for event in copied]
    short = (*tokens[:50], *QUESTION)
    found, _ = second.generate(short)
    alone, _ = Server(make_pool(name)).generate(short)
    assert [(event.token, event.logprob) for event in found] == [(event.token, event.logprob) for event in alone]


def test_a_file_of_hocket_run_is_restored_and_the_reverse(tmp_path: Path) -> None:
    name, prompt = "qwen35", list(prompt_of("qwen35"))
    session = Session(open_model(path_of(name)), context=CONTEXT, batch=BATCH)
    logits = session.evaluate([prompt])[0][-1]
    known = [*prompt, int(logits.argmax())]
    save_state(session, [known], tmp_path / "run")
    server = Server(make_pool(name))
    assert server.restore(0, tmp_path / "run") == len(prompt)
    events, cached = server.generate((*known, *QUESTION))
    assert cached == len(prompt)
    want = session.evaluate([[known[-1], *QUESTION]])[0][-1]
    assert events[0].token == int(want.argmax())
    tokens = server.save(0, tmp_path / "slot")
    other = Session(open_model(path_of(name)), context=CONTEXT, batch=BATCH)
    assert load_state(other, tmp_path / "slot") == [tokens]
    assert other.lengths == [len(tokens) - 1]


def make_block_pool(name: str, pool_tokens: int = 2 * CONTEXT) -> BlockSlotPool:
    session = Session(open_model(path_of(name)), on=DeviceGroup(threads=1))
    return BlockSlotPool(session, 3, pool_tokens=pool_tokens, context=CONTEXT, batch=BATCH)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_talk_is_restored_from_blocks_and_in_blocks(name: str, tmp_path: Path) -> None:
    """Blocks and regions have the same bits, so all four ways of a talk have the same tokens and probabilities."""
    results = []
    for saving in (make_block_pool, make_pool):
        first = Server(saving(name))
        answer = [event.token for event in first.generate(prompt_of(name), slot=1)[0]]
        tokens = first.save(1, tmp_path / "talk")
        assert tokens == [*prompt_of(name), *answer]
        for restoring in (make_block_pool, make_pool):
            second = Server(restoring(name))
            second.generate(prompt_of(name, 6), slot=2)
            assert second.restore(2, tmp_path / "talk") == len(tokens) - 1
            events, cached = second.generate((*tokens, *QUESTION))
            assert cached == len(tokens) - 1
            results.append([(event.token, event.logprob) for event in events])
    assert results[1:] == results[:1] * 3


def test_retained_slots_give_their_blocks_to_requests(tmp_path: Path) -> None:
    server = Server(make_block_pool("llama", CONTEXT))
    server.generate(prompt_of("llama"), slot=0)
    server.save(0, tmp_path / "talk")
    for seed in range(1, 5):  # each prompt has 96 tokens, of 256 in all
        server.generate(prompt_of("llama", seed), slot=1)
    with pytest.raises(ModelError, match="slot 0 has no tokens"):
        server.files.capture(0)
    with pytest.raises(ModelError, match="not a saved state of this model"):
        Server(make_block_pool("qwen35")).restore(0, tmp_path / "talk")
    assert server.restore(0, tmp_path / "talk") == 100
    assert server.files.erase(0) == 100
    server.engine.restart_and_requeue_requests((), "")
    pool = server.pool
    assert isinstance(pool, BlockSlotPool)
    assert pool.allocator.free_count == pool.allocator.usable_count


@pytest.mark.long
def test_layers_with_a_window_are_not_saved_from_blocks() -> None:
    server = Server(make_block_pool("gemma3"))
    server.generate(prompt_of("gemma3"), slot=0)
    with pytest.raises(ModelError, match="layers with an attention window cannot be saved from a pool of blocks"):
        server.files.capture(0)


def test_slot_files_are_checked(tmp_path: Path) -> None:
    server = Server(make_pool("qwen35"))
    with pytest.raises(ModelError, match="slot 2 has no tokens; send it a request first, with id_slot"):
        server.files.capture(2)
    server.generate(prompt_of("qwen35"), slot=0)
    server.save(0, tmp_path / "talk")
    with pytest.raises(ModelError, match="not a saved state of this model"):
        Server(make_pool("llama")).restore(0, tmp_path / "talk")
    with pytest.raises(ModelError, match="need more memory; start the server with a larger --cache-memory"):
        Server(make_pool("qwen35"), state_bytes=16).restore(0, tmp_path / "talk")
    with pytest.raises(ModelError, match="a state here has 100 at most"):
        read_state(tmp_path / "talk", 100)
    state = server.files.capture(0)
    short = type(state)({**state.header, "tokens": [[1, 2]]}, state.arrays)
    with pytest.raises(ModelError, match="has 2 of 100 tokens, as after a context shift"):
        server.files.restore(0, short, "talk")
    assert server.files.capture(0).header == state.header  # nothing was changed
    assert server.files.erase(0) == 100
    with pytest.raises(ModelError, match="slot 0 has no tokens"):
        server.files.capture(0)
    assert server.generate((*prompt_of("qwen35"), 3))[1] == 0


def damage_states(path: Path) -> dict[str, bytes]:
    """Return damaged copies of the file of a slot by the reason that its error has."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if "cache" in name)
    array = np.load(io.BytesIO(members[name]))

    def write(header: Mapping[str, object] | None = None, states: np.ndarray | None = None) -> bytes:
        file, own = io.BytesIO(), dict(members)
        if header is not None:
            text = json.loads(np.load(io.BytesIO(own["header.npy"])).tobytes()) | header
            own["header.npy"] = as_npy(np.frombuffer(json.dumps(text).encode(), np.uint8))
        if states is not None:
            own[name] = as_npy(states)
        with zipfile.ZipFile(file, "w") as archive:
            for each, content in own.items():
                archive.writestr(each, content)
        return file.getvalue()

    def with_number(number: float, dtype: type = array.dtype) -> np.ndarray:
        changed = array.astype(dtype)
        changed.flat[-1] = number
        return changed

    def as_npy(content: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.save(file, content)
        return file.getvalue()

    return {
        "holds NaN or infinite numbers": write(states=with_number(np.nan)),
        "holds NaN or infinite numbers)": write(states=with_number(-np.inf)),
        "too large for F16": write(states=with_number(1e30, np.float32)),
        "is no array of float32 or float16": write(states=array.astype(np.float64)),
        "other names or shapes": write(states=array[:-1]),
        "its format is not": write({"format": "hocket-state-1"}),
        "of another model": write({"model": "0" * 64}),
        "its lengths are no counts": write({"lengths": [1.5]}),
        "of 100000 tokens": write({"lengths": [100_000]}),
    }


@pytest.mark.parametrize("make", [make_pool, make_block_pool], ids=["regions", "blocks"])
def test_a_damaged_file_changes_no_slot(make: Callable[[str], SlotPool], tmp_path: Path) -> None:
    """A slot of a pool of blocks had lost its contents."""
    server = Server(make("qwen35"))
    server.generate(prompt_of("qwen35"), slot=0)
    tokens, path = server.save(0, tmp_path / "talk"), tmp_path / "damaged"
    before = server.files.capture(0)
    for reason, data in damage_states(tmp_path / "talk").items():
        path.write_bytes(data)
        with pytest.raises(ModelError, match=re.escape(reason)) as caught:
            server.restore(0, path)
        assert str(caught.value).isprintable()
    again = server.files.capture(0)
    assert again.header == before.header
    assert all(np.array_equal(again.arrays[name], array) for name, array in before.arrays.items())
    assert server.restore(0, tmp_path / "talk") == len(tokens) - 1


@pytest.mark.long
def test_a_file_that_ends_at_any_byte_is_one_line(tmp_path: Path) -> None:
    server = Server(make_pool("qwen35"))
    server.generate((3, 4, 5), slot=0)
    server.save(0, tmp_path / "talk")
    data, path = (tmp_path / "talk").read_bytes(), tmp_path / "cut"
    structure = {at + i for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6") for at in find_all(data, mark) for i in range(9)}
    for length in sorted({*structure, *range(0, len(data), 997), *range(len(data) - 60, len(data))}):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="not a saved state of this model") as caught:
            read_state(path, len(data))
        assert str(caught.value).isprintable()


def find_all(data: bytes, mark: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(mark), data)]


@pytest.mark.parametrize("make", [make_pool, make_block_pool], ids=["regions", "blocks"])
def test_a_restore_that_fails_in_the_device_leaves_an_empty_slot(
    make: Callable[[str], SlotPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later prompts had gone on from tokens that were overwritten in part."""
    server = Server(make("llama"))
    alone, _ = server.generate((*prompt_of("llama"), 3), slot=1)
    server.generate(prompt_of("llama"), slot=0)
    server.save(0, tmp_path / "talk")
    restore = saved_state._restore_state

    def fail(*operands: Any) -> None:
        restore(*operands)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(saved_state, "_restore_state", fail)
    with pytest.raises(RuntimeError):
        server.restore(0, tmp_path / "talk")
    with pytest.raises(ModelError, match="slot 0 has no tokens"):
        server.files.capture(0)
    assert server.generate((*prompt_of("llama"), 3), slot=0)[0] == [replace(event, request="3") for event in alone]


def test_a_request_waits_for_the_slot_that_it_names() -> None:
    server = Server(make_pool("llama"))
    params = GenerationParams(3, Sampling(), 1, frozenset())
    for i in range(3):
        server.engine.submit(GenerationRequest(f"r{i}", prompt_of("llama", i), params, slot=1))
    server.engine.submit(GenerationRequest("free", prompt_of("llama", 9), params))
    events = run_all(server.engine)
    assert {end_of(events, f"r{i}").timing.slot for i in range(3)} == {1}
    assert end_of(events, "free").timing.slot != 1
    assert len(tokens_of(events, "r2")) == 3
