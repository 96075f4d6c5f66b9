"""Names and prose become plainer: no folder has more findings of `words.py` than its maximum, which only falls."""

from __future__ import annotations

import re

import pytest

from . import word_counts, words
from .words import Finding

RETIRED_TABLE = """
[words]
crew = "thread pool"
lane = { use = "device plan", allowed = ["backends/", "lane_count"] }
[names]
Turn = "DeviceLock"
[shared]
names = ["log"]
"""
RETIRED = words.read_retired(RETIRED_TABLE)


def find(source: str, path: str = "graph/x.py") -> list[tuple[str, int, str]]:
    """Return metric, line and text of each finding in one file."""
    return [(found.metric, found.line, found.text) for found in words.find_all({path: source}, RETIRED)]


def find_metrics(source: str, path: str = "graph/x.py") -> list[str]:
    return [metric for metric, _, _ in find(source, path)]


# ----------------------------------------------------------------------------------------------- planted violations


@pytest.mark.parametrize("name", ["loaded", "_stored", "cut", "made", "_told"])
def test_a_function_named_by_a_bare_participle_is_found(name):
    assert find(f"class Store:\n    def {name}(self): ...\n") == [("participles", 2, name)]
    assert find(f"async def {name}(): ...\n") == [("participles", 1, name)]


@pytest.mark.parametrize("name", ["load", "loaded_weights", "feed", "embed", "is_made", "proceed"])
def test_a_function_named_by_a_verb_or_with_a_noun_is_right(name):
    assert not find(f"def {name}(): ...\n{name} = 1\n")


@pytest.mark.parametrize(
    "source",
    [
        "def start_crew(): ...",
        "class ThreadCrew: ...",
        "def start(*, crew): ...",
        "CREW_SIZE = 3",
        "for crew in (): ...",
        "import x as y; [crew for crew in y]",
        "with open('x') as crew: ...",
        "class Turn: ...",
        "lane = 1",
    ],
)
def test_a_name_with_a_retired_word_is_found(source):
    assert find_metrics(source) == ["retired"]


@pytest.mark.parametrize("source", ["screws = 1", "turn = 1", "lane_count = 1", "crew.start(crew)", "text = 'crew'"])
def test_a_name_without_a_retired_word_or_in_its_right_place_is_not_found(source):
    assert not find(source)


def test_a_retired_word_may_be_right_in_a_folder():
    assert find("lane = 1\nlane = 2\n") == [("retired", 1, "lane (use: device plan)")]
    assert not find("lane = 1\n", "backends/x.py")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("self.crew = 1", "graph/x.py"),
        ("", "graph/crew.py"),
        ("", "docs/add-a-crew.md"),
        ("int /* crew */ f(int crew) { return 0; }  // crew", "backends/cupy/x.cu"),
        ('const crew = "crew";', "view/page/x.js"),
    ],
)
def test_an_attribute_a_file_or_a_name_of_another_language_with_a_retired_word_is_found(source, path):
    assert find_metrics(source, path) == ["attributes"]


LONG_SENTENCE = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (f'"""Short.\n\n{LONG_SENTENCE}."""', 3),
        (f"x = 1\n# Short one. {LONG_SENTENCE.capitalize()}.", 2),
        (f"x = 1  # {LONG_SENTENCE}", 1),
        (f'x = "#"\n# {LONG_SENTENCE[:70]}\n# {LONG_SENTENCE[70:]}', 2),
        (f'x = 1\n"""{LONG_SENTENCE}."""', 2),
        (f'def f():\n    """{LONG_SENTENCE}?"""', 2),
    ],
)
def test_a_long_sentence_of_a_docstring_or_comment_is_found(source, line):
    assert [(metric, at) for metric, at, _ in find(source)] == [("sentences", line)]


@pytest.mark.parametrize(
    "source",
    [
        f'x = "{LONG_SENTENCE}"',
        f"# {LONG_SENTENCE[:100]}\n# - {LONG_SENTENCE[100:]}",
        f'"""{LONG_SENTENCE[:60]}. {LONG_SENTENCE[60:].capitalize()}."""',
        f'"""Text.\n\n```\n{LONG_SENTENCE}\n```\n"""',
        f'"""Text.\n\n>>> {LONG_SENTENCE}\n{LONG_SENTENCE}\n"""',
        f'"""A `{LONG_SENTENCE}` here."""',
    ],
)
def test_code_lists_and_short_sentences_are_not_long(source):
    assert not find(source)


def test_cells_of_tables_and_items_of_lists_are_texts_of_their_own():
    half = " ".join(["a"] * 20)
    assert not find(f"| {half} | {half} |\n|---|---|\n\n- {half}\n- {half}\n", "docs/x.md")
    assert find_metrics(f"{half}\n{half}\n", "docs/x.md") == ["sentences"]


@pytest.mark.parametrize(
    "text",
    [
        "There are so many chunks.",
        "What an op takes is checked.",
        "The size is that of the next one.",
        "Those that are left wait.",
        "The axis by which it is sharded.",
        "A device whose memory is full.",
        "Nobody reads it.",
        "The state stays as it lies.",
        "All but for one.",
        "Nothing but names.",
        "Besides, it is slow.",
        "It takes one in its stead.",
        "It is not that none is there.",
    ],
)
def test_a_forbidden_construct_is_found(text):
    assert find_metrics(f"# {text}") == ["constructs"]
    assert find_metrics(text, "README.md") == ["constructs"]


@pytest.mark.parametrize("text", ["What does an op take?", "The `what` of `nobody`.", "None of them waits, but one."])
def test_questions_code_and_plain_sentences_have_no_forbidden_construct(text):
    assert not find(text, "docs/x.md")


