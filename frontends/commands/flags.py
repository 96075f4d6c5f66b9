"""The flags that several commands have in common, and the devices and sessions that they describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...graph.files import check_writable
from ...scheduler import SPLIT_NAMES
from ..devices import CACHES
from ..errors import ModelError
from ..models import Model
from ..open import open_adapted, open_session
from ..session import DEFAULT_BATCH, Group, Session
from ..terminal.arguments import StandsFor, device_list, natural, placement, positive, scaled_file, shares
from ..terminal.output import log
from ..terminal.threads import set_threads
from ..watch import Watch

DEVICES = (
    "where to run, as cpu:0,cpu:1; parts of one device are cuda:0.0,cuda:0.1; under mpiexec cpu:0@1 is one of rank 1, "
    "and cpu:0 that of every rank (cpu:0)"
)


EXACT = (
    "float32 throughout, on CPUs in plain NumPy: slower; SmolLM2 on three devices then differs from one by an NMSE of "
    "2.5e-13, else by an NMSE of 5e-4"
)


def model_flags(sub: argparse.ArgumentParser, help: str = "GGUF file", metavar: str = "MODEL", **options: Any) -> None:
    """The model as first argument, or behind ``-m`` as llama.cpp has it."""
    sub.add_argument("model", metavar=metavar, help=help, **options)
    sub.add_argument("-m", "--model", action=StandsFor, dest="model", metavar=metavar, help=f"as {metavar}")


def session_flags(sub: argparse.ArgumentParser) -> None:
    """What every command that runs a model takes."""
    group_flags(sub, sub)
    adapter_flags(sub)
    sub.add_argument("--exact", action="store_true", help=EXACT)
    wire_flag(sub)
    cache_flags(sub)
    packed_flag(sub)
    sub.add_argument(
        "--fast",
        action="store_true",
        help="compute the delta rule, and products with weights of 16 bits, in 16 bits where that is faster",
    )
    context_flag(sub)
    batch_flag(sub, DEFAULT_BATCH, "tokens a run")
    in_ranks(sub)
    sub.add_argument(
        "-t", "--threads", type=positive, metavar="N", help="threads of each device (its share of the processors)"
    )
    sub.add_argument("--cache-dir", metavar="DIR", help="where compiled kernels and plans are kept (~/.cache/hocket)")
    trace_flag(sub)
    sub.add_argument(
        "--watch", metavar="REGEX", help="print statistics of values with such names after each step, to stderr"
    )


def adapter_flags(sub: argparse.ArgumentParser) -> None:
    """What changes a model without changing its file."""
    add = partial(sub.add_argument, type=scaled_file, action="append", default=[], metavar="FILE[:SCALE]")
    add("--lora", help="apply a LoRA adapter; may be repeated")
    add("--control-vector", help="add a control vector; may be repeated")
    sub.add_argument(
        "--control-vector-layer-range",
        type=natural,
        nargs=2,
        metavar=("START", "END"),
        help="the first and the last layer behind which control vectors are added (all but layer 0)",
    )


def model_of(args: argparse.Namespace) -> Model:
    """The model of a command with what `adapter_flags` say."""
    span = args.control_vector_layer_range
    return open_adapted(
        args.model,
        lora=args.lora,
        control_vectors=args.control_vector,
        control_layers=None if span is None else (span[0], span[1]),
    )


def in_ranks(sub: argparse.ArgumentParser) -> None:
    """A command that several processes run together; of others rank 0 runs them alone."""
    sub.set_defaults(in_ranks=True)


def group_flags(sub: argparse.ArgumentParser, where: argparse._ActionsContainer) -> None:
    """The devices, named in `where`, which may be a group of flags of `sub` that exclude each other, and how they
    share."""
    where.add_argument("--devices", type=device_list, default=("cpu:0",), metavar="LIST", help=DEVICES)
    sub.add_argument(
        *("-sm", "--split-mode"),
        default="auto",
        metavar="MODE",
        help=f"how several devices share: {'; '.join(SPLIT_NAMES)} (auto); with layers on several devices a "
        "long prompt is pipelined through them",
    )
    sub.add_argument(
        *("-ts", "--tensor-split"), type=shares, default=(), metavar="LIST", help="shares of the devices, as 3,1"
    )
    sub.add_argument(
        "--place",
        type=placement,
        action="append",
        default=[],
        metavar="REGEX=DEVICE",
        help="run nodes of this name, and those that read weights or states of this name, on one device, as "
        "'ffn_up=cpu:1'; may be repeated, the first that matches counts",
    )


def wire_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--wire", choices=("f32", "bf16"), default="f32", help="type in which large sums are sent between GPUs (f32)"
    )


def cache_flags(sub: argparse.ArgumentParser) -> None:
    """What is kept of each token for attention."""
    for short, name, what in (("-ctk", "--cache-type-k", "keys"), ("-ctv", "--cache-type-v", "values")):
        sub.add_argument(short, name, choices=(*CACHES,), help=f"type of cached {what} (f16; with --exact f32)")


def packed_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--keep-packed",
        action="store_true",
        help="keep the repacked weights in the cache folder, so that later runs start sooner",
    )


def caches_of(args: argparse.Namespace) -> dict[str, str | None]:
    """The fields of `Group` that `cache_flags` say."""
    return {"cache_type_k": args.cache_type_k, "cache_type_v": args.cache_type_v}


def trace_flag(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--trace",
        metavar="FILE",
        help="write what ran when, for ui.perfetto.dev and hocket view --trace (.gz: packed); parts of a prompt then "
        "go through the devices one at a time",
    )


@contextmanager
def traced(session: Session, path: str | None) -> Iterator[None]:
    """In this context runs of a session are traced, if a file is named, which is written in the end, also of a failure.

    Of several processes rank 0 writes one, of what its own devices did.  Raises `OSError`, at the beginning if the file
    cannot be written.
    """
    if path is None or session.world.rank:
        yield
        return
    check_writable(path)
    with session.tracing() as trace:
        try:
            yield
        finally:
            trace.save(path)
            left = f" ({trace.left_out} more were not traced)" if trace.left_out else ""
            log(f"{path}: {len(trace.runs)} runs{left}; open it in ui.perfetto.dev, or give it to hocket view --trace")


def context_flag(sub: argparse.ArgumentParser) -> None:
    help = "tokens of context, 0: as many as the model allows"
    sub.add_argument("-c", "--ctx-size", dest="context", type=natural, metavar="N", help=help)


def batch_flag(sub: argparse.ArgumentParser, default: int, meaning: str) -> None:
    sub.add_argument("-b", "--batch-size", dest="batch", type=positive, default=default, metavar="N", help=meaning)


def group_of(args: argparse.Namespace, **others: Any) -> Group:
    """The devices of `group_flags` and how they share; `others` are fields of `Group` for which a command has flags."""
    given, named = len(args.tensor_split), len(args.devices)
    if 0 < given < named and args.world.size == 1 and not getattr(args, "simulate", None):
        raise ModelError(f"--tensor-split has {given} shares for {named} devices; give each one, which may be 0")
    return Group(args.devices, args.split_mode, args.tensor_split, tuple(args.place), **others)


def watch_of(args: argparse.Namespace) -> Watch | None:
    """What is watched, and printed."""
    return None if args.watch is None else Watch(args.watch, lambda seen: log("\n".join(seen.lines())))


def session_of(args: argparse.Namespace, model: Model, context: int, *, watched: bool = True) -> Session:
    """A session as `session_flags` describe it; one that is not `watched` shows nothing of what it computes."""
    if args.cache_dir:
        os.environ["HOCKET_CACHE_DIR"] = args.cache_dir  # read where the first kernel is compiled
    if args.threads:
        set_threads(args.threads)
    computed = {"exact": args.exact, "fast": args.fast, "wire": args.wire, **caches_of(args)}
    computed["keep_packed"] = args.keep_packed
    group = group_of(args, threads=args.threads, **computed)
    watch = watch_of(args) if watched else None
    return open_session(model, on=group, context=context, batch=args.batch, watch=watch, world=args.world)


def text_of(args: argparse.Namespace, read: Callable[[], str]) -> str:
    """A text that rank 0 reads, for all ranks."""
    keep = "surrogatepass"  # what is no UTF-8 is refused where it is read, with a word about it
    return str(args.world.broadcast_from_first(lambda: read().encode(errors=keep)).decode(errors=keep))
