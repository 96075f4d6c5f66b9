"""Every public function answers a wrong argument with one line: an error of hocket's own, never one of Python's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import hocket
from hocket import ops, scheduler
from hocket.backends import base
from hocket.frontends.generation.generate import generate_tokens
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.gguf.tokenization.tokenizer import Tokenizer, tokenizer_from_metadata
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Model, Step
from hocket.frontends.open_model import open_model
from hocket.graph.parse import parse_case
from hocket.graph.spec import Spec

from ..given.models.goldens import FIXTURES

MAX_MESSAGE_LENGTH = 700
"""Characters of a message."""
DECLARING = {"op", "op_of", "Op"}
"""For authors of ops; their mistakes are ours."""
MAPPINGS = {"Options"}
"""A dict to Python; who is given it looks at its entries."""


class Awkward:
    """A value without text, truth or array."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


def holder(value: Any) -> Any:
    objects = np.empty(3, object)
    objects[0] = value
    return objects


x, w, ids = hocket.input("x", (3, 4)), hocket.weight("w", (5, 4)), hocket.input("ids", (3,), "i32")
s, q = hocket.state("s", (3, 5)), hocket.weight("q", (2, 32), "q8_0")
new = ops.add(ops.mul_mat(w, x), s)
graph = hocket.Graph({"y": new, "z": ops.get_rows(w, ids), "q": ops.get_rows(q, ids)}, {s: new})
WEIGHTS = {"w": np.ones((5, 4), np.float32), "q": np.zeros((2, 34), np.uint8)}
INPUTS = {"x": np.ones((3, 4), np.float32), "ids": np.zeros(3, np.int32)}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 2**100, 10**5000, 1.5, float("nan"), float("inf"), 1j),
    *("", "text", "a\0b", "\ud800", "line\nline", "9" * 5000, "x" * 100_000, b"bytes", bytearray(b"b")),
    *([], [None], [-1], [1.5], [float("nan")], [2**100], ["a"], [["a"]], [[1], [1, 2]], [("a", "b")], ["cpu:0", None]),
    *({}, {"a": 1}, {1: 2}, {"y": x.node}, {"y": x}, {x: x}, {1, 2}, (), range(3), iter([1]), slice(1)),
    *(np.array([1j]), np.array(["a"]), holder(None), holder("a"), np.array(2**40), np.array([2**40]), np.zeros((2, 2))),
    *(np.float32("nan"), np.datetime64("2026-01-01"), np.zeros(0), np.zeros(3, "i4,f4"), np.array([0.5, -1.0])),
    *(object(), Awkward(), int, len, x, x.node, x.spec, graph, hocket.DType.F32, base.Device("cpu", 0)),
)


@cache
def plan() -> Any:
    return hocket.plan(graph, "numpy:0")


@cache
def executor(device: str = "numpy:0") -> Any:
    return hocket.load(hocket.plan(graph, device), WEIGHTS)


@cache
def model() -> Model:
    return open_model(FIXTURES / "llama/model.gguf")


@cache
def session() -> Session:
    return Session(model(), on=DeviceGroup(devices=("numpy:0",)), context=64)


@cache
def language_model() -> hocket.Model:
    return hocket.Model(None, devices="numpy:0", context=64)


@cache
def tokenizer() -> Tokenizer:
    return tokenizer_from_metadata(open_model(None).gguf.metadata)


