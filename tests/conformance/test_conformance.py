"""The kit: cases that read back, shapes and layouts as they say, judgement by row, reports, a package from outside."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from itertools import accumulate, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from hocket.backends import find_device
from hocket.backends.base import Support
from hocket.backends.numpy.backend import NumpyBackend
from hocket.conformance import Outcome, Suite, parse_case, run_case, run_cases_of_suite, suite
from hocket.conformance.cases.case import INPUTS, LAYOUTS, get_tested_op, list_tested_op_names, make_case
from hocket.conformance.cases.inputs import as_reference_array, generate_random_operands
from hocket.conformance.cases.model_cases import collect_model_cases
from hocket.conformance.checks import zero_propagation
from hocket.conformance.checks.case_graph import (
    build_case_graph,
    build_verified_device_plan,
    find_unsupported_reason,
)
from hocket.conformance.checks.compare_arrays import compare_with_reference
from hocket.conformance.checks.guarded_memory import GuardedProgram, add_guard_zones, compute_byte_range
from hocket.conformance.checks.metamorphic import list_metamorphic_checks
from hocket.conformance.checks.run_case import Result, has_aliased_result
from hocket.conformance.checks.tolerance import ErrorBudget, ExpectedResult
from hocket.conformance.command import main
from hocket.conformance.generate_cases import (
    generate_cases_of_matching_ops,
    generate_full_cases,
    select_quick_cases,
)
from hocket.conformance.reports.expected_failures import ExpectedFailures
from hocket.conformance.reports.failure_traits import group_failures_by_op_with_traits
from hocket.conformance.reports.html_page import format_html_report
from hocket.conformance.reports.text_report import (
    OUTCOME_MEANINGS,
    format_junit_report,
    format_markdown_report,
    format_run_total,
)
from hocket.graph import GraphError, Spec
from hocket.graph.parse import parse_case as parse_point
from hocket.ops import REGISTRY

from ..given.kernel_faults import FAULTS
from ..given.kernel_faults.covering_cases import choose_covering_cases
from ..given.kernel_faults.site import FaultyBackend
from ..given.models.goldens import ROOT

CPU = find_device("cpu:0")
SMALL = ("add", "mul_mat", "rms_norm", "set_rows", "softmax", "cumsum", "gated_delta_net")


# --------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("op", [*map(get_tested_op, list_tested_op_names())], ids=lambda op: op.name)
def test_a_case_reads_back_from_its_text(op):
    for number, sample in enumerate(make_case(op, parse_point(text)) for text in op.samples):
        case = sample.with_settings(
            layout=LAYOUTS[number % len(LAYOUTS)], inputs=INPUTS[number % len(INPUTS)], check="cut-m"
        )
        assert parse_case(str(case)) == case
        assert parse_case(str(case.with_settings(seed=7))).seed == 7


def test_a_case_says_what_is_wrong_with_its_text():
    for text, message in (
        ("mul_mat", "it looks like"),
        ("no_such_op(x=f32[3])", "there is no op 'no_such_op'"),
        ("add(a=f32[3], b=f32[3], layout=round)", "layout is 'round'"),
        ("add(a=f32[3], c=f32[3])", "no operand or attribute c"),
    ):
        with pytest.raises(GraphError) as caught:
            parse_case(text)
        assert message in str(caught.value)


def test_the_same_text_draws_the_same_numbers_and_another_seed_others():
    case = parse_case("mul_mat(w=q4_K[5,256], x=f32[7,256], layout=permuted, inputs=large)")
    one, two, moved = (
        generate_random_operands(case),
        generate_random_operands(parse_case(str(case))),
        generate_random_operands(case.with_settings(seed=1)),
    )
    assert one["x"].tobytes() == two["x"].tobytes() != moved["x"].tobytes()
    assert one["w"].tobytes() == two["w"].tobytes() != moved["w"].tobytes()


@pytest.mark.long
def test_the_full_run_has_more_cases_than_test_backend_ops():
    assert any(count > 21_427 for count in accumulate(len(generate_full_cases(op)) for op in REGISTRY.values()))


@pytest.mark.parametrize("name", SMALL)
def test_the_quick_run_shows_every_dtype_layout_input_kind_attribute_and_check(name):
    full, quick = generate_full_cases(REGISTRY[name]), select_quick_cases(REGISTRY[name])
    assert len(quick) < len(full)

    def find_covered_features(chosen):
        pairs = {(c.layout, c.inputs) for c in chosen if c.check == "reference"}
        dtypes = {(c.layout, k, s.dtype) for c in chosen for k, s in c.operands}
        return pairs, dtypes, {a for c in chosen for a in c.attrs}, {c.check for c in chosen}

    for everything, some in zip(find_covered_features(full), find_covered_features(quick), strict=True):
        assert everything == some


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_operand_has_the_strides_of_its_layout(layout):
    case = parse_case(f"add(a=f32[3,4,5], b=f32[3,4,5], layout={layout})")
    program = build_verified_device_plan(build_case_graph(case).graph, *CPU).program
    (a, b), out = program.instructions[-1].src, program.instructions[-1].dst[0]
    assert a.shape == (3, 4, 5)
    dense = (20, 5, 1)
    strides = {"sliced": (32, 8, 1), "permuted": (1, 3, 12), "broadcast": (0, 5, 1)}
    assert a.strides == strides.get(layout, dense)
    assert (a.offset % 64 != 0) == (layout in ("offset", "sliced"))
    assert (out.offset == a.offset) == (layout in ("inplace", "twin"))
    assert (a == b) == (layout == "twin")
    assert has_aliased_result(case, *CPU) == (layout in ("inplace", "twin"))


# ------------------------------------------------------------------------------------------------------- judging


def test_values_are_pulled_apart_with_guards_between_them():
    program = build_verified_device_plan(
        build_case_graph(parse_case("softmax(x=f32[2,3,5], mask=f32[3,5])")).graph, *CPU
    ).program
    moved, regions = add_guard_zones(program)
    assert all(b[0] - a[1] >= 1024 for a, b in pairwise(regions))
    for one, two in zip(program.instructions, moved.instructions, strict=True):
        assert [t.strides for t in one.dst] == [t.strides for t in two.dst]
        assert all(
            any(a <= compute_byte_range(t)[0] and compute_byte_range(t)[1] <= b for a, b in regions) for t in two.dst
        )


def test_a_stray_byte_is_named_with_its_distance():
    case = parse_case("neg(x=f32[5])")
    guarded = GuardedProgram(build_verified_device_plan(build_case_graph(case).graph, *CPU), {})
    guarded.poison_arena_and_guard_zones(0xFF)
    assert guarded.find_stray_write(guarded.copy_guarded_arena_to_host()) is None
    end = compute_byte_range(guarded.program.outputs["result.0"])[1]
    guarded.buffers[guarded.arena][end + 3] = 0
    assert "3 bytes past the end" in (guarded.find_stray_write(guarded.copy_guarded_arena_to_host()) or "")


def compare_to_reference(got, want, dtype="f32"):
    budget = ErrorBudget(np.full(want.shape, 1e-6), np.full(want.shape, 1e-7))
    return compare_with_reference(got, want, budget, make_spec(want.shape, dtype), REGISTRY["add"])


def make_spec(shape, dtype):
    parsed = parse_point(f"x={dtype}[{','.join(map(str, shape))}]")["x"]
    assert isinstance(parsed, Spec)
    return parsed


def test_an_error_in_one_row_of_4000_is_found():
    want = np.random.default_rng(0).standard_normal((4000, 8))
    got = want.copy()
    got[1234] *= 1.001
    pooled = ((got - want) ** 2).sum() / (want**2).sum()
    assert pooled < 5e-4  # test-backend-ops would let this error pass
    assert "[1234, " in compare_to_reference(got, want).why
    assert not compare_to_reference(want, want).why


def test_matching_infinities_hide_nothing():
    want = np.array([[1.0, np.inf, 2.0], [3.0, -np.inf, 4.0]])
    assert not compare_to_reference(want.copy(), want).why
    got = want.copy()
    got[1, 0] = 3.5
    assert "at [1, 0]: got 3.5" in compare_to_reference(got, want).why
    for wrong in (np.nan, -np.inf, 7.0):
        got = want.copy()
        got[0, 1] = wrong
        assert compare_to_reference(got, want).why


def test_a_number_too_large_for_its_dtype_may_be_infinite():
    want = np.array([[1e5, -1e5, 1.0]])
    assert not compare_to_reference(np.array([[np.inf, -np.inf, 1.0]]), want, "f16").why
    assert compare_to_reference(np.array([[-np.inf, -np.inf, 1.0]]), want, "f16").why
    assert compare_to_reference(np.array([[np.inf, -np.inf, 1.0]]), want, "f32").why


def test_the_tolerance_grows_with_the_reduction_and_with_coarser_arithmetic():
    def limit(text, arithmetic=None):
        case = parse_case(text)
        operands = {n: as_reference_array(a, case.specs[n]) for n, a in generate_random_operands(case).items()}
        expected = ExpectedResult(case, operands, *([arithmetic] if arithmetic else []))
        scale = np.abs(operands["x"]) @ np.abs(operands["w"]).T
        return float(np.median(expected.compute_error_budgets([Spec((7, 5))])[0].max_element_error / scale))

    short, long = limit("mul_mat(w=f32[5,16], x=f32[7,16])"), limit("mul_mat(w=f32[5,4096], x=f32[7,4096])")
    assert short < long < 20 * short
    assert limit("mul_mat(w=f32[5,16], x=f32[7,16])", 2.0**-8) > 1000 * short


@pytest.mark.long
def test_what_cases_leave_behind_does_not_pile_up(monkeypatch):
    """Python rarely collects cycles during a command, and emulated devices have a limit of mappings."""

    class CachedOperands:
        pass

    alive, max_alive = weakref.WeakSet(), 0

    def leaving(case, backend, device):
        nonlocal max_alive
        case_cache = CachedOperands()
        case_cache.itself = case_cache
        alive.add(case_cache)
        max_alive = max(max_alive, len(alive))
        return run_case(case, backend, device)

    monkeypatch.setattr(suite, "run_case", leaving)
    gc.disable()
    try:
        found = run_cases_of_suite(Suite(op="add", jobs=1))
    finally:
        gc.enable()
    assert len(found) > 2 * suite.CASES_PER_TASK >= 2 * max_alive


def test_metamorphic_checks_follow_from_the_signature():
    assert list_metamorphic_checks(parse_case("mul_mat(w=f32[6,64], x=f32[7,64])")) == ("cut-n", "sum-k", "cut-m")
    delta = "gated_delta_net(q=f32[5,2,8], k=f32[5,2,8], v=f32[5,4,8], g=f32[5,4,1], beta=f32[5,4], state=f32[4,8,8])"
    assert set(list_metamorphic_checks(parse_case(delta))) == {
        "steps-t",
        "cut-key_heads",
        "cut-e",
        "cut-value_heads",
        "composed-unfused",
    }
    assert "steps-s" in list_metamorphic_checks(parse_case("ssm_conv(x=f32[7,12], w=f32[12,4])"))
    assert list_metamorphic_checks(parse_case("rms_norm(x=f32[3,64])")) == ()
    experts = "mul_mat_id(w=f32[5,6,8], x=f32[7,2,8], ids=i32[7,4])"
    assert set(list_metamorphic_checks(parse_case(experts))) == {"deal-experts", "cut-n", "cut-v", "cut-r", "sum-k"}
    assert "deal-experts" in list_metamorphic_checks(parse_case("add_id(a=f32[7,2,6], b=f32[5,6], ids=i32[7,2])"))
    part = parse_case("mul_mat_id(w=f32[5,6,8], x=f32[7,2,8], ids=i32[7,4], first=1, total=7)")
    assert "deal-experts" not in list_metamorphic_checks(part)


def test_zeros_are_asked_for_where_the_op_declares_them():
    assert zero_propagation.list_zero_checks(parse_case("swiglu(gate=f32[3,5], up=f32[3,5])")) == ("zeros-gate",)
    assert zero_propagation.list_zero_checks(parse_case("sigmoid(x=f32[3,5])")) == ()


# ------------------------------------------------------------------------------------------------------ outcomes


class Partial(NumpyBackend):
    def supports(self, node, on):
        return Support(False, "not written yet") if node.op == "mul_mat" else super().supports(node, on)


def test_a_case_passes_fails_is_unsupported_or_has_no_reference():
    def outcome(text, backend=CPU[0]):
        return run_case(parse_case(text), backend, CPU[1]).outcome

    assert outcome("add(a=f32[3], b=f32[3])") is Outcome.PASS
    assert outcome("mul_mat(w=f32[3,4], x=f32[2,4])", Partial()) is Outcome.UNSUPPORTED
    assert outcome("mul_mat(w=q8_K[3,256], x=f32[2,256])") is Outcome.NO_REFERENCE


def test_an_expected_failure_that_passes_is_a_failure():
    case = parse_case("add(a=f32[3], b=f32[3])")
    expected = ExpectedFailures(("# a comment", "add(a=f32[3]*  # known"))
    assert expected.mark_expected_outcome(Result(case, Outcome.FAIL, "x")).outcome is Outcome.XFAIL
    passed = expected.mark_expected_outcome(Result(case, Outcome.PASS))
    assert passed.outcome is Outcome.FAIL
    assert "take its line out" in passed.why
    other = Result(parse_case("add(a=f32[4], b=f32[4])"), Outcome.FAIL, "x")
    assert expected.mark_expected_outcome(other) is other


def failures(results):
    return [f"{r.case}: {r.why}" for r in results if r.outcome not in (Outcome.PASS, Outcome.NO_REFERENCE)]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("part", ["covering", pytest.param("rest", marks=pytest.mark.nightly(cases=0))])
@pytest.mark.parametrize("name", REGISTRY)
def test_backends_of_ours_pass_the_quick_run(name, part):
    """The references run few of the comparisons with themselves: test_backends.py compares every sample.

    Half of the cases that cover pairs of traits are for the nightly run. `test_planted_faults` finds its faults by the
    others.
    """
    cases = choose_covering_cases(REGISTRY[name])
    if part == "rest":
        covering = set(cases)
        cases = [case for case in select_quick_cases(REGISTRY[name]) if case not in covering]
    assert not failures(run_cases_of_suite(Suite(backend="cpu", op=name, require="SHOULD"), selected=cases))
    chosen = [*[c for c in cases if c.check == "reference"][::16], *[c for c in cases if c.check != "reference"][::2]]
    assert not failures(run_case(c, *find_device("reference:0")) for c in chosen)


@pytest.mark.long
def test_several_processes_have_the_results_of_one():
    settings = Suite(op="neg")
    one, two = ([(str(r.case), r.outcome) for r in run_cases_of_suite(replace(settings, jobs=jobs))] for jobs in (1, 2))
    assert one == two
    assert len(one) > suite.CASES_PER_TASK, "each process has some"


# ------------------------------------------------------------------------------------------------------- reports


def results_of(*outcomes):
    case = parse_case("add(a=f16[3], b=f32[3])")
    return [Result(replace(case, seed=i), o, "why <&>" if o != "pass" else "") for i, o in enumerate(outcomes)]


def test_a_report_shows_the_worst_of_a_cell_and_junit_counts():
    results = results_of(Outcome.PASS, Outcome.FAIL, Outcome.UNSUPPORTED)
    assert "| [add](#add) | f16/f32 | FAIL 1/3 |" in format_markdown_report(results, "cpu")
    suite = ElementTree.fromstring(format_junit_report(results, "cpu").encode())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert suite.find("testcase/failure").get("message") == "why <&>"


BROADCAST_FAULT = next(f for f in FAULTS if str(f) == "mul: broadcast by runs instead of modulo")


def test_failures_come_by_op_smallest_first_with_what_they_share():
    """A fault that is planted where `b` has several entries to repeat: the kit's words must say just that."""
    results = [run_case(c, FaultyBackend(BROADCAST_FAULT), CPU[1]) for c in select_quick_cases(REGISTRY["mul"])[::3]]
    (group,) = group_failures_by_op_with_traits(results)
    best = group.traits[0]
    assert best.text == "`b` is repeated along an axis where it has several entries"
    assert best.failing == len(group.results) > 5 * best.passing
    sizes = [sum(s.size for _, s in r.case.operands) for r in group.results]
    assert sizes == sorted(sizes)
    page, text = format_html_report(results, "cpu"), format_markdown_report(results, "cpu")
    for report in (page, text):
        where = [
            report.index(words)
            for words in (format_run_total(results, "cpu"), OUTCOME_MEANINGS[Outcome.FAIL], best.text, "Every op")
        ]
        assert where == sorted(where)
    targets = re.findall(r'href="#([^"]+)"', page)
    assert targets
    assert set(targets) <= set(re.findall(r'id="([^"]+)"', page))


