"""``hocket run``: prints generated text after a prompt, or answers a chat."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Sequence

from ...backends.base import find_device
from ...graph.errors import format_count
from ...graph.storage.files import require_writable
from ...scheduler import format_bytes
from ..config_options import list_options
from ..errors import ModelError
from ..flag_values import parse_json_object, parse_natural_or_minus_one, parse_seed
from ..generation.conversation import Conversation
from ..generation.generate import (
    EMPTY_PROMPT_ERROR,
    GenerationParams,
    GenerationTiming,
    compile_generation_plans,
    sample_tokens_of_all_sequences,
    stream_text,
)
from ..generation.grammar import Grammar
from ..generation.sampling import DEFAULT_TEMPERATURE, Sampling
from ..generation.speculative import (
    DEFAULT_DRAFT_TOKENS,
    ModelDrafter,
    MtpDrafter,
    SpeculativeDecoder,
    require_same_vocabulary,
)
from ..gguf.chat import ChatTemplateWithVariables, choose_chat_template_and_variables
from ..gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata
from ..inference.device_group import resolve_device_name_for_exact_results
from ..inference.saved_state import load_state, save_state
from ..inference.session import Session
from ..models import Model
from ..open_model import choose_context, open_adapted_model, open_model, read_text_without_bom_and_newline
from ..run_config import list_option_names_in_scopes
from ..terminal.chat_loop import run_chat_loop
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed
from ..terminal.word_wrap import write_wrapped_to_stdout
from .shared_flags import (
    SESSION_OPTIONS,
    add_model_file_argument,
    add_option_flags,
    add_session_flags,
    broadcast_text_from_rank_0,
    config_from_flags,
    open_session_from_flags,
    trace_to_file,
)

DEFAULT_PROMPT = "It is a truth universally acknowledged, that"
"""Default prompt of the embedded model."""
DEFAULT_NEW_TOKENS = 128
SAMPLING_OPTIONS = list_options(Sampling)
FLAGS_WITHOUT_COMPARE = ("chat", "trace", "watch", "save_state", "load_state", "predict")
"""Flags that `--compare` excludes."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub, "GGUF file or Hugging Face folder (the small built-in model)", nargs="?")
    text = sub.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    text.add_argument("-f", "--file", metavar="FILE", help="file with the text to continue; - is stdin")
    new = "new tokens; -1: until the context is full (128; with --chat -1)"
    sub.add_argument("-n", "--predict", "--n-predict", type=parse_natural_or_minus_one, metavar="N", help=new)
    add_option_flags(sub, SAMPLING_OPTIONS, SAMPLING_OPTIONS, temperature={"default": DEFAULT_TEMPERATURE})
    sub.add_argument(
        "-s",
        "--seed",
        type=parse_seed,
        default=-1,
        metavar="N",
        help="seed of the sampling; -1: a random seed (-1)",
    )
    help_text = "use the chat template; on a terminal /help lists commands"
    sub.add_argument("--chat", "-cnv", "--conversation", action="store_true", help=help_text)
    sub.add_argument("-sys", "--system-prompt", dest="system", metavar="TEXT", help="system prompt")
    add_chat_template_and_variable_flags(sub)
    sub.add_argument("--save-state", metavar="FILE", help="write the state of the session to a file, to continue later")
    sub.add_argument("--load-state", metavar="FILE", help="continue from a saved state, on any number of devices")
    sub.add_argument(
        "--compare",
        metavar="DEVICE",
        help="debug: compute each node of the prompt again on this device, as reference:0, from the same operands, and "
        "print the first node with another result",
    )
    add_grammar_and_stop_flags(sub)
    add_session_flags(sub, SESSION_OPTIONS | list_option_names_in_scopes("generate"))


