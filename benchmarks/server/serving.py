"""Load model servers with concurrent clients, and compare hocket with llama-server.

    python benchmarks/server/serving.py MODEL.gguf --server hocket --server llama --llama-server PATH --clients 1,4,16

The script starts the servers and loads them in turns, so all of them are measured in the same minutes. ``--url URL``
loads a server that runs already. The load is closed or open:

- ``--clients N,...``: each of N clients sends its next request when its last one has ended.
- ``--rate R``: requests arrive as a Poisson process of R requests per second.

``--soak N`` sends N requests to each server in ten parts. It exits with 1 if a request fails, or if the memory grows by
more than 2 % after the first part.

``--all`` runs every workload with 1, 4 and 16 clients and one open loop, the most important cases first, and stops
after ``--minutes`` (18). ``--quick`` runs every workload once with two clients, to see that all of them work:

    python benchmarks/server/serving.py MODEL.gguf --server hocket --server llama --llama-server PATH --all --save STEM

Workload E (embeddings) is for hocket alone: llama-server would generate no text with `--embeddings`.

Prompts are lists of random token ids with fixed seeds, different in each round. Answers have a fixed length: the end
token is ignored. The load generator prints its own share of the CPU time of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from hocket.benchmarks import results_file as results
from hocket.benchmarks.server.load_generator import (
    DEFAULT_VOCABULARY,
    LONG,
    WORKLOADS,
    Exchange,
    Target,
    make_jobs,
    run_closed_loop,
    run_interruption,
    run_open_loop,
)

START_SECONDS = 300.0
"""Longest time until a server answers."""
STOP_SECONDS = 20.0
"""Longest time until a server ends after SIGTERM."""
SOAK_PARTS, MAX_SOAK_GROWTH = 10, 0.02
"""Parts of a soak, and the largest growth of the memory from the end of the first part to the end of the last one."""
MIN_GAP_MS = 0.1
"""Shortest median gap with a ratio. If tokens come faster, several of them are read at once."""
DECODING_CLIENTS = 8
"""Clients of workload I that decode when the long prompt arrives."""
FAIRNESS_WINDOW_SECONDS = 10.0
"""Seconds of the windows in which the tokens of clients are compared."""
OPEN_LOOP_SECONDS = 20.0
"""Seconds in which the requests of the open loop of `--all` arrive."""
ALL_MINUTES = 18.0
"""Limit of `--all`, without the start of the servers."""


# --------------------------------------------------------------------------------------------------------- measurement


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, for user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(read_cpu_seconds(int(child)) for child in children)


def read_memory_mib(pid: int) -> float:
    """Return RssAnon and VmSwap of a process in MiB; the pages of the model file are not among them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))) / 1024


