"""``hocket view``: writes the step of a model, a graph or a plan as one page for a browser."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ...graph.storage.files import require_writable
from ...view import Page, view_graph, view_plan
from ..errors import ModelError
from ..graph_file import STDIN
from ..terminal.arguments import replace_arguments_by_flag_names
from ..terminal.output import write_line_to_stderr
from .plan import (
    SIMULATE_HELP,
    create_session_layout_workload,
    make_requested_and_session_plans,
    read_plan,
    read_step_graph_and_context,
)
from .shared_flags import PLAN_OPTIONS, add_model_file_argument, add_option_flags, config_from_flags

PLAN_MARKER_BYTES = 200
"""Bytes at the start of a JSON file that are searched for the marker of plans."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(
        sub,
        "GGUF file (only its header is read), Hugging Face folder, dumped graph (- is stdin), .pt2 or .onnx program, "
        "or plan in JSON",
        "MODEL|GRAPH|PLAN",
    )
    sub.add_argument("-o", "--out", metavar="FILE", help="the page to write (the name of the model with .html)")
    where = sub.add_mutually_exclusive_group()
    where.add_argument("--simulate", metavar="SPEC", help=SIMULATE_HELP)
    where.add_argument("--graph", action="store_true", help="the graph alone, without a plan")
    add_option_flags(sub, PLAN_OPTIONS, devices_in=where, batch={"help": "tokens of a prefill (512)"})
    sub.add_argument(
        "--phase",
        choices=("decode", "prefill"),
        default="decode",
        help="plan a step of one token or of a batch (decode)",
    )
    sub.add_argument("--trace", metavar="FILE", help="show measured times from a file that hocket run --trace wrote")
    sub.add_argument("--diff", metavar="OTHER", help="also show this plan in JSON, and the differences")


def run(args: argparse.Namespace) -> int:
    name = "graph" if args.model == STDIN else Path(args.model).name
    out = args.out or f"{Path(name).stem}.html"
    require_writable(out, [path for path in (args.model, args.trace, args.diff, args.simulate) if path])
    page = load_or_make_plan_page(args, name)
    page.save(out)
    write_line_to_stderr(f"{out}: {len(page.html.encode('utf-8')) / 1e6:.2f} MB; open it in a browser")
    return 0


def load_or_make_plan_page(args: argparse.Namespace, title: str) -> Page:
    """Build the page that shows the plan in a file, or a new plan for the model or the graph in the file.

    A new plan is for the devices of the flags. With `--graph` the page shows only the graph.

    Raises:
        ModelError, GraphError, PlanError, BackendError: The file or the combination of flags is wrong.
    """
    if args.diff is not None and not is_json_plan_file(args.diff):
        raise ModelError(f"{args.diff}: is no plan in JSON; write one with `hocket plan -o`")
    if args.graph and args.trace:
        raise ModelError("a graph alone has no steps that took time; leave out --graph or --trace")
    before = None if args.diff is None else read_plan(args.diff)
    make_page = partial(
        view_plan, before=before, trace=args.trace, title=title, rename_arguments=replace_arguments_by_flag_names
    )
    if is_json_plan_file(args.model):
        plan = read_plan(args.model)
        return view_graph(plan.graph, title=title) if args.graph else make_page(plan)
    tokens = 1 if args.phase == "decode" else args.batch
    on = config_from_flags(args).group
    graph, context = read_step_graph_and_context(
        args.model, context=args.context, tokens=tokens, caches=on.cache_dtypes
    )
    if args.graph:
        return view_graph(graph, title=title)
    known = None if context is None else min(tokens, context)
    return make_page(
        make_requested_and_session_plans(graph, on, args.simulate, create_session_layout_workload(args, on, context))[
            1
        ],
        tokens=known,
    )


def is_json_plan_file(path: str) -> bool:
    """Return whether a file is a plan in JSON: the marker of plans is in its first bytes."""
    if path == STDIN or Path(path).is_dir():
        return False
    with open(path, "rb") as file:
        start = file.read(PLAN_MARKER_BYTES)
    return start.lstrip().startswith(b"{") and b'"hocket-plan-' in start
