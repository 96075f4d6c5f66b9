"""Fetch llama-server's test suite into the folder $HOCKET_LLAMA_SUITE: ``python .ci/llama_suite.py``.

The suite is part of the source archive of llama-cpp-python, which contains llama.cpp. Its license is MIT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
FOLDERS = ("tools/server/tests/", "models/templates/")
"""Folders of llama.cpp that the suite needs."""


def select_member(name: str) -> str | None:
    """Return the path inside llama.cpp of a member of the archive, or `None` if the suite does not need it."""
    path = name.partition("/vendor/llama.cpp/")[2]
    return path if path.startswith(FOLDERS) and ".." not in path.split("/") else None


def extract_suite(archive: Path, folder: Path) -> int:
    """Extract the suite, and return the number of files."""
    count = 0
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile() and (path := select_member(member.name)) and (data := members.extractfile(member)):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.read())
                count += 1
    return count


def main() -> int:
    folder = Path(os.environ["HOCKET_LLAMA_SUITE"])
    with tempfile.TemporaryDirectory() as name:
        words = ("download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", name, f"{PACKAGE}=={VERSION}")
        if status := subprocess.run((sys.executable, "-m", "pip", *words)).returncode:
            return status
        (archive,) = Path(name).glob("*.tar.gz")
        return int(not extract_suite(archive, folder))


if __name__ == "__main__":
    raise SystemExit(main())
