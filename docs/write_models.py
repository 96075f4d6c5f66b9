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
HEAD = """# Architectures

`python docs/write_models.py` writes this page from the table in `frontends/models/families.py`. A model file names its
architecture (`general.architecture`). Sizes, biases, norms, gates and experts follow from the file.

The columns:

- **How it runs**: "at once" marks diffusion models, which have logits of whole texts and no steps. "Encoder" marks
  models that give vectors of whole texts (`hocket embed`, `hocket.Model.embed`). "Chosen" gives the metadata keys with
  the longest context as their product; attention would have to choose from a longer context.
- **Sharded over**: the device counts for which the tiny models of the architecture, with `--exact`, give the logits of
  one device to an NMSE of 1e-10 in the worst row. `tests/given/models/sharded.py` measures them. Without `--exact`,
  devices round activations to 8 bits in another order: SmolLM2-135M on three devices differs by
  <!--fact:equality-->an NMSE of 5e-4<!--/fact--> ([equality of devices](concepts.md#equality-of-devices)).
- **MTP**: whether hocket runs the blocks of a file that predict further tokens (`hocket run --draft-max N`).

| architecture | mixers | how it runs | sharded over | MTP |
|---|---|---|---|---|
"""
TRAITS = """
## Traits

The differences from the blocks of LLaMA with rotated halves that do not follow from the file.
`frontends/models/inputs/family.py` explains each trait.

"""
TOKENIZERS = """
## Tokenizers and chats

Tokenizers and chats follow from the file alone:

- `tokenizer.ggml.model` names the kind of tokenizer.
- `tokenizer.ggml.pre` names the rule that splits a text into words.
- `tokenizer.chat_template` is the Jinja template that `--chat` renders.

| kind | rules that split a text into words |
|---|---|
"""
METADATA = """
## Metadata keys

The use of each metadata key that llama.cpp or the package `gguf` names, from the table in
`frontends/models/metadata_keys.py`. `{arch}` stands for the architecture. A key that is "read" has an effect where
llama.cpp reads it for the architecture. "Default only" means that hocket rejects a file with another value.
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
                + ", ".join(f"{name}={inner}".removesuffix("=True") for name, inner in list_non_default_fields(value))
                + ")"
            )
        yield field.name, f"{value:g}" if isinstance(value, float) else value


def format_architectures() -> Iterator[str]:
    """Yield a row for each architecture, sorted by name."""
    from hocket.frontends.models import ARCHITECTURES
    from hocket.frontends.models.read_hyperparameters import can_run_mtp

    counts = list_device_counts()
    for name, family in sorted(ARCHITECTURES.items()):
        plain = {"single": "attention"}.get(family.mixer, family.mixer)
        mixers = [family.recurrent] if family.recurrent_where == "all" else [plain, family.recurrent]
        runs = family.run_mode
        if family.sparse_keys:
            runs += ", chosen: " + " × ".join(f"`{key}`" for key in family.sparse_keys.split())
        mtp = "run" if can_run_mtp(family) else ""
        yield f"| `{name}` | {', '.join(filter(None, mixers))} | {runs} | {counts[name]} | {mtp} |\n"


def format_traits() -> Iterator[str]:
    """Yield a list entry for each architecture that has traits, sorted by name."""
    from hocket.frontends.models import ARCHITECTURES

    for name, family in sorted(ARCHITECTURES.items()):
        fields = [field for field in list_non_default_fields(family) if field[0] not in LISTED_TRAITS]
        traits = ", ".join(f"`{f'{field}={value}'.removesuffix('=True')}`" for field, value in fields)
        if traits:
            yield fill(f"- `{name}`: {traits}", 120, subsequent_indent="  ", break_long_words=False) + "\n"


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
        names = ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)) if kind == "gpt2" else "the rules of `gpt2`"
        yield f"| `{kind}` | {names if kind in PRE_KINDS else 'a rule of its own'} |\n"


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
        + TRAITS
        + "".join(format_traits())
        + TOKENIZERS
        + "".join(format_tokenizers())
        + METADATA
        + "".join(format_metadata_keys())
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