def find_percentile(numbers: Sequence[float], share: float) -> float:
    """Return the number below which `share` of the numbers are, or 0 without numbers."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def find_lowest_fairness(exchanges: Sequence[Exchange]) -> float:
    """Return the lowest of Jain's indices of the tokens of clients, over windows of 10 s; 1 if all have as many.

    A run that is shorter than a window is one window. Jain, Chiu and Hawe, 1984.
    """
    times = [(at, one.client) for one in exchanges for at in one.token_times]
    clients = {one.client for one in exchanges}
    if not times:
        return 0.0
    start, end = min(times)[0], max(times)[0]
    count = max(1, int((end - start) / FAIRNESS_WINDOW_SECONDS))
    windows = [dict.fromkeys(clients, 0) for _ in range(count)]
    for at, client in times:
        number = int((at - start) / FAIRNESS_WINDOW_SECONDS)
        if number < count or count == 1:
            windows[min(number, count - 1)][client] += 1
    sums = [(sum(one.values()) ** 2, len(one) * sum(n * n for n in one.values())) for one in windows]
    return min((square / total for square, total in sums if total), default=0.0)


def summarise_exchanges(exchanges: Sequence[Exchange], seconds: float, *, has_late: bool) -> dict[str, object]:
    """Summarise all requests of one run: return its throughput, latencies and errors as a result row.

    Args:
        exchanges: All requests.
        seconds: Wall time of the run.
        has_late: Whether the last exchange alone gives the time to the first token, and the others the gaps.
    """
    good, errors = [one for one in exchanges if not one.error], [one.error for one in exchanges if one.error]
    first, steady = (good[-1:], good[:-1]) if has_late else (good, good)
    waits = [1e3 * (one.token_times[0] - one.sent) for one in first]
    gaps = [1e3 * (b - a) for one in steady for a, b in zip(one.token_times, one.token_times[1:], strict=False)]
    prompt, cached, new = (
        (sum(counts) for counts in zip(*(one.counts for one in good), strict=True)) if good else (0,) * 3
    )
    usual, slow = find_percentile(gaps, 0.5), find_percentile(gaps, 0.99)
    row: dict[str, object] = {
        "requests": len(exchanges),
        "errors": len(errors),
        "error": errors[0] if errors else "",
        "seconds": seconds,
        "new_per_second": new / seconds,
        "prompt_per_second": prompt / seconds,
        "cached_share": cached / max(prompt, 1),
        "first_ms_p50": find_percentile(waits, 0.5),
        "first_ms_p99": find_percentile(waits, 0.99),
        "gap_ms_p50": usual,
        "gap_ms_p99": slow,
        "fairness": find_lowest_fairness(steady),
    }
    return row | ({"gap_ratio": slow / usual} if usual > MIN_GAP_MS else {})


@dataclass(frozen=True)
class LoadCase:
    """A workload with its load: a number of clients, or a rate of requests per second.

    `jobs` are the requests of a rate; 0 for the number that the caller gives.
    """

    workload: str
    clients: int = 1
    rate: float = 0.0
    jobs: int = 0

    @property
    def load(self) -> str:
        """The load as text."""
        return f"{self.rate:g}/s" if self.rate else str(self.clients)


def measure_load(target: Target, case: LoadCase, requests: int, seed: str) -> dict[str, object]:
    """Run a case once, and return its figures.

    Args:
        target: The server.
        case: The workload and the load.
        requests: Jobs of each client, or of the open loop.
        seed: Seed of the prompts.
    """
    workload, exchanges = WORKLOADS[case.workload], list[Exchange]()
    is_interrupted = case.workload == "I"
    count = case.clients if is_interrupted else case.jobs or requests if case.rate else requests * case.clients
    jobs = make_jobs(workload, count, f"{case} {seed}", target.vocabulary)
    if is_interrupted:
        (long,) = make_jobs(LONG, 1, f"long {case} {seed}", target.vocabulary)
        work = run_interruption(target, jobs, long, exchanges)
    elif case.rate:
        work = run_open_loop(target, jobs, case.rate, exchanges)
    else:
        work = run_closed_loop(target, jobs, case.clients, exchanges)
    cpu = read_cpu_seconds(target.pid) if target.pid else 0.0
    start, own = time.perf_counter(), time.process_time()
    asyncio.run(work)
    seconds, own = time.perf_counter() - start, time.process_time() - own
    row: dict[str, object] = {"workload": case.workload, "load": case.load, "server": target.name}
    row |= summarise_exchanges(exchanges, seconds, has_late=is_interrupted)
    row |= {"generator_cpu_seconds": own, "generator_share": own / seconds / (os.cpu_count() or 1)}
    if target.pid:
        row |= {"cpu_seconds": read_cpu_seconds(target.pid) - cpu, "memory_mib": read_memory_mib(target.pid)}
    return row


# ------------------------------------------------------------------------------------------------------------- servers


@contextmanager
def run_server(name: str, command: Sequence[str], port: int, api: str) -> Iterator[Target]:
    """Start a server, yield it when it answers, and end it.

    Args:
        name: Its name in the results.
        command: The command with its arguments.
        port: The port; 0 if the server prints its URL.
        api: ``native`` or ``openai``.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                log.seek(0)
                text = log.read()
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{shlex.join(command)} does not serve:\n{text[-2000:]}")
                found = re.search(r"http://127\.0\.0\.1:(\d+)", text)
                known = port or (int(found[1]) if found else 0)
                with suppress(OSError):
                    if known:
                        yield find_target(name, f"http://127.0.0.1:{known}", api, process.pid)
                        return
                time.sleep(0.1)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def find_target(name: str, url: str, api: str, pid: int | None = None) -> Target:
    """Return a server that answers at a URL.

    Raises:
        OSError: It does not answer yet.
    """
    with urllib.request.urlopen(f"{url}/health", timeout=5), urllib.request.urlopen(f"{url}/v1/models") as models:
        about = json.load(models)["data"][0].get("meta") or {}
    place = urlsplit(url)
    return Target(name, (place.hostname or "", place.port or 80), api, about.get("n_vocab", DEFAULT_VOCABULARY), pid)


def make_commands(args: argparse.Namespace, slots: int, context: int) -> Iterator[tuple[str, list[str], int]]:
    """Yield the name, the command and the port of each server; port 0 is chosen by the server."""
    for name in args.server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        if name == "hocket":
            command = [sys.executable, "-m", "hocket", "serve", args.model, "-np", str(slots), "-c", str(context)]
            yield name, [*command, "--port", "0", "-t", str(args.t), *shlex.split(args.hocket_args)], 0
        else:
            command = [args.llama_server, "-m", args.model, "-np", str(slots), "-c", str(slots * context)]
            command += ["-t", str(args.t), "-fa", "on", "--metrics", "--port", str(port)]
            yield name, [*command, *shlex.split(args.llama_args)], port


