"""``hocket replay``: repeats the requests of a server from its log, and reports the first difference."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ...graph.errors import format_count
from ..errors import ModelError
from ..gguf.tokenization.tokenizer import Tokenizer, has_vocabulary
from ..inference.model_digest import compute_model_digest
from ..language_model import Model
from ..serving.replay import LogReplay, ReplayDifferenceError, ReplayedTotals, read_complete_log_lines
from ..serving.served_model import ServedModel
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed
from .shared_flags import SESSION_OPTIONS


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("log", metavar="FILE", help="the log that hocket serve --log-requests wrote")
    sub.add_argument("-m", "--model", metavar="MODEL", help="the model, if it is not where the server had it")


def run(args: argparse.Namespace) -> int:
    total, replay, model = ReplayedTotals(), None, None
    try:
        for line, record in read_complete_log_lines(args.log):
            if "log" in record:
                if model is not None:
                    model.close()
                model, replay = None, None
                try:
                    model = open_model_with_logged_options(record, args.model)
                    replay = LogReplay(model.session, record, _find_tokenizer(model))
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise ModelError(
                        f"{args.log}: line {line} is no header ({error!r:.80}); give another log"
                    ) from error
                replay.counts = total
            else:
                assert replay is not None  # the first line is a header
                replay.repeat_line_and_compare(line, record)
    except ReplayDifferenceError as difference:
        write_to_stdout_unless_closed(f"{args.log}: {difference}\n")
        return 1
    finally:
        if model is not None:
            model.close()
    if replay is None:
        raise ModelError(f"{args.log}: is empty; give a file of --log-requests")
    counts = (
        f"{format_count(total.requests, 'request')}, {format_count(total.steps, 'step')} and "
        f"{format_count(total.tokens, 'token')}"
    )
    write_to_stdout_unless_closed(f"{args.log}: {counts} are equal to the log, bit by bit\n")
    return 0


def open_model_with_logged_options(header: Mapping[str, Any], path: str | None) -> Model:
    """Open the model of a log with the options of its server.

    Args:
        header: The header of the log.
        path: The file of the model; `None` is the file that the server had.

    Raises:
        ModelError: The file has another model, or the header has wrong options.
    """
    options = header["options"]
    if not isinstance(options, dict) or set(options) - {*SESSION_OPTIONS, "model"}:
        raise ModelError("the header of the log has unknown options; give a log of this version")
    chosen = {name: value for name, value in options.items() if name != "model"}
    model = Model(options["model"] if path is None else path, **chosen)
    if compute_model_digest(model.session.model) != header["model_digest"]:
        model.close()
        raise ModelError("the log is of another model; name the model of the server with -m")
    served = ServedModel(model, name="", version=str(header["version"]))
    if served.fingerprint != header["fingerprint"]:
        write_line_to_stderr("hocket: the plans or the processor differ from those of the server; so may the results")
    return model


def _find_tokenizer(model: Model) -> Tokenizer | None:
    return model.tokenizer if has_vocabulary(model.session.model.gguf.metadata) else None
