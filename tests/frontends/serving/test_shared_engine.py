"""Threads that share a model: their steps are one batch, and each text is the one of a thread alone."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest

import pytest

import hocket
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.inference import session as sessions
from hocket.frontends.inference.session_lease import IdleSessions
from hocket.frontends.serving import engine, shared_engine, slots
from hocket.frontends.serving.shared_engine import (
    MAX_AHEAD_TOKENS,
    MAX_HALF_WINDOW,
    MAX_IDLE_SLOTS,
    MAX_WINDOW,
    MIN_SHRINK_RATIO,
)
from hocket.frontends.serving.slots import SlotPool
from hocket.frontends.serving.step_runner import MAX_RESTARTS
from hocket.graph.errors import StatesLostError
from hocket.scheduler.runtime.rollback_log import RollbackLog

THREADS, CONTEXT, NEW_TOKENS = 8, 128, 12
PROMPTS = tuple(
    f"{start} {'of the ' * (number % 5)}" for number, start in enumerate(["It is", "She was", "On", "Mr."] * 4)
)
"""Prompts of different lengths."""
SHORT_GREEDY = {"max_tokens": NEW_TOKENS, "temperature": 0}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def open_model() -> hocket.Model:
    return hocket.Model(context=CONTEXT, threads=1)


@pytest.fixture(scope="module")
def shared_model() -> Iterator[hocket.Model]:
    with open_model() as loaded_model:
        yield loaded_model


@pytest.fixture(scope="module")
def texts_alone() -> list[str]:
    """The text of each prompt from a model that no other thread uses."""
    with open_model() as alone:
        return ["".join(alone.generate(prompt, **SHORT_GREEDY)) for prompt in PROMPTS]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each decode step adds its number of sequences."""
    sizes: list[int] = []
    decode = SlotPool.decode

    def decode_and_record(pool, tokens, before):
        sizes.append(len(tokens))
        return decode(pool, tokens, before)

    monkeypatch.setattr(SlotPool, "decode", decode_and_record)
    return sizes


def run_at_once(work: Callable[[int], object], count: int = THREADS) -> list[object]:
    """Return the results of `work` in threads that begin together."""
    start = threading.Barrier(count)

    def begin(number: int) -> object:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [SHORT_GREEDY, {**SHORT_GREEDY, "temperature": 1.5, "seed": 5}], ids=["greedy", "sampled"]
)
def test_eight_threads_get_the_tokens_of_one_thread_in_common_steps(shared_model, windows, options):
    with open_model() as alone:
        expected = [[token.id for token in alone.tokens(prompt, **options)] for prompt in PROMPTS]
    assert set(windows) == {1}
    windows.clear()

    def work(number: int) -> list[list[int]]:
        return [[token.id for token in shared_model.tokens(prompt, **options)] for prompt in PROMPTS[number::THREADS]]

    found = run_at_once(work)
    assert [ids for number in range(THREADS) for ids in found[number]] == [
        ids for number in range(THREADS) for ids in expected[number::THREADS]
    ]
    assert MAX_HALF_WINDOW < max(windows) <= MAX_WINDOW  # the embedded model has F32 matrices, but no F16 ones
    assert len(windows) < len(PROMPTS) * (NEW_TOKENS - 1)


