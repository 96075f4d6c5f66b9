"""The old paths of moved modules, which work until version 0.3 with a warning.

`MovedModuleFinder` is the last finder of `sys.meta_path`, so Python asks it only about modules that do not exist. The
first such question reads the table. The loaders have no base class, because `importlib.abc` imports many modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

MOVED_MODULES = """
backends backends: abilities>capabilities once>thread_safe_cache sources>kernel_sources table>kernel_tables
backends backends.fusion: beside>overlap chains>patterns flow>dataflow liveness operands
backends backends.host: board>progress_board calls>bindings meeting>collectives
backends.cpu backends.cpu: choices>top_k processor>target_cpu
backends.cpu backends.cpu.compilation: compiler fetching>prefetch_distance placing>object_loader words>kernel_args
backends.cpu backends.cpu.execution: binding>program_binding crew>thread_pool kept>binding_cache
    relocation>relocatable_tables replay
backends.cpu backends.cpu.steps: pieces>column_split
backends.cpu backends.cpu.tuning: limits>machine_limits
backends.cpu.kernels backends.cpu.kernels: collective>collectives limits>peak_probes table>kernel_table
backends.cpu.kernels backends.cpu.kernels.packed: packing>weight_packing
backends.cpu.kernels backends.cpu.kernels.rows: moves>gather_scatter norms reductions rotary>rope
backends.cpu.kernels backends.cpu.kernels.vector: amx>amx_tiles blocks>block_rows cells>cache_cells
    functions>vector_functions
backends.cpu.kernels backends.cpu.steps: crew>thread_sync loop>step_loop tickets>work_queue
backends.cpu.kernels.attention backends.cpu.kernels.attention: attention>bind_attention
    attention_few>decode_attention attention_keys>quantised_keys attention_many>prefill_attention
    attention_squares>amx_matrices attention_tiled>amx_attention scores>softmax_scores
backends.cpu.kernels.products backends.cpu.kernels.matmul: dense>float_matmul experts>moe_matmul gated>gated_units
    grouped>tile_loops matrices>batched_matmul pairs>gated_matmul_few pairs_experts>gated_moe_amx
    pairs_many>gated_matmul_many products>packed_matmul tiled>amx_matmul tiled_experts>amx_moe
    tiled_weights>amx_weights
backends.cpu.kernels.products backends.cpu.kernels.packed: grids>code_books rounding>activation_quantisation
    shifted_grids>iq1_codes
backends.cpu.kernels.products.weight_formats backends.cpu.kernels.packed: formats>format_table
    grid_formats>code_book_formats packed_format ternary_formats
backends.cpu.kernels.recurrent backends.cpu.kernels.recurrent: recurrent>gated_delta_net scans>linear_attention
    windows>sliding_windows
backends.cpu.simd backends.cpu.simd: bf16>bf16_pairs bytes>byte_vectors crossings>four_row_products
    crosswise>four_row_products dots>int8_dots halves>fold_halves order>permute_lanes shorts>half_memory
    squares>transpose_int8 terms>bf16_terms threads>atomics tiles>dot_tiles trits>base3_codes
backends.cupy backends.cupy: cuda>cuda_driver hip>hip_driver resources>kernel_resources table>kernel_table
backends.cupy.binding backends.cupy: programs>program_binding trial>trial_binding
backends.cupy.binding backends.cupy.binding: axes>iteration_axes chains>fused_binding launches>launch_builder
    packing>weight_packing
backends.cupy.device backends.cupy.device: cubins>cubin_cache early>dependent_launch lending>pinned_arrays
    limits>device_limits parcels>batched_copies rtc>runtime_compiler staging>host_transfers
backends.numpy backends.numpy: moves>gather_scatter recurrent>gated_delta_net rotary>rope table>kernel_table
frontends frontends: measuring>measure_plan open>open_model shipping>precompile_kernels
frontends frontends.inference: devices>device_group exactness>precision held>session_lease identity>model_digest
    laying_out>model_layout microbatches>micro_batches parts>prefill_chunks pooling rewinding>rewind saved_state
    session watch>value_watch
frontends frontends.models.inputs: step
frontends.models frontends.models: ahead>multi_token_prediction hyper>hyperparameters reading>read_hyperparameters
frontends.models frontends.models.inputs: family frame>graph_builder weights
frontends.models.layers frontends.models: residuals>residual_decoders
frontends.models.layers frontends.models.layers: blocks>feed_forward compressed>compressed_attention
    delta>gated_delta_net latent>latent_attention lightning>lightning_attention ngrams>ngram_embedding
