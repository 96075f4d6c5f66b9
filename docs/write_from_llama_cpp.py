"""Write docs/from-llama-cpp.md: the counterpart of each program and flag of llama.cpp, from the table in the code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hocket.frontends.terminal.llama_cpp import FLAGS, PROGRAM_REMEDIES, LlamaCppFlag

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "from-llama-cpp.md"
HEAD = """# From llama.cpp

This page is for readers who know llama.cpp. It gives the command of hocket for each program of llama.cpp. It gives the
counterparts of the flags of llama-cli, llama-completion, llama-bench and llama-perplexity. hocket reads the same GGUF
files.

`python docs/write_from_llama_cpp.py` writes this page from the table behind the messages about wrong command lines.

```
llama-cli -m model.gguf -ngl 99 -c 0 -cnv                   # llama.cpp
hocket run -m model.gguf --devices cuda:0 -c 0 --chat       # hocket

llama-completion -m model.gguf -no-cnv -p "It was" -n 64 --temp 0
hocket run -m model.gguf -p "It was" -n 64 --temp 0

llama-bench -m model.gguf -p 512 -n 128 -t 2 -ngl 0
hocket bench -m model.gguf -p 512 -n 128 -t 2

llama-perplexity -m model.gguf -f text.txt -c 512
hocket perplexity -m model.gguf -f text.txt -c 512

llama-imatrix -m model.gguf -f text.txt -o imatrix.gguf
hocket imatrix -m model.gguf -f text.txt -o imatrix.gguf

llama-server -m model.gguf -np 4 -c 16384
hocket serve -m model.gguf -np 4 -c 4096
```

[Serving](serving.md#for-users-of-llama-server) lists the flags of llama-server. Five things differ:

- Without `--devices` a command runs on `cpu:0`, also where there is a GPU.
- `hocket run` continues a text unless `--chat` is given.
- The context has 4,096 tokens, or fewer if the model allows fewer (`perplexity`, `compare` and `imatrix`: 512). `-c 0`
  takes the maximum of the model.
- `--chat-template` takes a file, as `--chat-template-file` does.
- A space separates a flag from its value: `-n 5`, not `-n5`.

[Commands](cli.md) lists all flags with their defaults; [the comparison](comparison.md) lists the features of both.

## Programs

| llama.cpp | hocket |
|---|---|
"""
SECTIONS = {
    "cbp": "Flags of all programs",
    "cp": "Flags of llama-cli, llama-completion and llama-perplexity",
    "c": "Flags of llama-cli and llama-completion",
    "b": "Flags of llama-bench",
    "p": "Flags of llama-perplexity",
}
"""A heading for each combination of programs."""


def format_row(flag: LlamaCppFlag) -> str:
    """Return a table row with the names of a flag, and its remedy or "the same"."""
    names, remedy = ", ".join(f"`{name}`" for name in flag.names), flag.remedy or "the same"
    return "| {} | {} |\n".format(names, remedy.replace("|", "\\|"))


def format_sections() -> Iterator[str]:
    """Yield a table for each combination of programs; flags that hocket accepts come first."""
    for programs, title in SECTIONS.items():
        own = [flag for flag in FLAGS if flag.programs == programs]
        yield f"\n## {title}\n\n| llama.cpp | hocket |\n|---|---|\n"
        yield from map(format_row, sorted(own, key=lambda flag: bool(flag.remedy)))


def page() -> str:
    """Return the expected text of the page."""
    return (
        HEAD
        + "".join(f"| `{name}` | {remedy} |\n" for name, remedy in PROGRAM_REMEDIES.items())
        + "".join(format_sections())
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
