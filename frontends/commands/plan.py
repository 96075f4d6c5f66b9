"""``hocket plan``: prints the plan for one step of a model, or for a graph in a file; no weights are loaded."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...backends.base import find_device
from ...graph import DType, Graph, PlanError
from ...graph.errors import format_count
from ...graph.storage.files import require_writable, write_text
from ...scheduler import (
    PASS_DUMPS,
    DevicePlan,
    HostOffload,
    Plan,
    Workload,
    choose_micro_batches,
    compute_missing_bytes,
    describe_memory_problem,
    diff_plans,
    format_bytes,
    format_seconds,
    parse_simulated_group,
    plan_for_group,
    plan_from_json,
    plan_to_json,
)
from ...scheduler.costs.calibration_file import choose_calibrated_or_built_in_hardware, describe_speed_source
from ..errors import ModelError
from ..flag_values import parse_positive
from ..graph_file import MAX_GRAPH_FILE_BYTES, is_gguf_or_hf_folder, read_graph
from ..inference.device_group import resolve_devices
from ..inference.model_layout import OFFLOAD_DEVICE, create_layout_workload, find_speeds_of_first_device_alone
from ..inference.prefill_chunks import explain_prefill_chunks
from ..models import Step
from ..open_model import choose_context, open_model
from ..run_config import ONE_DEVICE, DeviceGroup
from ..terminal.arguments import replace_arguments_by_flag_names
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed
from .shared_flags import PLAN_OPTIONS, add_model_file_argument, add_option_flags, config_from_flags

SIMULATE_HELP = "simulated devices, as h200:8,nvlink or 'h200:8,nvlink x 4,ib400', or a .toml file"


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(
        sub,
        "GGUF file (only its header is read), a Hugging Face folder, a dumped graph (- is stdin), or a .pt2 or .onnx "
        "program",
        "MODEL|GRAPH",
    )
    where = sub.add_mutually_exclusive_group()
    where.add_argument("--simulate", metavar="SPEC", help=SIMULATE_HELP)
    add_option_flags(sub, PLAN_OPTIONS, devices_in=where, batch={"help": "tokens of a prefill (512)"})
    sub.add_argument(
        "--phase",
        choices=("decode", "prefill"),
        default="decode",
        help="plan a step of one token or of a batch (decode)",
    )
    sub.add_argument(
        "-np",
        "--parallel",
        type=parse_positive,
        default=1,
        metavar="N",
        help="sequences; a step adds a token to each (1)",
    )
    sub.add_argument("--steps", action="store_true", help="also list all instructions of all devices")
    sub.add_argument("--show", choices=PASS_DUMPS, help="print the result of one pass instead of the explanation")
    sub.add_argument("--diff", metavar="PLAN", help="print the differences from this plan in JSON instead")
    sub.add_argument(
        "--measure",
        action="store_true",
        help="run the plan, and print predicted and measured times (weights and inputs of a graph are constant)",
    )
    sub.add_argument("--json", action="store_true", help="print the plan as JSON, which --diff reads")
    sub.add_argument("-o", "--out", metavar="FILE", help="also write the plan as JSON to a file")


def run(args: argparse.Namespace) -> int:
    if args.show and (args.json or args.diff):
        raise ModelError(f"--show {args.show} prints one pass alone; leave it out, or --json and --diff")
    if args.measure and (args.simulate or args.show or args.json or args.diff):
        raise ModelError("--measure runs the plan and prints times; leave out --simulate, --show, --json and --diff")
    if args.out:
        require_writable(args.out)
    other = None if args.diff is None else read_plan(args.diff)
    tokens = 1 if args.phase == "decode" else args.batch
    on = config_from_flags(args).group
    if args.parallel > 1 and args.phase == "prefill":
        raise ModelError("got -np with --phase prefill; sequences get a token each while they decode")
    graph_of = partial(
        read_step_graph_and_context, args.model, context=args.context, tokens=tokens, caches=on.cache_dtypes
    )
    graph, context = graph_of(sequences=args.parallel)
    use = create_session_layout_workload(args, on, context, args.parallel)
    requested, plan = make_requested_and_session_plans(graph, on, args.simulate, use)
    text = plan_to_json(plan) + "\n" if args.json or args.out else ""
    if args.out:
        write_text(args.out, text)
    if other is not None:
        changes = diff_plans(other, plan)
        output = json.dumps(changes) if args.json else "\n".join(changes or ("the plans do the same",))
        write_to_stdout_unless_closed(output + "\n")
    elif args.show:
        write_to_stdout_unless_closed(PASS_DUMPS[args.show](plan).rstrip("\n") + "\n")
    elif args.measure:
        from ..measure_plan import measure_graph_against_predictions, measure_steps_against_predictions

        lines = (
            measure_graph_against_predictions(plan)
            if context is None
            else measure_steps_against_predictions(open_model(args.model), on, tokens, args.context)
        )
        write_to_stdout_unless_closed("\n".join([f"speeds: {describe_speed_source(plan.hardware)}", *lines]) + "\n")
    else:
        if not args.json:
            prompt, is_decode = min(args.batch, context or 0), args.phase == "decode"
            write_to_stdout_unless_closed(
                format_memory_fit_and_speed_line(
                    requested, plan, context, args.parallel, prompt, graph_of, is_decode=is_decode
                )
                + "\n\n"
            )
        write_to_stdout_unless_closed(
            text if args.json else replace_arguments_by_flag_names(plan.explain(steps=args.steps)) + "\n"
        )
        if context is not None and not args.json:
            sequences, prompt = args.parallel, 0 if args.phase == "decode" else min(args.batch, context)
            write_to_stdout_unless_closed(
                describe_pipelining_gain(
                    plan, lambda **step: plan_with_weight_layout_of(plan, graph_of(**step)[0]), sequences, prompt
                )
            )
        if args.simulate and not args.json:
            write_to_stdout_unless_closed("\n".join(parse_simulated_group(args.simulate).describe_speeds(graph)) + "\n")
        elif not args.json:
            write_to_stdout_unless_closed(f"speeds: {describe_speed_source(plan.hardware)}\n")
    if problem := describe_memory_problem(requested, context=context):
        rest = "" if describe_memory_problem(plan) else f"; in this plan the rest is on {plan.device_plans[-1].device}"
        write_line_to_stderr(f"hocket: does not fit: {replace_arguments_by_flag_names(problem)}{rest}")
        return 1
    return 0


def format_memory_fit_and_speed_line(
    requested: Plan,
    plan: Plan,
    context: int | None,
    sequences: int,
    prompt: int,
    graph_of: Callable[..., tuple[Graph, int | None]],
    *,
    is_decode: bool,
) -> str:
    """Describe the memory fit of a plan, and the predicted speed, in one line.

    The speed of a model is the rate of new tokens and the time to the first token.

    Args:
        requested: The plan for the devices that were named.
        plan: The plan that runs, in which the host may hold the rest.
        context: Tokens of context of a model; None for a graph.
        sequences: Sequences that get a token each in a step.
        prompt: Tokens of the prompt.
        graph_of: Builds the graph of a step of `tokens` and `sequences`.
        is_decode: Whether the plan is for new tokens, not for a prompt.
    """

    def filling(device_plan: DevicePlan) -> float:
        return sum(device_plan.count_memory_bytes_by_kind().values()) / (device_plan.device.memory or math.inf)

    fullest = max(plan.device_plans, key=filling)
    needed, memory = format_bytes(sum(fullest.count_memory_bytes_by_kind().values())), fullest.device.memory
    room = f"{needed} of {format_bytes(memory)} on {fullest.device}" if memory else f"{needed} on {fullest.device}"
    if describe_memory_problem(plan):
        fits = "does not fit"
    else:
        fits = f"{'fits with the help of the host' if describe_memory_problem(requested) else 'fits'}: {room}"
    if context is None:
        return f"{fits}; a run takes {format_seconds(plan.cost.total)}"
    decode = plan if is_decode else plan_with_weight_layout_of(plan, graph_of(sequences=sequences, tokens=1)[0])
    prefill = plan_with_weight_layout_of(plan, graph_of(sequences=1, tokens=prompt)[0]) if is_decode else plan
    rate = sequences / decode.cost.total
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    first = format_seconds(prefill.cost.total)
    return f"{fits}; {speed} tokens a second; first token of a prompt of {prompt} after {first}"


def create_session_layout_workload(
    args: argparse.Namespace, on: DeviceGroup, context: int | None, sequences: int = 1
) -> Workload | None:
    """Make the workload for which a session would choose the model layout: prompts and decode steps.

    Without a `context`, as for a graph file, the result is None.
    """
    if context is None:
        return None
    graph_of = partial(read_step_graph_and_context, args.model, context=context, caches=on.cache_dtypes)
    return create_layout_workload(lambda count, tokens: graph_of(sequences=count, tokens=tokens)[0], sequences, context)


def describe_pipelining_gain(plan: Plan, plan_of: Callable[..., Plan], sequences: int, prompt: int) -> str:
    """Describe in one line how much faster pipelined runs are predicted to be.

    Several sequences run pipelined as micro-batches, and a prompt runs pipelined in chunks. The line is empty for one
    device, and for one sequence without a prompt.

    Args:
        plan: The plan.
        plan_of: Returns the plan of a step with given `sequences` or `tokens`.
        sequences: Sequences that get a token each in a step.
        prompt: Tokens of the prompt.
    """
    if sequences > 1:
        return f"sequences: {choose_micro_batches(sequences, lambda n: plan_of(sequences=n))}\n"
    if prompt and len(plan.device_plans) > 1:
        return f"prompt: {explain_prefill_chunks(prompt, plan, lambda n: plan_of(tokens=n))}\n"
    return ""


def read_step_graph_and_context(
    path: str,
    *,
    context: int | None,
    tokens: int,
    caches: tuple[DType, DType] = ONE_DEVICE.cache_dtypes,
    sequences: int = 1,
    pool_tokens: int = 0,
) -> tuple[Graph, int | None]:
    """Build the graph of one step of a model file, or read a graph file; also return the context in tokens.

    The context is None for a graph file. For a model, all cells of the context are in use, and each sequence has a row
    of logits. This is the largest step of such a session. If it fits into memory, the session fits too.

    Args:
        path: A model file or a graph file.
        context: Tokens of context; None selects the default of the model.
        tokens: Tokens of the step.
        caches: Dtypes of cached keys and values.
        sequences: Number of sequences.
        pool_tokens: Cells of the KV caches that all sequences share in blocks; 0 for cells of each sequence.

    Raises:
        ModelError: The file is no model, the context is too long, or the model or the context does not fit the pool.
        GraphError: The file is no graph.
    """
    if not is_gguf_or_hf_folder(path):
        return read_graph(path), None
    model = open_model(path, header_only=True)
    context = choose_context(model, 0, context)
    step = Step(sequences, min(tokens, context), context, context, sequences, keys=caches[0], values=caches[1])
    if pool_tokens:
        from ..serving.blocks.slot_pool import count_pool_blocks, require_model_and_context_fit_pool

        require_model_and_context_fit_pool(model, context, pool_tokens)
        step = replace(step, blocks=count_pool_blocks(pool_tokens))
    return model.graph(step), context


def make_requested_and_session_plans(
    graph: Graph, on: DeviceGroup, simulated: str | None = None, use: Workload | None = None
) -> tuple[Plan, Plan]:
    """Make the requested plan of `graph` for real or simulated devices, and the plan that a session would use.

    The session plan is the same plan if it fits into memory. Otherwise it has host offload.

    Args:
        graph: The graph of a step.
        on: The device group.
        simulated: Specification of simulated devices, or None.
        use: The workload of the layout, or None.
    """
    if simulated is None:
        group, host = resolve_devices(on), HostOffload(*find_device(OFFLOAD_DEVICE))
        hardware = choose_calibrated_or_built_in_hardware(graph, group)
        use = None if use is None else replace(use, lone_hardware=find_speeds_of_first_device_alone(on, group, graph))
    else:
        simulation = parse_simulated_group(simulated)
        group, hardware = list(simulation.group), simulation.hardware_for(graph)
        host = HostOffload(*simulation.host, simulation.host_hardware)
    options = partial(plan_for_group, split_mode=on.split_mode, tensor_split=on.tensor_split, place=on.place, use=use)
    plan = options(graph, group, hardware=hardware)
    if not compute_missing_bytes(plan):
        return (name_flags_in_pin_reasons(plan),) * 2
    with_host = options(graph, group, hardware=hardware, host=host)
    return name_flags_in_pin_reasons(plan), name_flags_in_pin_reasons(with_host)


def name_flags_in_pin_reasons(plan: Plan) -> Plan:
    """Return the same plan, where the reasons of pinned nodes name command-line flags in place of arguments."""
    pinned_nodes = (replace(p, because=replace_arguments_by_flag_names(p.because)) for p in plan.pinned_nodes)
    return replace(plan, pinned_nodes=tuple(pinned_nodes)) if plan.pinned_nodes else plan


def plan_with_weight_layout_of(plan: Plan, graph: Graph) -> Plan:
    """Plan the graph of another step with the weight layout of `plan`."""
    return plan_for_group(graph, plan.group, hardware=plan.hardware, like=plan)


def read_plan(path: str) -> Plan:
    """Read a plan from a JSON file; raise `ModelError` if the file has none."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_GRAPH_FILE_BYTES + 1)
        if len(data) > MAX_GRAPH_FILE_BYTES:
            raise PlanError(f"has more than {MAX_GRAPH_FILE_BYTES} bytes")
        return name_flags_in_pin_reasons(plan_from_json(data.decode("utf-8")))
    except UnicodeDecodeError:
        raise ModelError(f"{path}: is no plan (not UTF-8); write one with `hocket plan --json`") from None
    except PlanError as why:
        raise ModelError(f"{path}: {why}") from None


