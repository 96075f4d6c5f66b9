"""Every public function answers a wrong argument with one line: an error of hocket's own, never one of Python's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

import hocket
from hocket import ops, scheduler
from hocket.backends import base
from hocket.distributed import SINGLE_PROCESS
from hocket.frontends.generation.generate import generate_tokens
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.frontends.run_config import RunConfig
from hocket.graph import (
    format_graph,
    list_rule_violations,
    make_spec,
    replace_values,
    rewrite_graph,
    view_constant_array,
)
from hocket.graph.parse import parse_case
from hocket.graph.spec import Spec

from ..given.graphs.wrong_values import (
    INPUTS,
    WEIGHTS,
    WRONG,
    Awkward,
    executor,
    graph,
    image,
    kernel,
    language_model,
    model,
    new,
    plan,
    relatives,
    s,
    session,
    tokenizer,
    w,
    windows_of_image,
    x,
)
from ..given.models.goldens import FIXTURES

MAX_MESSAGE_LENGTH = 700
"""Characters of a message."""
DECLARING = {"op", "op_of", "Op", "require", "validate_arguments", "validate_constructor", "warn_of_old_name"}
"""For authors of ops and functions; their mistakes are ours."""
RECORDS = {
    "DeferredInterrupts",
    "ImmediateInterrupts",
    "LaunchedRun",
    "MicroBatchChoice",
    "ValueDifference",
    "SingleDeviceComm",
}
"""Results and contexts without arguments, which only hocket makes."""
MAPPINGS = {"Options"}
"""A dict to Python; who is given it looks at its entries."""


def asdict_of(record: Any, *without: str) -> dict[str, Any]:
    """The fields of a record by name, which `dataclasses.asdict` copies."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in without}


def with_one(call: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """`call` on a mapping in which one value is replaced."""
    return lambda value: call({**arguments, name: value})


def bound_store() -> Any:
    store = hocket.Store(plan().group)
    for value in graph.weights:
        store.bind(value.node.name, WEIGHTS[value.node.name], value.spec, plan().leaves[value.node.name])
    return store


def assign_state(index: Any, value: Any) -> None:
    executor().store.state("s")[index] = value


def generate_ids(**arguments: Any) -> list[int]:
    session().reset(0)
    return list(generate_tokens(session(), **arguments))


def continue_text(**arguments: Any) -> list[str]:
    return list(language_model().generate(**arguments))


def evaluate_session(**arguments: Any) -> Any:
    session().reset(0)
    return session().evaluate(**arguments)


LEAF = {"name": "n", "shape": (3,), "dtype": "f32"}
PLANNING = {"split_mode": "auto", "tensor_split": (), "place": (), "like": None}
THREADS = {"threads": 1}
PLANNED = {"devices": "numpy:0", "split_mode": "auto", "tensor_split": (), "place": (), "threads": 1}
SAMPLING = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1}
Case = tuple[Callable[..., Any], Mapping[str, Any]]


