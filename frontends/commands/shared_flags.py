"""Flags that several commands share, and the devices, models and sessions that the flags describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...graph.errors import format_count
from ...graph.storage.files import require_writable
from ..config_options import ConfigOption
from ..errors import ModelError
from ..flag_values import parse_regular_expression
from ..inference.session import Session
from ..inference.value_watch import StepWatch, ValueWatch
from ..models import Model
from ..open_model import open_session
from ..run_config import RUN_OPTIONS, RunConfig, list_option_names_in_scopes
from ..terminal.arguments import PositionalAliasAction
from ..terminal.blas_threads import set_blas_threads
from ..terminal.output import write_line_to_stderr

PLAN_OPTIONS, SESSION_OPTIONS = list_option_names_in_scopes("plan"), list_option_names_in_scopes("plan", "run")
"""The options of commands that plan a model, and of commands that run it."""


def add_model_file_argument(
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


def add_session_flags(
    sub: argparse.ArgumentParser,
    names: Container[str] = SESSION_OPTIONS,
    *,
    trace: bool = True,
    watch: bool = True,
    context: Mapping[str, Any] | None = None,
) -> None:
    """Add the flags of commands that run a model in a session.

    Args:
        sub: Parser of the command.
        names: Names of the options of the model run.
        trace: Whether the command has `--trace`.
        watch: Whether the command has `--watch`.
        context: Arguments of ``add_argument`` for `--ctx-size` that differ in this command.
    """
    add_option_flags(sub, names, context=context or {})
    mark_as_multi_rank_command(sub)
    add_cache_folder_flag(sub)
    if trace:
        add_trace_flag(sub)
    if watch:
        sub.add_argument(
            "--watch",
            type=parse_regular_expression,
            metavar="REGEX",
            help="print statistics of values with matching names to stderr after each step",
        )


def add_option_flags(
    sub: argparse.ArgumentParser,
    names: Container[str],
    table: Mapping[str, ConfigOption] = RUN_OPTIONS,
    *,
    devices_in: argparse._ActionsContainer | None = None,
    **changes: Mapping[str, Any],
) -> None:
    """Add the flags of options.

    Args:
        sub: Parser of the command.
        names: Names of the options.
        table: All options of a configuration, by name.
        devices_in: Receives `--devices` in place of `sub`; a mutually exclusive group of `sub`.
        changes: Arguments of ``add_argument`` that differ in this command, by option name.
    """
    for name, row in table.items():
        if name in names:
            is_list = row.argparse.get("action") == "append"
            default, help = ([], f"{row.help}; may be repeated") if is_list else (row.default, row.help)
            arguments = {"default": default, "help": help, **row.argparse, **changes.get(name, {})}
            (devices_in if devices_in and name == "devices" else sub).add_argument(*row.flags, dest=name, **arguments)


def run_options_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model run that the flags give, as arguments of `RunConfig` and `hocket.Model`.

    Raises:
        ModelError: `--tensor-split` has fewer shares than devices.
    """
    options = {name: getattr(args, name) for name in RUN_OPTIONS if name in args}
    share_count, device_count = len(options["tensor_split"]), len(options["devices"])
    if 0 < share_count < device_count and args.world.size == 1 and not getattr(args, "simulate", None):
        raise ModelError(
            f"--tensor-split has {format_count(share_count, 'share')} for "
            f"{format_count(device_count, 'device')}; give each one, which may be 0"
        )
    return options


def config_from_flags(args: argparse.Namespace) -> RunConfig:
    """Return the configuration of the model run that the flags describe; see `run_options_from_flags`."""
    return RunConfig(args.model, **run_options_from_flags(args))


def mark_as_multi_rank_command(sub: argparse.ArgumentParser) -> None:
    """Mark a command as one that all ranks run together under mpiexec; other commands run on rank 0 only."""
    sub.set_defaults(in_ranks=True)


def add_cache_folder_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--cache-dir", metavar="DIR", help="folder of compiled kernels and plans (~/.cache/hocket)")


def set_cache_folder_and_blas_threads(args: argparse.Namespace) -> None:
    """Set the cache folder and the BLAS threads of this process as the flags say."""
    if args.cache_dir:
        os.environ["HOCKET_CACHE_DIR"] = args.cache_dir  # read at the compilation of the first kernel
    if args.threads:
        set_blas_threads(args.threads)


def add_trace_flag(sub: argparse._ActionsContainer) -> None:
    sub.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace of all runs for ui.perfetto.dev and hocket view --trace. A file name with .gz is "
        "compressed. Prefill chunks then pass through the devices one at a time",
    )


@contextmanager
def trace_to_file(session: Session, path: str | None) -> Iterator[None]:
    """Trace the runs of a session in this context and write the trace to a file at the end.

    The file is also written after a failure. Without a path nothing is traced. With several processes rank 0 writes the
    trace of its own devices.

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
                f"{path}: {format_count(len(trace.runs), 'run')}{left}; open it in ui.perfetto.dev, or give it "
                "to hocket view --trace"
            )


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
    set_cache_folder_and_blas_threads(args)
    config = config_from_flags(args)
    watch = watch or (value_watch_from_flags(args) if watched else None)
    return open_session(model, on=config.group, context=context, batch=config.batch, watch=watch, world=args.world)


def broadcast_text_from_rank_0(args: argparse.Namespace, read: Callable[[], str]) -> str:
    """Return on all ranks the text that `read` returns on rank 0; other ranks do not call `read`."""
    keep = "surrogatepass"  # `read` refuses text that is not UTF-8 with its own message
    return str(args.world.broadcast_from_rank_0(lambda: read().encode(errors=keep)).decode(errors=keep))
