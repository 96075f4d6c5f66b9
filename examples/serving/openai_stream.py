"""A chat through the openai client, printed while it is generated."""

import sys

from openai import OpenAI

api = OpenAI(base_url=f"{sys.argv[1] if sys.argv[1:] else 'http://localhost:8080'}/v1", api_key="none")
stream = api.chat.completions.create(
    model="any",  # a server without --strict-model has one model for all names
    messages=[{"role": "user", "content": "Tell me of the sea."}],
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
