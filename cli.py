"""The command ``hocket``: flags, one function per subcommand, and the one place where errors become a line.

Data go to stdout, everything else to stderr.  Exit codes: 0 done, 1 a check failed, 2 wrong usage or bad input.
Nothing is coloured, so ``NO_COLOR`` has nothing to turn off.  Subcommands import what they need when they run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .frontends.flags import (
    CHUNK,
    NEW_TOKENS,
    Parser,
    bench_flags,
    devices_flags,
    dump_flags,
    logits_flags,
    one_line,
    ops_flags,
    perplexity_flags,
    plan_flags,
    run_flags,
    session_flags,
    tokenize_flags,
)

if TYPE_CHECKING:
    from .frontends.gguf.tokenizer import Tokenizer
    from .frontends.models import Model
    from .frontends.sampling import Sampling
    from .frontends.session import Group, Session

OPENING = "It is a truth universally acknowledged, that"
"""What the embedded model continues if nobody says otherwise."""

SHARING = (
    "Commands that run or plan a model take --devices, --split-mode, --tensor-split and --place REGEX=DEVICE (what has "
    "such a name, or reads a weight or state of such a name, runs on that device); see hocket COMMAND --help."
)

# ---------------------------------------------------------------------------------------------------- subcommands


def run(args: argparse.Namespace) -> int:
    """Generate text and stream it."""
    from .frontends.gguf.tokenizer import tokenizer_from_metadata
    from .frontends.open import open_model
    from .frontends.sampling import Sampling

    sampling = Sampling(args.temp, args.top_k, args.top_p, args.min_p)
    model = open_model(args.model)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    return (chat if args.chat else complete)(args, model, tokenizer, sampling)


def complete(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, sampling: Sampling) -> int:
    """Print a text and what follows it."""
    from .frontends.generate import Timing, generate, stream_text
    from .frontends.open import context_for, open_session
    from .frontends.saved_state import load_state, save_state

    text = prompt_text(args, OPENING if args.model is None else None)
    tokens = tokenizer.encode(text, add_special=args.load_state is None, parse_special=True)
    context = context_for(model, len(tokens), args.context)
    session = open_session(model, on=group_of(args), context=context, batch=args.batch)
    known = load_state(session, args.load_state)[0] + tokens if args.load_state else list(tokens)
    timing, stop = Timing(), frozenset() if args.ignore_eos else tokenizer.eos_ids
    limit = NEW_TOKENS if args.predict is None else args.predict
    new = generate(session, tokens, limit=limit, sampling=sampling, seed=args.seed, stop=stop, timing=timing)
    write(text)
    try:
        for piece in stream_text(recorded(new, known), tokenizer):
            write(piece)
    finally:
        write("\n")
    if args.save_state:
        save_state(session, [known[: session.lengths[0]]], args.save_state)
    log(f"{timing}; {memory_text(session)}")
    return 0


def recorded(tokens: Iterator[int], known: list[int]) -> Iterator[int]:
    """Pass tokens on, each also appended to `known`."""
    for token in tokens:
        known.append(token)
        yield token


def chat(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, sampling: Sampling) -> int:
    """Answer one message, or on a terminal one after the other."""
    from .frontends.conversation import Conversation
    from .frontends.gguf.chat import chat_template
    from .frontends.open import context_for, open_session

    chat_template(model.gguf.metadata)  # whether there is one should be known before the weights are loaded
    interactive = args.prompt is None and args.file is None and on_terminal()
    messages = asked() if interactive else iter([prompt_text(args, None)])
    session = open_session(model, on=group_of(args), context=context_for(model, 0, args.context), batch=args.batch)
    stop = frozenset() if args.ignore_eos else tokenizer.eos_ids
    limit = -1 if args.predict is None else args.predict
    conversation = Conversation(session, tokenizer, limit=limit, sampling=sampling, seed=args.seed, stop=stop)
    for message in messages:
        try:
            for piece in conversation.answer(message):
                write(piece)
        finally:
            write("\n")
    log(f"{conversation.timing}; {memory_text(session)}")
    return 0


def logits(args: argparse.Namespace) -> int:
    """Write the logits of every position."""
    from .frontends.gguf.tokenizer import tokenizer_from_metadata
    from .frontends.logits import check_tokens, every_logits, read_tokens, write_rows
    from .frontends.open import context_for, open_model, open_session

    model = open_model(args.model)
    if args.prompt is not None:
        tokens = tokenizer_from_metadata(model.gguf.metadata).encode(args.prompt, parse_special=True)
    else:
        tokens = read_tokens(args.tokens_file) if args.tokens is None else args.tokens
    check_tokens(tokens, model)
    context = context_for(model, len(tokens), args.context, default=len(tokens))
    session = open_session(model, on=group_of(args), context=context, batch=args.batch)
    blocks = every_logits(session, tokens, step=args.step)
    write_rows(args.out, blocks, (len(tokens), model.vocabulary_size))
    return 0


def tokenize(args: argparse.Namespace) -> int:
    """Print the token ids of a text."""
    from .frontends.gguf import open_gguf
    from .frontends.gguf.tokenizer import tokenizer_from_metadata

    tokenizer = tokenizer_from_metadata(open_gguf(args.model, header_only=True).metadata)
    ids = tokenizer.encode(args.prompt, add_special=args.add_special, parse_special=args.parse_special)
    if args.json:
        write(json.dumps(ids) + "\n")
    else:
        write("".join(f"{i:6}  {tokenizer.token_bytes(i).decode('utf-8', 'replace')!r}\n" for i in ids))
    return 0


def perplexity(args: argparse.Namespace) -> int:
    """Print how well a model predicts a text."""
    from tqdm import tqdm

    from .frontends.gguf.tokenizer import tokenizer_from_metadata
    from .frontends.open import context_for, open_model, open_session, read_text
    from .frontends.perplexity import Score, count_chunks, score_chunks

    model = open_model(args.model)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    tokens = tokenizer.encode(read_text(args.file))
    context = context_for(model, 0, args.context, default=CHUNK)
    total = count_chunks(len(tokens), context)
    session = open_session(model, on=group_of(args), context=context, batch=args.batch)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    chunks = score_chunks(session, tokens, bos=bos)
    score = Score.of(list(tqdm(chunks, total=total, desc="perplexity", unit="chunk", leave=False, disable=None)))
    row: dict[str, float] = {"chunks": score.chunks, "context": context, "tokens": len(tokens), "scored": score.scored}
    row |= {"nll": score.nll, "nll_error": score.nll_error, "perplexity": score.perplexity}
    if args.json:
        write(json.dumps({k: v if abs(v) < float("inf") else None for k, v in row.items()}) + "\n")
    else:
        write(f"{score.chunks} chunks of {context} tokens, {score.scored} tokens scored\n")
        write(f"mean NLL {score.nll:.4f} ± {score.nll_error:.4f}, perplexity {score.perplexity:.4f}\n")
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure how fast a model reads prompts and writes new tokens."""
    from .frontends.bench import Work, profiles, rows, tests, written
    from .frontends.open import open_model

    work = Work(open_model(args.model), tests(args.prompts, args.new, args.depths), args.repetitions, args.batch)
    groups = [group_of(args, threads) for threads in args.counts or [None]]
    for line in profiles(work, groups) if args.profile else written(rows(work, groups), args.output):
        write(line + "\n")
    return 0