def cases() -> Iterator[tuple[str, Case]]:
    """Names, functions, and arguments that are right."""
    yield "DType", (hocket.DType, {"value": "f32"})
    yield "Spec", (hocket.Spec, {"shape": (3, 4), "dtype": hocket.DType.F16})
    yield "Value", (hocket.Value, {"node": x.node, "index": 0})
    yield "Node", (hocket.Node, {name: getattr(new.node, name) for name in ("op", "src", "attrs", "specs", "name")})
    yield "Plan", (hocket.Plan, {f.name: getattr(plan(), f.name) for f in dataclasses.fields(hocket.Plan)})
    yield "Trace", (hocket.Trace, {"dropped_runs": 0, "noted": []})
    yield "LegalRange", (ops.LegalRange, {"low": 0.0, "high": "n", "distinct": True})
    yield "Graph", (hocket.Graph, {"outputs": {"y": new}, "updates": {s: new}})
    yield "Graph.leaves", (graph.leaves, {"op": "input"})
    yield "Graph.view", (graph.view, {"title": "a graph"})
    slides = {"stride": (1,), "dilation": (1,), "left": (0,), "right": (0,)}
    for name in ("convolution", "transposed_convolution"):
        yield name, (getattr(ops, name), {"x": image, "w": kernel, **slides, "groups": 1})
    yield "pool", (ops.pool, {"x": image, "kind": "max", "size": (2,), **slides})
    yield "add_windows", (ops.add_windows, {"x": windows_of_image, "shape": (4,), "size": (3,), **slides})
    yield "interpolate", (ops.interpolate, {"x": image, "shape": (1, 2, 7), "mode": "linear", "align_corners": False})
    for leaf in ("input", "weight", "state"):
        yield leaf, (getattr(hocket, leaf), LEAF)
    yield "constant", (hocket.constant, {"name": "n", "data": [1.0]})
    for name in ("dump", "to_json", "to_dot", "to_networkx", "verify"):
        yield name, (getattr(hocket, name), {"graph": graph})
    yield "parse", (hocket.parse, {"text": hocket.dump(graph)})
    yield "from_json", (hocket.from_json, {"text": hocket.to_json(graph)})
    yield "plan", (hocket.plan, {"graph": graph, "devices": "numpy:0", **PLANNING, **THREADS})
    two = {"devices": "numpy:0,numpy:1", "split_mode": "tensor", "tensor_split": (1, 2), "place": (("w", "numpy:1"),)}
    yield "plan on two", (hocket.plan, {"graph": graph, **PLANNING, **two})
    yield "load", (hocket.load, {"plan": plan(), "weights": WEIGHTS})
    arguments = {"graph": graph, "inputs": INPUTS, "weights": WEIGHTS, "devices": "numpy:0", "threads": 1}
    yield "run", (hocket.run, {**arguments, "split_mode": "auto"})
    yield "register", (hocket.register, {"op": ops.add})
    for name, right in WEIGHTS.items():
        yield f"load {name}", (with_one(partial(hocket.load, plan()), WEIGHTS, name), {"value": right})
    yield "Store", (hocket.Store, {"group": plan().group})
    yield "Store.bind", (bound_store().bind, {"name": "w", "data": WEIGHTS["w"], "spec": w.spec})
    yield "Store.bind, layout", (partial(bound_store().bind, "w", WEIGHTS["w"], w.spec), {"layout": plan().leaves["w"]})
    yield "Store.state", (executor().store.state, {"name": "s"})
    yield "Store.view_sequences", (executor().store.view_sequences, {"first": 0, "count": 1, "total": 1})
    rows = {"name": "s", "source": 0, "target": 1, "count": 0}
    yield "Store.copy_state_rows", (executor().store.copy_state_rows, rows)
    yield "Store.require_devices", (bound_store().require_devices, {"plan": plan()})
    yield "Store.buffers", (bound_store().buffers, {"plan": plan()})
    yield "a state", (partial(assign_state, ...), {"value": 1.0})
    yield "a row of a state", (partial(assign_state, 1), {"value": np.ones(5)})
    right = {"plan": plan(), "store": executor().store, "timeout": 1.0, "wire": hocket.DType.F32}
    yield "Executor", (hocket.Executor, right)
    for device in ("numpy:0", "cpu:0", "reference:0"):
        run = executor(device)
        yield f"Executor.run {device}", (run.run, {"inputs": INPUTS})
        yield f"Executor.launch {device}", (run.launch, {"inputs": INPUTS})
        yield f"Executor.bind {device}", (run.bind, {"inputs": INPUTS})
        for name, value in INPUTS.items():
            yield f"Executor.run {device} {name}", (with_one(run.run, INPUTS, name), {"value": value})
    yield "Executor.list_kernel_names", (executor().list_kernel_names, {"device": 0})
    yield "Executor.read_output_copies", (executor().read_output_copies, {"name": next(iter(graph.outputs))})
    yield "Plan.explain", (plan().explain, {"steps": False})
    yield "Plan.view", (plan().view, {"title": "a plan"})
    more = {"hardware": scheduler.DEFAULT_HARDWARE, "choose": None, "host": None}
    yield "plan_for_group", (scheduler.plan_for_group, {"graph": graph, "group": plan().group, **PLANNING, **more})
    yield "plan_to_json", (scheduler.plan_to_json, {"plan": plan()})
    yield "plan_from_json", (scheduler.plan_from_json, {"text": scheduler.plan_to_json(plan())})
    yield "diff_plans", (scheduler.diff_plans, {"before": plan(), "after": plan()})
    yield "parse_simulated_group", (scheduler.parse_simulated_group, {"text": "cpu:2"})
    yield from cases_of_planning()
    yield from cases_of_graphs()
    yield "group_of", (base.find_devices, {"names": ["numpy:0"], "threads": 1})
    yield "find", (base.find_device, {"name": "numpy:0"})
    yield "load a backend", (base.load_backend, {"kind": "numpy"})
    leaves = {**INPUTS, "w": WEIGHTS["w"], "q": np.zeros((2, 32))}
    yield "evaluate", (ops.evaluate, {"graph": graph, "bindings": leaves})
    for name, value in leaves.items():
        yield f"evaluate {name}", (with_one(partial(ops.evaluate, graph), leaves, name), {"value": value})
    yield "as_reference_array", (ops.as_reference_array, {"array": [1.0]})


