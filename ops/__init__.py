"""Every op, declared once: meaning, shapes, sharding, cost, samples.  Calling one builds a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ..graph.graph import Graph
from ..graph.node import LEAVES, Node
from ..graph.verify import RULES as GRAPH_RULES
from ..graph.verify import Rule
from ..graph.verify import verify as verify_rules
from . import attention as _attention
from . import elementwise, matmul, moves, norms, recurrent, views
from .attention import attention as attention
from .attention import causal_mask as causal_mask
from .attention import rope as rope
from .elementwise import add as add
from .elementwise import cast as cast
from .elementwise import cont as cont
from .elementwise import div as div
from .elementwise import exp as exp
from .elementwise import gelu as gelu
from .elementwise import mul as mul
from .elementwise import neg as neg
from .elementwise import relu as relu
from .elementwise import scale as scale
from .elementwise import sigmoid as sigmoid
from .elementwise import silu as silu
from .elementwise import softplus as softplus
from .elementwise import sub as sub
from .elementwise import swiglu as swiglu
from .elementwise import tanh as tanh
from .matmul import mul_mat as mul_mat
from .moves import concat as concat
from .moves import get_rows as get_rows
from .moves import set_rows as set_rows
from .norms import l2_norm as l2_norm
from .norms import rms_norm as rms_norm
from .norms import softmax as softmax
from .op import Op as Op
from .op import op as op
from .recurrent import gated_delta_net as gated_delta_net
from .recurrent import ssm_conv as ssm_conv
from .samples import Range as Range
from .signature import Mismatch
from .views import broadcast as broadcast
from .views import permute as permute
from .views import reshape as reshape
from .views import slice_ as slice_
from .views import transpose as transpose

_MODULES = (views, elementwise, norms, matmul, moves, _attention, recurrent)

REGISTRY: Mapping[str, Op[Any]] = MappingProxyType(
    {found.name: found for module in _MODULES for found in vars(module).values() if isinstance(found, Op)}
)


def op_of(node: Node) -> Op[Any]:
    """The declaration of a node's op; the graph must have been verified."""
    return REGISTRY[node.op]


def ops_are_declared(graph: Graph) -> Iterator[str]:
    """Every node is a leaf or an op of the registry."""
    for node in graph.nodes:
        if node.op not in REGISTRY and node.op not in LEAVES:
            yield f"%{node.label}: there is no op {node.op!r}; `hocket ops` lists them"


def specs_follow_from_operands(graph: Graph) -> Iterator[str]:
    """The specs a node claims are those its op infers."""
    for node in graph.nodes:
        declared = REGISTRY.get(node.op)
        if declared is None:
            continue
        try:
            inferred = declared.infer([None if s is None else s.spec for s in node.src], node.attrs)
        except (Mismatch, TypeError, KeyError) as why:
            yield f"{node!r}: {why}"
        else:
            if inferred != node.specs:
                yield f"{node!r}: operands give {', '.join(map(str, inferred))}"


RULES: tuple[Rule, ...] = (*GRAPH_RULES, ops_are_declared, specs_follow_from_operands)


def verify(graph: Graph) -> None:
    """Raise `GraphError` unless `graph` obeys every rule, those of its ops included."""
    verify_rules(graph, RULES)
