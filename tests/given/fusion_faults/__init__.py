"""Faults of fused kernels. They were written from the definition of the records alone, before a look at the verifier.

Each changes a correct description so that it computes other numbers, runs in an illegal order, or cannot be evaluated.
The faults of `gaps` passed the verifier at first.
"""

from __future__ import annotations

from .boxes import BOX_FAULTS
from .fault import FusionFault
from .gaps import GAP_FAULTS
from .order import ORDER_FAULTS
from .results import RESULT_FAULTS
from .rows import ROW_FAULTS
from .steps import STEP_FAULTS
from .views import VIEW_FAULTS

FUSION_FAULTS: tuple[FusionFault, ...] = (
    *STEP_FAULTS,
    *ROW_FAULTS,
    *VIEW_FAULTS,
    *BOX_FAULTS,
    *RESULT_FAULTS,
    *ORDER_FAULTS,
    *GAP_FAULTS,
)