@cache
def relatives() -> tuple[Any, ...]:
    """Objects of the right classes from another graph, plan, group, store or model."""
    wide, v = hocket.input("x", (7, 4)), hocket.state("s", (4, 4, 4), "f16")
    grown = ops.mul_mat(hocket.weight("w", (6, 4)), wide)
    other = hocket.Graph({"y": grown, "v": v}, {v: ops.scale(v, scale=2.0, bias=0.0)})
    same = hocket.Graph({"y": ops.silu(hocket.weight("w", (5, 4)))})
    deep = hocket.input("x", (8, 512))
    for layer in range(4):
        deep = ops.mul_mat(hocket.weight(f"w{layer}", (512, 512)), deep)
    sharded = {"devices": "numpy:0,numpy:1,numpy:2", "split_mode": "tensor"}
    plans = (
        *(hocket.plan(other, "numpy:0"), hocket.plan(other, **sharded), hocket.plan(graph, **sharded)),
        *(hocket.plan(graph, "cpu:0"), hocket.plan(graph, "numpy:1"), hocket.plan(same, "numpy:0")),
        hocket.plan(hocket.Graph({"y": deep}), "numpy:0,numpy:1,numpy:2,numpy:3", split_mode="layer,tensor"),
        *(hocket.plan(graph, "numpy:0,numpy:1", split_mode=mode) for mode in ("none", "layer")),
    )
    stores = tuple(hocket.Store(candidate.group) for candidate in plans)
    layouts = {layout: None for plan in plans for layout in (*plan.leaves.values(), *plan.outputs.values())}
    parts = (other, same, wide, v, grown, grown.node, v.node, v.spec, grown.spec, hocket.Value(grown.node, 1))
    values = ({"y": grown}, {v: grown}, {"x": wide}, (grown, None), (grown.spec, v.spec), grown.node.attrs)
    fields = (
        getattr(candidate, name)
        for candidate in plans[:3]
        for name in ("device_plans", "leaves", "outputs", "sharded_factors", "hardware", "group", "cost")
    )
    machines = (
        base.find_device("cpu:0"),
        scheduler.parse_simulated_group("cpu:3"),
        hocket.Trace(),
        DeviceGroup(devices=("numpy:0", "numpy:1")),
    )
    steps = (Step(2, 3, 16, 16, 3), Step(sequences=1, tokens=1, cells=10**6, context=10**6, outputs=1))
    ended = hocket.Model(None, devices="numpy:0", context=8)
    ended.close()
    theirs = (open_model(FIXTURES / "qwen3/model.gguf"), Sampling(bias=((10**6, 1.0),)), hocket.Token(1, "a", -1.0))
    executors = (executor("cpu:0"), hocket.load(plans[4], WEIGHTS))
    return (*parts, *values, *plans, *stores, *layouts, *fields, *machines, *steps, ended, *theirs, *executors)


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
    yield "group_of", (base.find_devices, {"names": ["numpy:0"], "threads": 1})
    yield "find", (base.find_device, {"name": "numpy:0"})
    yield "load a backend", (base.load_backend, {"kind": "numpy"})
    leaves = {**INPUTS, "w": WEIGHTS["w"], "q": np.zeros((2, 32))}
    yield "evaluate", (ops.evaluate, {"graph": graph, "bindings": leaves})
    for name, value in leaves.items():
        yield f"evaluate {name}", (with_one(partial(ops.evaluate, graph), leaves, name), {"value": value})
    yield "as_reference_array", (ops.as_reference_array, {"array": [1.0]})


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
    everything = {n: getattr(room, n) for room in (hocket, ops) for n in dir(room) if not n.startswith("_")}
    ours = {n: f for n, f in everything.items() if getattr(f, "__module__", "").startswith("hocket")}
    public = {n for n, f in ours.items() if callable(f)}
    errors = {n for n in public if n.endswith("Error")}
    assert public - errors - DECLARING - MAPPINGS - set(BUILDERS) - WITH_EXTRAS <= named
    for kind, right in ((hocket.Graph, "Graph"), (hocket.Store, "Store"), (hocket.Executor, "Executor")):
        methods = {n for n, f in vars(kind).items() if not n.startswith("_") and callable(f) and _has_arguments(f)}
        covered = {c.split()[0].rstrip(",") for c in CASES}
        assert {f"{right}.{m}" for m in methods} <= covered, kind


def _has_arguments(function: Any) -> bool:
    plain = getattr(function, "__wrapped__", function)
    return plain.__code__.co_argcount + plain.__code__.co_kwonlyargcount > 1
