"""Find names and sentences that readers outside the project cannot understand.

The terms to use are in docs/glossary.md, the retired words in retired_words.toml. `word_counts.py` counts the findings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hocket.tests.repository.files import ROOT, list_files

RETIRED_WORDS = ROOT / "tests/repository/retired_words.toml"
MAX_SENTENCE_WORDS = 30
MAX_COLUMNS = 160
MAX_MODULES = 3
METRICS = {
    "participles": "functions with a bare participle as their name",
    "retired": "names in Python with a retired word",
    "attributes": "attributes, files, and names in CUDA, C++ and JavaScript with a retired word",
    "sentences": f"sentences of more than {MAX_SENTENCE_WORDS} words",
    "constructs": "forbidden constructs in prose",
    "duplicates": f"top-level names that more than {MAX_MODULES} modules define",
    "markdown": f"Markdown lines of more than {MAX_COLUMNS} columns",
}
IGNORED_FOLDERS = {"fixtures", "goldens", "dagre"}
"""Folders with recorded output and with code of other projects."""
OTHER_CODE = {".cu", ".cuh", ".h", ".cpp", ".js"}

# ------------------------------------------------------------------------------------------------------------- names

_IRREGULAR = """
    arisen beaten begun bent bound bought broken brought built burnt caught chosen cut dealt done drawn driven dug
    eaten fallen fed felt fled flown forbidden foreseen foretold forgotten found frozen given gone grown heard held
    hidden hung kept known laid lain learnt led left lent lost lying made meant met paid ridden risen said seen sent
    shaken shown shrunk sold sought spelt spent spoken spun stolen stood struck stuck sunk swept taken taught thought
    thrown told torn understood withdrawn withheld won worn woven written
