"""The backend scheduler: plan a graph for a group of devices, verify the plan, run the plan, and report on it.

`planning` builds a `Plan` from the decisions of `sharding` and the programs of `lowering`, with the prices of `costs`.
`verifier` proves the plan, `runtime` runs it, and `reports` describes it. This module exports the names that other
folders use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..graph.old_names import warn_of_old_name
from .ir.execution_plan import SPLIT_MODE_NAMES as SPLIT_MODE_NAMES
from .ir.execution_plan import HostOffload as HostOffload
from .ir.execution_plan import Plan as Plan

if TYPE_CHECKING:
    from .costs.hardware import DEFAULT_HARDWARE as DEFAULT_HARDWARE
    from .costs.hardware import Hardware as Hardware
    from .costs.simulated_devices import parse_simulated_group as parse_simulated_group
    from .ir.formatting import format_bytes as format_bytes
    from .ir.formatting import format_seconds as format_seconds
    from .ir.layout import Layout as Layout
    from .lowering.device_plan import DevicePlan as DevicePlan
    from .lowering.lower import lower_graph as lower_graph
    from .measurement.compare_devices import NodeComparer as NodeComparer
    from .measurement.compare_devices import ValueDifference as ValueDifference
    from .measurement.compare_devices import format_surrounding_nodes as format_surrounding_nodes
    from .measurement.observe_values import (
        Statistics as Statistics,
    )
    from .measurement.observe_values import (
        select_matching_values as select_matching_values,
    )
    from .measurement.observe_values import (
        select_observed_outputs as select_observed_outputs,
    )
    from .measurement.observe_values import (
        with_observed_values as with_observed_values,
    )
    from .pipelining.stage_times import count_pipeline_stages as count_pipeline_stages
    from .pipelining.stage_times import estimate_pipeline_speedup as estimate_pipeline_speedup
    from .pipelining.stage_times import format_stage_count as format_stage_count
    from .plan_cache import plan_with_cache as plan_with_cache
    from .planning.memory_fit import compute_missing_bytes as compute_missing_bytes
    from .planning.memory_fit import describe_memory_problem as describe_memory_problem
    from .planning.micro_batches import MicroBatchChoice as MicroBatchChoice
    from .planning.micro_batches import choose_micro_batches as choose_micro_batches
    from .planning.planner import plan as plan
    from .planning.planner import plan_for_group as plan_for_group
    from .planning.prefill_chunks import ChunkTimeModel as ChunkTimeModel
    from .planning.prefill_chunks import choose_prefill_chunks as choose_prefill_chunks
    from .planning.workload import Workload as Workload
    from .reports.pass_dumps import PASS_DUMPS as PASS_DUMPS
    from .reports.plan_diff import diff_plans as diff_plans
    from .run_once import run as run
    from .runtime.communicators import SingleDeviceComm as SingleDeviceComm
    from .runtime.executor import Executor as Executor
    from .runtime.executor import load as load
    from .runtime.interrupts import DeferredInterrupts as DeferredInterrupts
    from .runtime.interrupts import ImmediateInterrupts as ImmediateInterrupts
    from .runtime.pipeline import PipelinedPlan as PipelinedPlan
    from .runtime.pipeline import PipelinedRuns as PipelinedRuns
    from .runtime.pipeline import run_pipelined as run_pipelined
    from .runtime.store import Store as Store
    from .runtime.trace import Trace as Trace
    from .serialisation.plan_json import plan_from_json as plan_from_json
    from .serialisation.plan_json import plan_to_json as plan_to_json
    from .sharding.layer_split import compute_balanced_proportions as compute_balanced_proportions
    from .verifier.memory.program_verifier import verify_program as verify_program

_LAZY_NAMES = {
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
    **dict.fromkeys(("Executor", "load"), ".runtime.executor"),
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
"""The module of each name that is imported at first use. A plan from the plan cache needs no planner."""


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
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_NAMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
