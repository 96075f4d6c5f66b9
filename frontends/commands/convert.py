"""``hocket convert``: a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import argparse

from ...graph.errors import format_count
from ...graph.storage.files import require_writable
from ..open_model import open_model
from ..safetensors import list_files_of_folder, write_folder_as_gguf
from ..terminal.output import write_line_to_stderr


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", metavar="FOLDER", help="folder with config.json and safetensors files")
    sub.add_argument("output", metavar="OUT.gguf", help="GGUF file to write")


def run(args: argparse.Namespace) -> int:
    require_writable(args.output, list_files_of_folder(args.folder))
    open_model(args.folder)  # raises if the folder is no complete model
    tensors, size = write_folder_as_gguf(args.folder, args.output)
    write_line_to_stderr(f"{args.output}: {format_count(tensors, 'tensor')}, {format_count(size, 'byte')}")
    return 0
