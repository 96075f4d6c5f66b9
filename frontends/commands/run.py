"""``hocket run``: a text and what follows it, or a talk."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Sequence

from ...backends.base import find
from ...graph.files import check_writable
from ...scheduler import nbytes_text
from ..errors import ModelError
from ..generation.conversation import Conversation
from ..generation.drafting import GUESSES, Ahead, Draft, OwnDraft, check_tokens
from ..generation.generate import EMPTY, Drawing, Timing, draw, prepare, stream_text
from ..generation.grammar import Grammar
from ..generation.sampling import Sampling
from ..gguf.chat import ChatFormat, chat_format
from ..gguf.tokenizer import Tokenizer, tokenizer_from_metadata
from ..models import Model
from ..open import context_for, open_model, read_text
from ..saved_state import load_state, save_state
from ..session import Session
from ..terminal.arguments import json_object, logit_bias, number, or_minus_one, positive
from ..terminal.output import log, write
from ..terminal.progress import compiling_shown
from ..terminal.talk import talk
from .flags import model_flags, model_of, session_flags, session_of, text_of, traced

OPENING = "It is a truth universally acknowledged, that"
"""What the embedded model continues if nobody says otherwise."""
NEW_TOKENS = 128
ALONE = ("chat", "trace", "watch", "save_state", "load_state", "predict")
"""Flags that say nothing of a comparison."""


def flags(sub: argparse.ArgumentParser) -> None:
    model_flags(sub, "GGUF file (the small model that comes with hocket)", nargs="?")
    text = sub.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    text.add_argument("-f", "--file", metavar="FILE", help="file with the text to continue, - for stdin")
    new = "new tokens, -1: until the context is full (128; --chat: -1)"
    sub.add_argument("-n", "--predict", "--n-predict", type=or_minus_one, metavar="N", help=new)
    sampling_flags(sub)
    said = "use the chat template; on a terminal /help lists commands"
    sub.add_argument("--chat", "-cnv", "--conversation", action="store_true", help=said)
    sub.add_argument("-sys", "--system-prompt", dest="system", metavar="TEXT", help="system prompt")
    chat_flags(sub)
    sub.add_argument("--save-state", metavar="FILE", help="keep the session's state, to go on later")
    sub.add_argument("--load-state", metavar="FILE", help="go on from a saved state, on any number of devices")
    sub.add_argument(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        dest="draft",
        metavar="FILE",
        help="small model that guesses the next tokens",
    )
    sub.add_argument(
        *("--draft-max", "--draft", "--draft-n", "--spec-draft-n-max"),
        dest="draft_max",
        type=positive,
        metavar="N",
        help="tokens that are guessed at a time (4): by -md, without it by the MTP blocks of the model",
    )
    sub.add_argument(
        "--compare",
        metavar="DEVICE",
        help="debug: compute each node of the prompt again on this device, as reference:0, from the same values, and "
        "name the first that differs",
    )
    ending_flags(sub)
    session_flags(sub)


def chat_flags(sub: argparse.ArgumentParser) -> None:
    """How messages become a prompt."""
    names = ("--chat-template", "--chat-template-file")
    sub.add_argument(*names, dest="template", metavar="FILE", help="chat template (jinja2) in place of the model's")
    further = "further variables of the chat template, as '{\"enable_thinking\": false}'"
    sub.add_argument("--chat-template-kwargs", dest="variables", type=json_object, metavar="JSON", help=further)
    sub.add_argument("--tools", metavar="FILE", help="JSON list of the functions that the chat template describes")


def ending_flags(sub: argparse.ArgumentParser) -> None:
    """What a text may be, and where it ends."""
    sub.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    sub.add_argument(
        *("-r", "--reverse-prompt"),
        dest="stops",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    sub.add_argument("--context-shift", action="store_true", help="forget the older half of a full context and go on")
    rules = sub.add_mutually_exclusive_group()
    rules.add_argument("--grammar", metavar="GBNF", help="grammar that the text must follow, as llama.cpp's or as Lark")
    rules.add_argument("--grammar-file", metavar="FILE", help="the same in a file")
    rules.add_argument("-j", "--json-schema", metavar="JSON", help="JSON schema that the text must follow")
    lenient = "leave out keywords of the schema that cannot be followed, and list them"
    sub.add_argument("--schema-lenient", action="store_true", help=lenient)


def sampling_flags(sub: argparse.ArgumentParser) -> None:
    """How tokens are chosen; the defaults are llama.cpp's."""
    add = sub.add_argument
    add(
        "--temp",
        "--temperature",
        type=number,
        default=0.8,
        metavar="T",
        help="temperature; 0 takes the likeliest (0.8)",
    )
    add("--top-k", type=or_minus_one, default=40, metavar="K", help="keep the K likeliest, 0 or -1: all (40)")
    add("--top-p", type=number, default=0.95, metavar="P", help="keep the likeliest up to P in sum (0.95)")
    add("--min-p", type=number, default=0.05, metavar="P", help="keep those above P times the best (0.05)")
    add("--repeat-penalty", type=number, default=1.0, metavar="X", help="divide logits of recent tokens by X (1)")
    add("--repeat-last-n", type=or_minus_one, default=64, metavar="N", help="count of recent tokens, -1: all (64)")
    add("--presence-penalty", type=number, default=0.0, metavar="X", help="subtract X from logits of recent tokens (0)")
    add(
        "--frequency-penalty",
        type=number,
        default=0.0,
        metavar="X",
        help="subtract X times the count of a recent token (0)",
    )
    add(
        "-l",
        "--logit-bias",
        type=logit_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to a token's logit",
    )
    add("-s", "--seed", type=or_minus_one, default=-1, metavar="N", help="seed of the sampling, -1: a random one (-1)")


