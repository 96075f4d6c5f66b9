"""Chat through the openai client: an answer, several answers with a seed, probabilities, and JSON by a schema."""

import json
import sys

from openai import OpenAI

api = OpenAI(base_url=f"{sys.argv[1] if sys.argv[1:] else 'http://localhost:8080'}/v1", api_key="none")
model_name = api.models.list().data[0].id
messages = [{"role": "user", "content": "Who was at the ball?"}]

answer = api.chat.completions.create(model=model_name, messages=messages, max_tokens=24, temperature=0)
print(answer.choices[0].message.content)
print("tokens:", answer.usage.prompt_tokens, "+", answer.usage.completion_tokens, answer.choices[0].finish_reason)

several = api.chat.completions.create(model=model_name, messages=messages, max_tokens=8, n=2, seed=1, stop=["."])
for choice in several.choices:
    print(choice.index, repr(choice.message.content))

sure = api.chat.completions.create(model=model_name, messages=messages, max_tokens=2, logprobs=True, top_logprobs=2)
for token in sure.choices[0].logprobs.content:
    print(repr(token.token), [(other.token, round(other.logprob, 2)) for other in token.top_logprobs])

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["Emma", "Elinor"]}, "dances": {"type": "boolean"}},
    "required": ["name", "dances"],
    "additionalProperties": False,
}
guest = api.chat.completions.create(
    model=model_name,
    messages=messages,
    max_tokens=40,
    response_format={"type": "json_schema", "json_schema": {"name": "guest", "schema": schema, "strict": True}},
)
print(json.loads(guest.choices[0].message.content))
