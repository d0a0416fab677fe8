"""An agent of its own loop over the `google-genai` client: a tool, and the answer. The question is its input."""

import sys

from google import genai
from google.genai import types

SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}, "b": {"type": "INTEGER"}}}
ADD = types.FunctionDeclaration(name="add", description="Adds.", parameters=SCHEMA)

client = genai.Client()
config = types.GenerateContentConfig(system_instruction="Be brief.", tools=[types.Tool(function_declarations=[ADD])])
contents = [types.Content(role="user", parts=[types.Part(text=sys.stdin.read())])]
while True:
    request = {"model": "policy", "contents": contents, "config": config}
    if "stream" in sys.argv:
        chunks = [chunk.candidates[0].content for chunk in client.models.generate_content_stream(**request)]
        parts = [part for chunk in chunks for part in chunk.parts or ()]
    else:
        parts = client.models.generate_content(**request).candidates[0].content.parts
    contents.append(types.Content(role="model", parts=parts))
    calls = [part.function_call for part in parts if part.function_call]
    if not calls:
        break
    results = [
        types.Part.from_function_response(name=call.name, response={"result": call.args["a"] + call.args["b"]})
        for call in calls
    ]
    contents.append(types.Content(role="user", parts=results))
print("".join(part.text or "" for part in parts))