def add_chat_template_and_variable_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of the chat template and its variables."""
    names = ("--chat-template", "--chat-template-file")
    sub.add_argument(*names, dest="template", metavar="FILE", help="chat template (jinja2) instead of the model's own")
    further = "further variables of the chat template, as '{\"enable_thinking\": false}'"
    sub.add_argument("--chat-template-kwargs", dest="variables", type=parse_json_object, metavar="JSON", help=further)
    sub.add_argument("--tools", metavar="FILE", help="JSON list of the functions that the chat template describes")


def add_grammar_and_stop_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of grammars, stop strings and other ends of a text."""
    sub.add_argument("--ignore-eos", action="store_true", help="continue after an end token")
    sub.add_argument(
        *("-r", "--reverse-prompt"),
        dest="stops",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    sub.add_argument("--context-shift", action="store_true", help="drop the older half of a full context and continue")
    rules = sub.add_mutually_exclusive_group()
    rules.add_argument("--grammar", metavar="GBNF", help="grammar of the text, in the syntax of llama.cpp or Lark")
    rules.add_argument("--grammar-file", metavar="FILE", help="file with such a grammar")
    rules.add_argument("-j", "--json-schema", metavar="JSON", help="JSON schema that the text must follow")
    lenient = "ignore keywords of the schema that hocket cannot enforce, and list them"
    sub.add_argument("--schema-lenient", action="store_true", help=lenient)


def run(args: argparse.Namespace) -> int:
    sampling = sampling_from_flags(args)
    if args.seed < 0:
        args.seed = int(broadcast_text_from_rank_0(args, lambda: str(int.from_bytes(os.urandom(4)) >> 1)))
    if args.system is not None and not args.chat:
        raise ModelError("-sys is the system prompt of a chat; add --chat, or put it into the prompt")
    if not args.chat and (args.template or args.variables or args.tools):
        raise ModelError("--chat-template, --chat-template-kwargs and --tools are for a talk; add --chat")
    if args.save_state and not args.world.rank:
        require_writable(args.save_state)
    model = open_adapted_model(config_from_flags(args))
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    if args.compare is not None:
        return print_first_wrong_device_value(args, model, tokenizer)
    if (args.draft or args.draft_max) and args.context_shift:
        raise ModelError("a context that shifts has no guesses; leave out -md and --draft-max, or --context-shift")
    if args.draft_max and not args.draft:
        model = model.with_mtp_blocks()
    default = -1 if args.chat else DEFAULT_NEW_TOKENS
    params = GenerationParams(
        default if args.predict is None else args.predict,
        sampling,
        args.seed,
        frozenset() if args.ignore_eos else tokenizer.eos_ids,
        grammar_from_flags(args, tokenizer),
        int(tokenizer.add_bos) if args.context_shift else None,
        tokenizer.n_tokens,
    )
    return (answer_message_or_chat_at_terminal if args.chat else print_completion)(args, model, tokenizer, params)


def sampling_from_flags(args: argparse.Namespace) -> Sampling:
    return Sampling(**{name: getattr(args, name) for name in SAMPLING_OPTIONS} | {"bias": tuple(args.bias)})


def grammar_from_flags(args: argparse.Namespace, tokenizer: Tokenizer) -> Grammar | None:
    text = read_text_without_bom_and_newline(args.grammar_file) if args.grammar_file else args.grammar
    if text:
        return Grammar(tokenizer, grammar=text)
    if not args.json_schema:
        return None
    grammar = Grammar(tokenizer, json_schema=args.json_schema, schema_lenient=args.schema_lenient)
    if grammar.ignored_keywords_warning and not args.world.rank:
        write_line_to_stderr(f"hocket: {grammar.ignored_keywords_warning}")
    return grammar


def print_completion(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, params: GenerationParams) -> int:
    """Complete a prompt: print it and its continuation; return the exit code."""
    text = broadcast_text_from_rank_0(
        args, lambda: read_prompt(args, "" if args.load_state else DEFAULT_PROMPT if args.model is None else None)
    )
    tokens = tokenizer.encode(text, add_special=args.load_state is None, parse_special=True)
    min_tokens = len(tokens) if params.pinned_tokens is None else 0  # a context shift cuts a longer text
    with show_compile_progress():
        started = time.perf_counter()
        session = open_session_from_flags(args, model, choose_context(model, min_tokens, args.context))
        load = time.perf_counter() - started
        before = load_state(session, args.load_state)[0] if args.load_state else []
        new = before[session.lengths[0] :] + tokens  # the last shown token has not been evaluated yet
        if not new:
            message = f"{args.load_state}: its text has come to an end; give more of it with -p"
            raise ModelError(message if before else EMPTY_PROMPT_ERROR)
        ahead = speculative_decoder_from_flags(args, session)
        timing = compile_generation_plans(session, new, params, ahead) + GenerationTiming(load=load)
    known = [before[: session.lengths[0]]]
    samples = sample_tokens_of_all_sequences(
        session, [new], params, known=known, timing=timing, ahead=ahead, needs_logits=False
    )
    write_to_stdout_unless_closed(text)
    with trace_to_file(session, args.trace):
        try:
            for new_text in stream_text((one.token for one in samples), tokenizer, args.stops):
                write_to_stdout_unless_closed(new_text)
        finally:
            write_to_stdout_unless_closed("\n")
    if args.save_state:
        samples.close()
        save_state(session, known, args.save_state)
    write_line_to_stderr(
        f"{timing}; {format_acceptance(ahead)}{format_bytes_by_device_and_kind(session)}{format_seed_flag(args)}"
    )
    return 0


def print_first_wrong_device_value(args: argparse.Namespace, model: Model, tokenizer: Tokenizer) -> int:
    """Compare all values of a prompt with another device; print the first wrong one, and the graph around it.

    The last token is a step of its own, because other kernels compute single tokens.

    Returns:
        The exit code: 1 if a value differs, else 0.
    """
    if clash := [f"--{name.replace('_', '-')}" for name in FLAGS_WITHOUT_COMPARE if getattr(args, name)]:
        raise ModelError(f"--compare writes no text, so {clash[0]} has no meaning beside it; leave out one of the two")
    if args.world.size > 1:
        raise ModelError("--compare is for one process; start it without mpiexec")
    find_device(args.compare)  # an unknown device is refused before the weights are loaded
    tokens = tokenizer.encode(read_prompt(args, DEFAULT_PROMPT if args.model is None else None), parse_special=True)
    with show_compile_progress():
        session = open_session_from_flags(
            args, model, choose_context(model, len(tokens), args.context or max(len(tokens), 1))
        )
        for part in filter(None, (tokens[:-1], tokens[-1:])):
            message, is_wrong = compare_step_with_device(session, part, args.compare)
            write_to_stdout_unless_closed(f"{format_count(len(part), 'token')}: {message}\n")
            if is_wrong:
                return 1
    return 0


def compare_step_with_device(session: Session, tokens: Sequence[int], device: str) -> tuple[str, bool]:
    """Compare the values of one step with another device; return a message and whether a value is wrong."""
    count, nearest = 0, None
    for found in session.compare_with_device(tokens, device):
        if found.is_wrong:
            return f"the first value that {device} has otherwise is\n{found}\n\n{found.surrounding_lines}", True
        count += 1
        nearest = max(nearest or found, found, key=lambda d: d.error_over_limit)
    return f"{format_count(count, 'value')} as on {device}" + (
        f"; nearest to its limit is {nearest}" if nearest else ""
    ), False


def answer_message_or_chat_at_terminal(
    args: argparse.Namespace, model: Model, tokenizer: Tokenizer, params: GenerationParams
) -> int:
    """Answer one message, or hold a conversation if stdin is a terminal; return the exit code."""
    format = chat_template_from_flags(args, model)  # a wrong template is refused before the weights are loaded
    asked = args.prompt is None and args.file is None
    interactive = (
        asked and broadcast_text_from_rank_0(args, lambda: "yes" if is_stdin_terminal_or_closed() else "") == "yes"
    )
    if interactive and args.world.size > 1:
        raise ModelError("a talk on a terminal is for one process; give a message with -p, or pipe it in")
    message = None if interactive else broadcast_text_from_rank_0(args, lambda: read_prompt(args, None))
    if message is not None and not message.strip():
        raise ModelError("the message is empty; give one with -p or -f, or pipe it in")
    with show_compile_progress():
        started = time.perf_counter()
        session = open_session_from_flags(args, model, choose_context(model, 0, args.context))
        load = time.perf_counter() - started
        ahead = speculative_decoder_from_flags(args, session)
        timing = compile_generation_plans(session, [], params, ahead) + GenerationTiming(load=load)
    options = {"stops": args.stops, "system": args.system, "format": format}
    conversation = Conversation(session, tokenizer, params, decoder=ahead, **options)
    conversation.timing = timing
    if args.load_state:
        conversation.load(args.load_state)
    with trace_to_file(session, args.trace):
        if message is None:
            run_chat_loop(conversation)
        else:
            try:
                write_wrapped_to_stdout(conversation.reply(message))
            finally:
                write_to_stdout_unless_closed("\n")
    if args.save_state:
        conversation.save(args.save_state)
    write_line_to_stderr(
        f"{conversation.timing}; {format_acceptance(ahead)}{format_bytes_by_device_and_kind(session)}"
        f"{format_seed_flag(args)}"
    )
    return 0


def chat_template_from_flags(args: argparse.Namespace, model: Model) -> ChatTemplateWithVariables:
    """Return the chat template and its variables that the flags describe.

    Raises:
        ModelError: A file is missing or damaged, or the template is wrong.
    """
    template = (
        broadcast_text_from_rank_0(args, lambda: read_text_without_bom_and_newline(args.template))
        if args.template
        else None
    )
    tools = None
    if args.tools:
        try:
            tools = json.loads(broadcast_text_from_rank_0(args, lambda: read_text_without_bom_and_newline(args.tools)))
        except ValueError as why:
            raise ModelError(f"{args.tools}: is no JSON ({why}); need a list of tools") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ModelError(f"{args.tools}: need a JSON list of objects, one for each tool")
    return choose_chat_template_and_variables(
        model.gguf.metadata, template=template, tools=tools, variables=args.variables
    )


def speculative_decoder_from_flags(args: argparse.Namespace, session: Session) -> SpeculativeDecoder | None:
    """Return the speculative decoder that the flags describe, with a draft model (-md) or MTP blocks; else None."""
    if session.model.mtp_block_count:
        return SpeculativeDecoder(session, MtpDrafter(session), args.draft_max)
    if args.draft is None:
        return None
    model = open_model(args.draft)
    require_same_vocabulary(session.model, model)
    if not session.model.is_causal or not model.is_causal:
        raise ModelError("a model that sees all tokens at once (diffusion) has no steps; leave out -md")
    context = min(session.context, model.context_length)
    return SpeculativeDecoder(
        session,
        ModelDrafter(open_session_from_flags(args, model, context, watched=False)),
        args.draft_max or DEFAULT_DRAFT_TOKENS,
    )


def format_acceptance(ahead: SpeculativeDecoder | None) -> str:
    return f"{ahead.counts}; " if ahead else ""


def read_prompt(args: argparse.Namespace, default: str | None) -> str:
    """Return the prompt: the text of -p or -f, or else the piped text, or else the default.

    Raises:
        ModelError: There is no text.
    """
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        return read_text_without_bom_and_newline(args.file)
    if default is None and is_stdin_terminal_or_closed():
        raise ModelError("there is no prompt; give one with -p or -f, or pipe it in")
    if default is None:
        return read_text_without_bom_and_newline("-")
    return (read_text_without_bom_and_newline("-") if has_readable_piped_text() else "") or default


def has_readable_piped_text() -> bool:
    """Return whether text can be read from stdin at once, without waiting; False for a terminal or an empty pipe."""
    try:
        return not is_stdin_terminal_or_closed() and bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # stdin is closed, or has no file descriptor
        return False


def is_stdin_terminal_or_closed() -> bool:
    """Return whether stdin is a terminal, or closed, so that no text is piped in."""
    return sys.stdin is None or sys.stdin.isatty()


def format_seed_flag(args: argparse.Namespace) -> str:
    """Format the text ``; --seed N`` that tells how to generate the same text again.

    The result is empty at temperature 0.
    """
    return f"; --seed {args.seed}" if args.temperature else ""


def format_bytes_by_device_and_kind(session: Session) -> str:
    """Format the bytes in use on each device by kind, for example ``cpu:0: weight 90 MiB, state 4 MiB``.

    One process also lists the named devices that it does not use. With several processes, each lists the bytes of
    weights that it has read.
    """
    store, world = session.store, session.world
    local_devices = [session.group[number][1] for number in store.between.local_devices]
    parts = []
    for device, used_bytes in zip(local_devices, store.count_bytes_by_kind(), strict=True):
        parts.append(f"{device}: " + ", ".join(f"{kind} {format_bytes(n)}" for kind, n in used_bytes.items()))
    if world.size > 1:
        parts.append(f"{world.describe_rank(world.rank)} read {format_bytes(store.loaded_byte_count)} of weights")
    else:
        used = {str(device) for _, device in session.group}
        named = [
            str(find_device(resolve_device_name_for_exact_results(name, session.on))[1]) for name in session.on.devices
        ]
        if unused := [name for name in named if name not in used]:
            parts.append(f"{', '.join(unused)} left free")
    return "; ".join(text.decode() for text in world.all_gather_bytes("; ".join(parts).encode()))
