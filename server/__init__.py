"""The HTTP server of ``hocket serve``: the APIs of OpenAI, Anthropic and llama-server over one served model.

`create_app` builds the ASGI application of a `ModelService`; `run_server` serves it until a signal.
"""

from .app import create_app as create_app
from .lifecycle import run_server as run_server
from .options import ServerOptions as ServerOptions
