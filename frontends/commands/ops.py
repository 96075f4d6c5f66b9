"""``hocket ops``: the ops that each backend supports, by dtype. Exit code 1 if the declaration of an op is wrong."""

from __future__ import annotations

import argparse
import sys

from ...conformance.reports.support_matrix import format_support_matrix, support_matrix
from ..terminal.output import write_to_stdout_unless_closed


def add_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--format", choices=("md", "json", "html"), default="md", help="output format (md)")


def run(args: argparse.Namespace) -> int:
    rows = support_matrix()
    write_to_stdout_unless_closed(format_support_matrix(rows, args.format))
    faults = [row.fault for row in rows if row.fault]
    for fault in faults:
        print(f"hocket ops: {fault}", file=sys.stderr)
    return 1 if faults else 0
