"""Write docs/models.md: every architecture, with the traits that model files do not state."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
HEAD = """# Every architecture

Written by `python docs/write_models.py` from the table in `frontends/models/families.py`.  A model file names its
architecture (`general.architecture`); sizes, biases, norms, gates and experts follow from the file.  "Traits" are what
does not, where they differ from LLaMA's blocks with rotated halves; `frontends/models/family.py` says what each means.
"At once" marks diffusion models, which have logits for whole texts and no steps, and "encoder" those that give vectors
of whole texts (`hocket embed`, `hocket.Model.embed`); "chosen" gives the keys whose product is the longest context,
since attention would have to choose from a longer one.  "Cut over" are the numbers of devices on which the
architecture's tiny models, with `--exact`, give the logits of one device to an NMSE of 1e-10 in the worst row:
measured, see `tests/given/models/sharded.py`.  Without `--exact` devices round activations to 8 bits in another
order: SmolLM2-135M on three devices differs by <!--fact:equality-->an NMSE of 5e-4<!--/fact--> ([equality of
devices](concepts.md#equality-of-devices)).  "MTP" says whether blocks that guess further tokens are run
where a file has any (`hocket run --draft-max N`).

| architecture | mixers | how it runs | cut over | MTP | traits |
|---|---|---|---|---|---|
"""
TOKENIZERS = """
## Tokenizers and chats

These follow from the file alone, whatever its architecture: `tokenizer.ggml.model` names the kind, `tokenizer.ggml.pre`
how text is cut into words, `tokenizer.chat_template` is the template, in Jinja, that `--chat` renders.

| kind | words are cut as |
|---|---|
"""
METADATA = """
## Metadata keys

Of every metadata key that llama.cpp or the package `gguf` names: the use that hocket makes of it, from the table in
`frontends/models/metadata_keys.py`.  `{arch}` stands for the architecture.  A key that is "read" counts where
llama.cpp reads it for the architecture.  "Default only" means that a file with another value is refused by name.
"""
RESULTS_FILE = ROOT / "tests" / "fixtures" / "architectures" / "sharded.json"
MAX_NMSE = 1e-10
LISTED_TRAITS = (
    "mixer",
    "recurrent",
    "recurrent_where",
    "interval",
    "run_mode",
    "sparse_keys",
    "ignores",
    "optional_tensors",
    "has_feed_forward_scale",
)


def list_non_default_fields(row: object) -> Iterator[tuple[str, object]]:
    """Yield the fields of a dataclass that differ from their defaults; a nested dataclass gives its own such fields."""
    for field in fields(row):  # type: ignore[arg-type]  # rows are dataclasses
        value = getattr(row, field.name)
        if value == field.default:
            continue
        if is_dataclass(value):
            value = (
                "("
                + ", ".join(f"{name} {inner}".removesuffix(" True") for name, inner in list_non_default_fields(value))
                + ")"
            )
        yield field.name, value


def format_architectures() -> Iterator[str]:
    """Yield a row for each architecture, sorted by name."""
    from hocket.frontends.models import ARCHITECTURES
    from hocket.frontends.models.reading import can_run_mtp

    counts = list_device_counts()
    for name, family in sorted(ARCHITECTURES.items()):
        plain = {"single": "attention"}.get(family.mixer, family.mixer)
        mixers = [family.recurrent] if family.recurrent_where == "all" else [plain, family.recurrent]
        runs = family.run_mode
        if family.sparse_keys:
            runs += ", chosen: " + " × ".join(f"`{key}`" for key in family.sparse_keys.split())
        mtp = "run" if can_run_mtp(family) else ""
        traits = [
            f"{name} {value}".removesuffix(" True")
            for name, value in list_non_default_fields(family)
            if name not in LISTED_TRAITS
        ]
        traits_cell = ", ".join(traits).replace("|", "\\|")
        yield f"| `{name}` | {', '.join(filter(None, mixers))} | {runs} | {counts[name]} | {mtp} | {traits_cell} |\n"


def list_device_counts() -> dict[str, str]:
    """Return for each architecture the device counts for which all of its models give the logits of one device."""
    errors: dict[str, dict[str, float]] = {}
    for model, measured in json.loads(RESULTS_FILE.read_text("utf-8")).items():
        worst = errors.setdefault(model.rsplit("-", 1)[0], {})
        for count, error in measured.items():
            worst[count] = max(worst.get(count, 0.0), error)
    return {name: ", ".join(n for n, error in worst.items() if error <= MAX_NMSE) for name, worst in errors.items()}


def format_tokenizers() -> Iterator[str]:
    """Yield a row for each kind of tokenizer."""
    from hocket.frontends.gguf.tokenization.pretokenizers import PRE_TOKENIZERS
    from hocket.frontends.gguf.tokenization.tokenizer_models import TOKENIZER_MODELS
    from hocket.frontends.gguf.tokenization.vocabulary import PRE_KINDS

    for kind in sorted(TOKENIZER_MODELS):
        names = ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)) if kind == "gpt2" else "as of `gpt2`"
        yield f"| `{kind}` | {names if kind in PRE_KINDS else 'by a rule of its own'} |\n"


def format_metadata_keys() -> Iterator[str]:
    """Yield a list of keys for each use and reason."""
    from hocket.frontends.models.metadata_keys import METADATA_KEYS

    names: dict[tuple[str, str], list[str]] = {}
    for name, key in METADATA_KEYS.items():
        values = ", ".join(map(repr, key.accepted))
        names.setdefault((key.use, key.reason), []).append(name + (f" ({values})" if values else ""))
    for (use, reason), group in names.items():
        text = fill(", ".join(sorted(group)), 120, break_long_words=False, break_on_hyphens=False)
        yield f"\n**{use}**, {reason}:\n\n```text\n{text}\n```\n"


def page() -> str:
    """Return the expected text of the page."""
    return (
        HEAD
        + "".join(format_architectures())
        + TOKENIZERS
        + "".join(format_tokenizers())
        + METADATA
        + "".join(format_metadata_keys())
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
