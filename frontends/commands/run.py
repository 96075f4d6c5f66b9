"""``hocket run``: a text and what follows it, or a talk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from ...scheduler import nbytes_text
from ..conversation import Conversation
from ..errors import ModelError
from ..generate import Timing, generate, stream_text
from ..gguf.chat import chat_template
from ..gguf.tokenizer import Tokenizer, tokenizer_from_metadata
from ..models import Model
from ..open import context_for, open_model, read_text
from ..output import log, write
from ..sampling import Sampling
from ..saved_state import load_state, save_state
from ..session import Session
from .flags import session_flags, session_of

OPENING = "It is a truth universally acknowledged, that"
"""What the embedded model continues if nobody says otherwise."""
NEW_TOKENS = 128


def flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file (the small model that comes with hocket)")
    text = sub.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    text.add_argument("-f", "--file", metavar="FILE", help="file with the text to continue, - for stdin")
    sub.add_argument(
        "-n", "--predict", type=int, metavar="N", help="new tokens, -1: until the context is full (128; --chat: -1)"
    )
    sub.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 takes the likeliest (0)")
    sub.add_argument("--top-k", type=int, default=40, metavar="K", help="keep the K likeliest, 0: all (40)")
    sub.add_argument("--top-p", type=float, default=0.95, metavar="P", help="keep the likeliest up to P in sum (0.95)")
    sub.add_argument("--min-p", type=float, default=0.05, metavar="P", help="keep those above P times the best (0.05)")
    sub.add_argument("--chat", action="store_true", help="use the chat template; on a terminal /exit ends the talk")
    sub.add_argument("--save-state", metavar="FILE", help="keep the session's state, to go on later")
    sub.add_argument("--load-state", metavar="FILE", help="go on from a saved state, on any number of devices")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    session_flags(sub)


def run(args: argparse.Namespace) -> int:
    sampling = Sampling(args.temp, args.top_k, args.top_p, args.min_p)
    model = open_model(args.model)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    return (chat if args.chat else complete)(args, model, tokenizer, sampling)


def complete(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, sampling: Sampling) -> int:
    """Print a text and what follows it."""
    text = prompt_text(args, OPENING if args.model is None else None)
    tokens = tokenizer.encode(text, add_special=args.load_state is None, parse_special=True)
    session = session_of(args, model, context_for(model, len(tokens), args.context))
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
    chat_template(model.gguf.metadata)  # whether there is one should be known before the weights are loaded
    interactive = args.prompt is None and args.file is None and on_terminal()
    messages = asked() if interactive else iter([prompt_text(args, None)])
    session = session_of(args, model, context_for(model, 0, args.context))
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


def prompt_text(args: argparse.Namespace, default: str | None) -> str:
    """The text of -p or -f, else the default, else stdin.  Raises `ModelError` if that is a terminal."""
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


def memory_text(session: Session) -> str:
    """Bytes in use on each device."""
    parts = []
    for (_, device), held in zip(session.group, session.store.nbytes(), strict=True):
        parts.append(f"{device}: " + ", ".join(f"{kind} {nbytes_text(n)}" for kind, n in held.items()))
    return "; ".join(parts)
