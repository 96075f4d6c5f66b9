"""A trace has every step of every device once, between the ends of its run, and Perfetto can read it."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from hocket.backends.base import find_device
from hocket.graph import BackendError, PlanError, StepError
from hocket.ops.collectives import find_collective_sequence_number
from hocket.scheduler import load, plan_for_group
from hocket.scheduler.reports.measured_steps import read_measured_times_from_trace
from hocket.scheduler.reports.pass_dumps import compute_memory_and_last_use_by_step
from hocket.scheduler.reports.perfetto_trace import format_chrome_trace

from ...given.browser import browser
from ...given.devices.emulation import needs_compiler
from ...given.graphs.random_graphs import bindings
from ...given.importer import run_queries
from ...given.plans.faults import SLOW, decoder
from ...given.plans.grouped import weights_of

RUNS = 3
TRACED_DEVICES = ["reference", "numpy", "cpu", pytest.param("cuda-emulated", marks=needs_compiler)]


def run_with_trace(kind, mode):
    """An executor over two devices, and the trace of a few runs."""
    graph = decoder()
    plan = plan_for_group(graph, [find_device(f"{kind}:{i}") for i in range(2)], split_mode=mode, hardware=SLOW)
    values = bindings(graph, np.random.default_rng(0))
    run = load(plan, weights_of(graph, values))
    feed = {"x": values["x"], "ids": np.arange(3)}
    run.run(feed)
    with run.tracing() as trace:
        for _ in range(RUNS):
            run.run(feed)
    run.run(feed)
    return run, trace


def save_trace(trace, path):
    trace.save(path)
    return json.loads(path.read_text("ascii"))


REDUCTIONS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("kind", TRACED_DEVICES)
def test_every_step_of_every_device_is_there_once_a_run_and_in_its_time(kind, mode, tmp_path):
    run, trace = run_with_trace(kind, mode)
    assert len(trace.runs) == RUNS
    document = save_trace(trace, tmp_path / "trace.json")
    events = document["traceEvents"]
    runs = [e for e in events if e["ph"] == "X" and e["cat"] == "run"]
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in runs]
    assert ends == sorted(ends)
    for device, device_plan in enumerate(run.plan.device_plans):
        steps = [e for e in events if e["ph"] == "X" and e["pid"] == 2 + device]
        program = device_plan.program.instructions
        for start, end in ends:
            mine = [e for e in steps if start - 0.01 <= e["ts"] <= end]
            groups = {tuple(e["args"]["steps"]) for e in mine}
            assert Counter(n for group in groups for n in group) == dict.fromkeys(range(len(program)), 1)
            assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in itertools.pairwise(mine))
            assert mine[-1]["ts"] + mine[-1]["dur"] <= end + 0.01
        for e in steps:
            args, last = e["args"], program[e["args"]["steps"][-1]]
            assert (e["name"], e["cat"], args["shape"]) == (last.node, last.op, str(last.dst[0].spec))
            assert args["nodes"].split() == [program[n].node for n in args["steps"]]
            assert args["bytes"] > 0


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_collectives_are_arrows_between_devices_and_memory_is_counted(mode, tmp_path):
    run, trace = run_with_trace("reference", mode)
    events = save_trace(trace, tmp_path / "trace.json")["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["cat"] != "run"]
    collectives = {
        find_collective_sequence_number(i.op, i.attrs) for i in run.plan.device_plans[0].program.instructions
    } - {None}
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert len(starts) == len(ends) == len(collectives) * RUNS > 0
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"] + 0.001
        for arrow in (start, end):  # each end lies on a step of a meeting
            (there,) = [s for s in steps if s["pid"] == arrow["pid"] and s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"]]
            assert there["cat"] in (*REDUCTIONS, "send" if arrow is start else "receive")
    for device, device_plan in enumerate(run.plan.device_plans):
        counted = [
            e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 2 + device and "co" in e["name"]
        ]
        live = compute_memory_and_last_use_by_step(device_plan.program)[0]
        assert counted == [n for n, before in zip(live, [-1, *live], strict=False) if n != before] * RUNS


@pytest.mark.parametrize("kind", ["reference", "numpy", "cpu"])
def test_a_failed_step_is_undone_and_reported_as_if_without_a_trace(kind):
    run, _ = run_with_trace(kind, "tensor")
    before = [np.array(run.store.state(name)) for name in run.store.states]
    wrong = {"x": np.ones((3, 8)), "ids": [0, 1, 99]}
    with pytest.raises(BackendError) as plainly:
        run.run(wrong)
    with run.tracing() as trace, pytest.raises(StepError) as watched:
        run.run(wrong)
    messages = (re.sub(f"{kind}:[01]", kind, str(why.value)) for why in (watched, plainly))  # both fail; one is first
    assert len(set(messages)) == 1
    assert not trace.runs
    assert all((np.array(run.store.state(n)) == b).all() for n, b in zip(run.store.states, before, strict=True))


def test_times_of_a_trace_are_found_for_a_plan_with_the_same_steps_and_no_other(tmp_path):
    run, trace = run_with_trace("cpu", "tensor")
    trace.save(tmp_path / "trace.json.gz")
    times = read_measured_times_from_trace(run.plan, tmp_path / "trace.json.gz")
    assert (times.run_count, times.has_equal_shapes) == (RUNS, True)
    lasted = sum(one.end - one.start for one in trace.runs) / RUNS
    for steps in times.steps_by_device:
        assert all(s is not None and s.seconds >= 0 and s.kernel for s in steps)
        assert 0 < sum(s.seconds for s in steps) <= 2 * lasted  # as n medians of n times are, for any times
    other, _ = run_with_trace("cpu", "layer")
    with pytest.raises(PlanError, match="none of its 1 plan has the steps of this one"):
        read_measured_times_from_trace(other.plan, trace)


WRONG = {
    "traceEvents": [
        None,
        3,
        [7],
        [{"ph": "X"}],
        [{"ph": "X", "args": {"plan": 0}, "cat": "run", "dur": float("nan")}],
        [],
    ],
    "otherData": [None, {}, {"format": "x" * 10_000}, {"format": "hocket-trace-1", "plans": [[]]}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_damaged_trace_is_refused_in_one_line(field, value, tmp_path):
    run, trace = run_with_trace("reference", "tensor")
    document = copy.deepcopy(save_trace(trace, path := tmp_path / "trace.json"))
    document[field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError) as caught:
        read_measured_times_from_trace(run.plan, path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b garbage", b"[" * 100_000, b"\xff\xfe", b'{"otherData": 1}', b"[]"])
def test_a_file_that_is_no_trace_is_refused(data, tmp_path):
    (tmp_path / "trace.json").write_bytes(data)
    with pytest.raises(PlanError, match=r"trace\.json: is (no trace|damaged)"):
        read_measured_times_from_trace(run_with_trace("reference", "tensor")[0].plan, tmp_path / "trace.json")


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_perfettos_importer_takes_a_trace_without_a_complaint(mode, tmp_path):
    _, trace = run_with_trace("reference", mode)
    events = save_trace(trace, path := tmp_path / "trace.json")["traceEvents"]
    count = Counter(e["ph"] for e in events)
    steps = sorted(
        (2 + d, s.kernel, s.instruction_numbers) for run in trace.runs for d, own in enumerate(run.steps) for s in own
    )
    with browser(tmp_path / "profile") as page:
        found = run_queries(
            page,
            path.read_bytes(),
            [
                "select count(*) from slice",
                "select count(*) from counter",
                "select count(*) from flow join slice a on a.id = slice_out join slice b on b.id = slice_in "
                "where a.track_id != b.track_id and (a.category = b.category or 'receive' in (a.category, b.category))",
                "select name, value from stats where severity != 'info' and value > 0",
                "select count(*) from slice where depth > 0 or dur < 0",
                "select distinct pid, name from process where pid > 0 order by pid",
                "select pid, count(*) from slice join thread_track t on t.id = slice.track_id join thread using (utid) "
                "join process using (upid) group by pid order by pid",
            ],
        )
    # The importer reverses an arrow to a receiver that has waited since before the sender began.
    assert found[:5] == [[(count["X"],)], [(count["C"],)], [(count["s"],)], [], [(0,)]]
    assert found[5] == [(1, "hocket"), (2, "reference:0"), (3, "reference:1")]
    assert found[6] == sorted(Counter([1] * RUNS + [pid for pid, *_ in steps]).items())


@pytest.mark.long
def test_perfettos_importer_complains_of_what_is_no_trace(tmp_path):
    _, trace = run_with_trace("reference", "tensor")
    text = "".join(format_chrome_trace(trace))
    with browser(tmp_path / "profile") as page, pytest.raises(ValueError, match="Invalid number"):
        run_queries(page, text.replace('"dur": ', '"dur": x').encode(), [])
