"""``hocket imatrix``, as in ``llama-imatrix``: an importance matrix for quantisation, from a text.

The model reads the text in chunks of the context length. For each column of a weight, the squares of the activations
that it multiplies are summed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from ...graph.errors import format_count
from ...graph.storage.files import require_writable
from ..errors import ModelError
from ..flag_values import parse_natural, parse_positive
from ..gguf.tokenization.tokenizer import tokenizer_from_metadata
from ..inference.product_inputs import InputEnergyReporter
from ..inference.session import Session
from ..open_model import choose_context, open_adapted_model, read_text_without_bom_and_newline
from ..quantisation.importance import ImportanceSums, read_importance_sums
from ..terminal.arguments import PositionalAliasAction
from ..terminal.compile_progress import show_compile_progress
from ..terminal.output import write_line_to_stderr, write_to_stdout_unless_closed
from .perplexity import CHUNK_OPTION, DEFAULT_CONTEXT_TOKENS, count_complete_chunks
from .shared_flags import (
    add_model_file_argument,
    add_session_flags,
    broadcast_text_from_rank_0,
    config_from_flags,
    open_session_from_flags,
    trace_to_file,
)

BLOCK_MARK = "blk."
"""A part of the names of the weights of blocks; other weights are output matrices or read by look-ups."""


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub, nargs="?")
    add = sub.add_argument
    add("file", metavar="TEXT", nargs="?", help="text in UTF-8; - is stdin. Without a text, --in-file files are merged")
    add("-f", "--file", action=PositionalAliasAction, dest="file", metavar="TEXT", help="as TEXT")
    add("-o", "--output", "--output-file", default="imatrix.gguf", metavar="OUT", help="GGUF file (imatrix.gguf)")
    add("--chunks", type=parse_positive, metavar="N", help="read at most N chunks of the text (all)")
    add("--chunk", type=parse_natural, default=0, metavar="N", help="skip the first N chunks of the text (0)")
    add("--in-file", action="append", default=[], metavar="FILE", help="add an importance matrix; may be repeated")
    add(
        "--output-frequency",
        type=parse_positive,
        default=10,
        metavar="N",
        help="write the file after every N chunks (10). An interrupted run goes on with --in-file OUT --chunk READ",
    )
    add("--process-output", action="store_true", help="also sum the inputs of the output matrix")
    add("--parse-special", action="store_true", help="read the text of a special token as that token")
    add_session_flags(sub, watch=False, context=CHUNK_OPTION)


@show_compile_progress()
def run(args: argparse.Namespace) -> int:
    is_first_rank = args.world.rank == 0
    if is_first_rank:
        require_writable(args.output)
    sums = ImportanceSums(args.context or DEFAULT_CONTEXT_TOKENS)
    for path in args.in_file:
        sums.merge(read_importance_sums(path))
    if args.file is not None:
        accumulate_and_write_importances(args, sums)
    elif args.model is not None or not args.in_file:
        raise ModelError("hocket imatrix needs a MODEL and a TEXT, or files to merge after --in-file")
    if is_first_rank:
        sums.write(args.output)
        for name, count in sums.list_unused_matrices().items():
            write_line_to_stderr(f"{name}: {count} of {len(sums.counts[name])} experts were not chosen; add text")
        chunks = f"{format_count(sums.chunk_count, 'chunk')} of {format_count(sums.chunk_tokens, 'token')}"
        write_to_stdout_unless_closed(f"{args.output}: {format_count(len(sums.sums), 'weight')}, {chunks}\n")
    return 0


def accumulate_and_write_importances(args: argparse.Namespace, sums: ImportanceSums) -> None:
    """Run the model on the text of the flags, add the sums of its products, and write them from time to time."""
    model = open_adapted_model(config_from_flags(args))
    sources = [*model.gguf.part_paths, *([] if args.file == "-" else [args.file])]
    require_writable(args.output, sources)
    tokenizer = tokenizer_from_metadata(model.gguf.metadata)
    text = broadcast_text_from_rank_0(args, lambda: read_text_without_bom_and_newline(args.file))
    tokens = tokenizer.encode(text, parse_special=args.parse_special)
    context = sums.chunk_tokens = choose_context(model, 0, args.context, default=DEFAULT_CONTEXT_TOKENS)
    total = count_complete_chunks(len(tokens), context)
    if args.chunk >= total:
        raise ModelError(
            f"--chunk {args.chunk}: the text has {format_count(total, 'chunk')} of "
            f"{format_count(context, 'token')}; skip fewer"
        )
    total = min(total - args.chunk, args.chunks or total)
    tokens = tokens[args.chunk * context :][: total * context]
    # An encoder may have other names in its file than in its graph.
    names = {n: t.name for n, t in model.gguf.tensors.items() if args.process_output or BLOCK_MARK in n}
    watch = InputEnergyReporter(names.__contains__, lambda name, *arrays: sums.add_column_sums(names[name], *arrays))
    session = open_session_from_flags(args, model, context, watch=watch)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    steps = run_chunks_yielding_count(session, tokens, bos=bos, needs_logits=args.process_output)
    if args.file != "-":
        sums.datasets.append(args.file)
    with trace_to_file(session, args.trace):
        for number in tqdm(steps, total=total, desc="imatrix", unit="chunk", leave=False, disable=None):
            if number % args.output_frequency == 0 and number < total and args.world.rank == 0:
                sums.write(args.output)


def run_chunks_yielding_count(
    session: Session, tokens: Sequence[int], *, bos: int | None, needs_logits: bool
) -> Iterator[int]:
    """Run the model on each complete chunk of the tokens, and yield the number of chunks that have run.

    Args:
        session: The session; its context is the chunk length.
        tokens: The tokens of the text.
        bos: The BOS token, which replaces the first token of each chunk; None keeps this token.
        needs_logits: Whether the output matrix is multiplied, too.
    """
    size = session.context
    for number in range(len(tokens) // size):
        chunk = list(tokens[number * size : (number + 1) * size])
        if bos is not None:
            chunk[0] = bos
        session.reset(0)
        session.evaluate(
            [chunk], every_position=True, hidden=not (needs_logits and not session.model.is_encoder_without_logits)
        )
        yield number + 1