def run(args: argparse.Namespace) -> int:
    sampling = Sampling(
        args.temp,
        max(args.top_k, 0),
        args.top_p,
        args.min_p,
        args.repeat_penalty,
        args.repeat_last_n,
        args.presence_penalty,
        args.frequency_penalty,
        tuple(args.logit_bias),
    )
    if args.seed < 0:
        args.seed = int(text_of(args, lambda: str(int.from_bytes(os.urandom(4)) >> 1)))
    if args.system is not None and not args.chat:
        raise ModelError("-sys is what a talk begins with; add --chat, or put it into the prompt")
    if not args.chat and (args.template or args.variables or args.tools):
        raise ModelError("--chat-template, --chat-template-kwargs and --tools are for a talk; add --chat")
    if args.save_state and not args.world.rank:
        check_writable(args.save_state)
    model = model_of(args)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    if args.compare is not None:
        return compare(args, model, tokenizer)
    if (args.draft or args.draft_max) and args.context_shift:
        raise ModelError("a context that shifts has no guesses; leave out -md and --draft-max, or --context-shift")
    if args.draft_max and not args.draft:
        model = model.guessing()
    default = -1 if args.chat else NEW_TOKENS
    drawing = Drawing(
        default if args.predict is None else args.predict,
        sampling,
        args.seed,
        frozenset() if args.ignore_eos else tokenizer.eos_ids,
        grammar_of(args, tokenizer),
        int(tokenizer.add_bos) if args.context_shift else None,
        tokenizer.n_tokens,
    )
    return (chat if args.chat else complete)(args, model, tokenizer, drawing)


def grammar_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Grammar | None:
    text = read_text(args.grammar_file) if args.grammar_file else args.grammar
    if text:
        return Grammar(tokenizer, grammar=text)
    if not args.json_schema:
        return None
    grammar = Grammar(tokenizer, json_schema=args.json_schema, schema_lenient=args.schema_lenient)
    if grammar.left_out and not args.world.rank:
        log(f"hocket: {grammar.left_out}")
    return grammar


def complete(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, drawing: Drawing) -> int:
    """Print a text and what follows it."""
    text = text_of(args, lambda: prompt_text(args, "" if args.load_state else OPENING if args.model is None else None))
    tokens = tokenizer.encode(text, add_special=args.load_state is None, parse_special=True)
    fewest = len(tokens) if drawing.kept is None else 0  # else a longer text is cut
    with compiling_shown():
        started = time.perf_counter()
        session = session_of(args, model, context_for(model, fewest, args.context))
        load = time.perf_counter() - started
        before = load_state(session, args.load_state)[0] if args.load_state else []
        new = before[session.lengths[0] :] + tokens  # the last token that was shown has not been read yet
        if not new:
            ended = f"{args.load_state}: its text has come to an end; give more of it with -p"
            raise ModelError(ended if before else EMPTY)
        ahead = ahead_of(args, session)
        timing = prepare(session, new, drawing, ahead) + Timing(load=load)
    known = [before[: session.lengths[0]]]
    drawn = draw(session, [new], drawing, known=known, timing=timing, ahead=ahead)
    write(text)
    with traced(session, args.trace):
        try:
            for piece in stream_text((one.token for one in drawn), tokenizer, args.stops):
                write(piece)
        finally:
            write("\n")
    if args.save_state:
        drawn.close()
        save_state(session, known, args.save_state)
    log(f"{timing}; {draft_text(ahead)}{memory_text(session)}{seed_text(args)}")
    return 0


def compare(args: argparse.Namespace, model: Model, tokenizer: Tokenizer) -> int:
    """Print the first value of the prompt that differs, with the graph around it; of its last token by itself, which
    other kernels run.  1 if there is one."""
    if clash := [f"--{name.replace('_', '-')}" for name in ALONE if getattr(args, name)]:
        raise ModelError(f"--compare writes no text, so {clash[0]} has no meaning beside it; leave out one of the two")
    if args.world.size > 1:
        raise ModelError("--compare is for one process; start it without mpiexec")
    find(args.compare)  # whether it exists should be known before weights are loaded
    tokens = tokenizer.encode(prompt_text(args, OPENING if args.model is None else None), parse_special=True)
    with compiling_shown():
        session = session_of(args, model, context_for(model, len(tokens), args.context or max(len(tokens), 1)))
        for part in filter(None, (tokens[:-1], tokens[-1:])):
            said, is_wrong = judged(session, part, args.compare)
            write(f"{len(part)} token{'s' * (len(part) > 1)}: {said}\n")
            if is_wrong:
                return 1
    return 0


