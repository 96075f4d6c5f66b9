"""Save benchmark results with their circumstances, as JSON and as a table in Markdown."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from hocket.graph.storage.files import replacing


def collect_circumstances(shared: bool) -> dict[str, object]:
    """Return the date, the processor, the commit, the load, and whether others used the machine at the same time."""
    commit, changes = _run_git("rev-parse", "--short", "HEAD"), _run_git("status", "--porcelain", "-uno")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": describe_processor(),
        "cores": os.cpu_count(),
        "commit": (commit or "unknown") + ("+" if changes else ""),
        "shared": shared,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def _run_git(*words: str) -> str:
    """Return the output of git for this repository, or an empty string without git."""
    try:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def describe_processor() -> str:
    """Return the name of the processor, its family and model, and its best vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict(reversed([tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line]))
    flags = set(facts.get("flags", "").split()) & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"}
    where = f"family {facts.get('cpu family')} model {facts.get('model')}"
    return f"{facts.get('model name', platform.processor())}, {where}, {' '.join(sorted(flags))}"


def format_circumstances(about: Mapping[str, object]) -> str:
    """Return the circumstances as one line of text."""
    return f"{about['date']}, {_describe_machine(about)}, {about['commit']}"


def _describe_machine(about: Mapping[str, object]) -> str:
    shared = "shared with other work" if about["shared"] else "otherwise idle"
    return f"{about['cpu']}, {about['cores']} cores, {shared} (load {about['load']})"


def _find_script_path() -> str:
    """Return the path of the running script in the repository, or its name if it lies elsewhere."""
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    return script.relative_to(root).as_posix() if script.is_relative_to(root) else script.name


def format_page_head(title: str, about: Mapping[str, object]) -> str:
    """Return the title and the list with which a result page begins."""
    lines = (
        f"- Machine: {_describe_machine(about)}.",
        f"- Date and commit: {about['date']}, {about['commit']}.",
        f"- Command: `python {_find_script_path()}`.",
    )
    items = (textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    return f"# {title}\n\n" + "".join(f"{item}\n" for item in items)


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def write_result(stem: Path, about: Mapping[str, object], rows: Sequence[Mapping[str, object]], text: str) -> None:
    """Write ``stem.json`` with all samples and ``stem.md`` with a head and the table.

    Each file is replaced only after its new content is on the disk, so that an outage leaves the former file.

    Args:
        stem: The path without a suffix.
        about: The circumstances.
        rows: All samples.
        text: The table in Markdown.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n ".join(map(json.dumps, rows))
    files = {
        "json": f'{{"about": {json.dumps(about)},\n "rows": [\n {body}]}}\n',
        "md": f"{format_page_head(stem.name, about)}\n{text}",
    }
    for suffix, content in files.items():
        with replacing(stem.with_name(f"{stem.name}.{suffix}"), durable=True) as file:
            file.write(content.encode())
