"""Fused kernels against their ops one by one: random graphs, the graphs of all fixtures, and a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

from hocket import ops
from hocket.backends import find_device
from hocket.backends.cpu.kernels.vector import elementwise
from hocket.conformance.cases.model_cases import read_model_graphs
from hocket.conformance.checks.fused_kernels import check_fused_kernels, make_random_graphs
from hocket.conformance.command import main
from hocket.graph import Graph, input
from hocket.ops.declaration.expression import Expression

from ..given.models.goldens import FIXTURES

MODELS = sorted(path.name for path in FIXTURES.iterdir() if (path / "model.gguf").exists())


def take_graphs(count: int) -> Iterator[Graph]:
    return (graph for graph, _ in zip(make_random_graphs(0), range(count), strict=False))


@pytest.mark.long
def test_the_kernels_of_random_graphs_have_the_bits_of_their_ops():
    results = list(check_fused_kernels(take_graphs(25), *find_device("cpu")))
    assert [r for r in results if r.fault] == []
    assert len(results) > 15
    assert any(len(r.ops) > 4 for r in results)


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_of_each_fixture_have_the_bits_of_their_ops(name: str):
    graphs = read_model_graphs(FIXTURES / name / "model.gguf", tokens=(1, 9))
    assert [r for r in check_fused_kernels(graphs, *find_device("cpu")) if r.fault] == []


def make_permuted_graphs() -> Iterator[Graph]:
    """Make graphs in which an op reads a composed value with permuted axes, element by element or row by row."""
    for axes in permutations(range(3)):
        shape = (3, 4, 4)
        x, y = input("x", shape), input("y", (4, 1))
        product = ops.permute(ops.mul(ops.neg(x), y), axes=axes)
        other = input("z", product.shape)
        yield Graph({"sums": ops.scale(ops.sum_rows(product), scale=2.0)})
        yield Graph({"y": ops.add(ops.reshape(product, shape=(12, 4)), ops.reshape(other, shape=(12, 4)))})
        yield Graph({"y": ops.mul(ops.norm(ops.permute(x, axes=axes)), other)})


def test_one_kernel_computes_values_that_are_read_with_permuted_axes():
    results = [list(check_fused_kernels([graph], *find_device("cpu"))) for graph in make_permuted_graphs()]
    assert [r for some in results for r in some if r.fault] == []
    assert [len(some) for some in results] == [1] * 18
    assert {len(r.ops) for some in results for r in some} == {2, 3, 4}


@pytest.mark.long
def test_a_kernel_that_rounds_less_often_is_found(monkeypatch: pytest.MonkeyPatch):
    right = elementwise.make_expression_kernel

    def round_once(expression: Expression, *strides: tuple[bool, ...]):
        """The kernel of a composed expression, in which each sum of a product is one rounding."""
        steps = list(expression.steps)
        for number, step in enumerate(steps if expression.listed_results else ()):
            if step.function == "add" and steps[step.sources[0]].function == "mul":
                steps[number] = step._replace(
                    function="fma", sources=(*steps[step.sources[0]].sources, step.sources[1])
                )
        return right(Expression(tuple(steps), listed_results=expression.listed_results), *strides)

    monkeypatch.setattr(elementwise, "make_expression_kernel", round_once)
    results = list(check_fused_kernels(take_graphs(60), *find_device("cpu")))
    assert any("elements differ" in r.fault for r in results)


def test_check_fused_prints_a_line_and_refuses_a_backend_without_fused_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("hocket.conformance.checks.fused_kernels.RANDOM_GRAPHS", 3)
    assert main(["--fused"]) == 0
    assert " fused kernels of " in capsys.readouterr().out
    assert main(["--fused", "--backend", "numpy"]) == 2
    assert "numpy generates no fused kernels; give --backend cpu" in capsys.readouterr().err
