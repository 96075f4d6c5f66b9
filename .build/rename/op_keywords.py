"""Renames keywords of the decorator ``@op``, and calls that the script of renames does not see.

A second run changes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEYWORDS = {
    "form": "signature_key",
    "needs": "check",
    "where": "derived_sizes",
    "share": "active_fraction",
    "whole": "unsharded_dimensions",
    "must": "is_required",
}
OPERATORS = {
    "combined": "apply_operator",
    "power": "build_power",
    "product": "build_matmul",
    "part": "apply_index",
    "transposed": "build_transpose",
    "absent": "describe_missing_attribute",
}


def rename_keywords(text: str) -> str:
    """Keywords at the beginning of a line, or behind a comma or a bracket, inside ``@op(...)``."""

    def rename(match: re.Match[str]) -> str:
        return re.sub(
            rf"(?<=[ (])({'|'.join(KEYWORDS)})=(?=[^=])", lambda keyword: KEYWORDS[keyword[1]] + "=", match[0]
        )

    return re.sub(r"^@op\(.*?^(?=def )", rename, text, flags=re.DOTALL | re.MULTILINE)


def main() -> None:
    for path in sorted((ROOT / "ops").rglob("*.py")):
        path.write_text(rename_keywords(path.read_text()))
    node = ROOT / "graph" / "node.py"
    names = "|".join(OPERATORS)
    node.write_text(
        re.sub(rf"_load_operators\(\)\.({names})\b", lambda m: f"_load_operators().{OPERATORS[m[1]]}", node.read_text())
    )


if __name__ == "__main__":
    main()
