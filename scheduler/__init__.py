"""From graph to running program: strides, order, memory, lowering, the verifier of programs, execution."""

from .check import check as check
from .executor import Executor as Executor
from .executor import load as load
from .layout import Layout as Layout
from .plan import Host as Host
from .plan import Plan as Plan
from .plan import plan as plan
from .plan import plan_for as plan_for
from .store import Store as Store
from .units import nbytes_text as nbytes_text
