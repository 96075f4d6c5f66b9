"""The subcommands of ``hocket``, one module each: `add_flags` adds the arguments to a parser, `run` executes it.

A module is imported when its command is given. `hocket --help` needs only this table.
"""

COMMAND_HELP = {
    "run": "Generate text and stream it.",
    "serve": "Serve a model over HTTP to clients of OpenAI, Anthropic and llama-server.",
    "replay": "Repeat the requests of a server from its log, and report the first difference.",
    "logits": "Write the logits of every position.",
    "tokenize": "Print the token ids of a text.",
    "embed": "Write an embedding of each text, from an encoder or a language model.",
    "perplexity": "Print the perplexity of a text under a model.",
    "compare": "Print the difference of two models with one vocabulary on a text.",
    "quantize": "Write a model file with smaller weights.",
    "imatrix": "Write an importance matrix for quantisation, from a text.",
    "convert": "Write a Hugging Face folder as a GGUF file.",
    "bench": "Measure the speed of prefill and decode of a model.",
    "dump": "Print a graph.",
    "plan": "Print the plan of a graph: its layouts, its cost and the reasons.",
    "view": "Write a page that shows a graph, its plan, memory and time in a browser.",
    "devices": "Print the devices of this machine.",
    "calibrate": "Measure the speeds of devices and links for later plans.",
    "ops": "Print the ops and dtypes that each backend supports.",
    "check": "Check a backend against the reference functions of the ops.",
}
"""The help line of each subcommand."""
