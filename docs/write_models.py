"""Write docs/models.md: every architecture, with what its row says beyond the file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
HEAD = """# Every architecture

Written by `python docs/write_models.py` from the table in `frontends/models/families.py`.  A model file names its
architecture (`general.architecture`); sizes, biases, norms, gates and experts follow from the file.  "Traits" are what
does not, where they differ from LLaMA's blocks with rotated halves; `frontends/models/family.py` says what each means.
"At once" marks diffusion models, which have logits for whole texts and no steps; "chosen" gives the keys whose product
is the longest context, since attention would have to choose from a longer one.

| architecture | mixers | how it runs | traits |
|---|---|---|---|
"""
SHOWN = ("mixer", "recurrent", "recurrent_where", "interval", "causal", "sparse", "ignores", "spare", "scaled")


def differing(row: object) -> Iterator[tuple[str, object]]:
    """The fields of a dataclass that are not at their defaults; of one inside it those of its own."""
    for field in fields(row):  # type: ignore[arg-type]  # rows are dataclasses
        value = getattr(row, field.name)
        if value == field.default:
            continue
        if is_dataclass(value):
            value = "(" + ", ".join(f"{name} {inner}".removesuffix(" True") for name, inner in differing(value)) + ")"
        yield field.name, value


def rows() -> Iterator[str]:
    """A row for each architecture, by name."""
    from hocket.frontends.models import ARCHITECTURES

    for name, family in sorted(ARCHITECTURES.items()):
        plain = {"single": "attention"}.get(family.mixer, family.mixer)
        mixers = [family.recurrent] if family.recurrent_where == "all" else [plain, family.recurrent]
        runs = "steps" if family.causal else "at once"
        if family.sparse:
            runs += ", chosen: " + " × ".join(f"`{key}`" for key in family.sparse.split())
        traits = [f"{name} {value}".removesuffix(" True") for name, value in differing(family) if name not in SHOWN]
        said = ", ".join(traits).replace("|", "\\|")
        yield f"| `{name}` | {', '.join(filter(None, mixers))} | {runs} | {said} |\n"


def page() -> str:
    """The page as it should be."""
    return HEAD + "".join(rows())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
