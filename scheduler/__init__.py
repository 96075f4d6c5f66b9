"""The backend scheduler: plan a graph for a group of devices, verify the plan, run the plan, and report on it.

`planning` builds a `Plan` from the decisions of `sharding` and the programs of `lowering`, with the prices of `costs`.
`verifier` proves the plan, `runtime` runs it, and `reports` describes it. This module exports the names that other
folders use.
"""

from importlib import import_module
from typing import Any

from ..graph.old_names import warn_of_old_name
from .ir.execution_plan import SPLIT_MODE_NAMES as SPLIT_MODE_NAMES
from .ir.execution_plan import HostOffload as HostOffload
from .ir.execution_plan import Plan as Plan

LAZY_NAMES = {
    "run": ".run_once",
    **dict.fromkeys(("describe_memory_problem", "compute_missing_bytes"), ".planning.memory_fit"),
    **dict.fromkeys(("MicroBatchChoice", "choose_micro_batches"), ".planning.micro_batches"),
    **dict.fromkeys(("ChunkTimeModel", "choose_prefill_chunks"), ".planning.prefill_chunks"),
    "Workload": ".planning.workload",
    "plan_with_cache": ".plan_cache",
    "Layout": ".ir.layout",
    "DevicePlan": ".lowering.device_plan",
    "lower_graph": ".lowering.lower",
    **dict.fromkeys(("DEFAULT_HARDWARE", "Hardware"), ".costs.hardware"),
    "parse_simulated_group": ".costs.simulated_devices",
    **dict.fromkeys(("plan", "plan_for_group"), ".planning.planner"),
    **dict.fromkeys(("ValueDifference", "NodeComparer", "format_surrounding_nodes"), ".measurement.compare_devices"),
    **dict.fromkeys(
        ("Statistics", "select_matching_values", "with_observed_values", "select_observed_outputs"),
        ".measurement.observe_values",
    ),
    "SingleDeviceComm": ".runtime.communicators",
    **dict.fromkeys(("Executor", "LaunchedRun", "load"), ".runtime.executor"),
    **dict.fromkeys(("DeferredInterrupts", "ImmediateInterrupts"), ".runtime.interrupts"),
    **dict.fromkeys(("PipelinedPlan", "PipelinedRuns", "run_pipelined"), ".runtime.pipeline"),
    "Store": ".runtime.store",
    "Trace": ".runtime.trace",
    "compute_balanced_proportions": ".sharding.layer_split",
    **dict.fromkeys(
        ("count_pipeline_stages", "estimate_pipeline_speedup", "format_stage_count"), ".pipelining.stage_times"
    ),
    **dict.fromkeys(("plan_from_json", "plan_to_json"), ".serialisation.plan_json"),
    "diff_plans": ".reports.plan_diff",
    "PASS_DUMPS": ".reports.pass_dumps",
    **dict.fromkeys(("format_bytes", "format_seconds"), ".ir.formatting"),
    "verify_program": ".verifier.memory.program_verifier",
}
"""The module of each name that is imported at first use; `docs/write_stubs.py` writes a stub.

A plan from the plan cache needs no planner.
"""


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
    **{"CPU": "DEFAULT_HARDWARE", "simulate": "parse_simulated_group", "Lane": "DevicePlan"},
}
"""The new name of each export that was renamed; the old ones work until 0.3."""


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        warn_of_old_name(__name__, name, _OLD_NAMES[name])
        name = _OLD_NAMES[name]
    if name not in LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LAZY_NAMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_NAMES})
