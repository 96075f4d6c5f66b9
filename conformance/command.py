"""The command line of the conformance kit: ``hocket check``.

Results go to stdout, progress to stderr. Exit codes: 0 everything passed, 1 something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ..backends import find_device
from ..backends.progress_bar import open_progress_bar
from ..frontends.flag_values import parse_natural, parse_positive
from ..frontends.terminal.arguments import CommandParser, describe_os_error_with_remedy
from ..graph.errors import BackendError, HocketError, format_count
from ..graph.storage.files import require_writable, write_text
from .cases.case import DECLARATION_CHECK, get_tested_op
from .cases.inputs import NoReference
from .cases.model_cases import collect_case_texts, read_model_graphs
from .checks.run_case import Outcome, Result
from .generate_cases import find_declaration_fault
from .reports.html_page import format_html_report
from .reports.json_records import compare_reports, format_json_lines, save_failure_arrays, select_failed_results
from .reports.text_report import format_failure_traits_report, format_junit_report, format_markdown_report
from .suite import Suite, run_cases_of_suite

STDOUT = Path("-")
"""The path of a report that is printed in place of the text report."""
REPORT_FORMATS: Mapping[str, Callable[[Sequence[Result], str], str]] = MappingProxyType(
    {
        "json": format_json_lines,
        "junit": format_junit_report,
        "markdown": format_markdown_report,
        "html": format_html_report,
    }
)
"""The function of each report option, which formats results and the name of the backend."""


def build_parser(prog: str = "hocket check") -> argparse.ArgumentParser:
    """Build the parser of ``hocket check``."""
    options = CommandParser(prog, description="Check that a backend computes what the ops mean.")
    add_arguments(options)
    return options


def add_arguments(command_parser: argparse.ArgumentParser) -> None:
    """Add the options of the kit to a parser."""
    what = command_parser.add_argument_group("cases")
    what.add_argument(
        "--backend", default="cpu", metavar="NAME", help="a backend or device: cpu, cuda:1 (default: cpu)"
    )
    what.add_argument("--op", default="", metavar="REGEX", help="only ops with a name that matches completely")
    what.add_argument(
        "--case", action="append", default=[], metavar="STRING", help="one case, as printed; may be repeated"
    )
    what.add_argument("--full", action="store_true", help="all cases, instead of the covering selection")
    what.add_argument("--thorough", action="store_true", help="all cases, then shapes that Hypothesis chooses")
    what.add_argument(
        "--from-graph",
        type=Path,
        metavar="MODEL",
        help="the exact cases of the graphs of a GGUF file or Hugging Face folder, or of a .pt2 or .onnx program",
    )
    what.add_argument(
        "--seed", type=parse_natural, default=0, metavar="N", help="seed of all random numbers (default: 0)"
    )
    what.add_argument(
        "-j",
        "--jobs",
        type=parse_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: one per processor)",
    )
    what.add_argument("--list", action="store_true", help="print the cases instead of running them")
    how = command_parser.add_argument_group("expectations")
    how.add_argument("--require", choices=("MUST", "SHOULD"), default="", help="unsupported ops of this tier fail")
    how.add_argument(
        "--xfail", type=Path, metavar="FILE", help="file of cases that must fail; a pass counts as a failure"
    )
    out = command_parser.add_argument_group("reports")
    out.add_argument("--json", type=Path, metavar="FILE", help="a line of JSON for each case; - is stdout")
    out.add_argument("--junit", type=Path, metavar="FILE", help="JUnit XML; - is stdout")
    out.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="failures by op, and a matrix of dtypes and layouts; - is stdout",
    )
    out.add_argument("--html", type=Path, metavar="FILE", help="the same as a page; - is stdout")
    out.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="folder for .npz files with the operands, the expected and the actual results of failing cases",
    )
    other = command_parser.add_argument_group("other modes")
    other.add_argument("--perf", action="store_true", help="measure speed with cold buffers")
    other.add_argument(
        "--fused",
        action="store_true",
        help="compare fused kernels with their ops one by one: of random graphs, or of --from-graph",
    )
    other.add_argument(
        "--counters", action="store_true", help="print the memory accesses of CUDA kernels as Markdown (cuda-emulated)"
    )
    other.add_argument(
        "--order",
        action="store_true",
        help="print unordered conflicting accesses of threads of CUDA kernels (cuda-emulated)",
    )
    other.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="print the changes between two --json files"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hocket check`` with command-line words, and return the exit code."""
    return run_parsed_command(build_parser().parse_args(None if argv is None else list(argv)))