@pytest.mark.long
def test_chats_and_texts_with_stop_strings_join(shared_model):
    with open_model() as alone:
        text = "".join(alone.generate(PROMPTS[0], **SHORT_GREEDY))
        chat = "".join(alone.chat("It is", chat_template=TEMPLATE, **SHORT_GREEDY))

    def work(number: int) -> str:
        if number % 2:
            return "".join(shared_model.chat("It is", chat_template=TEMPLATE, **SHORT_GREEDY))
        return "".join(shared_model.generate(PROMPTS[0], stop=text[5:8], **SHORT_GREEDY))

    assert run_at_once(work) == [text[: text.index(text[5:8])], chat] * (THREADS // 2)


@pytest.mark.long
def test_generators_that_are_read_in_turn_run_in_common_steps(texts_alone, windows):
    with open_model() as model:
        turns = zip_longest(*(model.generate(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:3]), fillvalue="")
        assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == texts_alone[:3]
    assert max(windows) == 3


def test_a_request_runs_only_a_few_tokens_ahead_of_its_reader(windows):
    with open_model() as model:
        slow, fast = (model.tokens(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:2])
        next(slow)
        assert len(list(fast)) == NEW_TOKENS
        assert max(windows) == 2
        assert sum(windows) == MAX_AHEAD_TOKENS + NEW_TOKENS - 1  # the first tokens come from the prompts


def test_an_error_ends_the_text_of_its_thread_only(shared_model, texts_alone):
    def work(number: int) -> object:
        try:
            if number == 3:
                return list(shared_model.generate([10**9], **SHORT_GREEDY))
            if number == 5:
                return list(
                    shared_model.generate(
                        PROMPTS[5], bias=[(token, -float("inf")) for token in range(2048)], **SHORT_GREEDY
                    )
                )
            return "".join(shared_model.generate(PROMPTS[number], **SHORT_GREEDY))
        except hocket.ModelError as error:
            return str(error)

    found = run_at_once(work)
    assert "need 0 to 2047" in found[3]
    assert "-inf for every token that may come next" in found[5]
    for number in {*range(THREADS)} - {3, 5}:
        assert found[number] == texts_alone[number]


@pytest.mark.parametrize("moment", ["run", "compilation"])
def test_an_interrupt_ends_the_text_of_the_main_thread_only(texts_alone, monkeypatch, moment):
    """Half of a run would leave states that do not fit the tokens; compilation leaves nothing."""
    is_interrupted = False

    def interrupt_once() -> None:
        nonlocal is_interrupted
        if threading.current_thread() is threading.main_thread() and not is_interrupted:
            is_interrupted = True
            signal.raise_signal(signal.SIGINT)
            assert moment == "run", "the interrupt waited"

    place, name = (SlotPool, "decode") if moment == "run" else (sessions, "Executor")
    call = getattr(place, name)

    def interrupt_and_call(*args, **options):
        interrupt_once()
        return call(*args, **options)

    with open_model() as model, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(place, name, interrupt_and_call)
        own = model.tokens(PROMPTS[0], **SHORT_GREEDY)
        with pytest.raises(KeyboardInterrupt):
            list(own)
        assert is_interrupted
        others = [
            pool.submit(lambda prompt=prompt: "".join(model.generate(prompt, **SHORT_GREEDY)))
            for prompt in PROMPTS[1:3]
        ]
        assert "".join(model.generate(PROMPTS[0], **SHORT_GREEDY)) == texts_alone[0]
        assert [other.result() for other in others] == texts_alone[1:3]


def test_an_interrupt_beside_other_threads_ends_none_of_their_texts(shared_model, texts_alone, monkeypatch):
    decode, left = SlotPool.decode, iter(range(1000))

    def interrupt_third(pool, tokens, before):
        if threading.current_thread() is threading.main_thread() and next(left) == 2:
            signal.raise_signal(signal.SIGINT)
        return decode(pool, tokens, before)

    monkeypatch.setattr(SlotPool, "decode", interrupt_third)
    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(lambda p=p: "".join(shared_model.generate(p, **SHORT_GREEDY))) for p in (PROMPTS[4], PROMPTS[6])
        ]
        with pytest.raises(KeyboardInterrupt):
            list(chain.from_iterable(shared_model.generate(PROMPTS[0], **SHORT_GREEDY) for _ in range(1000)))
        assert [other.result() for other in others] == [texts_alone[4], texts_alone[6]]


def test_a_second_interrupt_within_a_step_ends_the_other_texts_with_an_error(texts_alone, monkeypatch):
    """It may come between the removal of a token and the next one; the text would then wait for ever."""
    choose, prompts, last_errors = engine.choose_token, [], list[str]()

    def interrupt_twice(one, logits):
        if one.request.prompt not in prompts:
            prompts.append(one.request.prompt)
        elif len(prompts) == 2 and one.request.prompt == prompts[0]:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return choose(one, logits)

    def read_rest() -> None:
        try:
            list(second)
        except hocket.ModelError as error:
            last_errors.append(str(error))

    with open_model() as model:
        second, first = (model.tokens(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:2])
        next(second)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "choose_token", interrupt_twice)
            with pytest.raises(KeyboardInterrupt):
                list(first)
        reader = threading.Thread(target=read_rest, daemon=True)
        reader.start()
        reader.join(20)
        assert not reader.is_alive()
        assert "a step of another thread failed: KeyboardInterrupt" in last_errors[0]
        assert "".join(model.generate(PROMPTS[0], **SHORT_GREEDY)) == texts_alone[0]