def test_a_name_that_four_modules_define_is_found_once():
    sources = ["def trim(): ...", "trim = 1", "trim: int = 1", "class trim: ..."]
    files = {f"graph/{stem}.py": text for stem, text in zip("abcd", sources, strict=True)}
    (found,) = words.find_all(files, RETIRED)
    assert found == Finding("duplicates", "graph/a.py", 1, "trim: graph/a.py, graph/b.py, graph/c.py, graph/d.py")
    assert not words.find_all({path: text for path, text in files.items() if path != "graph/d.py"}, RETIRED)
    shared = dict.fromkeys(files, "def log(): ...\ndef test_x(): ...\n__all__ = 1\n")
    assert not words.find_all(shared, RETIRED)


def test_a_wide_line_of_markdown_is_found():
    assert find_metrics("a" * 161, "docs/x.md") == ["markdown"]
    assert not find("a" * 160, "docs/x.md")
    assert not find("x = '" + "a" * 200 + "'")


# ------------------------------------------------------------------------------------------------------------ maxima

FINDINGS = [Finding("retired", "ops/a.py", line, text) for line, text in enumerate(["crew", "crew", "lane"], 1)]


def test_a_table_of_maxima_is_read_as_it_is_written():
    counts = {("ops", "retired"): 3, (".", "markdown"): 2}
    assert word_counts.read_maxima(word_counts.format_maxima(counts)) == counts


def test_growth_and_an_excess_are_seen_by_folder_and_metric():
    counts = word_counts.count_findings(FINDINGS)
    assert counts == {("ops", "retired"): 3}
    for maximum, grown, excessive in [(2, True, False), (3, False, False), (4, False, True)]:
        maxima = {("ops", "retired"): maximum}
        assert bool(word_counts.find_grown(counts, maxima)) == grown
        assert bool(word_counts.find_excessive(counts, maxima)) == excessive
    assert word_counts.find_grown(counts, {("graph", "retired"): 3}) == [("ops", "retired")]
    limits = {("ops", "retired"): 3, ("graph", "retired"): 1}
    assert word_counts.find_excessive(counts, limits) == [("graph", "retired")]


def test_an_update_lowers_maxima_and_raises_them_only_if_asked():
    counts, maxima = {("ops", "retired"): 1, ("view", "retired"): 5}, {("ops", "retired"): 3, ("view", "retired"): 2}
    assert word_counts.merge_maxima(counts, maxima, may_rise=False) == {("ops", "retired"): 1, ("view", "retired"): 2}
    assert word_counts.merge_maxima(counts, maxima, may_rise=True) == counts
    assert not word_counts.merge_maxima({("new", "retired"): 1}, {}, may_rise=False)


@pytest.mark.parametrize("has_git", [True, False])
def test_a_message_lists_the_findings_that_are_new(has_git, monkeypatch):
    """The earlier file had one `crew` less and the same `lane`; without git all are listed."""
    outputs = {"log": "123abc\n", "diff": "ops/a.py\0", "show": "crew = 1\nlane = 2\n", "ls-files": "ops/b.py\0"}
    monkeypatch.setattr(word_counts, "run_git", lambda command, *_: outputs[command] if has_git else None)
    monkeypatch.setattr(word_counts, "read_retired", lambda _: RETIRED)
    texts = ["crew (use: thread pool)", "lane (use: device plan)"]
    paths = ["ops/a.py", "ops/a.py", "ops/b.py"]
    findings = [Finding("retired", path, 7, texts[i]) for path, i in zip(paths, (0, 1, 0), strict=True)]
    first, *new = word_counts.describe_growth(findings, {("ops", "retired"): 2})
    assert first.startswith("ops: names in Python with a retired word: 3, at most 2 allowed")
    listed = findings if not has_git else findings[2:]
    assert new == [f"    {finding}" for finding in listed]


# -------------------------------------------------------------------------------------------------------- repository


def read_present_maxima() -> word_counts.Counts:
    return word_counts.read_maxima(word_counts.WORD_COUNTS.read_text("utf-8"))


@pytest.mark.long
def test_no_folder_has_more_findings_than_its_maximum():
    growth = word_counts.describe_growth(words.find_in_repository(), read_present_maxima())
    assert not growth, "\n".join(["see docs/glossary.md for the terms to use", *growth])


@pytest.mark.long
def test_no_maximum_is_larger_than_needed():
    """A rewrite that leaves fewer findings lowers the maximum in the same commit."""
    counts = word_counts.count_findings(words.find_in_repository())
    excessive = word_counts.find_excessive(counts, read_present_maxima())
    assert not excessive, "lower the maxima: python tests/repository/word_counts.py --update"


def test_the_table_of_retired_words_is_well_formed():
    retired = words.read_retired(words.RETIRED_WORDS.read_text("utf-8"))
    assert all(word.isalpha() and word == word.lower() for word in retired.words)
    entries = [*retired.words.values(), *retired.names.values()]
    assert all(set(entry) <= {"use", "allowed"} and entry["use"] for entry in entries)
    assert not {"wire", "beside", "ring", "identity", "ticket", "journal", "board"} & set(retired.words)


def test_each_term_of_the_glossary_has_one_definition_with_its_source():
    page = (words.ROOT / "docs/glossary.md").read_text("utf-8").partition("## Graph and ops")[2]
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.*(?:\n  .*)*)", page, re.MULTILINE)]
    found = [re.fullmatch(r"\*\*(.+?)\*\*: [A-Z].+\. Source: .+?\.( Replaces: `.+`\.)?", entry) for entry in entries]
    assert not [entry for entry, match in zip(entries, found, strict=True) if not match]
    terms = [match[1] for match in found if match]
    assert len(terms) == len(set(terms)) > 200