def cases_of_planning() -> Iterator[tuple[str, Case]]:
    """Yield the functions of the scheduler that plan with a cache, choose, predict, run in a pipeline and describe."""
    speeds = {"hardware": scheduler.DEFAULT_HARDWARE, "host": None, "use": None}
    yield "Hardware", (scheduler.Hardware, asdict_of(scheduler.DEFAULT_HARDWARE))
    yield "Device", (base.Device, asdict_of(base.find_device("numpy:0")[1]))
    backend, device = base.find_device("numpy:1")
    yield "HostOffload", (scheduler.HostOffload, {"backend": backend, "device": device, "hardware": None})
    workload = scheduler.Workload(lambda sequences, tokens: graph, (1, 4))
    yield "Workload", (partial(scheduler.Workload, workload.build_graph), asdict_of(workload, "build_graph"))
    yield "plan_with_cache", (scheduler.plan_with_cache, {"graph": graph, "group": plan().group, **PLANNING, **speeds})
    yield "format_bytes", (scheduler.format_bytes, {"n": 1.5})
    yield "format_seconds", (scheduler.format_seconds, {"seconds": 1.5})
    yield "format_stage_count", (scheduler.format_stage_count, {"stages": 2, "devices": 4})
    for name in ("count_pipeline_stages", "estimate_pipeline_speedup", "compute_missing_bytes"):
        yield name, (getattr(scheduler, name), {"plan": plan()})
    yield "describe_memory_problem", (scheduler.describe_memory_problem, {"plan": plan(), "context": 8})
    arguments = {"graph": graph, "device_count": 2, "hardware": scheduler.DEFAULT_HARDWARE}
    yield "compute_balanced_proportions", (scheduler.compute_balanced_proportions, arguments)
    yield (
        "choose_micro_batches",
        (partial(scheduler.choose_micro_batches, plan_of=lambda n: plan()), {"sequence_count": 2}),
    )
    times = {"token_counts": (1, 4), "cell_counts": (8, 64)}
    model_times = partial(scheduler.ChunkTimeModel, lambda tokens, cells: plan())
    yield "ChunkTimeModel", (model_times, times)
    chunks = {"token_count": 9, "past_tokens": 0, "allowed_sizes": (1, 4)}
    yield (
        "choose_prefill_chunks",
        (
            scheduler.choose_prefill_chunks,
            {**chunks, "time_model": model_times(**times)},
        ),
    )
    pipelined = scheduler.PipelinedPlan(plan(), bound_store())
    yield "run_pipelined", (scheduler.run_pipelined, {"runs": [(pipelined, INPUTS)]})
    yield "PipelinedRuns", (scheduler.PipelinedRuns, {"first": pipelined, "together": True})
    (one,) = plan().device_plans
    yield "lower_graph", (scheduler.lower_graph, {"graph": graph, "backend": one.backend, "device": one.device})
    lowered = {"graph": one.graph, "program": one.program, "backend": one.backend}
    yield "verify_program", (scheduler.verify_program, lowered)
    yield "with_observed_values", (scheduler.with_observed_values, {"graph": graph, "values": {"new": new}})
    yield "select_observed_outputs", (scheduler.select_observed_outputs, {"outputs": {"observed y": 1}})
    yield "select_matching_values", (scheduler.select_matching_values, {"graph": graph, "pattern": "0"})
    arguments = {"plan": plan(), "store": bound_store(), "weights": WEIGHTS, "other": plan().group[0], "place": ()}
    yield "NodeComparer", (scheduler.NodeComparer, arguments)
    yield "Statistics", (scheduler.Statistics.of, {"array": [1.0]})
    yield "DevicePlan", (scheduler.DevicePlan, {"device": one.device, **lowered})
    surroundings = {"graph": graph, "node": new.node, "reach": 1}
    yield "format_surrounding_nodes", (lambda **named: len(scheduler.format_surrounding_nodes(**named)), surroundings)


