"""The choice of slots that get drafts: by predicted times and measured acceptance, with trials that become rare."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model
from hocket.frontends.serving.drafting.draft_choice import MAX_PAUSE, DraftSlotChooser, compute_break_even_acceptance
from hocket.frontends.serving.drafting.drafting_pool import DraftingSlotPool
from hocket.frontends.serving.drafting.model_drafter import ModelSlotDrafter
from hocket.frontends.serving.drafting.mtp_drafter import MtpSlotDrafter
from hocket.frontends.serving.slots import SlotPool

from ....given.models.goldens import TINY, path_of
from ....given.models.rewritten import with_blocks_ahead
from ....given.serving.engine_runs import BATCH, CONTEXT


def test_the_break_even_acceptance_makes_both_kinds_of_step_equally_fast() -> None:
    plain, verify, draft = 4.0, 5.0, 2.0
    accepted = compute_break_even_acceptance(plain, verify, draft)
    assert (1 + accepted) / (verify + draft) == 1 / plain


def test_drafts_that_can_never_pay_are_never_tried() -> None:
    choice = DraftSlotChooser(2, 3)
    assert all(choice.choose_slots([0, 1], 3.0) == [] for _ in range(2 * MAX_PAUSE))
    assert choice.choose_slots([0, 1], 2.9) == [0, 1]


def test_a_slot_whose_drafts_do_not_pay_pauses_and_is_tried_again() -> None:
    choice, drafted = DraftSlotChooser(1, 3), list[int]()
    for token in range(3 * MAX_PAUSE):
        if choice.choose_slots([0], 1.5):
            choice.record_accepted_tokens(0, 1)  # right ones, but too few
            drafted.append(token)
    gaps = [b - a for a, b in pairwise(drafted)]
    first_pause = gaps.index(MAX_PAUSE + 2)
    assert gaps[:first_pause] == [1] * first_pause
    assert first_pause < 9
    assert gaps[first_pause + 1 :].count(MAX_PAUSE + 2) >= 1


def test_a_slot_whose_drafts_pay_goes_on() -> None:
    choice = DraftSlotChooser(1, 3)
    for _ in range(100):
        assert choice.choose_slots([0], 1.5) == [0]
        choice.record_accepted_tokens(0, 2)


def test_the_gain_of_some_slots_must_pay_for_all_slots_of_a_step() -> None:
    """A step with drafts delays all slots, also those without drafts."""
    choice = DraftSlotChooser(4, 3)
    for slot in (1, 2, 3):
        choice.record_accepted_tokens(slot, 0)
        choice.record_accepted_tokens(slot, 0)
    assert choice.choose_slots([0, 1, 2, 3], 1.0) == []
    assert choice.choose_slots([0, 1], 1.0) == [0]


def test_a_new_text_in_a_slot_is_tried_at_once() -> None:
    choice = DraftSlotChooser(1, 3)
    choice.record_accepted_tokens(0, 0)
    assert choice.choose_slots([0], 0.5) == []
    choice.forget_slot(0)
    assert choice.choose_slots([0], 0.5) == [0]


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["mtp", "model"])
def test_plans_predict_when_drafts_pay(drafter: str, tmp_path: Path) -> None:
    """An MTP block takes a part of the time of the model; a draft model as large as the model takes all of it."""
    group = DeviceGroup(threads=1)
    if drafter == "mtp":
        model = with_blocks_ahead(tmp_path / "ahead.gguf", Path(TINY), 30.0).with_mtp_blocks()
        pool = DraftingSlotPool(
            Session(model, on=group, context=CONTEXT),
            4,
            context=CONTEXT,
            batch=BATCH,
            make_drafter=lambda pool: MtpSlotDrafter(pool, 3),
        )
        assert 0 < pool.predict_break_even_acceptance(1, 50) < 3
    else:
        root, small = (Session(open_model(path_of("llama")), on=group, context=CONTEXT) for _ in range(2))
        own = SlotPool(small, 4, context=CONTEXT, batch=BATCH)
        pool = DraftingSlotPool(
            root, 4, context=CONTEXT, batch=BATCH, make_drafter=lambda pool: ModelSlotDrafter(own, 3)
        )
        assert pool.predict_break_even_acceptance(1, 50) >= 3
        pool.compile_short_steps()
        steps = [step for window in own._windows.values() for step in window.planned_steps]
        assert not any(step.tokens == 4 for step in steps)  # steps with drafts are not compiled
    longer = pool.predict_break_even_acceptance(4, 50)
    assert longer > 0
    assert pool.predict_break_even_acceptance(4, 60) == longer
