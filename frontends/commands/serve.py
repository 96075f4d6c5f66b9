"""``hocket serve``: runs a model server for clients of OpenAI, Anthropic and llama-server."""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...graph.errors import DeviceLostError, format_install_command
from ...graph.storage.files import open_log, require_writable
from ..config_options import list_options
from ..errors import ModelError
from ..flag_values import parse_json_object, parse_natural, parse_number, parse_positive, parse_seed
from ..generation.sampling import DEFAULT_TEMPERATURE, Sampling
from ..generation.speculative import DEFAULT_DRAFT_TOKENS
from ..inference.session import DEFAULT_CONTEXT
from ..language_model import Model
from ..open_model import open_model, read_text_without_bom_and_newline, require_usable_model_files
from ..run_config import RunConfig, list_option_names_in_scopes
from ..serving.drafting.drafter import MAX_DRAFT_TOKENS
from ..terminal.output import write_line_to_stderr
from .plan import print_serving_prediction
from .shared_flags import (
    SESSION_OPTIONS,
    add_cache_folder_flag,
    add_model_file_argument,
    add_option_flags,
    config_from_flags,
    mark_as_multi_rank_command,
    run_options_from_flags,
    set_cache_folder_and_blas_threads,
)

if TYPE_CHECKING:
    from ...server.options import ServerOptions
    from ..serving.request_log import RequestLog

API_KEY_VARIABLE = "HOCKET_API_KEY"
"""The environment variable with the API key of a server without ``--api-key-file``."""
DEFAULT_SLOTS = 4
QUEUE_PER_SLOT = 4
"""Default number of requests that wait, for each slot."""
MAX_PORT = 65535
GC_THRESHOLD_OBJECTS = 10_000
"""The number of new objects after which a server searches for garbage cycles; a search takes about a millisecond."""
MISSING_EXTRA_ERROR = f"hocket serve needs starlette, uvicorn and msgspec; {format_install_command('server')}"


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub)
    mark_as_multi_rank_command(sub)
    _add_address_flags(sub)
    sub.add_argument(
        *("-np", "--parallel"),
        type=parse_positive,
        default=DEFAULT_SLOTS,
        metavar="N",
        help=f"requests that run at once; each has a slot ({DEFAULT_SLOTS})",
    )
    sub.add_argument(
        "--queue", type=parse_natural, metavar="N", help=f"requests that wait for a slot ({QUEUE_PER_SLOT} per slot)"
    )
    sub.add_argument(
        "--max-gap",
        type=parse_seconds_or_milliseconds,
        default=100.0,
        metavar="MS",
        help="longest predicted time of a prompt chunk while other requests get tokens (100)",
    )
    sub.add_argument(
        "--cache-memory",
        type=parse_natural,
        default=1024,
        metavar="MIB",
        help="memory for saved recurrent states of earlier prompts (1024)",
    )
    sub.add_argument(
        "--pool-tokens",
        type=parse_positive,
        default=0,
        metavar="N",
        help="tokens in the KV caches of all slots, which then share blocks of 64 (slots times context)",
    )
    sub.add_argument(
        "--admit",
        choices=("ahead", "whole"),
        default="ahead",
        help="with --pool-tokens, start a request when its prompt and 256 tokens fit, or the whole text (ahead)",
    )
    sub.add_argument(
        "--default-max-tokens",
        type=parse_positive,
        default=4096,
        metavar="N",
        help="new tokens of a request that gives no limit (4096)",
    )
    temperature = {"default": DEFAULT_TEMPERATURE, "help": f"temperature if a request has none ({DEFAULT_TEMPERATURE})"}
    add_option_flags(sub, ("temperature",), list_options(Sampling), temperature=temperature)
    sub.add_argument(
        *("-s", "--seed"),
        type=parse_seed,
        default=-1,
        metavar="N",
        help="seed of requests that give none; -1: a random seed (-1)",
    )
    sub.add_argument("--chat-template", metavar="FILE", help="a chat template in place of the template of the model")
    sub.add_argument(
        "--chat-template-kwargs",
        dest="variables",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, as '{\"enable_thinking\": false}'",
    )
    sub.add_argument(
        "--slot-save-path", metavar="FOLDER", help="folder of the files of POST /slots/ID?action=save and restore"
    )
    sub.add_argument(
        "--log-requests", metavar="FILE", help="append all requests, with their texts, to a log for hocket replay"
    )
    sub.add_argument("--no-metrics", action="store_true", help="/metrics answers 501")
    sub.add_argument("--no-slots", action="store_true", help="/slots answers 501")
    sub.add_argument("-v", "--verbose", action="store_true", help="answers to chats have the prompt in __verbose")
    sub.add_argument("--dry-run", action="store_true", help="print memory and predicted speed, load nothing, and end")
    slot_tokens = f"tokens of each slot, 0: as many as the model allows ({DEFAULT_CONTEXT}, or fewer)"
    drafts = (
        f"draft tokens of a request in a step, at most {MAX_DRAFT_TOKENS} ({DEFAULT_DRAFT_TOKENS}); without -md, MTP"
    )
    names = SESSION_OPTIONS | list_option_names_in_scopes("generate")
    add_option_flags(sub, names, context={"help": slot_tokens}, draft_max={"help": drafts})
    add_cache_folder_flag(sub)


