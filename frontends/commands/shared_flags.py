"""Flags that several commands share, and the devices, models and sessions that the flags describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...graph.storage.files import require_writable
from ...scheduler import SPLIT_MODE_NAMES
from ..errors import ModelError
from ..inference.device_group import CACHE_DTYPES
from ..inference.session import DEFAULT_BATCH, DeviceGroup, Session
from ..inference.value_watch import StepWatch, ValueWatch
from ..models import Model
from ..open_model import open_adapted_model, open_session
from ..terminal.arguments import (
    PositionalAliasAction,
    parse_devices,
    parse_natural,
    parse_placement,
    parse_positive,
    parse_scaled_file,
    parse_shares,
)
from ..terminal.blas_threads import set_blas_threads
from ..terminal.output import write_line_to_stderr

DEVICES_HELP = (
    "devices, as cpu:0,cpu:1 (cpu:0). Parts of one device are cuda:0.0 and cuda:0.1. Under mpiexec, cpu:0@1 is a "
    "device of rank 1, and cpu:0 is this device of every rank"
)
EXACT_HELP = (
    "compute in float32 throughout, on CPUs with plain NumPy, which is slower. Results of SmolLM2 on one and on three "
    "devices then differ by an NMSE of 2.5e-13, otherwise by an NMSE of 5e-4"
)


def add_model_flags(
    sub: argparse.ArgumentParser, help: str = "GGUF file or Hugging Face folder", metavar: str = "MODEL", **options: Any
) -> None:
    """Add the argument for the model file, which may stand alone or after ``-m`` as in llama.cpp.

    Args:
        sub: Parser of the command.
        help: Help text of the argument.
        metavar: Name of the argument in the help.
        options: Further options of ``add_argument``.
    """
    sub.add_argument("model", metavar=metavar, help=help, **options)
    sub.add_argument("-m", "--model", action=PositionalAliasAction, dest="model", metavar=metavar, help=f"as {metavar}")


def add_session_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of all commands that run a model in a session."""
    add_device_flags(sub, sub)
    add_adapter_flags(sub)
    sub.add_argument("--exact", action="store_true", help=EXACT_HELP)
    add_transfer_dtype_flag(sub)
    add_cache_flags(sub)
    add_packed_flag(sub)
    sub.add_argument(
        "--fast",
        action="store_true",
        help="compute the delta rule and products with 16-bit weights in 16 bits where that is faster",
    )
    add_context_flag(sub)
    add_batch_flag(sub, DEFAULT_BATCH, "maximum tokens of a run")
    mark_as_multi_rank_command(sub)
    sub.add_argument(
        "-t", "--threads", type=parse_positive, metavar="N", help="threads of each device (its share of the processors)"
    )
    sub.add_argument("--cache-dir", metavar="DIR", help="folder of compiled kernels and plans (~/.cache/hocket)")
    add_trace_flag(sub)
    sub.add_argument(
        "--watch", metavar="REGEX", help="print statistics of values with matching names to stderr after each step"
    )


def add_adapter_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of LoRA adapters and control vectors."""
    add = partial(sub.add_argument, type=parse_scaled_file, action="append", default=[], metavar="FILE[:SCALE]")
    add("--lora", help="apply a LoRA adapter; may be repeated")
    add("--control-vector", help="add a control vector; may be repeated")
    sub.add_argument(
        "--control-vector-layer-range",
        type=parse_natural,
        nargs=2,
        metavar=("START", "END"),
        help="the first and the last layer after which control vectors are added (all except layer 0)",
    )


def load_model_from_flags(args: argparse.Namespace) -> Model:
    """Load the model that the flags name, with its adapters."""
    span = args.control_vector_layer_range
    return open_adapted_model(
        args.model,
        lora=args.lora,
        control_vectors=args.control_vector,
        control_layers=None if span is None else (span[0], span[1]),
    )


def mark_as_multi_rank_command(sub: argparse.ArgumentParser) -> None:
    """Mark a command as one that all ranks run together under mpiexec; other commands run on rank 0 only."""
    sub.set_defaults(in_ranks=True)


def add_device_flags(sub: argparse.ArgumentParser, where: argparse._ActionsContainer) -> None:
    """Add the flags of the device group: devices, split mode, tensor split and placement.

    Args:
        sub: Parser of the command.
        where: Receives `--devices`; it may be a mutually exclusive group of `sub`.
    """
    where.add_argument("--devices", type=parse_devices, default=("cpu:0",), metavar="LIST", help=DEVICES_HELP)
    sub.add_argument(
        *("-sm", "--split-mode"),
        default="auto",
        metavar="MODE",
        help=f"how devices share the graph: {'; '.join(SPLIT_MODE_NAMES)} (auto). A long prompt is pipelined through "
        "devices with different layers",
    )
    sub.add_argument(
        *("-ts", "--tensor-split"), type=parse_shares, default=(), metavar="LIST", help="shares of the devices, as 3,1"
    )
    sub.add_argument(
        "--place",
        type=parse_placement,
        action="append",
        default=[],
        metavar="REGEX=DEVICE",
        help="run nodes with a matching name on one device, as 'ffn_up=cpu:1'. Nodes that read a weight or state with "
        "a matching name also run there. May be repeated; the first match applies",
    )


def add_transfer_dtype_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--wire", choices=("f32", "bf16"), default="f32", help="dtype in which large sums are sent between GPUs (f32)"
    )


def add_cache_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of the dtypes of the KV cache."""
    for short, name, what in (("-ctk", "--cache-type-k", "keys"), ("-ctv", "--cache-type-v", "values")):
        sub.add_argument(short, name, choices=(*CACHE_DTYPES,), help=f"dtype of cached {what} (f16; with --exact f32)")


