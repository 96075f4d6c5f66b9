"""The backend scheduler: plan a graph for a group of devices, verify the plan, run it and report it.

`planner` builds a `Plan` from the decisions of `sharding` and the programs of `lowering`. `verifier` proves the plan,
`running` runs it, and `telling` reports it as text and JSON. This module exports the names that other folders use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .plan import SPLIT_NAMES as SPLIT_NAMES
from .plan import Host as Host
from .plan import Plan as Plan

if TYPE_CHECKING:
    from .at_once import run as run
    from .choosing.fits import memory_problem as memory_problem
    from .choosing.fits import shortage as shortage
    from .choosing.microbatches import Dealing as Dealing
    from .choosing.microbatches import dealing as dealing
    from .choosing.parts import Predicted as Predicted
    from .choosing.parts import in_parts as in_parts
    from .choosing.uses import Use as Use
    from .kept import kept_plan as kept_plan
    from .layout import Layout as Layout
    from .lowering.lane import Lane as Lane
    from .lowering.lower import lower as lower
    from .machines.hardware import CPU as CPU
    from .machines.hardware import Hardware as Hardware
    from .machines.simulated import simulate as simulate
    from .planner import plan as plan
    from .planner import plan_for as plan_for
    from .probing.comparing import Difference as Difference
    from .probing.comparing import Judge as Judge
    from .probing.comparing import surroundings as surroundings
    from .probing.observing import Statistics as Statistics
    from .probing.observing import matching as matching
    from .probing.observing import observed as observed
    from .probing.observing import taken as taken
    from .running.comm import Alone as Alone
    from .running.executor import Executor as Executor
    from .running.executor import load as load
    from .running.interrupts import InterruptsKept as InterruptsKept
    from .running.pipeline import Pipeline as Pipeline
    from .running.pipeline import Succession as Succession
    from .running.pipeline import in_turn as in_turn
    from .running.store import Store as Store
    from .running.trace import Trace as Trace
    from .sharding.layers import even_shares as even_shares
    from .succession import followed as followed
    from .succession import gain as gain
    from .succession import stages_text as stages_text
    from .telling.as_json import plan_from_json as plan_from_json
    from .telling.as_json import plan_to_json as plan_to_json
    from .telling.diff import difference as difference
    from .telling.listing import PASSES as PASSES
    from .units import nbytes_text as nbytes_text
    from .units import time_text as time_text
    from .verifier.program import check as check

_LATER = {
    "run": ".at_once",
    **dict.fromkeys(("memory_problem", "shortage"), ".choosing.fits"),
    **dict.fromkeys(("Dealing", "dealing"), ".choosing.microbatches"),
    **dict.fromkeys(("Predicted", "in_parts"), ".choosing.parts"),
    "Use": ".choosing.uses",
    "kept_plan": ".kept",
    "Layout": ".layout",
    "Lane": ".lowering.lane",
    "lower": ".lowering.lower",
    **dict.fromkeys(("CPU", "Hardware"), ".machines.hardware"),
    "simulate": ".machines.simulated",
    **dict.fromkeys(("plan", "plan_for"), ".planner"),
    **dict.fromkeys(("Difference", "Judge", "surroundings"), ".probing.comparing"),
    **dict.fromkeys(("Statistics", "matching", "observed", "taken"), ".probing.observing"),
    "Alone": ".running.comm",
    **dict.fromkeys(("Executor", "load"), ".running.executor"),
    "InterruptsKept": ".running.interrupts",
    **dict.fromkeys(("Pipeline", "Succession", "in_turn"), ".running.pipeline"),
    "Store": ".running.store",
    "Trace": ".running.trace",
    "even_shares": ".sharding.layers",
    **dict.fromkeys(("followed", "gain", "stages_text"), ".succession"),
    **dict.fromkeys(("plan_from_json", "plan_to_json"), ".telling.as_json"),
    "difference": ".telling.diff",
    "PASSES": ".telling.listing",
    **dict.fromkeys(("nbytes_text", "time_text"), ".units"),
    "check": ".verifier.program",
}
"""The module of each name that is imported at first use. A plan that the plan cache has needs no planner."""
globals().pop("plan")  # removes the module `plan`, so that the name gives the function


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
