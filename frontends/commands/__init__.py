"""The subcommands of ``hocket``, one module each: `add_flags` adds the arguments to a parser, `run` executes it.

A module is imported when its command is given. `hocket --help` needs only this table.
"""

COMMAND_HELP = {
    "run": "Generate text and stream it.",
    "serve": "Serve a model over HTTP to clients of OpenAI, Anthropic and llama-server.",
    "logits": "Write the logits of every position.",
    "tokenize": "Print the token ids of a text.",
    "embed": "Write a vector for each text, by an encoder or a language model.",
    "perplexity": "Print how well a model predicts a text.",
    "bench": "Measure how fast a model reads prompts and writes new tokens.",
    "dump": "Print a graph.",
    "plan": "Print how a graph would be dealt to devices, what it costs and why.",
    "view": "Write a page that shows a graph, its plan, memory and time in a browser.",
    "devices": "Print the devices of this machine.",
    "calibrate": "Measure how fast devices and links are, for later plans.",
    "ops": "Print which op runs on which backend in which dtypes.",
    "check": "Check that a backend computes what the ops mean.",
}
"""The help line of each subcommand."""
