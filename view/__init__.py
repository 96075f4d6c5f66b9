"""HTML pages that show a graph, or a plan with its memory and time: each page is a single file that needs no network.

`view_graph` and `view_plan` return a `Page`; ``hocket view``, `Graph.view` and `Plan.view` call them.
"""

from .page import Page as Page
from .page import view_graph as view_graph
from .page import view_plan as view_plan