def dump(args: argparse.Namespace) -> int:
    """Print a graph."""
    from .frontends.graph_file import read_graph
    from .frontends.layer import cut_layer
    from .graph import dump, to_dot, to_json

    graph = read_graph(args.model, context=args.context, tokens=args.batch)
    if args.layer is not None:
        graph = cut_layer(graph, args.layer)
    text = {"text": dump, "json": to_json, "dot": to_dot}[args.format](graph)
    write(text.removesuffix("\n") + "\n")
    return 0


def plan(args: argparse.Namespace) -> int:
    """Print how a graph would be dealt to devices, what it costs and why."""
    from .frontends.planning import plan_group, read_plan, step_graph
    from .scheduler import PASSES, difference, memory_problem, plan_to_json

    other = None if args.diff is None else read_plan(args.diff)
    tokens = 1 if args.phase == "decode" else args.batch
    graph, context = step_graph(args.model, context=args.context, tokens=tokens)
    asked, made = plan_group(graph, group_of(args), args.simulate)
    text = plan_to_json(made) + "\n" if args.json or args.out else ""
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text)
    if other is not None:
        changes = difference(other, made)
        shown = json.dumps(changes) if args.json else "\n".join(changes or ("the plans do the same",))
        write(shown + "\n")
    elif args.show:
        write(PASSES[args.show](made).rstrip("\n") + "\n")
    else:
        write(text if args.json else made.explain(steps=args.steps) + "\n")
    if problem := memory_problem(asked, context=context):
        rest = "" if memory_problem(made) else f"; in this plan the rest is on {made.lanes[-1].device}"
        log(f"hocket: does not fit: {problem}{rest}")
        return 1
    return 0


def devices(args: argparse.Namespace) -> int:
    """Print the devices of this machine."""
    from .frontends.devices import find_devices, measure_host
    from .scheduler import nbytes_text

    measured = measure_host() if args.measure else None
    rows: list[dict[str, object]] = []
    lines: list[str] = []
    for found in find_devices():
        row: dict[str, object] = {"device": found.name, "memory": found.memory, "description": found.description}
        line = f"{found.name:14} {nbytes_text(found.memory) if found.memory else '-':>12}  {found.description}"
        if measured and found.is_host:
            row |= {"read_bytes_per_second": measured.bandwidth, "f32_flops_per_second": measured.flops}
            line += f"; NumPy reads {measured.bandwidth / 1e9:.1f} GB/s, {measured.flops / 1e9:.1f} GFLOP/s in f32"
        rows.append(row)
        lines.append(line)
    write((json.dumps(rows) if args.json else "\n".join(lines)) + "\n")
    return 0