def add_packed_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--keep-packed",
        action="store_true",
        help="keep the repacked weights in the cache folder, so that later runs start sooner",
    )


def cache_dtypes_from_flags(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the KV-cache dtypes that the flags give, as fields of `DeviceGroup`."""
    return {"cache_type_k": args.cache_type_k, "cache_type_v": args.cache_type_v}


def add_trace_flag(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace of all runs for ui.perfetto.dev and hocket view --trace. A file name with .gz is "
        "compressed. Prefill chunks then pass through the devices one at a time",
    )


@contextmanager
def trace_to_file(session: Session, path: str | None) -> Iterator[None]:
    """Trace the runs of a session in this context and write the trace to a file at the end, also after a failure.

    Without a path nothing is traced. With several processes rank 0 writes the trace of its own devices.

    Raises:
        OSError: The file cannot be written; this is checked at the beginning.
    """
    if path is None or session.world.rank:
        yield
        return
    require_writable(path, session.model.gguf.part_paths)
    with session.tracing() as trace:
        try:
            yield
        finally:
            trace.save(path)
            left = f" ({trace.dropped_runs} more were not traced)" if trace.dropped_runs else ""
            write_line_to_stderr(
                f"{path}: {len(trace.runs)} runs{left}; open it in ui.perfetto.dev, or give it to hocket view --trace"
            )


def add_context_flag(sub: argparse.ArgumentParser) -> None:
    help = "tokens of context; 0: the longest context of the model"
    sub.add_argument("-c", "--ctx-size", dest="context", type=parse_natural, metavar="N", help=help)


def add_batch_flag(sub: argparse.ArgumentParser, default: int, meaning: str) -> None:
    sub.add_argument(
        "-b", "--batch-size", dest="batch", type=parse_positive, default=default, metavar="N", help=meaning
    )


def device_group_from_flags(args: argparse.Namespace, **others: Any) -> DeviceGroup:
    """Return the device group that the flags describe; `others` are further fields of it.

    Raises:
        ModelError: `--tensor-split` has fewer shares than devices.
    """
    share_count, device_count = len(args.tensor_split), len(args.devices)
    if 0 < share_count < device_count and args.world.size == 1 and not getattr(args, "simulate", None):
        raise ModelError(
            f"--tensor-split has {share_count} shares for {device_count} devices; give each one, which may be 0"
        )
    return DeviceGroup(args.devices, args.split_mode, args.tensor_split, tuple(args.place), **others)


def value_watch_from_flags(args: argparse.Namespace) -> ValueWatch | None:
    """Return the value watch that `--watch` describes, which prints statistics to stderr, or None."""
    return (
        None
        if args.watch is None
        else ValueWatch(args.watch, lambda seen: write_line_to_stderr("\n".join(seen.format_lines())))
    )


def open_session_from_flags(
    args: argparse.Namespace, model: Model, context: int, *, watched: bool = True, watch: StepWatch | None = None
) -> Session:
    """Open a session as the flags describe it.

    Args:
        args: The parsed flags.
        model: The model.
        context: Context in tokens.
        watched: False ignores the flag `--watch`.
        watch: An observer of the steps, in place of the flag `--watch`.
    """
    if args.cache_dir:
        os.environ["HOCKET_CACHE_DIR"] = args.cache_dir  # read at the compilation of the first kernel
    if args.threads:
        set_blas_threads(args.threads)
    computed = {"exact": args.exact, "fast": args.fast, "wire": args.wire, **cache_dtypes_from_flags(args)}
    computed["keep_packed"] = args.keep_packed
    group = device_group_from_flags(args, threads=args.threads, **computed)
    watch = watch or (value_watch_from_flags(args) if watched else None)
    return open_session(model, on=group, context=context, batch=args.batch, watch=watch, world=args.world)


def broadcast_text_from_rank_0(args: argparse.Namespace, read: Callable[[], str]) -> str:
    """Return on all ranks the text that `read` returns on rank 0; other ranks do not call `read`."""
    keep = "surrogatepass"  # `read` refuses text that is not UTF-8 with its own message
    return str(args.world.broadcast_from_rank_0(lambda: read().encode(errors=keep)).decode(errors=keep))