def judged(session: Session, tokens: Sequence[int], device: str) -> tuple[str, bool]:
    """What a comparison of one step finds, and whether a value is wrong."""
    count, nearest = 0, None
    for found in session.judge(tokens, device):
        if found.is_wrong:
            return f"the first value that {device} has otherwise is\n{found}\n\n{found.around}", True
        count += 1
        nearest = max(nearest or found, found, key=lambda d: d.share)
    return f"{count} values are as on {device}" + (f"; nearest to its limit is {nearest}" if nearest else ""), False


def chat(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, drawing: Drawing) -> int:
    """Answer one message, or on a terminal one after the other."""
    format = format_of(args, model)  # a wrong one should be refused before the weights are loaded
    asked = args.prompt is None and args.file is None
    interactive = asked and text_of(args, lambda: "yes" if on_terminal() else "") == "yes"
    if interactive and args.world.size > 1:
        raise ModelError("a talk on a terminal is for one process; give a message with -p, or pipe it in")
    message = None if interactive else text_of(args, lambda: prompt_text(args, None))
    if message is not None and not message.strip():
        raise ModelError("the message is empty; give one with -p or -f, or pipe it in")
    with compiling_shown():
        started = time.perf_counter()
        session = session_of(args, model, context_for(model, 0, args.context))
        load = time.perf_counter() - started
        ahead = ahead_of(args, session)
        timing = prepare(session, [], drawing, ahead) + Timing(load=load)
    said = {"stops": args.stops, "system": args.system, "format": format}
    conversation = Conversation(session, tokenizer, drawing, ahead=ahead, **said)
    conversation.timing = timing
    if args.load_state:
        conversation.load(args.load_state)
    with traced(session, args.trace):
        if message is None:
            talk(conversation)
        else:
            try:
                for piece in conversation.answer(message):
                    write(piece)
            finally:
                write("\n")
    if args.save_state:
        conversation.save(args.save_state)
    log(f"{conversation.timing}; {draft_text(ahead)}{memory_text(session)}{seed_text(args)}")
    return 0


def format_of(args: argparse.Namespace, model: Model) -> ChatFormat:
    """The chat template and its variables, as `chat_flags` name them."""
    template = text_of(args, lambda: read_text(args.template)) if args.template else None
    tools = None
    if args.tools:
        try:
            tools = json.loads(text_of(args, lambda: read_text(args.tools)))
        except ValueError as why:
            raise ModelError(f"{args.tools}: is no JSON ({why}); need a list of tools") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ModelError(f"{args.tools}: need a JSON list of objects, one for each tool")
    return chat_format(model.gguf.metadata, template=template, tools=tools, variables=args.variables)


def ahead_of(args: argparse.Namespace, session: Session) -> Ahead | None:
    """What guesses: the draft model of -md, on the devices of the model for which it does, or a block of that."""
    if session.model.guessers:
        return Ahead(session, OwnDraft(session), args.draft_max)
    if args.draft is None:
        return None
    model = open_model(args.draft)
    check_tokens(session.model, model)
    if not session.model.is_causal or not model.is_causal:
        raise ModelError("a model that sees all tokens at once (diffusion) has no steps; leave out -md")
    context = min(session.context, model.context_length)
    return Ahead(session, Draft(session_of(args, model, context, watched=False)), args.draft_max or GUESSES)


def draft_text(ahead: Ahead | None) -> str:
    return f"{ahead.accepted}; " if ahead else ""


def prompt_text(args: argparse.Namespace, default: str | None) -> str:
    """The text of -p or -f, else what is piped in, else the default.  Raises `ModelError` if there is none."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        return read_text(args.file)
    if default is None and on_terminal():
        raise ModelError("there is no prompt; give one with -p or -f, or pipe it in")
    if default is None:
        return read_text("-")
    return (read_text("-") if is_piped() else "") or default


def is_piped() -> bool:
    """Whether text waits in stdin; a pipe into which nobody has written yet is not waited for."""
    try:
        return not on_terminal() and bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # stdin is closed, or no file of the system's
        return False


def on_terminal() -> bool:
    """Whether stdin is a person (or closed, so that nobody can say anything)."""
    return sys.stdin is None or sys.stdin.isatty()


def seed_text(args: argparse.Namespace) -> str:
    """How to get this text again."""
    return f"; --seed {args.seed}" if args.temp else ""


def memory_text(session: Session) -> str:
    """Bytes in use on each device; in several processes also what each has read of the model."""
    store, world = session.store, session.world
    own = [session.group[number][1] for number in store.between.local_devices]
    parts = []
    for device, held in zip(own, store.nbytes(), strict=True):
        parts.append(f"{device}: " + ", ".join(f"{kind} {nbytes_text(n)}" for kind, n in held.items()))
    if world.size > 1:
        parts.append(f"{world.name(world.rank)} read {nbytes_text(store.nread)} of weights")
    return "; ".join(text.decode() for text in world.all_gather_bytes("; ".join(parts).encode()))
