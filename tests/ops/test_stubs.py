"""Editors, `help` and type checkers see ops as the registry declares them."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import hocket
from hocket import GraphError, ops
from hocket.ops import stubs

from ..given.models.goldens import ROOT


def test_the_stub_is_up_to_date():
    assert (ROOT / "ops" / "__init__.pyi").read_text("utf-8") == stubs.build_ops_stub(), (
        "run python -m hocket.ops.stubs, and write its output to ops/__init__.pyi"
    )


def test_help_says_what_an_op_does_and_how_it_is_called():
    text = pydoc.render_doc(ops.rope, renderer=pydoc.plaintext)
    assert 'rope(x, pos, factors=None, *, n_dims, mode="normal"' in text
    assert ops.rope.documentation.splitlines()[0] in text
    assert len(text.splitlines()) < 20
    assert (
        str(inspect.signature(ops.clamp)) == "(x: 'Value', *, min: 'float', max: 'float', name: 'str' = '') -> 'Value'"
    )


@pytest.mark.parametrize(
    ("asked", "suggestion"), [("matmul", "mul_mat"), ("rmsnorm", "rms_norm"), ("rope_multy", "rope_multi")]
)
def test_an_op_that_is_not_there_is_answered_with_the_nearest(asked, suggestion):
    with pytest.raises(AttributeError, match=f"no op '{asked}'; did you mean {suggestion}"):
        getattr(ops, asked)


def test_an_op_is_registered_once_and_with_attributes_that_graphs_keep():
    def twice(x):
        """``2 x``."""
        return 2 * x

    def add(x):
        return x

    def strange(x, *, how: complex = 1j):
        return x

    with pytest.raises(GraphError, match="there is an op 'add' already"):
        hocket.register(ops.op("x[...] -> [...]")(add))
    with pytest.raises(GraphError, match="attribute how is annotated 'complex'; need int, float"):
        hocket.register(ops.op("x[...] -> [...]")(strange))
    with pytest.raises(GraphError, match="op is <function"):
        hocket.register(twice)
    assert hocket.register(ops.add) is ops.add


def test_names_before_0_2_are_aliases():
    assert ops.Range is ops.LegalRange
    assert ops.RULES is ops.OP_RULES
    assert ops.exact is ops.as_reference_array


def test_old_keywords_of_a_declaration_mean_the_new_ones():
    def halves(x, *, count: int, kind: str = "even"):
        return x

    def check(**_):
        return "not now"

    old = ops.op(
        {"even": "x[..., *n] -> [..., m]"},
        form="kind",
        needs=check,
        where={"m": lambda n, **_: n // 2},
        share=lambda node: 0.25,
        whole=lambda attrs: ("n",),
        must=False,
    )(halves)
    assert (old.signature_key, old.check, old.is_required) == ("kind", check, False)
    assert old.derived_sizes["m"](n=6) == 3
    assert old.active_fraction(None) == 0.25
    assert old.unsharded_dimensions({}) == ("n",)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wants'"):
        ops.op("x[...] -> [...]", wants=check)
