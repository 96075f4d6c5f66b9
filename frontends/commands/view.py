"""``hocket view``: a model's step, a graph or a plan in a file as one page, for a browser."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ...view import Page, view_graph, view_plan
from ..errors import ModelError
from ..session import DEFAULT_BATCH
from ..terminal.output import log
from .flags import batch_flag, cache_flags, caches_of, context_flag, group_flags, group_of, model_flags
from .plan import plan_group, read_plan, step_graph, used

PLAN_START = 200
"""Bytes of a file within which a plan in JSON says that it is one."""


def flags(sub: argparse.ArgumentParser) -> None:
    model_flags(sub, "GGUF file (only its header is read), dumped graph, or plan in JSON", "MODEL|GRAPH|PLAN")
    sub.add_argument("-o", "--out", metavar="FILE", help="the page to write (the model's name with .html)")
    where = sub.add_mutually_exclusive_group()
    group_flags(sub, where)
    where.add_argument("--simulate", metavar="SPEC", help="devices that are not there, as h200:8,nvlink or rtx3090:2")
    where.add_argument("--graph", action="store_true", help="the graph alone, without a plan")
    context_flag(sub)
    batch_flag(sub, DEFAULT_BATCH, "tokens of a prefill (512)")
    cache_flags(sub)
    sub.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="one token, or a batch (decode)")
    sub.add_argument("--trace", metavar="FILE", help="times of its steps, as hocket run --trace wrote them")
    sub.add_argument("--diff", metavar="OTHER", help="show this plan in JSON next to it, and the differences")


def run(args: argparse.Namespace) -> int:
    name = Path(args.model).name
    page = page_of(args, name)
    out = args.out or f"{Path(name).stem}.html"
    page.save(out)
    log(f"{out}: {len(page.html.encode('utf-8')) / 1e6:.2f} MB; open it in a browser")
    return 0


def page_of(args: argparse.Namespace, title: str) -> Page:
    """The page of the graph alone, or of the plan in the file, or of one made for the devices.

    Raises `ModelError`, `GraphError`, `PlanError` or `BackendError`.
    """
    if args.diff is not None and not is_plan(args.diff):
        raise ModelError(f"{args.diff}: is no plan in JSON; write one with `hocket plan -o`")
    if args.graph and args.trace:
        raise ModelError("a graph alone has no steps that took time; leave out --graph or --trace")
    before = None if args.diff is None else read_plan(args.diff)
    shown = partial(view_plan, before=before, trace=args.trace, title=title)
    if is_plan(args.model):
        plan = read_plan(args.model)
        return view_graph(plan.graph, title=title) if args.graph else shown(plan)
    tokens = 1 if args.phase == "decode" else args.batch
    on = group_of(args, **caches_of(args))
    graph, context = step_graph(args.model, context=args.context, tokens=tokens, caches=on.caches)
    if args.graph:
        return view_graph(graph, title=title)
    known = None if context is None else min(tokens, context)
    return shown(plan_group(graph, on, args.simulate, used(args, on, context))[1], tokens=known)


def is_plan(path: str) -> bool:
    """Whether a file says in its first bytes that it is a plan."""
    with open(path, "rb") as file:
        start = file.read(PLAN_START)
    return start.lstrip().startswith(b"{") and b'"hocket-plan-' in start
