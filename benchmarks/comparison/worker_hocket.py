"""Run the tests of ``vs_llama_cpp.py`` in hocket; they arrive as JSON lines.

Started as ``python worker_hocket.py MODEL THREADS CONTEXT``.
"""

from __future__ import annotations

import json
import sys

import hocket
from hocket.frontends.commands.bench import BenchmarkTest, create_random_context_tokens, measure_test_seconds
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.open_model import open_model


def main() -> None:
    path, threads, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    session = Session(open_model(path), on=DeviceGroup(threads=threads), context=size)
    tokens = create_random_context_tokens(session)
    print(json.dumps({"version": hocket.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure_test_seconds(session, BenchmarkTest(**json.loads(line)), tokens)), flush=True)


if __name__ == "__main__":
    main()
