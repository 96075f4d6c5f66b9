"""Run the tests of crashed workers again, each alone in a process: ``python .ci/crashed.py PYTEST_LOG``.

A crash of a worker, such as an abort of a compiler library, is no result of a test. The crash is printed. The exit
status is 0 if the log has no other failure and every such test passes alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_TRACEBACK_LINES = 30
FAILURE = re.compile(r"^(?:FAILED|ERROR) ", re.MULTILINE)
CRASH = re.compile(r"^worker '\w+' crashed while running '(.*)'$", re.MULTILINE)
"""The report of a crash; the line of the summary may be truncated to the width of the terminal."""
FATAL = re.compile(rf"Fatal Python error.*|^Current thread .*(?:\n.*){{0,{MAX_TRACEBACK_LINES}}}", re.MULTILINE)


def find_crashed_tests(log: str) -> list[str]:
    """Return the tests of crashed workers; empty if the log has another failure."""
    tests = CRASH.findall(log)
    return tests if len(tests) == len(FAILURE.findall(log)) else []


def run_alone(test: str) -> bool:
    """Run one test in a new process; return whether it passes."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-n", "0", "--tb=short", test]
    return subprocess.run(command, check=False).returncode == 0


def main(arguments: Sequence[str], run: Callable[[str], bool] = run_alone) -> int:
    """Return 0 if crashes are the only failures and all their tests pass alone."""
    log = Path(arguments[0]).read_text(encoding="utf-8", errors="replace")
    for fatal in FATAL.findall(log):
        print(fatal)
    tests = find_crashed_tests(log)
    passed = []
    for test in tests:
        print(f"\n--- the worker of {test} crashed; the test runs again alone", flush=True)
        passed.append(run(test))
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
