"""The exports of `hocket`, written by `python docs/write_stubs.py`."""

from . import graph as graph
from . import ops as ops
from . import scheduler as scheduler
from .frontends.completion import Completion as Completion
from .frontends.completion import Token as Token
from .frontends.errors import ModelError as ModelError
from .frontends.generation.options import Options as Options
from .frontends.generation.sampling import Sampling as Sampling
from .frontends.language_model import Model as Model
from .frontends.onnx.importer import from_onnx as from_onnx
from .frontends.torch.importer import from_torch as from_torch
from .graph import BackendError as BackendError
from .graph import DType as DType
from .graph import Graph as Graph
from .graph import GraphError as GraphError
from .graph import HocketError as HocketError
from .graph import Node as Node
from .graph import PlanError as PlanError
from .graph import Spec as Spec
from .graph import Value as Value
from .graph import constant as constant
from .graph import from_json as from_json
from .graph import input as input
from .graph import state as state
from .graph import to_json as to_json
from .graph import to_networkx as to_networkx
from .graph import weight as weight
from .ops import register as register
from .ops import verify as verify
from .ops.text import dump as dump
from .ops.text import parse as parse
from .scheduler import Executor as Executor
from .scheduler import Plan as Plan
from .scheduler import Store as Store
from .scheduler import Trace as Trace
from .scheduler import load as load
from .scheduler import plan as plan
from .scheduler import run as run
from .view.dot import to_dot as to_dot

__version__: str
