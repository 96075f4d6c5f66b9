"""Run llama-server's own test suite against ``hocket serve``: ``python llama_suite.py TESTS [FILE...]``.

1. TESTS is the folder ``tools/server/tests`` of llama.cpp. The run uses a copy, because the tests write files.
2. The suite starts a launcher in place of llama-server. `map_flags` translates the flags; the model is always the model
   in ``data/``, with a context of 512 tokens. Downloads fail.
3. ``tests/fixtures/llama_suite.toml`` lists the files that do not run and the tests that must fail, with the reasons.

The exit status is 1 if an unlisted test fails, or if a listed test passes. FILE is a file such as ``test_basic.py``;
without one, all files run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL, MODEL_CONTEXT = ROOT / "data" / "hocket-tiny-q8_0.gguf", 512
EXPECTED_TABLE = ROOT / "tests" / "fixtures" / "llama_suite.toml"
TEST_SECONDS = 120
"""The time limit of one test."""
VALUE_FLAGS = (
    *("hf-repo", "hf-file", "model", "model-url", "model-draft", "models-dir", "models-max", "models-preset"),
    *("ubatch-size", "n-gpu-layers", "pooling", "tags", "slot-save-path", "grp-attn-n", "grp-attn-w", "lora"),
    *("spec-type", "spec-draft-n-max", "spec-draft-n-min", "spec-synth-len", "spec-synth-rates", "reasoning-format"),
    *("mmproj-url", "media-path", "sleep-idle-seconds", "cache-ram", "tools", "tools-runtime", "mcp-servers-config"),
    *("mcp-servers-json", "cors-origins", "api-key", "alias", "ctx-size", "parallel", "batch-size", "threads"),
    *("host", "port", "temp", "seed", "n-predict", "reasoning", "chat-template", "chat-template-file"),
)
SWITCHES = (
    *("offline", "cont-batching", "embedding", "reranking", "metrics", "kv-unified", "swa-full", "slots", "no-slots"),
    *("verbose", "context-shift", "no-ui", "no-models-autoload", "jinja", "no-jinja", "no-mmproj", "ui-mcp-proxy"),
    *("no-cache-idle-slots", "backend_sampling"),
)
PLUGIN = f'''
"""Writes the outcome of each test, limits its time, and leaves out the download of models."""
import os, signal
import pytest

def pytest_collection_modifyitems(items):
    import utils
    utils.ServerPreset.load_all = staticmethod(lambda: None)

def expire(*args):
    raise TimeoutError("the test took longer than {TEST_SECONDS} s")

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    signal.signal(signal.SIGALRM, expire)
    signal.alarm({TEST_SECONDS})
    yield
    signal.alarm(0)

outcomes = {{}}

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or ""
        outcomes[report.nodeid] = (report.outcome, " ".join(why.split())[:300])
    if report.when == "teardown":
        outcome, why = outcomes.get(report.nodeid, ("failed", "the test has no outcome"))
        with open(os.environ["HOCKET_LLAMA_OUTCOMES"], "a", encoding="utf-8") as out:
            out.write("\\t".join((report.nodeid.removeprefix("unit/"), outcome, why)) + "\\n")
'''
WGET = '''
"""Refuses downloads in place of the package wget, which the suite imports."""

def download(url, out=None):
    raise OSError(f"tests download nothing: {url}")
'''
CHAT_TEMPLATES: Mapping[str, str] = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|"
    "{{ {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role] }}_TOKEN|>{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
"""Chat templates that llama-server knows by name."""
PLAIN_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n\n{% endif %}{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
)
"""The template of the model, which has none: a model of plain text continues a text."""


# ------------------------------------------------------------------------------------------------------------ launcher


def map_flags(words: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment variables of ``hocket serve`` for the flags of llama-server.

    Args:
        words: The flags of llama-server. Its context is the sum over the slots unless ``--kv-unified`` is set.
        folder: A folder for the file of a chat template.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in VALUE_FLAGS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("-ctk", "-ctv", "-fa"):
        parser.add_argument(name)
    args = parser.parse_args(words)
    slots = int(args.parallel or 4)
    context = int(args.ctx_size or MODEL_CONTEXT) // (1 if args.kv_unified else slots)
    context = min(context, MODEL_CONTEXT)
    flags = ["--host", args.host, "--port", args.port, "--parallel", str(slots), "--ctx-size", str(context)]
    flags += ["--temp", args.temp, "--seed", args.seed]
    flags += ["--queue", "64"]  # the queue of llama-server has no bound
    flags += ["--batch-size", str(min(int(args.batch_size or 2048), context))]
    if args.n_predict and int(args.n_predict) > 0:
        flags += ["--default-max-tokens", args.n_predict]
    for name in sorted((args.alias or "").split(",")):
        flags += ["--alias", name] if name else []
    origins = args.cors_origins or ("localhost" if args.tools else "*")
    flags += [word for origin in origins.split(",") for word in ("--cors-origin", origin)]
    flags += [] if args.metrics else ["--no-metrics"]
    flags += [] if args.slots else ["--no-slots"]
    flags += ["--verbose"] if args.verbose else []
    thinks = "false" if args.reasoning == "off" else "true"  # llama-server lets models think by default
    flags += ["--chat-template-kwargs", f'{{"enable_thinking": {thinks}}}']
    template = args.chat_template_file
    if not template:
        text = args.chat_template or PLAIN_TEMPLATE
        template = str(folder / f"template-{args.port}.jinja")
        Path(template).write_text(CHAT_TEMPLATES.get(text, text), encoding="utf-8")
    flags += ["--chat-template", template]
    return flags, {"HOCKET_API_KEY": args.api_key} if args.api_key else {}


def launch(words: Sequence[str], folder: Path) -> None:
    """Become ``hocket serve`` with the flags of llama-server."""
    flags, variables = map_flags(words, folder)
    os.environ.update(variables)
    os.execv(sys.executable, [sys.executable, "-m", "hocket", "serve", str(MODEL), *flags])


# -------------------------------------------------------------------------------------------------------------- runner


@dataclass
class Table:
    """The expected outcomes.

    - `unsupported_files`: files that do not run, with the reasons.
    - `failures`: tests that fail, with the reasons; a name without brackets stands for all cases of a test.
    - `quick_tests`: files and tests that run in CI; `quick_count`: the number of their cases.
    """

    unsupported_files: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    quick_tests: tuple[str, ...] = ()
    quick_count: int = 0

    def find_reason(self, test: str) -> str | None:
        """Return why a test is expected to fail, or `None`."""
        return self.failures.get(test) or self.failures.get(test.partition("[")[0])


def read_table(path: Path = EXPECTED_TABLE) -> Table:
    """Return the expected outcomes of a file."""
    data = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return Table(
        {name: entry["reason"] for entry in data.get("file", ()) for name in entry["names"]},
        {name: entry["reason"] for entry in data.get("failure", ()) for name in entry["tests"]},
        tuple(data.get("quick_tests", ())),
        data.get("quick_count", 0),
    )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: ``passed``, ``failed`` or ``skipped``, and the message of a failure."""

    test: str
    outcome: str
    why: str = ""

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]