def cases_of_graphs() -> Iterator[tuple[str, Case]]:
    yield "list_rule_violations", (list_rule_violations, {"graph": graph})
    yield "format_graph", (format_graph, {"graph": graph})
    yield "make_spec", (make_spec, {"shape": (3, 4), "dtype": "f32"})
    yield "parse_case", (parse_case, {"text": "x=f32[7,256], eps=1e-06"})
    yield "replace_values", (replace_values, {"graph": graph, "replacements": {new: ops.neg(new)}})
    yield "rewrite_graph", (partial(rewrite_graph, rule=lambda node: None), {"graph": graph})
    yield "rewrite_graph, rule", (lambda value: rewrite_graph(graph, lambda node: value), {"value": None})
    yield "view_constant_array", (view_constant_array, {"node": hocket.constant("n", [1.0]).node})


def cases_of_models() -> Iterator[tuple[str, Case]]:
    yield "Token", (hocket.Token, {"id": 1, "text": "a", "logprob": -0.5})
    completion = {"text": "a", "tokens": (hocket.Token(1, "a", -0.5),), "finish_reason": "stop", "prompt_tokens": 1}
    yield "Completion", (hocket.Completion, completion)
    yield "open_model", (open_model, {"path": None, "header_only": False})
    yield "DeviceGroup", (DeviceGroup, dataclasses.asdict(DeviceGroup(devices=("numpy:0",), threads=1)))
    yield "Sampling", (Sampling, SAMPLING)
    on = DeviceGroup(devices=("numpy:0",))
    arguments = {"model": model(), "on": on, "sequences": 1, "context": 8, "batch": 4}
    yield "Session", (Session, arguments)
    path = str(FIXTURES / "llama/model.gguf")
    yield "Model", (partial(hocket.Model, path), {**PLANNED, "context": 8, "batch": 4, "exact": False, "fast": False})
    options = {"max_tokens": 1, "temperature": 0.5, "seed": 1, "stop": ".", "ignore_eos": True, "bias": ((1, 0.5),)}
    one = {"config": RunConfig(path=path, devices="numpy:0", context=8), "world": SINGLE_PROCESS}
    yield "Model.open_on_ranks", (hocket.Model.open_on_ranks, one)
    yield "Model.generate", (continue_text, {"prompt": [1], **options})
    yield "Model.complete", (language_model().complete, {"prompt": [1], "top_logprobs": 1, **options})
    yield "Model.logits", (language_model().logits, {"prompt": [1]})
    yield "Model.score", (language_model().score, {"text": [1]})
    yield "Model.embed", (language_model().embed, {"texts": [[1]], "normalise": False})
    yield "Model.tokenize", (language_model().tokenize, {"text": "a", "special": True})
    yield "Model.detokenize", (language_model().detokenize, {"ids": [1], "special": False})
    yield "Session.evaluate", (evaluate_session, {"tokens": [[1]], "every_position": False})
    yield "Session.evaluate, tokens", (lambda new: evaluate_session(tokens=[new]), {"new": [1]})
    yield "Session.make_step", (session().make_step, {"tokens": 1, "length": 1, "outputs": 1})
    yield "Session.plan", (session().plan, {"step": session().make_step(1, 1)})
    yield "Session.executor", (session().executor, {"step": session().make_step(1, 1)})
    yield (
        "Session.compare_with_device",
        (
            lambda **arguments: list(session().compare_with_device(**arguments)),
            {"tokens": [1], "device": "reference:0"},
        ),
    )
    yield "Session.reset", (session().reset, {"sequence": 0})
    yield "Step", (Step, {"sequences": 1, "tokens": 1, "cells": 8, "context": 8, "outputs": 1})
    right = {"prompt": [1], "limit": 1, "sampling": Sampling(), "seed": 0, "stop": frozenset([5]), "timing": None}
    yield "generate", (generate_ids, right)
    yield "Tokenizer.encode", (tokenizer().encode, {"text": "a", "add_special": True, "parse_special": False})
    yield "Tokenizer.encode_chat", (tokenizer().encode_chat, {"rendered": "a"})
    yield "Tokenizer.decode", (tokenizer().decode, {"ids": [1], "special": False})
    yield "Tokenizer.token_bytes", (tokenizer().token_bytes, {"token": 1})


