"""An agent over the `openai` client's Responses: the second request names the first answer instead of sending it."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}

client = OpenAI()
given = [{"role": "user", "content": sys.stdin.read()}]
previous = None
while True:
    options = {"previous_response_id": previous} if "previous" in sys.argv and previous else {}
    if "stream" in sys.argv:
        with client.responses.stream(model="policy", input=given, tools=[TOOL], **options) as events:
            for _ in events:
                pass
            response = events.get_final_response()
    else:
        response = client.responses.create(model="policy", input=given, tools=[TOOL], **options)
    previous = response.id
    calls = [item for item in response.output if item.type == "function_call"]
    if "previous" in sys.argv:
        given = []
    else:
        given += [item.model_dump(exclude_none=True) for item in response.output]
    if not calls:
        break
    for call in calls:
        arguments = json.loads(call.arguments)
        total = str(arguments["a"] + arguments["b"])
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
print(response.output_text)
