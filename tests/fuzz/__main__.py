"""Damaged inputs for file readers: ``python -m tests.fuzz gguf --cases 10000``, in the root of the project.

Every target runs in a process of its own, which may crash or get stuck. With atheris (``pip install atheris``) the
branches and comparisons that inputs reach choose the next damage; without it lines of code do.

An input that was read wrong is written to ``--keep`` and ends the command with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Report

TARGETS = ("gguf", "text", "json", "plan", "state", "template")
ENGINES = ("lines", "atheris")
MEMORY = 8 << 30
"""Bytes of address space for a process."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="damage inputs, and see how they are read"
    )
    parser.add_argument(
        "targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all of them unless given"
    )
    parser.add_argument("--cases", type=int, default=10_000, help="damaged inputs for each target (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="an earlier end for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for faults (%(default)s)")
    parser.add_argument("--engine", choices=ENGINES, help="atheris unless that is not installed")
    parser.add_argument("--read", type=Path, help="read this one file instead, as the one target given does")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(unknown)}; those there are: {', '.join(TARGETS)}")
    args.targets = args.targets or TARGETS
    args.engine = args.engine or ENGINES[importlib.util.find_spec("atheris") is not None]
    return args


def run_supervised(name: str, args: argparse.Namespace) -> bool:
    """Run a target in a process of its own; whether it ended well."""
    options = [f"--{key}={getattr(args, key)}" for key in ("cases", "seconds", "seed", "keep", "engine")]
    log, current = args.keep / f"{name}.log", args.keep / f"{name}-current"
    with log.open("w") as file:
        command = [sys.executable, "-m", "tests.fuzz", name, "--here", *options]
        code = subprocess.run(command, check=False, stderr=file).returncode
    if current.exists():
        print(f"{name}: the process ended with {code} while it read {current}; {log} says more", flush=True)
    return code == 0


def here(name: str, args: argparse.Namespace) -> bool:
    """Run a target in this process; whether nothing was read wrong."""
    if args.engine == "atheris":  # it instruments later imports
        import atheris

        atheris.instrument_imports(include=["hocket"]).__enter__()
    from .engine import Report, fuzz
    from .targets import TARGETS as READERS

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    report, start, current = Report(READERS[name]), time.monotonic(), args.keep / f"{name}-current"

    def goes_on() -> bool:
        return report.cases < args.cases and time.monotonic() - start < args.seconds

    if args.engine == "atheris":
        fuzz_by_branches(report, args.seed, goes_on, current.write_bytes, lambda: finish(report, args.keep))
    else:
        fuzz(report, args.seed, goes_on, current.write_bytes)
    finish(report, args.keep)
    return not report.faults


def fuzz_by_branches(
    report: Report,
    seed: int,
    goes_on: Callable[[], bool],
    about_to_read: Callable[[bytes], object],
    finish: Callable[[], object],
) -> None:
    """As `engine.fuzz`; libFuzzer, which atheris drives, ends the process, so that `finish` is called before."""
    import atheris

    from .engine import LARGEST, sound

    seeds = sound(report.target)

    def damage(data: bytes, max_length: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, max_length))
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = report.target.damage(data, rng.choice(seeds), rng)
        return data[:max_length]

    def read(data: bytes) -> None:
        if not goes_on():
            finish()
            os._exit(bool(report.faults))
        about_to_read(data)
        report.take(data)

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(seeds):
            Path(folder, str(number)).write_bytes(data)
        options = (
            f"-seed={seed + 1}",
            f"-max_len={LARGEST}",
            "-rss_limit_mb=0",
            "-timeout=600",
            "-verbosity=0",
            "-report_slow_units=600",
        )
        atheris.Setup(["fuzz", *options, folder], read, custom_mutator=damage)
        atheris.Fuzz()


def finish(report: Report, keep: Path) -> None:
    """Print the result of a run, and save the inputs that were read wrong."""
    (keep / f"{report.target.name}-current").unlink(missing_ok=True)
    print(report)
    for number, (words, data) in enumerate(report.faults.values()):
        path = keep / f"{report.target.name}-{number}"
        path.write_bytes(data)
        print(f"  {path}: {words}")
    sys.stdout.flush()


def main() -> int:
    args = parse_arguments()
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.read is not None:
        from .engine import read_input
        from .targets import TARGETS as READERS

        print(read_input(READERS[args.targets[0]], args.read.read_bytes()))
        return 0
    run = here if args.here else run_supervised
    ended_well = [run(name, args) for name in args.targets]
    return 0 if all(ended_well) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