CASES, MODELS = dict(cases()), dict(cases_of_models())


def faults(call: Callable[..., Any], right: Mapping[str, Any], wrong: tuple[Any, ...] = WRONG) -> Iterator[str]:
    """Answers to wrong arguments that are no error of hocket's, or none of one short line."""
    call(**right)  # right arguments work
    for name in right:
        for value in (*wrong, *relatives()):
            try:
                call(**{**right, name: value})
            except hocket.HocketError as why:
                if "\n" in str(why) or len(str(why)) > MAX_MESSAGE_LENGTH:
                    yield f"{name}={label(value)}: {len(str(why))} characters: {str(why)[:100]!r}"
            except Exception as why:  # this test looks for raw errors
                yield f"{name}={label(value)}: {type(why).__name__}: {str(why)[:100]}"


def label(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Awkward | int) else " ".join(repr(value).split())[:40]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_of_a_public_function_is_an_error_of_hockets_own(name):
    assert not list(faults(*CASES[name]))


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_argument_where_models_run_is_an_error_of_hockets_own(name):
    assert not list(faults(*MODELS[name]))


def test_a_wrong_file_of_a_saved_state_is_an_error_of_hockets_own(tmp_path):
    path = tmp_path / "state"
    right = {"session": session(), "path": path}
    wrong = tuple(v for v in WRONG if not isinstance(v, str))  # of files that are not there Python says so
    assert not list(faults(lambda **arguments: save_state(tokens=[[]], **arguments), right, wrong))
    assert not list(faults(lambda tokens: save_state(session(), tokens, path), {"tokens": [[1]]}, wrong))
    save_state(session(), [[]], path)
    assert not list(faults(load_state, right, wrong))


def test_a_wrong_path_of_a_trace_or_page_is_an_error_of_hockets_own(tmp_path):
    wrong = tuple(v for v in WRONG if not isinstance(v, str) or v in ("", "a\0b", "\ud800"))
    for record in (hocket.Trace(), graph.view()):
        assert not list(faults(record.save, {"path": tmp_path / "file"}, wrong))


def test_a_wrong_program_is_an_error_of_hockets_own():
    """Check wrong programs only: right ones need an extra package, which the checks do not import."""
    for name in WITH_EXTRAS:
        for value in (*WRONG, *relatives()):
            with pytest.raises(hocket.HocketError, match=r"^[^\n]+$"):
                getattr(hocket, name)(value)


WITH_EXTRAS = {"from_torch", "from_onnx"}
BUILDERS = {name: op for name, op in vars(ops).items() if isinstance(op, ops.Op)}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_wrong_operand_or_attribute_is_an_error_of_hockets_own(name):
    op = BUILDERS[name]
    found, forms = [], set()
    for sample in op.samples:
        case = parse_case(sample)
        if tuple(case) in forms:
            continue
        forms.add(tuple(case))
        right = {k: hocket.input(k, v.shape, v.dtype) if isinstance(v, Spec) else v for k, v in case.items()}
        found += faults(op, {**op.defaults, **right, "name": "n"})
    assert forms
    assert not found