"""
IRREGULAR_PARTICIPLES = frozenset(_IRREGULAR.split())
_NO_PARTICIPLES = (
    "bed bleed breed creed deed embed exceed feed hundred indeed need proceed red reed seed shed sled speed"
)
NOUNS_AND_VERBS_IN_ED = frozenset(_NO_PARTICIPLES.split())
PART_OF_NAME = re.compile(r"[A-Z]{1,}(?![a-z])|[A-Z]?[a-z]+")


class Retired(NamedTuple):
    """The table of retired words: for each word, or whole name, the terms to use and where it is still right."""

    words: Mapping[str, Mapping[str, str | list[str]]]
    names: Mapping[str, Mapping[str, str | list[str]]]
    shared_names: frozenset[str]


class Finding(NamedTuple):
    """A place that a metric counts."""

    metric: str
    path: str
    line: int
    text: str

    @property
    def folder(self) -> str:
        """The top-level folder, or `.` for a file at the root."""
        return self.path.split("/")[0] if "/" in self.path else "."

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def read_retired(text: str) -> Retired:
    """Parse the table of retired words; an entry is the terms to use, or a table with `use` and `allowed`."""
    table = tomllib.loads(text)
    words, names = (
        {word: {"use": entry} if isinstance(entry, str) else entry for word, entry in table[key].items()}
        for key in ("words", "names")
    )
    return Retired(words, names, frozenset(table["shared"]["names"]))


def is_bare_participle(name: str) -> bool:
    """Return whether a name is a past participle without a noun: `loaded`, but not `loaded_weights`."""
    name = name.strip("_")
    return name in IRREGULAR_PARTICIPLES or (
        re.fullmatch("[a-z]{2,}ed", name) is not None and name not in NOUNS_AND_VERBS_IN_ED
    )


def find_retired_word(name: str, path: str, retired: Retired) -> str | None:
    """Return the terms to use in place of a retired word of a name, or None if the name is right in this file."""
    entries = [retired.words.get(part.lower()) for part in PART_OF_NAME.findall(name)]
    for entry in [retired.names.get(name), *entries]:
        if entry is not None and not any(name == where or path.startswith(where) for where in entry.get("allowed", ())):
            return str(entry["use"])
    return None


def find_names(metric: str, path: str, lines: Mapping[str, int], retired: Retired) -> Iterator[Finding]:
    """Yield the names of a file that have a retired word; `lines` is the line of each."""
    for name, line in lines.items():
        if (use := find_retired_word(name, path, retired)) is not None:
            yield Finding(metric, path, line, f"{name} (use: {use})")


# ------------------------------------------------------------------------------------------------------------- prose

WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
END_OF_SENTENCE = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]?[A-Z0-9])""")
NEW_BLOCK = re.compile(r"\s*(?:[-*+]\s|\d+[.)]\s|>\s|\#|\||\w[\w ,*]*: )")
CONSTRUCT = re.compile(
    r"""\b(?:
        so\ (?:many|much|few|often)
        | what(?:ever)?
        | (?:that|those)\ of
        | those\ (?:that|which|who|in|with|from)
        | (?:of|by)\ (?:which|whom|what)
        | whose
        | (?:no|some|every|any)body | whoever
        | as\ (?:[a-z]+\ ){1,3}(?:lies?|lay|stands?)
        | but\ for | nothing\ but | none\ but | otherwise\ than
        | besides?
        | in\ (?:its|their|the)\ stead
        | (?:no|not|never|none|nothing)\ (?:[a-z]+\ ){0,3}(?:no|not|never|none|nothing)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)


def split_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of a text with their line, counted from 0; no code."""
    block: list[str] = []
    start, fenced, doctest = 0, False, False
    for number, line in enumerate(text.split("\n")):
        bare = line.strip()
        is_fence = bare.startswith(("```", "~~~"))
        fenced ^= is_fence
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        is_prose = bool(bare.strip("-=|: ")) and not (fenced or is_fence or doctest)
        if block and (not is_prose or NEW_BLOCK.match(line)):
            yield start, " ".join(block)
            block = []
        if is_prose and bare[0] == "|":
            yield from ((number, cell) for cell in bare.strip("|").split("|"))
        elif is_prose:
            start = start if block else number
            block.append(bare)
    if block:
        yield start, " ".join(block)


def find_in_prose(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield the long sentences and the forbidden constructs of a text; a code span counts as one word."""
    for offset, block in split_blocks(text):
        plain = re.sub(r"``[^`]*``|`[^`]*`", "Code", block)
        plain = re.sub(r"\]\([^)]*\)|https?://\S+|<[^>]*>", "] ", plain)
        for sentence in END_OF_SENTENCE.split(plain):
            if len(sentence) > 2 * MAX_SENTENCE_WORDS and len(WORD.findall(sentence)) > MAX_SENTENCE_WORDS:
                yield Finding("sentences", path, line + offset, sentence.strip())
            if not sentence.rstrip().endswith("?"):
                for match in CONSTRUCT.finditer(sentence):
                    yield Finding("constructs", path, line + offset, f"“{match[0]}” in: {sentence.strip()}")


# ------------------------------------------------------------------------------------------------------------- files

READ_NODES = frozenset(
    {ast.Name, ast.arg, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef}
    | {ast.Attribute, ast.Expr, ast.Constant, ast.JoinedStr}
)
MARK = re.compile(r"#\s*(?:!|type:|noqa|pragma)")


class PythonFile(NamedTuple):
    """The names and texts of one Python file, from one walk over its tree."""

    functions: list[tuple[str, int]]
    names: dict[str, int]
    attributes: dict[str, int]
    top_level: frozenset[str]
    prose: list[tuple[int, str]]


def read_python(source: str) -> PythonFile:
    """Parse a Python file; each name has the line of its first definition."""
    tree = ast.parse(source)
    functions, prose, strings = [], [], []
    names: dict[str, int] = {}
    attributes: dict[str, int] = {}
    for node in ast.walk(tree):
        if type(node) not in READ_NODES:  # most nodes are of other types, and patterns are slow
            continue
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ClassDef(name=name):
                names.setdefault(name, node.lineno)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.setdefault(name, node.lineno)
                functions.append((name, node.lineno))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                attributes.setdefault(name, node.lineno)
            case ast.Expr(value=ast.Constant(value=str(text))):
                prose.append((node.lineno, text))
            case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
                strings.append(node)
    prose += join_comments(find_comments(source, strings))
    return PythonFile(functions, names, attributes, find_top_level(tree), prose)


def find_top_level(tree: ast.Module) -> frozenset[str]:
    """Return the functions, classes and variables of a module, except tests and names like `__all__`."""
    nodes = [t for node in tree.body for t in getattr(node, "targets", [getattr(node, "target", node)])]
    names = (getattr(node, "name", None) or getattr(node, "id", None) for node in nodes)
    return frozenset(n for n in names if isinstance(n, str) and not n.startswith(("__", "test_")))


def find_comments(source: str, strings: list[ast.expr]) -> Iterator[tuple[int, str]]:
    """Yield the comments of a source with their lines.

    Tokens are slow to split. They are needed only where a `#` shares a line with a string.
    """
    occupied: set[int] = set()
    for string in strings:
        occupied.update(range(string.lineno, (string.end_lineno or string.lineno) + 1))
    lines = [(number, line) for number, line in enumerate(source.split("\n"), 1) if "#" in line]
    if any(number in occupied for number, _ in lines):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    else:
        yield from ((number, line[line.index("#") :]) for number, line in lines)


def join_comments(comments: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Join comments of adjacent lines to one text each; marks for tools are no prose."""
    blocks: list[tuple[int, list[str]]] = []
    for line, text in comments:
        if not MARK.match(text):
            if not blocks or line != blocks[-1][0] + len(blocks[-1][1]):
                blocks.append((line, []))
            blocks[-1][1].append(text.lstrip("# "))
    return [(line, "\n".join(texts)) for line, texts in blocks]


def find_in_python(path: str, source: str, retired: Retired) -> tuple[list[Finding], frozenset[str]]:
    """Return the findings in one Python file, and its top-level names."""
    read = read_python(source)
    found = [Finding("participles", path, line, name) for name, line in read.functions if is_bare_participle(name)]
    found += find_names("retired", path, read.names, retired)
    found += find_names("attributes", path, read.attributes, retired)
    for line, text in read.prose:
        found += find_in_prose(path, line, text)
    return found, read.top_level


def find_in_markdown(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in one Markdown file."""
    for number, line in enumerate(source.split("\n"), 1):
        if len(line) > MAX_COLUMNS:
            yield Finding("markdown", path, number, f"{len(line)} columns: {line[:80]}")
    yield from find_in_prose(path, 1, source)


def find_in_other_code(path: str, source: str, retired: Retired) -> Iterator[Finding]:
    """Yield the names of a file in C++, CUDA or JavaScript that have a retired word, without comments and strings."""
    bare = re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
        lambda m: "\n" * m[0].count("\n"),
        source,
        flags=re.DOTALL,
    )
    lines: dict[str, int] = {}
    for number, line in enumerate(bare.split("\n"), 1):
        for name in re.findall(r"[A-Za-z_]\w+", line):
            lines.setdefault(name, number)
    yield from find_names("attributes", path, lines, retired)


def find_duplicates(modules: Mapping[str, frozenset[str]], retired: Retired) -> Iterator[Finding]:
    """Yield the top-level names of too many modules, each in the first of them; `modules` has the names of each."""
    paths = defaultdict(list)
    for path in sorted(modules):
        for name in modules[path] - retired.shared_names:
            paths[name].append(path)
    for name, found in sorted(paths.items()):
        if len(found) > MAX_MODULES:
            yield Finding("duplicates", found[0], 1, f"{name}: {', '.join(found)}")


def find_all(files: Mapping[str, str], retired: Retired) -> list[Finding]:
    """Return the findings in files, given as texts by path."""
    found: list[Finding] = []
    modules = {}
    for path, source in files.items():
        name = Path(path)
        found += find_names("attributes", path, {name.stem: 1}, retired)
        if name.suffix == ".py":
            in_python, modules[path] = find_in_python(path, source, retired)
            found += in_python
        elif name.suffix == ".md":
            found += find_in_markdown(path, source)
        else:
            found += find_in_other_code(path, source, retired)
    return [*found, *find_duplicates(modules, retired)]


def is_read(path: str) -> bool:
    """Return whether the metrics read a file: Python, Markdown, CUDA, C++ and JavaScript of this project."""
    parts = path.split("/")
    is_hidden = any(part.startswith(".") for part in parts)
    suffix = Path(path).suffix
    return suffix in {".py", ".md", *OTHER_CODE} and not is_hidden and not IGNORED_FOLDERS & set(parts)


@cache
def find_in_repository() -> tuple[Finding, ...]:
    """Return the findings in all files of the repository."""
    paths = {path.relative_to(ROOT).as_posix(): path for path in list_files()}
    files = {name: path.read_text("utf-8") for name, path in paths.items() if is_read(name)}
    return tuple(find_all(files, read_retired(RETIRED_WORDS.read_text("utf-8"))))