@pytest.mark.long
def test_a_garbage_collection_may_end_requests_at_any_moment(shared_model):
    """It closes generators of a reference cycle; a step had failed if it began within the list of the requests."""
    thresholds = gc.get_threshold()
    try:
        for threshold in range(1, 40):
            turns = [shared_model.tokens(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:3]]
            assert all(map(next, turns))
            gc.disable()
            gc.collect()  # the next one comes after `threshold` further objects
            left, cycle = turns.pop(), [turns]
            cycle.append(cycle)
            del turns, cycle
            gc.set_threshold(threshold)
            gc.enable()
            assert len(list(left)) == NEW_TOKENS - 1
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_a_fault_in_a_step_is_reported_to_all_its_threads_and_later_calls_work(texts_alone, monkeypatch):
    with open_model() as model:
        first, second = (model.tokens(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:2])
        next(first)
        next(second)
        with monkeypatch.context() as patch:
            patch.setattr(SlotPool, "decode", lambda *args: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                list(first)
        with pytest.raises(hocket.ModelError, match="a step of another thread failed: ZeroDivisionError"):
            list(second)
        assert "".join(model.generate(PROMPTS[0], **SHORT_GREEDY)) == texts_alone[0]


def test_a_text_that_needs_more_memory_than_there_is_ends_alone(texts_alone, monkeypatch):
    def refuse(like, count):
        raise hocket.ModelError("the devices have 1 GiB")

    with open_model() as model:
        first = model.generate(PROMPTS[0], **SHORT_GREEDY)
        start = next(first)
        monkeypatch.setattr(slots, "require_slot_memory", refuse)
        with pytest.raises(hocket.ModelError, match=r"2 texts at once need more memory; .*1 GiB"):
            next(model.generate(PROMPTS[1], **SHORT_GREEDY))
        assert start + "".join(first) == texts_alone[0]


@pytest.mark.long
def test_a_full_context_is_an_error_unless_the_text_has_no_limit():
    with hocket.Model(context=16, threads=1) as model:
        prompt = [5, 6, 7, 8]
        assert len(list(model.tokens(prompt, max_tokens=-1, ignore_eos=True))) == 13  # the last one needs no cell
        with pytest.raises(hocket.ModelError, match="context of 16 tokens is full after 13 new ones"):
            list(model.tokens(prompt, max_tokens=14, ignore_eos=True))
        assert len(list(model.tokens([5] * 16, max_tokens=1, ignore_eos=True))) == 1


def test_the_last_text_is_saved_unless_its_states_are_overwritten(texts_alone, tmp_path):
    with open_model() as model:
        pieces = model.tokens(PROMPTS[0], **SHORT_GREEDY)
        begun = [next(pieces).id for _ in range(3)]
        pieces.close()
        model.save(tmp_path / "talk")
        ids = model.load(tmp_path / "talk")
        assert ids == [*model.tokenize(PROMPTS[0]), *begun]
        rest = [token.id for token in model.tokens(ids, **{**SHORT_GREEDY, "max_tokens": NEW_TOKENS - 3})]
        assert model.detokenize([*begun, *rest]) == texts_alone[0]
        model.save(tmp_path / "longer")
        assert model.load(tmp_path / "longer") == [*ids, *rest]
        list(model.generate(PROMPTS[1], **SHORT_GREEDY))
        running = model.generate(PROMPTS[2], **SHORT_GREEDY)
        next(running)
        with pytest.raises(hocket.ModelError, match="another call uses the states of the last call"):
            model.save(tmp_path / "gone")


def test_a_model_with_one_reader_has_the_states_of_one_sequence():
    with open_model() as model:
        before = model.memory["cpu:0"]["state"]
        list(model.generate(PROMPTS[0], **SHORT_GREEDY))
        assert model.memory["cpu:0"]["state"] == before
        turns = [model.generate(prompt, **SHORT_GREEDY) for prompt in PROMPTS[:2]]
        assert all(map(next, turns))
        assert model.memory["cpu:0"]["state"] >= 2 * before


@pytest.mark.long
def test_calls_on_pipelined_devices_have_sessions_of_their_own(monkeypatch):
    monkeypatch.setattr(shared_engine, "count_useful_pipeline_stages", lambda plan: len(plan.device_plans))
    with hocket.Model(context=CONTEXT, devices="cpu:0,cpu:1", split_mode="layer", threads=1) as model:
        assert len(list(model.tokens(PROMPTS[0], **SHORT_GREEDY))) == NEW_TOKENS
        assert model._shared_engine is None


@pytest.mark.long
def test_threads_join_on_devices_that_share_each_matrix():
    with hocket.Model(context=CONTEXT, devices="cpu:0,cpu:1", split_mode="tensor", exact=True) as model:
        expected = ["".join(model.generate(prompt, **SHORT_GREEDY)) for prompt in PROMPTS[:2]]
        assert run_at_once(lambda number: "".join(model.generate(PROMPTS[number], **SHORT_GREEDY)), 2) == expected
        assert model._shared_engine is not None


def test_a_model_that_is_closed_as_a_text_begins_opens_no_engine(monkeypatch):
    """The engine had kept the states of a closed model in memory."""
    with open_model() as model:
        monkeypatch.setattr(IdleSessions, "idle_leases", property(lambda idle: model.close() or []))
        with pytest.raises(hocket.ModelError, match="the model is closed"):
            next(model.generate(PROMPTS[0], **SHORT_GREEDY))
        assert model._shared_engine is None


@pytest.mark.long
def test_memory_shrinks_after_texts_have_ended(texts_alone):
    """The texts that go on, and later ones, are the same."""
    with open_model() as model:
        first = model.generate(PROMPTS[1], **SHORT_GREEDY)
        begun = next(first)
        suspended = [
            model.generate(f"{number} times", **SHORT_GREEDY) for number in range(MIN_SHRINK_RATIO * MAX_IDLE_SLOTS)
        ]
        for text in suspended:
            next(text)
        pool = model._shared_engine._pool
        assert pool.slots == 2 * MIN_SHRINK_RATIO * MAX_IDLE_SLOTS
        state_bytes = sum(kinds["state"] for kinds in model.memory.values())
        for text in suspended:
            text.close()
        assert begun + "".join(first) == texts_alone[1]
        for number in (0, 2, 3):
            assert "".join(model.generate(PROMPTS[number], **SHORT_GREEDY)) == texts_alone[number]
        assert pool.slots == MAX_IDLE_SLOTS
        assert sum(kinds["state"] for kinds in model.memory.values()) < state_bytes / 4


@pytest.mark.long
def test_texts_go_on_after_a_step_that_cannot_be_undone(
    texts_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that begins undoes the launched step of another one. Without a restart, the undo would end both."""
    monkeypatch.setattr(CpuBackend, "has_separate_memory", True, raising=False)
    undo, failures = RollbackLog.undo_last_run.func, list[object]()

    def fail_once(log: RollbackLog) -> Callable[[], object]:
        if failures:
            return undo(log)
        failures.append(log)
        raise OSError("no power")

    monkeypatch.setattr(RollbackLog, "undo_last_run", property(fail_once))
    with open_model() as model:
        first = model.generate(PROMPTS[0], **SHORT_GREEDY)
        begun = [next(first) for _ in range(3)]
        assert "".join(model.generate(PROMPTS[1], **SHORT_GREEDY)) == texts_alone[1]
        assert "".join([*begun, *first]) == texts_alone[0]
        assert failures


@pytest.mark.parametrize("loser", ["step", "second text"])
def test_memory_to_which_a_device_may_still_write_ends_the_engine(texts_alone: list[str], loser: str) -> None:
    with open_model() as model:
        first = model.generate(PROMPTS[0], **SHORT_GREEDY)
        next(first)
        store = model._shared_engine.session.store
        store.lost_states.record(
            StatesLostError("cpu:1 does not stop: states are lost, load anew", can_begin_anew=False)
        )
        text = first if loser == "step" else model.generate(PROMPTS[1], **SHORT_GREEDY)
        with pytest.raises(StatesLostError, match=r"cpu:1 does not stop: states are lost, load anew\)$"):
            "".join(text)
        assert "".join(model.generate(PROMPTS[2], **SHORT_GREEDY)) == texts_alone[2]
        assert model._shared_engine.session.store is not store


def test_an_engine_that_loses_its_states_again_and_again_ends(
    texts_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[StatesLostError] = []

    def lose(*args: object) -> None:
        losses.append(StatesLostError("no power", is_of_earlier_run=True))
        raise losses[-1]

    with open_model() as model:
        with monkeypatch.context() as patch:
            patch.setattr(engine.Engine, "step", lose)
            with pytest.raises(StatesLostError, match="no power"):
                "".join(model.generate(PROMPTS[0], **SHORT_GREEDY))
        assert len(losses) == MAX_RESTARTS + 1
        assert "".join(model.generate(PROMPTS[0], **SHORT_GREEDY)) == texts_alone[0]