def find_free_port() -> int:
    """Return a port that no server uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_suite(tests: Path, files: Sequence[str], *, select: str = "", log: Path | None = None) -> list[Outcome]:
    """Return the outcomes of files of the suite.

    Args:
        tests: The folder ``tools/server/tests`` of llama.cpp.
        files: Files in its folder ``unit``, or tests of them, such as ``test_basic.py::test_server_props``.
        select: The expression of ``pytest -k``; all tests if empty.
        log: A file for the output of pytest.
    """
    with tempfile.TemporaryDirectory(prefix="llama-suite-") as name:
        folder = Path(name)
        copy = folder / "tools" / "server" / "tests"
        shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("__pycache__", "tmp"))
        for link in ("models", "tools/mtmd"):
            (folder / link).symlink_to(tests.resolve().parents[2] / link, target_is_directory=True)
        outcomes, launcher = folder / "outcomes", folder / "llama-server"
        (folder / "hocket_plugin.py").write_text(PLUGIN, encoding="utf-8")
        (folder / "wget.py").write_text(WGET, encoding="utf-8")
        launcher.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"from pathlib import Path\nfrom llama_suite import launch\nlaunch(sys.argv[1:], Path({name!r}))\n",
            encoding="utf-8",
        )
        launcher.chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
            "LLAMA_SERVER_BIN_PATH": str(launcher),
            "HOCKET_LLAMA_OUTCOMES": str(outcomes),
            "PORT": str(find_free_port()),
            "PYTHONPATH": os.pathsep.join((name, str(copy), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
            "HTTPS_PROXY": "http://127.0.0.1:9",  # a download fails at once
            "OPENBLAS_NUM_THREADS": "1",
        }
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "hocket_plugin",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hocket",
        ]
        words += ["-m", "not slow", "--tb=short", *(["-k", select] if select else []), *(f"unit/{f}" for f in files)]
        with open(log or os.devnull, "w", encoding="utf-8") as out:
            subprocess.run(words, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        lines = outcomes.read_text(encoding="utf-8").splitlines() if outcomes.exists() else []
        return [Outcome(*line.split("\t", 2)) for line in lines]


def compare_outcomes(outcomes: Sequence[Outcome], table: Table) -> list[str]:
    """Return a line for each outcome that the table does not expect."""
    problems = []
    for outcome in outcomes:
        reason = table.find_reason(outcome.test)
        if outcome.outcome == "failed" and reason is None:
            problems.append(f"{outcome.test} fails and is not listed: {outcome.why}")
        elif outcome.outcome == "passed" and reason is not None:
            problems.append(f"{outcome.test} passes, but is listed: {reason}")
    return problems


def format_counts(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each file and one for all of them, with the number of tests of each outcome."""
    rows = {"in all": Counter(outcome.outcome for outcome in outcomes)}
    for outcome in outcomes:
        rows.setdefault(outcome.file, Counter())[outcome.outcome] += 1
    names = ("passed", "failed", "skipped")
    lines = [f"{file:32}" + "".join(f"{row[name]:5} {name}" for name in names) for file, row in sorted(rows.items())]
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run llama-server's test suite against hocket serve.")
    parser.add_argument("tests", type=Path, help="folder tools/server/tests of llama.cpp")
    parser.add_argument("files", nargs="*", help="files or tests of the suite; without one, all files")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="run the tests that match it, as pytest does")
    parser.add_argument("--quick", action="store_true", help="run the quick tests of the table")
    parser.add_argument("--log", type=Path, help="file for the output of pytest")
    args = parser.parse_args(words)
    table = read_table()
    every = sorted(path.name for path in (args.tests / "unit").glob("test_*.py"))
    files = list(
        args.files or (table.quick_tests if args.quick else [f for f in every if f not in table.unsupported_files])
    )
    outcomes = run_suite(args.tests, files, select=args.k, log=args.log)
    problems = compare_outcomes(outcomes, table)
    print(format_counts(outcomes), *problems, sep="\n")
    if not outcomes:
        print("no test has run; see --log")
    return int(bool(problems) or not outcomes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
