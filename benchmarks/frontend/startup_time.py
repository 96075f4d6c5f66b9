"""Measure `hocket run MODEL -p Hello -n 1` from start to end, and llama.cpp's `llama-completion`.

    python benchmarks/frontend/startup_time.py model.gguf --llama path/to/llama-completion

The two programs alternate. Both are warm: model files are in memory, and kernels, plans and bytecode are cached. The
variable PYTHONDONTWRITEBYTECODE is removed from the environment: without cached bytecode a start takes a third longer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median
from time import perf_counter

ROUND_COUNT = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF model")
    parser.add_argument("--llama", help="llama.cpp's llama-completion")
    args = parser.parse_args()
    commands = {"hocket": [sys.executable, "-m", "hocket", "run", args.model, "-p", "Hello", "-n", "1"]}
    if args.llama:
        commands["llama.cpp"] = [args.llama, "-m", args.model, "-p", "Hello", "-n", "1", "-no-cnv"]
    warm = {name: [measure_command_seconds(command)] for name, command in commands.items()}
    for _ in range(ROUND_COUNT):
        for name, command in commands.items():
            warm[name].append(measure_command_seconds(command))
    for name, times in warm.items():
        runs = sorted(times[1:])
        print(f"{name:10} median {1e3 * median(runs):5.0f} ms, {1e3 * runs[0]:.0f} to {1e3 * runs[-1]:.0f}")


def measure_command_seconds(command: list[str]) -> float:
    """Return the wall time of a command, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = perf_counter()
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return perf_counter() - start


if __name__ == "__main__":
    main()
