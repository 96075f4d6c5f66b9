"""Sessions: sequences side by side, prefill in pieces, resets, full contexts, plans that are used again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hocket.frontends.errors import ModelError
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, LoadProgress, Session
from hocket.frontends.models import Model
from hocket.frontends.open_model import choose_context, open_model
from hocket.graph import DType

from ...given.models.goldens import DENSE, FLOAT_CACHES, INDEX, nmse, path_of, tokens_of


def noise(name: str) -> float:
    """Return the NMSE limit of float32 results that differ only in the order of additions: four times float32's error.

    Random weights amplify rounding; mistakes show as 1e-6 and more. Equality in float64 is tested with the models.
    """
    return 4 * float(INDEX[name]["nmse_float32"])


def open_with_tokens(name: str) -> tuple[Model, list[int]]:
    tokens = tokens_of(name)
    return open_model(path_of(name)), tokens


FAST, EXACT = DeviceGroup(**FLOAT_CACHES), DeviceGroup(exact=True)


def alone(model: Model, tokens: list[int], on: DeviceGroup = FAST) -> npt.NDArray[np.float32]:
    return Session(model, on=on).evaluate([tokens], every_position=True)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_sequences_of_different_length_in_one_batch_equal_each_alone(name: str) -> None:
    model, tokens = open_with_tokens(name)
    texts = [tokens[:23], tokens[10:17]]
    both = Session(model, on=FAST, sequences=2).evaluate(texts, every_position=True)
    for got, text in zip(both, texts, strict=True):
        assert nmse(got, alone(model, text)) <= noise(name)


@pytest.mark.long
def test_sequences_of_the_embedded_model_side_by_side_equal_each_alone() -> None:
    model = open_model(None)
    texts = [list(range(300, 340)), list(range(700, 711))]
    both = Session(model, on=EXACT, sequences=2, batch=16).evaluate(texts, every_position=True)
    for got, text in zip(both, texts, strict=True):
        assert nmse(got, alone(model, text, EXACT)) <= 1e-12


@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_may_join_later_and_another_idle(name: str) -> None:
    model, tokens = open_with_tokens(name)
    session = Session(model, on=FAST, sequences=2)
    first, nothing = session.evaluate([tokens[:9], []], every_position=True)
    assert nothing.shape == (0, model.vocabulary_size)
    second, joined = session.evaluate([tokens[9:10], tokens[3:15]], every_position=True)
    idle, last = session.evaluate([[], tokens[15:17]])
    assert len(idle) == 0
    assert session.lengths == [10, 14]
    assert nmse(np.concatenate([first, second]), alone(model, tokens[:10])) <= noise(name)
    want = alone(model, tokens[3:17])
    assert nmse(joined, want[:12]) <= noise(name)
    assert nmse(last, want[-1:]) <= noise(name)


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_prefill_in_pieces_equals_one_batch(name: str) -> None:
    model, tokens = open_with_tokens(name)
    session = Session(model, on=FAST, batch=8)
    assert nmse(session.evaluate([tokens[:29]], every_position=True)[0], alone(model, tokens[:29])) <= noise(name)
    session.reset(0)
    assert nmse(session.evaluate([tokens[:29]])[0], alone(model, tokens[:29])[-1:]) <= noise(name)
    assert all(step.tokens <= 8 for step in session.planned_steps)


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_a_reset_sequence_starts_anew_and_its_neighbour_goes_on(name: str) -> None:
    model, tokens = open_with_tokens(name)
    session = Session(model, on=FAST, sequences=2)
    session.evaluate([tokens[:12], tokens[20:30]])
    session.reset(0)
    assert session.lengths == [0, 10]
    anew, onward = session.evaluate([tokens[5:9], tokens[30:31]], every_position=True)
    assert nmse(anew, alone(model, tokens[5:9])) <= noise(name)
    assert nmse(onward, alone(model, tokens[20:31])[-1:]) <= noise(name)


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_full_context_is_an_error_that_leaves_the_session_as_it_was(name: str) -> None:
    model, tokens = open_with_tokens(name)
    session = Session(model, on=FAST, context=16)
    session.evaluate([tokens[:10]])
    with pytest.raises(
        ModelError, match=r"would have 17 tokens, but the context holds 16.*context=N.*context_shift=True"
    ):
        session.evaluate([tokens[10:17]])
    assert session.lengths == [10]
    assert nmse(session.evaluate([tokens[10:16]], every_position=True)[0], alone(model, tokens[:16])[10:]) <= noise(
        name
    )
    assert session.lengths == [16]


@pytest.mark.long
def test_plans_are_built_once_for_each_bucket() -> None:
    model = open_model(None)
    session = Session(model, on=FAST)
    session.evaluate([list(range(100, 113))])
    for _ in range(14):
        session.evaluate([list(range(16))])
    for token in range(30):
        session.evaluate([[token]])
    # A prefill of up to 16 tokens, and single tokens within the first 256 and within all 512 cells.
    assert [(s.tokens, s.cells, s.outputs) for s in session.planned_steps] == [(16, 256, 1), (1, 256, 1), (1, 512, 1)]
    one = session.executor(session.planned_steps[1])
    session.reset(0)
    session.evaluate([list(range(9))])
    session.evaluate([[7]])
    assert len(session.planned_steps) == 3
    assert session.executor(session.planned_steps[1]) is one


def test_loading_tells_its_progress_up_to_the_last_byte() -> None:
    reports: list[LoadProgress] = []
    model = open_model(None)
    Session(model, on_progress=reports.append)
    total = sum(tensor.nbytes for tensor in model.gguf.tensors.values())
    assert [p.loaded_bytes for p in reports] == sorted(p.loaded_bytes for p in reports)
    assert reports[-1] == LoadProgress(total, total)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"sequences": 0}, "sequences is 0"),
        ({"context": 0}, "context is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"context": 513}, "the model was trained for 512"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(flags: dict[str, int], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Session(open_model(None), **flags)  # type: ignore[arg-type]


def test_tokens_for_another_number_of_sequences_are_refused() -> None:
    with pytest.raises(ModelError, match="sequences: got tokens for 2, the session has 1"):
        Session(open_model(None)).evaluate([[1], [2]])


def test_the_context_is_chosen_before_the_weights_are_loaded() -> None:
    model = open_model(None, header_only=True)
    assert choose_context(model, 10, None) == 512
    assert choose_context(model, 10, None, default=64) == 64
    assert choose_context(model, 10, 20) == 20
    with pytest.raises(ModelError, match="the context holds 20; shorten it or give a larger context=N"):
        choose_context(model, 21, 20)
    with pytest.raises(ModelError, match=r"but the context holds 512; shorten it$"):
        choose_context(model, 513, None)


def test_caches_are_of_16_bits_unless_asked_for_or_exact(tmp_path: Path) -> None:
    """Check that a saved state changes between the formats: every 16-bit value fits into 32 bits."""
    model, tokens = open_with_tokens("llama")
    halves, floats = Session(model), Session(model, on=FAST)
    assert [s.store.count_bytes_by_kind()[0]["state"] for s in (halves, floats)] == [
        n := halves.store.count_bytes_by_kind()[0]["state"],
        2 * n,
    ]
    assert DeviceGroup(exact=True).cache_dtypes == FAST.cache_dtypes == (DType.F32, DType.F32)
    assert DeviceGroup(cache_type_v="bf16").cache_dtypes == (DType.F16, DType.BF16)
    want = floats.evaluate([tokens[:12]], every_position=True)[0]
    assert 0 < nmse(halves.evaluate([tokens[:12]], every_position=True)[0], want) <= 1e-5
    save_state(halves, [tokens[:12]], tmp_path / "state")
    floats.reset(0)
    load_state(floats, tmp_path / "state")
    cache_rows = [np.array(s.store.state("cache_k.0"), np.float32)[:12] for s in (halves, floats)]
    assert np.array_equal(*cache_rows)
    assert nmse(floats.evaluate([[7]])[0], halves.evaluate([[7]])[0]) <= 1e-5
    with pytest.raises(ModelError, match=r"cache_type_k is 'q9'.*f32 or f16 or bf16"):
        DeviceGroup(cache_type_k="q9")