def run_parsed_command(args: argparse.Namespace) -> int:
    """Run ``hocket check`` with parsed options, and return the exit code; an error is one line on stderr."""
    try:
        if args.compare:
            return _print_report_changes(*args.compare)
        if args.fused:
            return _compare_fused_kernels_with_ops(args)
        suite = _make_suite(args)
        if args.list:
            for case in suite.generate_cases():
                print(case)
            return 0
        if args.counters:
            return _print_counters_and_check_budgets(suite)
        if args.order:
            return _print_races(suite)
        return _print_cold_speeds_and_limit_fractions(suite) if args.perf else _run_checks(suite, args)
    except HocketError as why:
        print(f"hocket check: {why}", file=sys.stderr)
        return 2
    except OSError as why:
        print(f"hocket check: {describe_os_error_with_remedy(why)}", file=sys.stderr)
        return 2


def _make_suite(args: argparse.Namespace) -> Suite:
    """Return the suite that the options describe."""
    return Suite(
        backend=args.backend,
        op=args.op,
        texts=collect_case_texts(args.case, args.from_graph),
        full=args.full,
        seed=args.seed,
        require=args.require,
        xfail=args.xfail,
        thorough=args.thorough,
        jobs=args.jobs,
    )


def _run_checks(suite: Suite, args: argparse.Namespace) -> int:
    """Run the cases of a suite with a progress bar, write the reports, and return the exit code."""
    suite.read_expected_failures()
    paths: dict[str, Path | None] = {name: getattr(args, name) for name in REPORT_FORMATS}
    on_stdout = [name for name, path in paths.items() if path == STDOUT]
    if len(on_stdout) > 1:
        raise HocketError(f"--{on_stdout[0]} and --{on_stdout[1]} are both -; give a file to one of them")
    for path in paths.values():
        if path not in (None, STDOUT):
            require_writable(path)
    start = time.perf_counter()
    progress = partial(open_progress_bar, unit="case")
    selected = list(progress(suite.generate_cases(), desc="choose cases"))
    with progress(total=len(selected), desc="check") as bar:
        failed = 0

        def on_result(result: Result) -> None:
            nonlocal failed
            failed += result.outcome is Outcome.FAIL
            bar.set_postfix_str(f"{failed} failed, {result.case.op}", refresh=False)
            bar.update()

        results = run_cases_of_suite(suite, on_result, selected)
    seconds = time.perf_counter() - start
    for name, path in paths.items():
        if path not in (None, STDOUT):
            write_text(path, REPORT_FORMATS[name](results, suite.backend))
    bad = select_failed_results(results)
    if args.save is not None and bad:
        backend, device = find_device(suite.backend)
        for result in progress([r for r in bad if r.case.check != DECLARATION_CHECK], desc="save"):
            save_failure_arrays(result, args.save, backend, device)
        print(f"{format_count(len(bad), 'failing case')} saved in {args.save}", file=sys.stderr)
    if on_stdout:
        sys.stdout.write(REPORT_FORMATS[on_stdout[0]](results, suite.backend))
    else:
        print(format_failure_traits_report(results, suite.backend, seconds))
    return 1 if bad else 0


def _print_cold_speeds_and_limit_fractions(suite: Suite) -> int:
    """Print the speed of each case with cold buffers, and its fraction of the limit of the device."""
    from .reports import op_speed

    backend, device = find_device(suite.backend)
    limits = op_speed.MeasuredLimits(backend, device)
    gflops = limits.measure_matmul_flops_once_per_dtype("f32") / 1e9
    print(f"{device}: moves {limits.bandwidth / 1e9:.1f} GB/s, multiplies {gflops:.1f} GFLOP/s (f32)")
    names = suite.list_matching_ops()
    faults = [fault for n in names if (fault := find_declaration_fault(n))]
    cases = (
        list(suite.generate_cases())
        if suite.texts
        else [
            c
            for n in names
            if not find_declaration_fault(n)
            for c in op_speed.generate_large_case_per_dtypes(get_tested_op(n))
        ]
    )
    for case in cases:
        try:
            print(op_speed.measure_op_speed_with_cold_buffers(case, backend, device).format_line(limits), flush=True)
        except (BackendError, NoReference) as why:
            print(f"hocket check: {case} is left out: {why}", file=sys.stderr)
    return _print_faults(faults)