def print_serving_prediction(args: argparse.Namespace) -> int:
    """Print the plan of a decode step with all slots, its memory and its speed, for ``hocket serve --dry-run``.

    Returns:
        The exit code: 1 if memory is too small, else 0.
    """
    group = config_from_flags(args).group
    graph_of = partial(
        read_step_graph_and_context,
        args.model,
        context=args.context,
        tokens=1,
        caches=group.cache_dtypes,
        pool_tokens=args.pool_tokens,
    )
    graph, context = graph_of(sequences=args.parallel)
    if context is None:
        raise ModelError(f"{args.model}: is a graph; give a model")
    workload = create_session_layout_workload(args, group, context, args.parallel)
    requested, plan = make_requested_and_session_plans(graph, group, None, workload)
    prompt = min(args.batch, context)
    fit = format_memory_fit_and_speed_line(requested, plan, context, args.parallel, prompt, graph_of, is_decode=True)
    explained = replace_arguments_by_flag_names(plan.explain())
    write_to_stdout_unless_closed(
        f"{format_count(args.parallel, 'slot')} of {format_count(context, 'token')}; {fit}\n\n{explained}\n"
    )
    if problem := describe_memory_problem(requested, context=context):
        write_line_to_stderr(
            f"hocket: does not fit with {format_count(args.parallel, 'slot')}: "
            f"{replace_arguments_by_flag_names(problem)}"
        )
        return 1
    return 0