def parse_seconds_or_milliseconds(text: str) -> float:
    """Parse a duration in seconds or milliseconds: a finite number of at least 0."""
    value = parse_number(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; need a finite number of at least 0")
    return value


def _add_address_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--host", default="127.0.0.1", metavar="ADDRESSES", help="addresses, as in A,B (127.0.0.1)")
    sub.add_argument("--port", type=parse_natural, default=8080, metavar="N", help="port; 0: any free one (8080)")
    sub.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"keys, one in a line, of which clients need one; without a file ${API_KEY_VARIABLE} is the key",
    )
    sub.add_argument("--insecure", action="store_true", help="allow an address of the network without a key")
    sub.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="a web page that may call; repeatable"
    )
    sub.add_argument("--alias", action="append", default=[], metavar="NAME", help="name of the model; repeatable")
    sub.add_argument("--strict-model", action="store_true", help="refuse requests that name another model")
    for flag, help, seconds in (
        ("--queue-timeout", "longest wait for a slot", 60),
        ("--timeout", "longest duration of a request", 3600),
        ("--drain", "time for running requests after SIGTERM", 30),
    ):
        text = f"{help}, in s ({seconds})"
        sub.add_argument(flag, type=parse_seconds_or_milliseconds, default=float(seconds), metavar="S", help=text)
    sub.add_argument("--ssl-cert-file", metavar="FILE", help="certificate for HTTPS, with --ssl-key-file")
    sub.add_argument("--ssl-key-file", metavar="FILE", help="private key for HTTPS")


def run(args: argparse.Namespace) -> int:
    set_cache_folder_and_blas_threads(args)
    refuse_flags_incompatible_with_drafts(args)
    if args.admit == "whole" and not args.pool_tokens:
        raise ModelError("--admit whole reserves tokens of a pool; give --pool-tokens, or leave out --admit")
    if args.world.rank:
        return 0 if args.dry_run else follow_server_on_rank_0(args)
    if args.world.size > 1 and args.log_requests is not None:
        raise ModelError("--log-requests is for one process; leave it out, or start the server without mpiexec")
    options = read_server_options_and_files(args)
    check_server_options_before_load(options)
    require_usable_model_files(config_from_flags(args))
    if args.log_requests is not None:
        require_writable(args.log_requests)
    if args.dry_run:
        return print_serving_prediction(args)
    with ExitStack() as stack:
        listeners = bind_server_sockets(options)
        for listener in listeners:
            stack.enter_context(listener)
        return serve_model(args, options, listeners)


def refuse_flags_incompatible_with_drafts(args: argparse.Namespace) -> None:
    """Raise `ModelError` for flags that cannot be combined with draft tokens."""
    others = {
        "--log-requests": args.log_requests is not None,
        "--dry-run": args.dry_run,
        "--pool-tokens": args.pool_tokens > 0,
    }
    refused = [flag for flag, is_set in others.items() if is_set]
    if refused and (args.draft is not None or args.draft_max is not None):
        raise ModelError(f"{refused[0]} does not support drafts; leave out -md and --draft-max, or {refused[0]}")


def refuse_generation_flags_for_encoder(args: argparse.Namespace) -> None:
    """Raise `ModelError` for flags of text generation, which an encoder model cannot do."""
    reasons = {"--log-requests": "no steps to log", "--pool-tokens": "no KV caches"}
    is_set = {"--log-requests": args.log_requests is not None, "--pool-tokens": args.pool_tokens > 0}
    for flag, reason in reasons.items():
        if is_set[flag]:
            raise ModelError(f"{flag} is for models that generate text; an encoder has {reason}; leave out {flag}")


