"""An agent of its own loop over the `openai` client: a tool, and the answer. Reads the question from its input."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

stream = "stream" in sys.argv
client = OpenAI()
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    if stream:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})
print(message.content)