def _compare_fused_kernels_with_ops(args: argparse.Namespace) -> int:
    """Compare the fused kernels of random graphs or of a model with their ops; return 1 if one differs, else 0."""
    from .checks.fused_kernels import check_fused_kernels, make_random_graphs

    graphs = make_random_graphs(args.seed) if args.from_graph is None else read_model_graphs(args.from_graph)
    results = list(check_fused_kernels(graphs, *find_device(args.backend), args.seed))
    faults = [f"{' '.join(r.ops)} over {list(r.shape)}: {r.fault}" for r in results if r.fault]
    print(
        f"{format_count(len(results), 'fused kernel')} of "
        f"{format_count(sum(len(r.ops) for r in results), 'op')}, {len(faults)} differ"
    )
    return _print_faults(faults)


def _print_counters_and_check_budgets(suite: Suite) -> int:
    """Print the memory access counters of CUDA kernels; return 1 if a kernel exceeds its access budget, else 0."""
    from ..backends.cupy.emulation.access_budget import format_access_allowance_page, list_budget_violations
    from .reports.emulator_checks import emulate_cases_and_count_accesses

    counts = emulate_cases_and_count_accesses(_choose_selected_or_main_path_cases(suite, "counters are"))
    if not counts:
        raise BackendError("these cases launch no kernel, so there is nothing to count")
    print(format_access_allowance_page(counts))
    return _print_faults([why for counted in counts for why in list_budget_violations(counted)])


def _print_races(suite: Suite) -> int:
    """Print the races in CUDA kernels; return 1 if there are any, else 0.

    A race is an unordered pair of conflicting accesses of two threads to the same bytes.
    """

    texts = _choose_selected_or_main_path_cases(suite, "the order of accesses is")
    from .reports.emulator_checks import emulate_cases_and_list_races

    lines = emulate_cases_and_list_races(texts)
    if not lines:
        print(f"all accesses of {format_count(len(texts), 'case')} are in order")
    return _print_faults(lines)


def _choose_selected_or_main_path_cases(suite: Suite, subject: str) -> Sequence[str]:
    """Return the texts of the selected cases; without a selection, the emulator's default cases (`MAIN_PATH_CASES`).

    Args:
        suite: the suite, which must have the backend ``cuda-emulated``.
        subject: subject and verb of the error message for another backend.
    """
    from ..backends.cupy.emulation.access_budget import MAIN_PATH_CASES

    if suite.backend.partition(":")[0] != "cuda-emulated":
        raise BackendError(f"{subject} of cuda-emulated, not of {suite.backend}; give --backend cuda-emulated")
    if not suite.texts and not suite.op:
        return MAIN_PATH_CASES
    cases = [*suite.generate_cases()]
    if faults := [find_declaration_fault(case.op) for case in cases if case.check == DECLARATION_CHECK]:
        raise BackendError(faults[0])
    return [str(case) for case in cases]


def _print_faults(faults: Sequence[str]) -> int:
    """Print each fault on a line of stderr, and return 1 if there are any, else 0."""
    for why in faults:
        print(f"hocket check: {why}", file=sys.stderr)
    return 1 if faults else 0


def _print_report_changes(one: Path, two: Path) -> int:
    """Print the changes between two JSON reports; return 1 if a case fails now, else 0."""
    changes = compare_reports(one, two)
    for change in changes:
        print(json.dumps({"case": change.case, "before": change.before, "after": change.after}, ensure_ascii=False))
    print(f"{format_count(len(changes), 'case')} changed", file=sys.stderr)
    return 1 if any(c.after == Outcome.FAIL for c in changes) else 0
