"""``hocket ops``: which op runs on which backend."""

from __future__ import annotations

import argparse

from ...conformance.reports.support_matrix import matrix_text, support_matrix
from ..terminal.output import write


def flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--format", choices=("md", "json", "html"), default="md", help="how to print (md)")


def run(args: argparse.Namespace) -> int:
    write(matrix_text(support_matrix(), args.format))
    return 0
