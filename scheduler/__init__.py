"""From a graph to running programs on a group of devices: plan, proof, run, and what is said of it.

`planner` makes a `Plan` (`plan.py` is the record) from what `sharding` decides and `lowering` builds; `verifier` proves
it, `running` runs it, `telling` says it in words and JSON.  What other folders use of all this is named here.
"""

from .at_once import run as run
from .comparing import Difference as Difference
from .comparing import Judge as Judge
from .comparing import surroundings as surroundings
from .fits import memory_problem as memory_problem
from .fits import shortage as shortage
from .hardware import CPU as CPU
from .hardware import Hardware as Hardware
from .layout import Layout as Layout
from .lowering.lane import Lane as Lane
from .lowering.lower import lower as lower
from .observing import Statistics as Statistics
from .observing import matching as matching
from .observing import observed as observed
from .observing import taken as taken
from .plan import Host as Host
from .plan import Plan as Plan
from .planner import SPLIT_MODES as SPLIT_MODES
from .planner import plan as plan
from .planner import plan_for as plan_for
from .running.comm import Alone as Alone
from .running.executor import Executor as Executor
from .running.executor import load as load
from .running.interrupts import InterruptsKept as InterruptsKept
from .running.store import Store as Store
from .running.trace import Trace as Trace
from .simulated import simulate as simulate
from .telling.as_json import plan_from_json as plan_from_json
from .telling.as_json import plan_to_json as plan_to_json
from .telling.diff import difference as difference
from .telling.listing import PASSES as PASSES
from .units import nbytes_text as nbytes_text
from .verifier.program import check as check
