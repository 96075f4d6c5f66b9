"""Hooks of mkdocs: the site has the layout of the repository, so that links need no change.

The site contains the pages and every file that a page links to.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK_TARGET = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
CODE_WITH_PIPE, BACKSLASH_PIPE = re.compile(r"`([^`]*\\\|[^`]*)`"), "\\|"
NUMBERED_STEP = re.compile(r"\d+\. ")


def resolve_link(page: str, link: str) -> str:
    """Return the path of the file that a link of a page leads to; for a folder the path of its README.

    Paths are relative to the root of the repository.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def list_linked_files() -> Iterator[str]:
    """Yield every file of the site once."""
    waiting = [*ROOT_PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
    known = {*waiting}
    while waiting:
        name = waiting.pop()
        yield name
        links = LINK_TARGET.findall((ROOT / name).read_text("utf-8")) if name.endswith(".md") else ()
        new = {path for link in links if (ROOT / (path := resolve_link(name, link))).is_file()} - known
        waiting += new
        known |= new


def on_files(files: Files, config: Any) -> Files:
    """Return the files of the site; mkdocs calls this hook. Files of the theme stay."""
    own = [file for file in files if file.src_uri.startswith("assets/")]
    pages = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in list_linked_files()]
    return Files([*own, *pages])


def indent_steps(markdown: str) -> str:
    """Return a page with the contents of numbered steps indented by four columns, which Python-Markdown needs.

    Pages indent them by three columns, as GitHub shows them.
    """
    lines, is_code, is_step = [], False, False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        if line and not line.startswith(" "):
            is_step = not is_code and NUMBERED_STEP.match(line) is not None
        lines.append(f" {line}" if is_step and line.startswith("   ") else line)
    return "\n".join(lines)


def keep_pipes_in_tables(markdown: str) -> str:
    """Return a page with HTML in place of code that has an escaped pipe in a row of a table.

    Python-Markdown would show the backslash, which GitHub removes.
    """

    def replace_code(code: re.Match[str]) -> str:
        return f"<code>{escape(code[1]).replace(BACKSLASH_PIPE, '&#124;')}</code>"

    lines = markdown.split("\n")
    return "\n".join(
        CODE_WITH_PIPE.sub(replace_code, line) if line.startswith("|") and BACKSLASH_PIPE in line else line
        for line in lines
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links to READMEs in place of links to folders; mkdocs calls this hook."""
    markdown = keep_pipes_in_tables(indent_steps(markdown))

    def replace_link(link: re.Match[str]) -> str:
        is_folder = (ROOT / posixpath.dirname(page.file.src_uri) / link[0]).is_dir()
        return f"{link[0].rstrip('/')}/README.md" if is_folder else link[0]

    return LINK_TARGET.sub(replace_link, markdown)
