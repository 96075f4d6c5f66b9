"""``hocket ops``: the ops that each backend supports, by dtype."""

from __future__ import annotations

import argparse

from ...conformance.reports.support_matrix import format_support_matrix, support_matrix
from ..terminal.output import write_to_stdout_unless_closed


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--format", choices=("md", "json", "html"), default="md", help="output format (md)")


def run(args: argparse.Namespace) -> int:
    write_to_stdout_unless_closed(format_support_matrix(support_matrix(), args.format))
    return 0
