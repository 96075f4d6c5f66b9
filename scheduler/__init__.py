"""The backend scheduler: plan a graph for a group of devices, verify the plan, run the plan, and report on it.

`planner` builds a `Plan` from the decisions of `sharding` and the programs of `lowering`. `verifier` proves the plan,
`running` runs it, and `telling` reports it as text and JSON. This module exports the names that other folders use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..graph.old_names import warn_of_old_name
from .plan import SPLIT_MODE_NAMES as SPLIT_MODE_NAMES
from .plan import HostOffload as HostOffload
from .plan import Plan as Plan

if TYPE_CHECKING:
    from .at_once import run as run
    from .choosing.fits import compute_missing_bytes as compute_missing_bytes
    from .choosing.fits import describe_memory_problem as describe_memory_problem
    from .choosing.microbatches import MicroBatchChoice as MicroBatchChoice
    from .choosing.microbatches import choose_micro_batches as choose_micro_batches
    from .choosing.parts import ChunkTimeModel as ChunkTimeModel
    from .choosing.parts import choose_prefill_chunks as choose_prefill_chunks
    from .choosing.uses import Workload as Workload
    from .kept import plan_with_cache as plan_with_cache
    from .layout import Layout as Layout
    from .lowering.lane import Lane as Lane
    from .lowering.lower import lower_graph as lower_graph
    from .machines.hardware import DEFAULT_HARDWARE as DEFAULT_HARDWARE
    from .machines.hardware import Hardware as Hardware
    from .machines.simulated import parse_simulated_group as parse_simulated_group
    from .planner import plan as plan
    from .planner import plan_for_group as plan_for_group
    from .probing.comparing import NodeComparer as NodeComparer
    from .probing.comparing import ValueDifference as ValueDifference
    from .probing.comparing import format_surrounding_nodes as format_surrounding_nodes
    from .probing.observing import Statistics as Statistics
    from .probing.observing import select_matching_values as select_matching_values
    from .probing.observing import select_observed_outputs as select_observed_outputs
    from .probing.observing import with_observed_values as with_observed_values
    from .running.comm import SingleDeviceComm as SingleDeviceComm
    from .running.executor import Executor as Executor
    from .running.executor import load as load
    from .running.interrupts import DeferredInterrupts as DeferredInterrupts
    from .running.pipeline import PipelinedPlan as PipelinedPlan
    from .running.pipeline import PipelinedRuns as PipelinedRuns
    from .running.pipeline import run_pipelined as run_pipelined
    from .running.store import Store as Store
    from .running.trace import Trace as Trace
    from .sharding.layers import compute_balanced_proportions as compute_balanced_proportions
    from .succession import count_pipeline_stages as count_pipeline_stages
    from .succession import estimate_pipeline_speedup as estimate_pipeline_speedup
    from .succession import format_stage_count as format_stage_count
    from .telling.as_json import plan_from_json as plan_from_json
    from .telling.as_json import plan_to_json as plan_to_json
    from .telling.diff import diff_plans as diff_plans
    from .telling.listing import PASS_DUMPS as PASS_DUMPS
    from .units import format_bytes as format_bytes
    from .units import format_seconds as format_seconds
    from .verifier.program import verify_program as verify_program

_LAZY_NAMES = {
    "run": ".at_once",
    **dict.fromkeys(("describe_memory_problem", "compute_missing_bytes"), ".choosing.fits"),
    **dict.fromkeys(("MicroBatchChoice", "choose_micro_batches"), ".choosing.microbatches"),
    **dict.fromkeys(("ChunkTimeModel", "choose_prefill_chunks"), ".choosing.parts"),
    "Workload": ".choosing.uses",
    "plan_with_cache": ".kept",
    "Layout": ".layout",
    "Lane": ".lowering.lane",
    "lower_graph": ".lowering.lower",
    **dict.fromkeys(("DEFAULT_HARDWARE", "Hardware"), ".machines.hardware"),
    "parse_simulated_group": ".machines.simulated",
    **dict.fromkeys(("plan", "plan_for_group"), ".planner"),
    **dict.fromkeys(("ValueDifference", "NodeComparer", "format_surrounding_nodes"), ".probing.comparing"),
    **dict.fromkeys(
        ("Statistics", "select_matching_values", "with_observed_values", "select_observed_outputs"),
        ".probing.observing",
    ),
    "SingleDeviceComm": ".running.comm",
    **dict.fromkeys(("Executor", "load"), ".running.executor"),
    "DeferredInterrupts": ".running.interrupts",
    **dict.fromkeys(("PipelinedPlan", "PipelinedRuns", "run_pipelined"), ".running.pipeline"),
    "Store": ".running.store",
    "Trace": ".running.trace",
    "compute_balanced_proportions": ".sharding.layers",
    **dict.fromkeys(("count_pipeline_stages", "estimate_pipeline_speedup", "format_stage_count"), ".succession"),
    **dict.fromkeys(("plan_from_json", "plan_to_json"), ".telling.as_json"),
    "diff_plans": ".telling.diff",
    "PASS_DUMPS": ".telling.listing",
    **dict.fromkeys(("format_bytes", "format_seconds"), ".units"),
    "verify_program": ".verifier.program",
}
"""The module of each name that is imported at first use. A plan from the plan cache needs no planner."""
globals().pop("plan")  # removes the module `plan`, so that the name gives the function


_OLD_NAMES = {
    **{"kept_plan": "plan_with_cache", "plan_for": "plan_for_group", "Alone": "SingleDeviceComm"},
    **{"InterruptsKept": "DeferredInterrupts", "Pipeline": "PipelinedPlan", "Succession": "PipelinedRuns"},
    **{"in_turn": "run_pipelined", "even_shares": "compute_balanced_proportions", "followed": "count_pipeline_stages"},
    **{"gain": "estimate_pipeline_speedup", "stages_text": "format_stage_count", "difference": "diff_plans"},
    **{"PASSES": "PASS_DUMPS", "nbytes_text": "format_bytes", "time_text": "format_seconds", "check": "verify_program"},
    **{"memory_problem": "describe_memory_problem", "shortage": "compute_missing_bytes", "Dealing": "MicroBatchChoice"},
    **{"dealing": "choose_micro_batches", "Predicted": "ChunkTimeModel", "in_parts": "choose_prefill_chunks"},
    **{"Use": "Workload", "Difference": "ValueDifference", "Judge": "NodeComparer", "lower": "lower_graph"},
    **{"surroundings": "format_surrounding_nodes", "matching": "select_matching_values"},
    **{"observed": "with_observed_values", "taken": "select_observed_outputs"},
    **{"CPU": "DEFAULT_HARDWARE", "simulate": "parse_simulated_group"},
}
"""The new name of each export that was renamed; the old ones work until 0.3."""


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        warn_of_old_name(__name__, name, _OLD_NAMES[name])
        name = _OLD_NAMES[name]
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_NAMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
