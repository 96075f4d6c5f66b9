"""A model that calls a function. The arguments follow the schema of the function."""

import json
import sys

from openai import OpenAI

FUNCTION = {
    "name": "get_weather",
    "description": "Return the weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Bath", "London", "Lyme"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


def get_weather(town: str) -> str:
    return {"Bath": "rain", "London": "fog", "Lyme": "sun"}[town]


api = OpenAI(base_url=f"{sys.argv[1] if sys.argv[1:] else 'http://localhost:8080'}/v1", api_key="none")
messages = [{"role": "user", "content": "What is the weather in Bath?"}]
tools = [{"type": "function", "function": FUNCTION}]
first = api.chat.completions.create(
    model="any", messages=messages, tools=tools, tool_choice="required", max_tokens=64
).choices[0]
print(first.finish_reason)
call = first.message.tool_calls[0]
result = get_weather(**json.loads(call.function.arguments))
print(f"{call.function.name}({call.function.arguments}) = {result}")

messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
answer = api.chat.completions.create(model="any", messages=messages, tools=tools, tool_choice="none", max_tokens=32)
print(answer.choices[0].message.content)
