"""Plans for 10, 20 and 30 minutes on a GPU: parts of the benchmark and some of their cases, in order.

The first steps answer the questions of issue 51: other libraries in the same run, decode, prompts, attention and the
delta net. Each longer plan continues the shorter one, so that a run of 10 minutes can become one of 30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RESERVED_SECONDS = 30.0
"""Seconds of a plan that are kept for the start of processes and for the files."""


@dataclass(frozen=True)
class PlanStep:
    """A part of the benchmark with a share of the time.

    `cases` is a regular expression that is searched in the titles of the cases; the empty one selects all of them.
    A case that has ended in an earlier step of the part is not run again.
    """

    part: str
    seconds: float
    cases: str = ""


_FIRST_STEPS = (
    PlanStep("device", 25),
    PlanStep("peers", 60, r"^versions|^PyTorch"),
    PlanStep("attention", 45, r"^(32 heads on 8 of 128|16 heads on 4 of 256), (2048|8192) tokens, f16"),
    PlanStep("products", 60, r"^q4_K (9216|2560|8192)×|^q6_K 2|^bf16 18432×2560|^q4_K 4096×4096, (1|4096) token"),
    PlanStep("candidates", 40),
    PlanStep("models", 130, r"4B"),
    PlanStep("delta-prefill", 40, r"^16/32×128, (2048|8192) tokens"),
    PlanStep("delta-decode", 20, r"^16/32×128, batch (1|64)$"),
    PlanStep("peers", 80, r"^flash-linear-attention, (8192 tokens|1 token, batch 1$)"),
    PlanStep("sharded", 30, r"^2 divided parts|^(collectives|an absent device), 2 divided"),
    PlanStep("models", 40, r"embedded"),
)
_MORE_STEPS = (
    PlanStep("models", 90, r"embedded|4B|\b8 of 48"),
    PlanStep("llama.cpp", 130),
    PlanStep("counters", 60),
    PlanStep("fixtures", 60),
    PlanStep("attention", 50, r"^(32 heads on 8 of 128|16 heads on 4 of 256),.*f16"),
    PlanStep("peers", 130, r"^flash-linear-attention|^FlashQLA|^FlashInfer"),
    PlanStep("conformance", 80, r"^(attention|gated_delta_net|mul_mat|mul_mat_id|rms_norm|rope)$"),
)
_LAST_STEPS = (
    PlanStep("models", 160),
    PlanStep("sharded", 80),
    PlanStep("products", 90),
    PlanStep("attention", 45),
    PlanStep("delta-prefill", 40),
    PlanStep("delta-decode", 30),
    PlanStep("delta-crossover", 30),
    PlanStep("conformance", 90),
    PlanStep("compile", 35),
)
TIME_PLANS: Mapping[int, tuple[PlanStep, ...]] = MappingProxyType(
    {
        10: _FIRST_STEPS,
        20: (*_FIRST_STEPS, *_MORE_STEPS),
        30: (*_FIRST_STEPS, *_MORE_STEPS, *_LAST_STEPS),
    }
)
"""For each number of minutes the steps in their order."""


def compute_step_seconds(steps: tuple[PlanStep, ...], seconds_left: float) -> float:
    """Return the seconds of the first step if all steps share `seconds_left` by their seconds."""
    return max(0.0, seconds_left) * steps[0].seconds / sum(step.seconds for step in steps)