def test_common_traits_of_failures_are_not_reported_where_nothing_passes():
    (group,) = group_failures_by_op_with_traits(results_of(Outcome.FAIL, Outcome.FAIL, Outcome.UNSUPPORTED))
    assert (group.traits, list(group.describe_failures())) == ((), ["2 of 2 cases that ran fail"])


@pytest.mark.long
def test_no_backend_is_asked_to_run_a_view():
    suite = Suite(backend="cuda-emulated", op="permute", require="MUST")
    results = run_cases_of_suite(suite, selected=list(suite.generate_cases())[:10])
    assert {r.outcome for r in results} <= {Outcome.PASS, Outcome.NO_REFERENCE}
    assert find_unsupported_reason(build_case_graph(results[0].case).graph, *find_device("cuda-emulated")) == ""


@pytest.mark.long
def test_the_command_writes_reports_that_compare(tmp_path, capsys):
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    arguments = ["--op", "add|neg", "--json", str(one), "--html", str(tmp_path / "x.html"), "--seed", "3"]
    arguments += ["--jobs", "1", "--junit", str(tmp_path / "x.xml"), "--markdown", str(tmp_path / "x.md")]
    assert main(arguments) == 0
    assert "pass" in capsys.readouterr().out
    rows = [json.loads(line) for line in one.read_text("utf-8").splitlines()]
    assert all(row["case"].endswith("seed=3)") for row in rows)
    changed = [{**rows[0], "outcome": "fail"}, *rows[1:-1]]
    two.write_text("".join(json.dumps(row) + "\n" for row in changed), "utf-8")
    assert main(["--compare", str(one), str(two)]) == 1
    assert '"after": "fail"' in capsys.readouterr().out
    assert "<table>" in (tmp_path / "x.html").read_text("utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "nonesuch"],
        ["--op", "("],
        ["--op", "nonesuch"],
        ["--case", "add(a=f32[3]"],
        ["--xfail", "no/such/file"],
        ["--compare", "no/such", "file"],
        ["--json", "no/such/folder/x.json", "--op", "neg"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_2(arguments, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("hocket check: ")
    assert message.count("\n") == 1


def test_inputs_of_a_failure_are_saved_with_a_line_that_repeats_it(tmp_path, capsys):
    (tmp_path / "expected").write_text("neg(x=f32[7], layout=contiguous, inputs=normal)\n", "utf-8")
    case = "neg(x=f32[7], layout=contiguous, inputs=normal)"
    assert main(["--case", case, "--xfail", str(tmp_path / "expected"), "--save", str(tmp_path / "saved")]) == 1
    assert f"hocket check --backend cpu --case '{case}'" in capsys.readouterr().out
    (saved,) = (tmp_path / "saved").glob("neg-*.npz")
    with np.load(saved) as arrays:
        assert str(arrays["case"]) == case
        np.testing.assert_array_equal(
            arrays["operand_x"], generate_random_operands(parse_case(case))["x"].astype(np.float32)
        )
        np.testing.assert_array_equal(arrays["expected_0"], -arrays["operand_x"])
        np.testing.assert_array_equal(arrays["got_0"], arrays["expected_0"])
        assert "take its line out" in str(arrays["why"])


@pytest.mark.long
def test_thorough_adds_shapes_of_hypothesis():
    thorough = Suite(op="neg", thorough=True)
    generated = {*generate_cases_of_matching_ops("neg", full=True)}
    assert {*thorough.generate_cases()} == generated
    results = run_cases_of_suite(thorough, selected=[])
    assert [r for r in results if r.case not in generated]
    assert not [r for r in results if r.outcome is Outcome.FAIL]


@pytest.mark.long
def test_the_cases_of_a_model_are_harvested():
    harvested = collect_model_cases(ROOT / "data" / "hocket-tiny-q8_0.gguf", tokens=(1,), cells=32)
    assert {"mul_mat", "rms_norm", "attention"} <= {c.op for c in harvested}
    assert all(parse_case(str(c)) == c for c in harvested)
    assert all(run_case(c, *CPU).outcome is Outcome.PASS for c in harvested)
