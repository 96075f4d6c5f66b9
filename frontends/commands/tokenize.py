"""``hocket tokenize``: the token ids of a text."""

from __future__ import annotations

import argparse
import json
import sys

from ..gguf.tokenization.tokenizer import tokenizer_from_metadata
from ..open_model import open_model_file
from ..terminal.output import write_to_stdout_unless_closed
from .shared_flags import add_model_file_argument


def add_flags(sub: argparse.ArgumentParser) -> None:
    add_model_file_argument(sub, "GGUF file (only its header is read) or Hugging Face folder")
    sub.add_argument("-p", "--prompt", metavar="TEXT", help="text to tokenize (stdin)")
    sub.add_argument("--add-special", action="store_true", help="add BOS and EOS tokens if the model asks for them")
    sub.add_argument("--parse-special", action="store_true", help="read the text of a special token as that token")
    sub.add_argument("--json", action="store_true", help="print a list of ids")


def run(args: argparse.Namespace) -> int:
    tokenizer = tokenizer_from_metadata(open_model_file(args.model, header_only=True).metadata)
    text = sys.stdin.read() if args.prompt is None else args.prompt
    ids = tokenizer.encode(text, add_special=args.add_special, parse_special=args.parse_special)
    if args.json:
        write_to_stdout_unless_closed(json.dumps(ids) + "\n")
    else:
        write_to_stdout_unless_closed(
            "".join(f"{i:6}  {tokenizer.token_bytes(i).decode('utf-8', 'replace')!r}\n" for i in ids)
        )
    return 0