frontends.onnx frontends.onnx: calls>op_calls model>importer recurrences>recurrent_cells spatial>convolutions
    sums>reductions table>op_table
frontends.torch frontends.torch: archive>pt2_archive arrays>array_views calls>op_calls exported>importer
    operands>parameter_binding parts>program_split spatial>convolutions table>op_table
graph graph.storage: disk_cache files
scheduler scheduler: at_once>run_once kept>plan_cache
scheduler scheduler.costs: shared_speeds>rank_speeds stages>timeline
scheduler scheduler.ir: acts>pipeline_actions layout plan>execution_plan units>formatting
scheduler scheduler.pipelining: succession>stage_times
scheduler scheduler.planning: planner spelling>decompose uncollected>gc_pause
scheduler.choosing scheduler.planning: auto>candidate branches clusters fits>memory_fit microbatches>micro_batches
    parts>prefill_chunks planning>plan_builder repeating>repeated_layers sharded>sharded_plan uses>workload
    ways>auto_candidates
scheduler.lowering scheduler.lowering: alike>structural_equality lane>device_plan order>execution_order
    undo>state_saves unfold>unroll
scheduler.machines scheduler.costs: calibrated>calibration_file catalogue>device_catalogue hardware machine_file
    simulated>simulated_devices speeds stand_ins
scheduler.probing scheduler.measurement: calibrating>calibrate comparing>compare_devices observing>observe_values
    probe_graphs reckoning>fit_speeds
scheduler.running scheduler.runtime: bound>bound_plan comm>communicators copies>shared_buffers
    digests>weight_digests executor interrupts journal>rollback_log packed>packed_weight_files pipeline
    side_by_side>device_threads state_view store timeline>virtual_clock trace turns>device_locks
scheduler.sharding scheduler.sharding: assign>propagation chunks>overlap_chunks early>early_sums emit>partitioner
    layers>layer_split rows>sequence_parallel shares>shard_ranges states>factor_layouts teams>hybrid_split
scheduler.sharding scheduler.sharding.search: again>incremental_propagation condense>collapse_layers
scheduler.telling scheduler.reports: critical>critical_path diff>plan_diff evenness>weight_balance explain
    hints>placement_hints layouts>value_layouts listing>pass_dumps measured>measured_steps perfetto>perfetto_trace
scheduler.telling scheduler.serialisation: as_data>program_data as_json>plan_json
scheduler.verifier scheduler.verifier: likeness>program_equality plan>plan_verifier record>record_checks
scheduler.verifier scheduler.verifier.communication: acts>pipeline_order meetings>collective_order
scheduler.verifier scheduler.verifier.memory: contents>buffer_contents program>program_verifier
    undo>rollback_verifier
scheduler.verifier scheduler.verifier.repeats: carrying>carried_values repeating>induction runs>repeatable_runs
scheduler.verifier scheduler.verifier.values: held>facts indices>index_sets op_instances passing>partial_sum_rules
    readers>node_matching restrict>restricted_ops summands>partial_sums trace>device_values value_numbering
"""
"""Old folder, new folder, and the modules: ``old>new``, or one name if it is the same."""


class MovedModuleFinder:
    """Finds moved modules of hocket, and removed folders of such modules, by their old paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with an old path, or None for every other name."""
        package, _, name = fullname.partition(".")
        if package != __package__:
            return None
        new_paths = read_new_module_paths()
        if name in new_paths:
            return ModuleSpec(fullname, cast(Any, _AliasLoader(f"{package}.{new_paths[name]}")))
        is_folder = any(old.startswith(f"{name}.") for old in new_paths)
        return ModuleSpec(fullname, cast(Any, _EmptyFolderLoader()), is_package=True) if is_folder else None


class _AliasLoader:
    """Import loader of an old module path: it warns, and returns the module with the new path."""

    def __init__(self, new_path: str) -> None:
        self._new_path = new_path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        message = f"{spec.name} is now {self._new_path}; the old path goes in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        module = import_module(self._new_path)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _EmptyFolderLoader:
    """Import loader of a removed folder: it makes an empty package.

    Imports of modules in this package then reach `MovedModuleFinder`.
    """

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


@cache
def read_new_module_paths() -> dict[str, str]:
    """Return the new path of each moved module by its old path, both without the name of the package."""
    new_paths = {}
    for row in MOVED_MODULES.replace("\n    ", " ").strip().splitlines():
        folders, _, names = row.partition(": ")
        old_folder, new_folder = folders.split()
        for entry in names.split():
            old, _, new = entry.partition(">")
            new_paths[f"{old_folder}.{old}"] = f"{new_folder}.{new or old}"
    return new_paths
