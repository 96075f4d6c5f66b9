"""A trait that is forgotten in the table of architectures fails the test of a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.frontends.models import ARCHITECTURES

from ...given.models.architectures import write_model
from ...given.models.trait_faults import PLANTED, Fault, architecture, faults, is_noticed

CASES = [(model, trait) for trait, models in PLANTED.items() for model in models]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(("model", "trait"), CASES, ids=[f"{model}-{trait}" for model, trait in CASES])
def test_a_trait_that_is_forgotten_is_noticed(model: str, trait: str, tmp_path: Path) -> None:
    write_model(model, tmp_path)
    (fault,) = (fault for fault in faults(model) if fault.trait == trait)
    assert is_noticed(fault, tmp_path)


def test_a_row_as_it_is_passes_where_faults_are_noticed(tmp_path: Path) -> None:
    for model in ("bloom-dense", "glm4-dense", "qwen4exp-moe"):
        write_model(model, tmp_path)
        assert not is_noticed(Fault(model, "nothing", ARCHITECTURES[architecture(model)]), tmp_path)
