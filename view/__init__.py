"""One page that shows a graph, a plan, its memory and its time: a single HTML file that needs no network.

`view_graph` and `view_plan` give a `Page`; ``hocket view``, `Graph.view` and `Plan.view` are doors to them.
"""

from .page import Page as Page
from .page import view_graph as view_graph
from .page import view_plan as view_plan
