"""Insert facts that change over time into the pages that state them, between ``<!--fact:NAME-->`` and ``<!--/fact-->``.

Measured facts are stored in docs/facts.toml; counts and tables of names follow from the code.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STORED_FACTS: dict[str, Any] = tomllib.loads((ROOT / "docs" / "facts.toml").read_text("utf-8"))
MARKED_FACT = re.compile(r"(<!--fact:([\w-]+)-->)(.*?)(<!--/fact-->)", re.DOTALL)
DATE_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d-")
TERA, GIB = 1e12, 2**30


def read_speeds(path: Path) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the rows of a result file by model, kind of test (``tg`` or ``pp``) and thread count."""
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {(row["model"], row["test"][:2], row["threads"]): row for row in rows}


def format_speed_ranges(path: Path) -> str:
    """Return the lowest and the highest ratio to llama.cpp of a result file, for decode and for prefill."""
    speeds = read_speeds(path)
    ranges = []
    for name, test in (("decode", "tg"), ("prefill", "pp")):
        ratios = [row["ratio"] for key, row in speeds.items() if key[1] == test]
        ranges.append(f"{name} {min(ratios):.1f} to {max(ratios):.1f}")
    return f"{', '.join(ranges)} times"


def format_speeds() -> Iterator[str]:
    """Yield the rows of README.md's table; each cell has a number for one thread and one for two."""
    intel, amd = (read_speeds(ROOT / f"{STORED_FACTS['speed'][name]}.json") for name in ("intel", "amd"))
    first, second = STORED_FACTS["speed"]["processors"].values()
    yield f"\n| | {first}: decode | ratio | prefill, 512 tokens | ratio | {second}: decode ratio | prefill ratio |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for model, name in STORED_FACTS["speed"]["models"].items():
        cells = [
            " / ".join(f"{table[model, test, threads][key]:{form}}" for threads in (1, 2))
            for table, keys in ((intel, (("hocket", ".0f"), ("ratio", ".1f"))), (amd, (("ratio", ".1f"),)))
            for test in ("tg", "pp")
            for key, form in keys
        ]
        yield f"| {name} | {' | '.join(cells)} |\n"


def format_speed_pages() -> str:
    """Return links to the result pages behind README.md's table."""
    stored = STORED_FACTS["speed"]
    return ", ".join(f"[{name}]({stored[key]}.md)" for key, name in stored["processors"].items())


def format_machines() -> Iterator[str]:
    """Yield a row for each kind of simulated device."""
    from hocket.scheduler.costs.device_catalogue import DATA_SHEETS

    yield "\n| kind | memory, GiB | TB/s | TFLOP/s | link, unless another is named | planned by the rules of |\n"
    yield "|---|--:|--:|--:|---|---|\n"
    for kind, m in DATA_SHEETS.items():
        backend = f"`{m.backend}`, {m.capability}" if m.capability else "`simulated`"
        sizes = f"{m.memory / GIB:.0f} | {m.bandwidth / TERA:.3g} | {m.flops / TERA:.4g}"
        yield f"| `{kind}` | {sizes} | `{m.link}` | {backend} |\n"


def format_links() -> Iterator[str]:
    """Yield a row for each link between simulated devices."""
    from hocket.scheduler.costs.device_catalogue import LINKS

    yield "\n| link | GB/s in one direction | latency, µs |\n|---|--:|--:|\n"
    yield from (f"| `{name}` | {link.bandwidth / 1e9:g} | {link.latency * 1e6:g} |\n" for name, link in LINKS.items())


def format_folder_families() -> Iterator[str]:
    """Yield a row for each family of Hugging Face folders."""
    from hocket.frontends.safetensors.families import FAMILIES

    yield "\n| `model_type` | architecture | rotary scaling |\n|---|---|---|\n"
    for name, family in FAMILIES.items():
        kinds = ", ".join(kind for kind in family.rope_kinds if kind != "default") or "none"
        yield f"| `{name}` | `{family.architecture}` | {kinds} |\n"


def collect_facts() -> Mapping[str, str]:
    """Return the text of each fact by its name."""
    from hocket.frontends.models import ARCHITECTURES
    from hocket.frontends.safetensors.families import FAMILIES
    from hocket.ops.registry import REGISTRY
    from hocket.scheduler.costs.simulated_devices import MAX_SIMULATED_DEVICES

    stored = {name: fact["text"] for name, fact in STORED_FACTS.items() if "text" in fact}
    suffix = "-vs-llama-cpp.json"
    results = (ROOT / "benchmarks" / "results").glob(f"*{suffix}")
    ranges = {DATE_PREFIX.sub("", path.name.removesuffix(suffix)): format_speed_ranges(path) for path in results}
    counts_and_tables = {
        "architectures": f"{len(ARCHITECTURES)} architectures",
        "ops": f"{len(REGISTRY)} ops",
        "folder-families": "".join(format_folder_families()),
        "folder-family-count": f"{len(FAMILIES)} families",
        "speeds": "".join(format_speeds()),
        "speed-pages": format_speed_pages(),
        "machines": "".join(format_machines()),
        "links": "".join(format_links()),
        "simulated-devices": f"{MAX_SIMULATED_DEVICES:,}",
    }
    return stored | ranges | counts_and_tables


def insert_facts(text: str, facts: Mapping[str, str]) -> str:
    """Return a page with the current text of every marked fact; a text that differs only in line breaks stays.

    Raises:
        KeyError: The page has an unknown fact.
    """

    def rewrite(mark: re.Match[str]) -> str:
        begin, name, stated, end = mark.groups()
        return begin + (stated if stated.split() == facts[name].split() else facts[name]) + end

    return MARKED_FACT.sub(rewrite, text)


def pages() -> dict[Path, str]:
    """Return the expected text of every page with marked facts, and of every writer of such a page."""
    here = Path(__file__).name
    paths = (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/write_*.py"),
        *ROOT.glob("benchmarks/**/*.md"),
    )
    texts = {path: path.read_text("utf-8") for path in sorted(paths) if path.name != here}
    facts = collect_facts()
    return {path: insert_facts(text, facts) for path, text in texts.items() if MARKED_FACT.search(text)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