def follow_server_on_rank_0(args: argparse.Namespace) -> int:
    """Run the part of the model on the devices of this rank, until the server on rank 0 ends; return the exit code.

    A launcher sends a signal to all ranks. Rank 0 ends the server, so this rank ignores the signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from ... import __version__
    from ..serving.served_model import ServedModel, is_non_generative
    from ..serving.thread import list_pool_and_draft_pool, make_served_pool

    model, name = open_served_model(args)
    with model:
        served = ServedModel(model, name=name, version=__version__)
        if is_non_generative(model):
            served.rank_calls.follow_rank_0([served])
        else:
            pool = make_served_pool(model, args.parallel, served.rank_calls, args.pool_tokens)
            served.rank_calls.follow_rank_0([served, *list_pool_and_draft_pool(pool)])
    return 0


def serve_model(args: argparse.Namespace, options: ServerOptions, listeners: Sequence[socket.socket]) -> int:
    """Open the model and serve it at bound sockets until a signal; return the exit code.

    Args:
        args: The flags.
        options: The options of the HTTP server.
        listeners: The listening sockets. Clients that connect wait until the model is open.
    """
    port, log = listeners[0].getsockname()[1], open_request_log(args)
    model, name = open_served_model(args)
    from ... import __version__
    from ...server.lifecycle import restart_in_fresh_process, run_server
    from ..serving.served_model import EncoderService, is_non_generative
    from ..serving.thread import EngineOptions, EngineThread

    queue = QUEUE_PER_SLOT * args.parallel if args.queue is None else args.queue
    saved, whole = args.cache_memory << 20, args.admit == "whole"
    keeps = args.slot_save_path is not None
    engine = EngineOptions(args.parallel, queue, args.max_gap / 1e3, saved, args.pool_tokens, whole, keeps)
    with model:
        failures, drained = list[str](), list[bool]()  # whether a signal of the user has begun the drain

        def end_server(why: str) -> None:
            failures.append(why)
            os.kill(os.getpid(), signal.SIGTERM)

        service: EngineThread | EncoderService
        if is_non_generative(model):
            refuse_generation_flags_for_encoder(args)
            service = EncoderService(model, name=name, version=__version__, on_failure=end_server)
        else:
            service = EngineThread(
                model,
                engine,
                name=name,
                version=__version__,
                log=log,
                on_failure=end_server,
                on_restart=partial(_announce, "the engine was built anew after a failure:"),
            )
        run_cyclic_gc_more_often()
        try:
            announce, start = partial(_announce, f"serves {name} at"), time.monotonic()
            code = run_server(
                service, options, announce, listeners=listeners, on_drain=lambda: drained.append(not failures)
            )
        finally:
            service.close(0.0)
        service.rank_calls.end()  # raises the failure of a rank
        if service.error is not None and args.debug:
            traceback.print_exception(service.error)
        if failures:
            write_line_to_stderr(f"hocket: the engine has failed: {failures[0]}")
        if isinstance(service.error, DeviceLostError):
            if args.world.size == 1 and not any(drained):
                restart_in_fresh_process(port, time.monotonic() - start, partial(_announce, "starts anew,"))
            os._exit(1)  # the device also refuses the calls that free its memory
        return 1 if failures else code


def _announce(what: str, details: str) -> None:
    write_line_to_stderr(f"hocket: {what} {details}")


def run_cyclic_gc_more_often() -> None:
    """Make the cyclic garbage collector run more often, as a long-running server needs.

    Libraries leave reference cycles after a request: jinja2 leaves 400 objects for each template that it compiles.
    The collector skips the objects of the model, which exist until the end. A lower threshold that is already set
    stays.
    """
    young, *old = gc.get_threshold()
    if young > GC_THRESHOLD_OBJECTS:
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD_OBJECTS, *old)


def open_served_model(args: argparse.Namespace) -> tuple[Model, str]:
    """Open the model that the flags describe, and return it with its name for clients."""
    model = Model.open_on_ranks(RunConfig(args.model, **model_arguments_from_flags(args)), args.world)
    return model, args.alias[0] if args.alias else Path(args.model).stem


def model_arguments_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Model` that the flags give. A context of 0 becomes the context of the model."""
    options = run_options_from_flags(args)
    if args.context == 0:
        options["context"] = open_model(args.model, header_only=True).context_length
    return options