# -------------------------------------------------------------------------------------------------------------- report

TABLE_COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "new_per_second": ("tok/s out", 1, 1),
    "prompt_per_second": ("tok/s in", 1, 0),
    "first_ms_p50": ("TTFT p50 ms", 1, 0),
    "first_ms_p99": ("p99", 1, 0),
    "gap_ms_p50": ("gap p50 ms", 1, 1),
    "gap_ms_p99": ("p99", 1, 1),
    "gap_ratio": ("p99 / p50", 1, 1),
    "fairness": ("Jain", 1, 2),
    "cached_share": ("cached %", 100, 0),
    "errors": ("errors", 1, 0),
    "cpu_seconds": ("CPU s", 1, 1),
    "memory_mib": ("MiB", 1, 0),
    "generator_share": ("generator %", 100, 1),
}
"""For each column its title, a factor and the number of decimals; cells are medians over the rounds."""
HEAD = ("workload", "load", "server", *(title for title, _, _ in TABLE_COLUMNS.values()), "out / first server")


def format_rows(rows: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return the cells of the table: one row for each case and server, with medians over the rounds."""
    groups: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["load"], row["server"]), []).append(row)
    table = []
    for (workload, load, server), group in groups.items():
        cells = []
        for name, (_, factor, digits) in TABLE_COLUMNS.items():
            numbers = [factor * row[name] for row in group if name in row]
            cells.append(f"{sum(numbers) if name == 'errors' else median(numbers):.{digits}f}" if numbers else "")
        first = next(others for key, others in groups.items() if key[:2] == (workload, load))
        pairs = zip(group, first, strict=False)
        ratio = median(one["new_per_second"] / max(other["new_per_second"], 1e-9) for one, other in pairs)
        table.append([str(workload), str(load), str(server), *cells, f"{ratio:.2f}"])
    return table


def run_cases(
    targets: Sequence[Target], cases: Sequence[LoadCase], args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Yield the figures of each run; the servers alternate, and a first run of each case is not counted.

    With `--minutes`, all cases run once before the second round. A case does not begin if it would end too late, as
    predicted from the tokens per second so far.
    """
    if not args.minutes:
        for case in cases:
            for target in targets:
                measure_load(target, case, 1, "warm")
            for i in range(args.rounds):
                for target in targets:
                    yield {"round": i, **measure_load(target, case, args.requests, f"round {i}")}
        return
    until = time.monotonic() + 60.0 * args.minutes
    rates: dict[str, float] = {}  # tokens per second of each server, in its slowest case so far
    for target in targets:
        measure_load(target, LoadCase("S", max(case.clients for case in cases)), 1, "warm")
    for i in range(args.rounds):
        for case in cases:
            weight = estimate_work_tokens(case, args.requests)
            users = [target for target in targets if case.workload != "E" or target.name != "llama"]
            seconds = sum(weight / rates[one.name] for one in users if one.name in rates)
            if time.monotonic() + seconds > until:
                print(f"left out for lack of time: {case.workload} {case.load}, round {i}", flush=True)
                continue
            for target in users:
                row = measure_load(target, case, args.requests, f"round {i}")
                rate = weight / float(str(row["seconds"]))
                rates[target.name] = min(rate, rates.get(target.name, rate))
                yield {"round": i, **row}


def estimate_work_tokens(case: LoadCase, requests: int) -> float:
    """Estimate the work of a case in tokens: prompts without their shared or known parts, and answers."""
    workload = WORKLOADS[case.workload]
    jobs = 1 if case.workload == "I" else requests
    each = workload.own + workload.answer + workload.turns * (workload.turn + 2 * workload.answer)
    count = case.jobs or jobs if case.rate else jobs * case.clients
    return count * each + workload.shared + (LONG.own if case.workload == "I" else 0)


def list_all_cases(clients: Sequence[int], rate: float) -> list[LoadCase]:
    """List all workloads, the most important and cheapest cases first.

    Args:
        clients: The numbers of clients, in the order of their importance.
        rate: Requests per second of the open loop.
    """
    closed = [LoadCase(name, count) for count in clients for name in "MSPLE"]
    talks = [LoadCase("T", count) for count in sorted(clients)]
    others = [LoadCase("I", DECODING_CLIENTS), LoadCase("M", rate=rate, jobs=math.ceil(OPEN_LOOP_SECONDS * rate))]
    return [*closed[:5], *others, *talks[:1], *closed[5:], *talks[1:]]


def run_soak(target: Target, case: LoadCase, requests: int) -> Iterator[dict[str, object]]:
    """Yield the figures of each part of a soak with `requests` requests in all, at least one per client and part."""
    each = max(1, requests // (SOAK_PARTS * case.clients))
    for i in range(SOAK_PARTS):
        yield {"round": i, **measure_load(target, case, each, f"soak {i}")}


def find_soak_faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the faults in the parts of a soak, a line each: failed requests, or memory that grew too much."""
    faults = [f"{row['errors']} requests failed: {row['error']}" for row in rows if row["errors"]]
    sizes = [row["memory_mib"] for row in rows if "memory_mib" in row]
    if sizes and (growth := sizes[-1] / sizes[0] - 1) > MAX_SOAK_GROWTH:
        faults.append(f"memory grew by {growth:.1%}, from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", nargs="?")
    parser.add_argument("--server", action="append", default=[], choices=("hocket", "llama"), help="repeatable")
    parser.add_argument("--url", action="append", default=[], help="a server that runs already; repeatable")
    parser.add_argument("--llama-server", default="llama-server", metavar="PATH", help="the program of that name")
    parser.add_argument("--hocket-args", default="", metavar="TEXT", help="further arguments of hocket serve")
    parser.add_argument("--llama-args", default="", metavar="TEXT", help="further arguments of llama-server")
    parser.add_argument("--api", default="native", choices=("native", "openai"), help="/completion or /v1/completions")
    parser.add_argument("-w", "--workloads", default="S", help=f"letters of {''.join(WORKLOADS)} (S)")
    parser.add_argument("--clients", default="1,4,16", help="numbers of clients of the closed loop (1,4,16)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second of the open loop")
    parser.add_argument("-n", "--requests", type=int, default=4, help="requests, or talks of T, per client (4)")
    parser.add_argument("-np", type=int, help="slots (the largest number of clients)")
    parser.add_argument("-c", type=int, help="tokens of a slot (as many as the workloads need)")
    parser.add_argument("-t", type=int, default=os.cpu_count(), help="threads of each server (all cores)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--all", action="store_true", help="all workloads, in 18 minutes at most")
    parser.add_argument("--quick", action="store_true", help="all workloads once, with 2 clients")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no case that would end later")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="requests of a soak, in place of rounds")
    parser.add_argument("--shared", action="store_true", help="say that others used the machine meanwhile")
    parser.add_argument("--save", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    args = parser.parse_args()
    if bool(args.server) != bool(args.model) or not (args.server or args.url):
        parser.error("give a model with --server, or --url")
    clients = [int(word) for word in args.clients.split(",")]
    loads = [LoadCase("", rate=args.rate)] if args.rate else [LoadCase("", count) for count in clients]
    cases = [replace(load, workload=name) for name in args.workloads if name != "I" for load in loads]
    cases += [LoadCase("I", DECODING_CLIENTS)] * ("I" in args.workloads)
    if args.all or args.quick:
        args.minutes = args.minutes or ALL_MINUTES
        args.requests, args.rounds = (1, 1) if args.quick else (2, 2)
        args.workloads, cases = "SMLPTIE", list_all_cases([2] if args.quick else [16, 4, 1], args.rate or 2.0)
    slots = args.np or max(case.clients + (case.workload == "I") for case in cases)
    sizes = [WORKLOADS[name].context for name in args.workloads] + [LONG.context] * ("I" in args.workloads)
    context = args.c or -(-max(sizes) // 256) * 256
    about, rows = results.collect_circumstances(args.shared), []
    with ExitStack() as stack:
        targets = [find_target(url, url, args.api) for url in args.url]
        for name, command, port in make_commands(args, slots, context):
            print(shlex.join(command), flush=True)
            targets.append(stack.enter_context(run_server(name, command, port, args.api)))
        print(results.format_table(HEAD[:-1], []), end="", flush=True)
        soaks = (run_soak(target, case, args.soak) for target in targets for case in cases)
        for row in chain.from_iterable(soaks) if args.soak else run_cases(targets, cases, args):
            rows.append(row)
            print(f"| {' | '.join(format_rows([row])[0][:-1])} |", flush=True)
            if row["error"]:
                print(f"error: {row['error']}", flush=True)
            if args.save:
                results.write_result(args.save, about, rows, results.format_table(HEAD, format_rows(rows)))
    if args.soak:
        groups = (
            list(group) for _, group in groupby(rows, key=lambda row: (row["server"], row["workload"], row["load"]))
        )
        raise SystemExit("\n".join(fault for group in groups for fault in find_soak_faults(group)) or None)
    print(f"\nMedians of {args.rounds} rounds:\n\n{results.format_table(HEAD, format_rows(rows))}")


if __name__ == "__main__":
    main()