# -------------------------------------------------------------------------------------------------- input, output


def prompt_text(args: argparse.Namespace, default: str | None) -> str:
    """The text of -p or -f, else the default, else stdin.  Raises `ModelError` if that is a terminal."""
    from .frontends.errors import ModelError
    from .frontends.open import read_text

    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        return read_text(args.file)
    if default is not None:
        return default
    if on_terminal():
        raise ModelError("there is no prompt; give one with -p or -f, or pipe it in")
    return read_text("-")


def on_terminal() -> bool:
    """Whether stdin is a person (or closed, so that nobody can say anything)."""
    return sys.stdin is None or sys.stdin.isatty()


def asked() -> Iterator[str]:
    """What the user types, line by line, until /exit or the end of input."""
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return
        if said == "/exit":
            return
        if said:
            yield said


def group_of(args: argparse.Namespace, threads: int | None = None) -> Group:
    """The devices that flags name, and how they share."""
    from .frontends.session import Group

    devices, place = tuple(args.devices.split(",")), tuple(args.place)
    modes = {name: getattr(args, name, False) for name in ("exact", "fast")}
    threads = getattr(args, "threads", threads)
    wire = getattr(args, "wire", "f32")
    return Group(devices, args.split_mode, args.tensor_split, place, threads=threads, wire=wire, **modes)


def memory_text(session: Session) -> str:
    """Bytes in use on each device."""
    from .scheduler import nbytes_text

    parts = []
    for (_, device), held in zip(session.group, session.store.nbytes(), strict=True):
        parts.append(f"{device}: " + ", ".join(f"{kind} {nbytes_text(n)}" for kind, n in held.items()))
    return "; ".join(parts)


def write(text: str) -> None:
    if sys.stdout is not None:  # it was closed by whoever started us, who wants no output
        sys.stdout.write(text)
        sys.stdout.flush()


def log(text: str) -> None:
    print(text, file=sys.stderr)


def ops(args: argparse.Namespace) -> int:
    """Print which op runs on which backend in which dtypes."""
    from .conformance.matrix import matrix_text, support_matrix

    write(matrix_text(support_matrix(), args.format))
    return 0


# -------------------------------------------------------------------------------------------------------- the whole


def build_parser() -> argparse.ArgumentParser:
    """All subcommands with their flags."""
    parser = Parser(
        "hocket", description="Run GGUF language models as compiled graphs.", epilog=SHARING, allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def add(command: Callable[[argparse.Namespace], int], *families: Callable[[argparse.ArgumentParser], None]) -> None:
        sub = commands.add_parser(
            command.__name__, help=command.__doc__, description=command.__doc__, allow_abbrev=False
        )
        sub.set_defaults(command=command)
        for family in families:
            family(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")

    add(run, run_flags, session_flags)
    add(logits, logits_flags, session_flags)
    add(tokenize, tokenize_flags)
    add(perplexity, perplexity_flags, session_flags)
    add(bench, bench_flags)
    add(dump, dump_flags)
    add(plan, plan_flags)
    add(devices, devices_flags)
    add(ops, ops_flags)
    commands.add_parser("check", help="Check that a backend computes what the ops mean.", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["check"]:  # the conformance kit reads its own flags, so that other commands need not load it
        from .conformance.command import main as check

        return check(words[1:])
    parser = build_parser()
    args = parser.parse_args(words)
    if args.version:
        from . import __version__

        write(f"hocket {__version__}\n")
        return 0
    if "command" not in args:
        parser.error("no command given")
    try:
        return _guarded(args)
    except BrokenPipeError:
        # Whoever read our output has enough of it; what is left must not fail again when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        log("")
        return 130


def _guarded(args: argparse.Namespace) -> int:
    """Run the command; the errors that bad input causes become one line."""
    from .graph.errors import HocketError

    try:
        encoding = getattr(sys.stdout, "encoding", None)  # none if a test or an embedding program collects the text
        if encoding and encoding.lower().replace("-", "") != "utf8":
            sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # typeshed has TextIO, which lacks it
        if getattr(args, "cache_dir", None):
            os.environ["HOCKET_CACHE_DIR"] = args.cache_dir  # read where the first kernel is compiled
        if getattr(args, "threads", None):
            from .frontends.threads import set_threads

            set_threads(args.threads)
        from .frontends.progress import compiling_shown

        with compiling_shown():
            return args.command(args)
    except BrokenPipeError:
        raise
    except (HocketError, OSError, MemoryError) as error:
        if args.debug:
            raise
        log(f"hocket: {one_line(_said(error))}")
        return 2


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "memory is out; use a smaller context, batch or model"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