def open_request_log(args: argparse.Namespace) -> RequestLog | None:
    """Open the file of `--log-requests`, if it is given.

    Raises:
        OSError: The file cannot be written.
    """
    if args.log_requests is None:
        return None
    from ..serving.request_log import RequestLog

    options = {name: value for name, value in model_arguments_from_flags(args).items() if name in SESSION_OPTIONS}
    options["model"] = str(Path(args.model).absolute())
    return RequestLog(open_log(args.log_requests), partial(_announce_log_error, args.log_requests), options)


def _announce_log_error(path: str, why: str) -> None:
    write_line_to_stderr(f"hocket: {path}: {why}; the log of requests ends here, the server goes on")


def read_server_options_and_files(args: argparse.Namespace) -> ServerOptions:
    """Read the options of the HTTP server from the flags, and from the files that they name (API keys, chat template).

    Raises:
        ModelError: The extra ``server`` is not installed, or options contradict each other.
        OSError: A file cannot be read.
    """
    try:
        from ...server.options import ServerOptions
    except ImportError as error:
        if error.name and error.name.split(".")[0] == "hocket":
            raise
        raise ModelError(MISSING_EXTRA_ERROR) from None
    if (args.ssl_cert_file is None) != (args.ssl_key_file is None):
        raise ModelError("HTTPS needs both --ssl-cert-file and --ssl-key-file")
    if args.port > MAX_PORT:
        raise ModelError(f"--port is {args.port}; need at most {MAX_PORT}")
    if args.slot_save_path is not None and not Path(args.slot_save_path).is_dir():
        raise ModelError(f"--slot-save-path: {args.slot_save_path!a:.200} is no folder; create it")
    if not all(args.alias):
        raise ModelError("--alias is empty; give a name")
    if not all(args.cors_origin):
        raise ModelError("--cors-origin is empty; give an origin, as https://page.example")
    return ServerOptions(
        host=args.host,
        port=args.port,
        api_keys=_read_api_keys(args.api_key_file),
        insecure=args.insecure,
        cors_origins=tuple(args.cors_origin),
        model_file=Path(args.model).name,
        aliases=tuple(args.alias),
        strict_model=args.strict_model,
        sampling=Sampling(temperature=args.temperature),
        seed=args.seed,
        default_max_tokens=args.default_max_tokens,
        chat_template=None if args.chat_template is None else read_text_without_bom_and_newline(args.chat_template),
        template_variables=args.variables,
        has_metrics=not args.no_metrics,
        has_slots=not args.no_slots,
        slot_save_path=args.slot_save_path or "",
        shows_prompts=args.verbose,
        queue_seconds=args.queue_timeout,
        request_seconds=args.timeout,
        drain_seconds=args.drain,
        tls_certificate=args.ssl_cert_file,
        tls_key=args.ssl_key_file,
    )


def check_server_options_before_load(options: ServerOptions) -> None:
    """Check the server options before the model is loaded, which may take long.

    Raises:
        ModelError: The certificate cannot be read, or the chat template has wrong syntax.
    """
    import ssl

    from jinja2 import TemplateSyntaxError

    from ..gguf.chat_sandbox import compile_chat_template

    certificate, key = options.tls_certificate, options.tls_key
    if certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:  # errors of TLS are such, too
            reason = error.strerror or str(error)
            raise ModelError(f"HTTPS cannot use {certificate} with {key}: {reason}; give PEM files") from None
    if options.chat_template is not None:
        try:
            compile_chat_template(options.chat_template)
        except TemplateSyntaxError as error:
            raise ModelError(f"--chat-template: line {error.lineno}: {error.message}; correct the template") from None


def bind_server_sockets(options: ServerOptions) -> list[socket.socket]:
    """Return a listening socket for each address, before the model is loaded, which may take long.

    Raises:
        ModelError: An address cannot be used.
    """
    from ...server.lifecycle import bind_sockets

    try:
        return bind_sockets(options)
    except (OSError, UnicodeError) as error:
        address, reason = getattr(error, "filename", options.host), getattr(error, "strerror", "is no address")
        raise ModelError(f"{address}: {reason}; choose another --host or --port") from None


def _read_api_keys(path: str | None) -> tuple[str, ...]:
    keys = (
        [os.environ.get(API_KEY_VARIABLE, "")] if path is None else read_text_without_bom_and_newline(path).splitlines()
    )
    found = tuple(key for line in keys if (key := line.strip()))
    if path is not None and not found:
        raise ModelError(f"{path}: has no API key; write one in a line")
    return found
