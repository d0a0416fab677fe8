"""An agent of its own loop over the `anthropic` client: a tool, and the answer. Reads the question from its input."""

import sys

from anthropic import Anthropic

TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}

client = Anthropic()
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    request = {"model": "policy", "max_tokens": 200, "system": "Be brief.", "messages": messages, "tools": [TOOL]}
    if "stream" in sys.argv:
        with client.messages.stream(**request) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**request)
    messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
        for call in calls
    ]
    messages.append({"role": "user", "content": results})
print(answer.content[0].text)
