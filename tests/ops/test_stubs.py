"""What editors, `help` and type checkers see of ops is what the registry says."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import hocket
from hocket import GraphError, ops
from hocket.ops import stubs

from ..given.models.goldens import ROOT


def test_the_stub_is_up_to_date():
    assert (ROOT / "ops" / "__init__.pyi").read_text("utf-8") == stubs.build_stub(), (
        "run python -m hocket.ops.stubs, and put what it writes into ops/__init__.pyi"
    )


def test_help_says_what_an_op_does_and_how_it_is_called():
    said = pydoc.render_doc(ops.rope, renderer=pydoc.plaintext)
    assert 'rope(x, pos, factors=None, *, n_dims, mode="normal"' in said
    assert ops.rope.documentation.splitlines()[0] in said
    assert len(said.splitlines()) < 20
    assert (
        str(inspect.signature(ops.clamp)) == "(x: 'Value', *, min: 'float', max: 'float', name: 'str' = '') -> 'Value'"
    )


@pytest.mark.parametrize(
    ("asked", "near"), [("matmul", "mul_mat"), ("rmsnorm", "rms_norm"), ("rope_multy", "rope_multi")]
)
def test_an_op_that_is_not_there_is_answered_with_the_nearest(asked, near):
    with pytest.raises(AttributeError, match=f"no op '{asked}'; did you mean {near}"):
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
