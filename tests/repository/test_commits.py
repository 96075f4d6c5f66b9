"""Subjects of commits are `area: what changes`, in the imperative and short, as CONTRIBUTING.md says."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from . import files
from .words import is_bare_participle

MAX_SUBJECT = 72
MAX_COMMITS = 50
SUBJECT = re.compile(r"(?P<area>[a-z0-9][\w./-]*(, [a-z0-9][\w./-]*)*): (?P<change>\S.*)")
NO_VERBS = {"a", "an", "the", "no", "all", "some", "more", "new", "what", "this", "it"}
"""First words of a change that show that it has no verb in the imperative."""


def find_fault(subject: str) -> str | None:
    """Return the fault of a subject of a commit, or None."""
    match = SUBJECT.fullmatch(subject)
    if match is None:
        return "need `area: what changes`, with an area in lower case"
    if len(subject) > MAX_SUBJECT:
        return f"{len(subject)} characters; need at most {MAX_SUBJECT}"
    if subject.endswith("."):
        return "need no period at the end"
    verb = match["change"].split()[0].lower().rstrip(",:;")
    if verb in NO_VERBS or (is_bare_participle(verb) and verb != "cut") or re.fullmatch("[a-z]{3,}ing", verb):
        return f"need a verb in the imperative, got {verb!r}"
    return None


def read_range() -> str:
    """Return the commits to check, as git names them: those after the last tag, or else after this file was added.

    Commits of branches that began before this file exists are not among them.
    """
    here = "tests/repository/test_commits.py"
    if (listed := files.run_git("log", "--diff-filter=A", "--format=%H", "--", here)) is None:
        pytest.skip("not in a repository of git")
    added = listed.split()
    if not added:
        return "HEAD..HEAD"
    tag = (files.run_git("describe", "--tags", "--abbrev=0") or "").strip()
    has_this = tag and files.run_git("merge-base", "--is-ancestor", added[-1], tag) is not None
    return f"{tag if has_this else added[-1]}..HEAD"


def read_subjects() -> list[str]:
    """Return the subjects of the commits to check, newest first, without merges."""
    commits = read_range()
    limit = [f"--max-count={MAX_COMMITS}"] if re.match("[0-9a-f]{40}", commits) else []
    return (files.run_git("log", "--no-merges", "--ancestry-path", "--format=%s", *limit, commits) or "").splitlines()


def test_subjects_of_commits_are_well_formed():
    assert not [f"{subject}: {fault}" for subject in read_subjects() if (fault := find_fault(subject))]


@pytest.mark.parametrize(
    "subject",
    [
        "cpu: split long rows over threads",
        "frontends/torch: leave ties of unstable sorts to PyTorch",
        "docs, tests: link the glossary",
        "ops: add `ring_attention` (fixes hang)",
        "ci: bring back the limit of 90 minutes",
        "scheduler: cut planning time by half",
        "x" * 30 + ": " + "y" * 40,
    ],
)
def test_a_subject_with_an_area_and_a_verb_is_right(subject):
    assert find_fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("A ratio is called so", "area"),
        ("split long rows", "area"),
        ("CPU: split long rows", "area"),
        ("cpu:split long rows", "area"),
        ("cpu: ", "area"),
        ("wip", "area"),
        ("x" * 30 + ": " + "y" * 41, "73 characters"),
        ("cpu: split long rows.", "period"),
        ("cpu: the rows are split", "imperative"),
        ("cpu: added a table", "imperative"),
        ("cpu: splitting long rows", "imperative"),
        ("tests: a shorter line", "imperative"),
    ],
)
def test_a_fault_of_a_subject_is_named(subject, fault):
    assert fault in (find_fault(subject) or "")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with bad subjects before the file was added, and on a branch that began before; returns `git`."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(subject: str) -> None:
        git("commit", "--allow-empty", "-m", subject)

    monkeypatch.setattr(files, "ROOT", tmp_path)
    git("init", "-b", "main")
    commit("Old")
    git("branch", "older")
    file = tmp_path / "tests/repository/test_commits.py"
    file.parent.mkdir(parents=True)
    file.touch()
    git("add", ".")
    commit("Add the test")
    git("checkout", "older")
    commit("Older branch")
    git("checkout", "main")
    git("merge", "--no-ff", "-m", "Merge it", "older")
    commit("cpu: split rows")
    return git


def test_commits_after_this_file_are_read_and_no_others(repository):
    assert read_subjects() == ["cpu: split rows"]


def test_commits_after_the_last_tag_are_read(repository):
    repository("tag", "v1")
    assert not read_subjects()
    repository("commit", "--allow-empty", "-m", "ops: add one")
    assert read_subjects() == ["ops: add one"]


def test_a_tag_before_this_file_does_not_count(repository):
    repository("tag", "v0", "older")
    assert read_subjects() == ["cpu: split rows"]
