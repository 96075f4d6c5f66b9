"""The kit's own test: the cases of an op that every run tries name each bug that is planted into a correct backend."""

from __future__ import annotations

import re

import pytest

from hocket.backends.base import Device
from hocket.conformance import Outcome, run_case
from hocket.ops import REGISTRY

from ..given.kernel_faults import FAULTS
from ..given.kernel_faults.covering_cases import choose_covering_cases
from ..given.kernel_faults.site import FaultyBackend, KernelFault

DEVICE = Device("cpu", 0)


def test_no_fault_is_planted_twice():
    assert len({str(f) for f in FAULTS}) == len(FAULTS)


@pytest.mark.nightly(cases=67)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: KernelFault):
    backend, cases = FaultyBackend(fault), choose_covering_cases(REGISTRY[fault.op])
    for case in cases:
        result = run_case(case, backend, DEVICE)
        found = result.outcome is Outcome.FAIL and re.search(fault.symptom, result.why)
        if found and not _fails_anyway(case):
            assert backend.broken is None, f"the fault itself does not run on {case}: {backend.broken!r}"
            return
    pytest.fail(f"{fault} was not found in {len(cases)} cases")


def _fails_anyway(case) -> bool:
    """Whether the case fails without the fault too, so that it shows nothing."""
    from hocket.backends.numpy.backend import NumpyBackend

    return run_case(case, NumpyBackend(), DEVICE).outcome is Outcome.FAIL
