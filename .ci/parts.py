"""Install the optional parts that tests need: ``python .ci/parts.py missing.txt``.

A part that cannot be installed is a failure, and the exit status is 1. There are two exceptions: the registry of the
part does not answer at all, or this user may not install system packages. The names of these parts are written to the
file, one on each line, and `skips.py` allows their skips.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip")
APT = ("apt-get", "-o", "APT::Update::Error-Mode=any")
PROBE_SECONDS = 120


class Installation(StrEnum):
    INSTALLED = "is installed"
    FAILED = "FAILED to install, and its registry answers"
    NO_ANSWER = "is missing: its registry does not answer"
    NOT_ALLOWED = "is missing: only root installs it, with apt-get"


@dataclass(frozen=True)
class OptionalPart:
    """An optional part.

    Args:
        name: The name in messages and in `skips.toml`.
        install: The words of pip or of apt-get behind ``install``.
        system: Whether apt-get installs the part.
        has: A program that the part brings; a system part that has it already is not installed again.
        fetch: A command that fetches the rest of the part from another registry.
        seconds: The time limit of the installation.
    """

    name: str
    install: tuple[str, ...]
    system: bool = False
    has: str = ""
    fetch: tuple[str, ...] = ()
    seconds: int = 300


def read_extra(name: str) -> tuple[str, ...]:
    """Return the requirements of an extra of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return tuple(project["optional-dependencies"][name])


PARTS = (
    OptionalPart("NVRTC", read_extra("nvrtc")),
    OptionalPart("ONNX", read_extra("onnx")),
    OptionalPart("MPI", read_extra("mpi")),
    OptionalPart("llguidance", read_extra("grammar")),
    OptionalPart("Selenium", read_extra("browser")),
    OptionalPart("Perfetto", read_extra("perfetto")),
    OptionalPart("mkdocs", read_extra("docs")),
    OptionalPart("PyTorch", ("torch==2.13.0", "expecttest"), seconds=900),
    OptionalPart("transformers", ("transformers==5.24.0",)),
    OptionalPart("SciPy", ("scipy>=1.11",)),
    OptionalPart("API clients", ("openai>=2", "anthropic>=0.70")),
    OptionalPart("LangChain", ("langchain-openai==1.7.4",)),
    OptionalPart("pyright", ("pyright[nodejs]",), fetch=(sys.executable, "-m", "pyright", "--version")),
    OptionalPart(
        "QEMU", ("qemu-user", "gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"), system=True, has="qemu-aarch64"
    ),
    OptionalPart("Chromium", ("chromium", "chromium-driver"), system=True, has="chromium"),
)

RunCommand = Callable[[Sequence[str], int], bool]


def run_command(command: Sequence[str], seconds: int) -> bool:
    """Return whether `command` passes within `seconds`; print the end of its output if it does not."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        print(f"    {' '.join(command)}: not done within {seconds} s")
        return False
    except OSError as why:
        print(f"    {' '.join(command)}: {why}")
        return False
    if done.returncode:
        print("    " + "\n    ".join(done.stdout.decode(errors="replace").splitlines()[-5:]))
    return done.returncode == 0


def can_use_apt() -> bool:
    return shutil.which("apt-get") is not None and hasattr(os, "geteuid") and os.geteuid() == 0


def install_part(part: OptionalPart, run: RunCommand = run_command, *, may_use_apt: bool | None = None) -> Installation:
    """Install one part; on a failure ask its registry for something that it certainly has."""
    if part.system:
        if part.has and shutil.which(part.has):
            return Installation.INSTALLED
        if not (can_use_apt() if may_use_apt is None else may_use_apt):
            return Installation.NOT_ALLOWED
        if not run((*APT, "update", "-qq"), PROBE_SECONDS):
            return Installation.NO_ANSWER
        installed = run((*APT, "install", "-y", "-qq", *part.install), part.seconds)
        answers = (*APT, "update", "-qq")
    else:
        installed = run((*PIP, "install", "--quiet", *part.install), part.seconds)
        answers = (*PIP, "index", "versions", "pip")
    if not installed:
        return Installation.FAILED if run(answers, PROBE_SECONDS) else Installation.NO_ANSWER
    if part.fetch and not run(part.fetch, part.seconds):
        run((*PIP, "uninstall", "--yes", part.name), PROBE_SECONDS)  # tests skip a part that is not there
        return Installation.NO_ANSWER
    return Installation.INSTALLED


def main(words: Sequence[str]) -> int:
    (missing,) = words
    outcomes = {}
    for part in PARTS:
        began = time.monotonic()
        outcomes[part.name] = install_part(part)
        print(f"{part.name} {outcomes[part.name]} ({time.monotonic() - began:.0f} s)", flush=True)
    absent = [
        name for name, outcome in outcomes.items() if outcome in (Installation.NO_ANSWER, Installation.NOT_ALLOWED)
    ]
    Path(missing).write_text("".join(f"{name}\n" for name in absent), encoding="utf-8")
    return int(Installation.FAILED in outcomes.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