def not_called_so() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield an error message, and a call that Python would answer with a TypeError."""
    yield "plan: there is no argument 'device'; did you mean devices", lambda: hocket.plan(graph, device="cpu:0")
    yield "plan: too many positional arguments; arguments: graph, ", lambda: hocket.plan(graph, "cpu:0", "tensor")
    yield "load: missing a required argument: 'weights'; arguments: plan, ", lambda: hocket.load(plan())
    yield "run: there is no argument 'device'; did you mean devices", lambda: hocket.run(graph, INPUTS, device="cpu:0")
    yield "Executor.run: there is no argument 'x'", lambda: executor().run(x=INPUTS["x"])
    yield "input: there is no argument 'dtyp'; did you mean dtype", lambda: hocket.input("n", (3,), dtyp="f32")
    yield "Model: there is no argument 'device'; did you mean devices", lambda: hocket.Model(device="cpu:0")
    yield "Model.embed: there is no argument 'normalize'", lambda: language_model().embed("a", normalize=True)
    yield "Model.generate: missing a required argument: 'prompt'", lambda: language_model().generate()
    yield "Plan.explain: there is no argument 'step'; did you mean steps", lambda: plan().explain(step=True)
    yield "from_onnx: there is no argument 'shape'; did you mean shapes", lambda: hocket.from_onnx("m.onnx", shape={})
    yield "from_torch: missing a required argument: 'exported'", lambda: hocket.from_torch()
    yield "Spec: missing a required argument: 'shape'; arguments: shape, dtype", lambda: hocket.Spec()
    yield "Graph: there is no argument 'output'; did you mean outputs", lambda: hocket.Graph(output={"y": x})
    yield "Sampling: there is no argument 'temp'; did you mean temperature", lambda: Sampling(temp=1.0)
    # And names that are not there.
    yield "unknown dtype 'f33'; did you mean f32", lambda: hocket.DType("f33")
    yield "unknown dtype 'float31'; did you mean float32", lambda: hocket.input("n", (3,), "float31")
    yield "no backend for device kind 'cpu0'; did you mean cpu", lambda: hocket.plan(graph, "cpu0")
    yield (
        "weight %w: f32[5,4] is not bound; pass it when loading the plan; did you mean W",
        lambda: hocket.load(plan(), {"W": 0, "q": WEIGHTS["q"]}),
    )
    yield (
        "there is no op 'sliu'; did you mean silu",
        lambda: hocket.verify(hocket.parse("%x = input() : f32[3]\n%y = sliu(%x) : f32[3]\nreturn y=%y")),
    )
    yield "no operand or attribute epsilon; did you mean eps", lambda: ops.rms_norm(x, epsilon=1e-5)
    yield "op is 'weights'; it must be one of constant, input, state, weight", lambda: graph.leaves("weights")
    yield (
        "the op's name is '<lambda>'; it must be a plain word",
        lambda: hocket.register(ops.op("x[...] -> [...]")(lambda x: x)),
    )
    yield "signature: 'x[...' cannot be read; see docs/add-an-op.md", lambda: ops.op("x[... -> [...]")(len)
    yield "got a grammar and a JSON schema; give one", lambda: continue_text(prompt="a", grammar="g", json_schema={})
    yield "nowhere/s.bin: No such file or directory; check its name", lambda: language_model().save("nowhere/s.bin")


def test_what_is_called_wrongly_says_what_there_is():
    for call_text, call in not_called_so():
        with pytest.raises(hocket.HocketError, match=r"^[^\n]+$") as caught:
            call()
        assert call_text in str(caught.value)


def test_a_name_that_the_package_does_not_have_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="no attribute 'Modle'; did you mean Model"):
        _ = hocket.Modle


def test_every_public_function_is_called_here():
    """A new name of the package is either tested or said to be none that can be called wrongly."""
    named = {name.split()[0].split(".")[0].rstrip(",") for name in (*CASES, *MODELS)}
    packages = (hocket, hocket.graph, ops, scheduler)
    everything = {n: getattr(room, n) for room in packages for n in dir(room) if not n.startswith("_")}
    ours = {n: f for n, f in everything.items() if getattr(f, "__module__", "").startswith("hocket")}
    public = {n for n, f in ours.items() if callable(f)}
    errors = {n for n in public if n.endswith("Error")}
    assert public - errors - DECLARING - RECORDS - MAPPINGS - set(BUILDERS) - WITH_EXTRAS <= named
    for kind, right in (
        *((hocket.Graph, "Graph"), (hocket.Plan, "Plan")),
        *((hocket.Store, "Store"), (hocket.Executor, "Executor")),
    ):
        methods = {n for n, f in vars(kind).items() if not n.startswith("_") and callable(f) and _has_arguments(f)}
        covered = {c.split()[0].rstrip(",") for c in CASES}
        assert {f"{right}.{m}" for m in methods} <= covered, kind


def _has_arguments(function: Any) -> bool:
    plain = inspect.unwrap(function)
    return plain.__code__.co_argcount + plain.__code__.co_kwonlyargcount > 1
