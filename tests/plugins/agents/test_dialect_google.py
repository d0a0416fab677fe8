"""The protocol of Gemini: parts read and written, chunks, thoughts, images, tools, and what is refused."""

from __future__ import annotations

import copy
import re
from base64 import b64encode
from collections.abc import Iterator
from functools import reduce
from itertools import product
from operator import getitem
from typing import Any

import httpx2
import pytest

from mtrl_plugins.agents.anthropic_dialect import UNREADABLE
from mtrl_plugins.agents.google_dialect import GoogleDialect
from mtrl_plugins.agents.requests import MessageCache, PolicyProblem
from tests.plugins.agents.agent_harness import CALL, TEMPLATE, Requests, open_agents, read_events
from tests.sample_images import png

ASK = {"role": "user", "parts": [{"text": "What is 3 + 4?"}]}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}}}
GENERATE, STREAM = "/v1beta/models/gemini-9:generateContent", "/v1/models/any:streamGenerateContent?alt=sse"
TURN = f"<think>Sum them.</think>I add.\n{CALL}"


async def post(agent: Requests, path: str, body: dict[str, Any]) -> httpx2.Response:
    """As Google's clients do: another path, and the key in a header of its own."""
    url = str(agent.client.base_url).rstrip("/").removesuffix("/v1")
    return await agent.client.post(url + path, json=body, headers={"x-goog-api-key": agent.session.api_key})


def read(*contents: Any, **body: Any) -> list[dict[str, Any]]:
    asked = GoogleDialect(stream=False).read_request({"contents": list(contents), **body}, MessageCache())
    return [dict(message) for message in asked.messages]


def answer_part(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": "7"}, **fields}}


def test_parts_of_a_turn_are_one_message_and_results_are_messages_before_the_text() -> None:
    turn = [{"text": "Sum them.", "thought": True}, {"text": "I "}, {"text": "add."}, {"functionCall": {"name": "add"}}]
    messages = read(
        ASK, {"role": "model", "parts": turn}, {"role": "user", "parts": [answer_part(), {"text": "Go on."}]},
        systemInstruction={"parts": [{"text": "One."}, {"text": "Two."}]},
    )  # fmt: skip
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert messages[0]["content"] == "One.\nTwo." and messages[3]["content"] == "7"
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("I add.", "Sum them.")


def test_results_without_ids_belong_to_the_calls_in_their_order() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("add", "look")]
    results = [answer_part("add"), answer_part("look", response={"a": 1, "b": 2})]
    messages = read(ASK, {"role": "model", "parts": calls}, {"role": "function", "parts": results})
    assert [call["id"] for call in messages[1]["tool_calls"]] == [one["tool_call_id"] for one in messages[2:]]
    assert messages[3]["content"] == '{"a": 1, "b": 2}'


def call_part(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("calls", "results", "ids"),
    [
        ([("add", "x"), ("look", "y")], [("look", ""), ("add", "")], ["y", "x"]),
        ([("add", "x"), ("add", "y")], [("add", ""), ("add", "")], ["x", "y"]),
        ([("add", "x"), ("add", "y")], [("add", "x"), ("add", "")], ["x", "y"]),
        ([("add", "x"), ("look", "y")], [("other", ""), ("look", "")], ["x", "y"]),
        ([("add", "x")], [("add", ""), ("add", "")], ["x", ""]),
        ([], [("add", "")], [""]),
    ],
)
def test_a_result_without_an_id_answers_the_first_open_call_of_its_name(calls: Any, results: Any, ids: Any) -> None:
    turn = {"role": "model", "parts": [{"text": "Go."}, *(call_part(name, id=id) for name, id in calls)]}
    parts = [answer_part(name, **({"id": id} if id else {})) for name, id in results]
    for contents in ([{"parts": parts}], [{"parts": [part]} for part in parts]):
        messages = read(ASK, turn, *contents, ASK, turn, *contents)  # The same contents again, which are read once.
        found = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert found == [*ids, *ids] and not any("name" in message for message in messages)


def test_letters_of_all_languages_and_unreadable_arguments_stay_as_they_are() -> None:
    turn = {
        "role": "model",
        "parts": [call_part("add", args={"a": "K\u00f6ln"}), call_part("add", args={UNREADABLE: "{"})],
    }
    _, said, result = read(ASK, turn, {"parts": [answer_part(response={"b": "\u6771\u4eac"})]})
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == ['{"a": "K\u00f6ln"}', "{"]
    assert result["content"] == '{"b": "\u6771\u4eac"}'


def test_only_types_of_schemas_are_lowered() -> None:
    kind = {"type": "STRING", "enum": ["A"], "default": {"type": "A"}, "example": {"type": "B"}}
    sent = {"type": "OBJECT", "properties": {"type": kind, "in_b": {"type": "ARRAY", "items": {"any_of": [kind]}}}}
    asked = GoogleDialect(stream=False).read_request(
        {"contents": [ASK], "tools": [{"functionDeclarations": [{**ADD, "parameters": sent}]}]}, MessageCache()
    )
    lowered = {**kind, "type": "string"}
    nested = {"type": "array", "items": {"anyOf": [lowered]}}
    schema = asked.tools[0]["function"]["parameters"]
    assert schema == {"type": "object", "properties": {"type": lowered, "in_b": nested}}


FREE = ("args", "response", "properties")
IMAGE = {"inlineData": {"mimeType": "image/png", "data": b64encode(png()).decode()}}
FULL: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be short."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hi."}, IMAGE]},
        {"role": "model", "parts": [{"text": "Hm.", "thought": True}, call_part("add", id="x", args={"my_a": 3})]},
        {"role": "user", "parts": [{"functionResponse": {"id": "x", "name": "add", "response": {"my_b": 1}}}]},
    ],
    "tools": [{"functionDeclarations": [ADD, {"name": "b", "parametersJsonSchema": {"properties": {"a_b": {}}}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"maxOutputTokens": 9, "temperature": 0.5, "topP": 0.9, "topK": 64, "stopSequences": ["."],
                         "candidateCount": 1, "presencePenalty": 0, "responseMimeType": "text/plain"},
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields of a request are, but for those of the client's own objects."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in rows:
        yield (*path, name)
        if name not in FREE and "properties" not in path:
            yield from places(one, (*path, name))


async def test_every_field_of_a_wrong_type_is_a_400_in_googles_form() -> None:
    paths = [path for path in places(FULL) if path[-2:-1] not in (("parameters",), ("parametersJsonSchema",))]
    async with open_agents(lambda prompt: "Hi.") as harness, harness.session() as agent:
        for path, wrong in product(paths, (True, 5, "NONSENSE", [7], {"x": 7})):
            body = copy.deepcopy(FULL)
            *above, last = path
            holder = reduce(getitem, above, body)
            if type(wrong) is type(holder[last]) or (isinstance(wrong, int) and isinstance(holder[last], int | float)):
                continue
            if last in ("systemInstruction", "stopSequences") and isinstance(wrong, str):
                continue  # A text is as good.
            holder[last] = wrong
            refused = await post(agent, GENERATE, body)
            assert refused.status_code == 400, (path, wrong, refused.text)
            assert refused.json()["error"]["status"] == "INVALID_ARGUMENT"


def spell(value: Any) -> Any:
    """With the names of fields as they are in the proto."""
    if isinstance(value, list):
        return [spell(one) for one in value]
    if not isinstance(value, dict):
        return value
    rows = ((re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", name), name, one) for name, one in value.items())
    return {new: one if name in FREE else spell(one) for new, name, one in rows}


def test_both_spellings_of_fields_are_read() -> None:
    asked = [GoogleDialect(stream=False).read_request(body, MessageCache()) for body in (FULL, spell(FULL))]
    assert "system_instruction" in spell(FULL) and asked[0] == asked[1]
    assert asked[0].max_tokens == 9 and len(asked[0].messages) == 4 and len(asked[0].tools) == 2


def test_images_are_read_from_questions_and_from_results() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": b64encode(png()).decode()}}
    question = {"role": "user", "parts": [{"text": "What?"}, image]}
    look = {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]}
    messages = read(question, look, {"role": "user", "parts": [answer_part("look", parts=[image])]})
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image"]
    assert [part["type"] for part in messages[2]["content"]] == ["text", "image"]


def test_functions_are_read_in_both_kinds_of_schemas_and_other_tools_are_named() -> None:
    plain = {"name": "look", "parametersJsonSchema": {"type": "object", "properties": {"b": {"type": "string"}}}}
    body = {"contents": [ASK], "tools": [{"functionDeclarations": [ADD, plain]}, {"googleSearch": {}}]}
    asked = GoogleDialect(stream=True).read_request(body, MessageCache())
    schemas = [tool["function"]["parameters"] for tool in asked.tools]
    assert [schema["type"] for schema in schemas] == ["object", "object"]
    assert schemas[0]["properties"]["a"] == {"type": "number"} and asked.options["left_out"] == ("googleSearch",)
    assert asked.stream and not asked.asked_form


def test_wishes_are_read_and_a_forced_form_is_noted() -> None:
    config = {"maxOutputTokens": 9, "temperature": 0.5, "topP": 0.9, "topK": 64, "stopSequences": ["."]}
    body = {"contents": [ASK], "generationConfig": {**config, "responseMimeType": "application/json"}}
    asked = GoogleDialect(stream=False).read_request(body, MessageCache())
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.stop) == (9, 0.5, 0.9, (".",))
    assert asked.asked_form and asked.options["left_out"] == ("top_k",)
    tools = [{"functionDeclarations": [ADD]}]
    for mode, offered, is_forced in (("ANY", 1, True), ("NONE", 0, False), ("AUTO", 1, False)):
        choice = {"functionCallingConfig": {"mode": mode}}
        body = {"contents": [ASK], "tools": tools, "toolConfig": choice}
        asked = GoogleDialect(stream=False).read_request(body, MessageCache())
        assert (len(asked.tools), asked.asked_form) == (offered, is_forced)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "contents"),
        ({"contents": [{"role": "tool", "parts": []}]}, "contents.0.role"),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents.0"),
        ({"contents": [{"role": "model", "parts": [{"executableCode": {}}]}]}, "contents.0"),
        ({"contents": [{"parts": [{"functionResponse": {}}]}]}, "contents.0.functionResponse"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]}, "contents.0.functionCall"),
        ({"contents": [{"role": "model", "parts": [{"text": "a", **call_part("add")}]}]}, "contents.0"),
        ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, "contents.0"),
        ({"contents": [3]}, "contents.0"),
        ({"contents": [{"parts": [{"functionResponse": 3}]}]}, "functionResponse"),
        ({"contents": [{}]}, "contents.0.parts"),
        ({"contents": [{"role": "user", "content": "hi"}]}, "contents.0.parts"),
        ({"contents": [{"role": "model", "content": "hi"}]}, "contents.0.parts"),
        ({"contents": [ASK], "cached_content": "cachedContents/1"}, "cachedContent"),
        ({"contents": [ASK], "tools": [{"functionDeclarations": [{}]}]}, "tools.0"),
        ({"contents": [ASK], "toolConfig": {"functionCallingConfig": {"mode": "NONSENSE"}}}, "mode"),
        ({"contents": [ASK], "generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"contents": [ASK], "generationConfig": {"presencePenalty": 1}}, "presencePenalty"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PolicyProblem) as caught:
        GoogleDialect(stream=False).read_request(body, MessageCache())
    assert caught.value.param == param


async def test_parts_that_come_back_go_on_from_the_ids_under_any_models_name() -> None:
    async with open_agents([TURN, "It is 7."]) as harness, harness.session() as agent:
        body: dict[str, Any] = {"tools": [{"functionDeclarations": [ADD]}]}
        first = (await post(agent, GENERATE, {**body, "contents": [ASK]})).json()
        said = first["candidates"][0]["content"]
        thought, text, call = said["parts"]
        assert (thought, text) == ({"text": "Sum them.", "thought": True}, {"text": "I add."})
        assert call["functionCall"]["args"] == {"a": 3, "b": 4}
        contents = [ASK, {**said, "parts": [text, call]}, {"role": "user", "parts": [answer_part()]}]
        second = (await post(agent, STREAM, {**body, "contents": contents})).text
        chunks = read_events(second)
        assert "".join(chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks[:-1]) == "It is 7."
        assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["usageMetadata"]["totalTokenCount"]
        (ledger,) = agent.session.tree.ledgers()
        assert len(ledger.turns) == 2 and '{"a":3,   "b": 4}' in TEMPLATE.tokenizer.decode(ledger.ids)


async def test_problems_and_counts_have_googles_form_and_keep_nothing() -> None:
    async with open_agents(["Hi."]) as harness, harness.session() as agent:
        refused = await post(agent, GENERATE, {"contents": []})
        assert (refused.status_code, refused.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        path = "/v1beta/models/x:countTokens"
        plain = (await post(agent, path, {"contents": [ASK]})).json()
        wrapped = {"generateContentRequest": {"contents": [ASK]}}
        assert plain["totalTokens"] > 0 and (await post(agent, path, wrapped)).json() == plain
        assert not agent.session.tree.turns


async def test_the_key_may_be_in_the_address_and_all_refusals_of_googles_paths_have_its_form() -> None:
    async with open_agents(["Hi."]) as harness, harness.session() as agent:
        url, key = str(agent.client.base_url).rstrip("/").removesuffix("/v1"), agent.session.api_key
        bare = httpx2.AsyncClient(timeout=30)
        async with bare:
            for wrong in ("", "?key=wrong"):
                assert (await bare.post(f"{url}{GENERATE}{wrong}", json={"contents": [ASK]})).status_code == 404
            assert (await bare.post(f"{url}{GENERATE}?key={key}", json={"contents": [ASK]})).status_code == 200
        for path, status in (
            ("/v1beta/models", 404),
            ("/v1beta/tunedModels/x:generateContent", 404),
            ("/v1/models/x:embedContent", 404),
            ("/v1beta/models/x:streamGenerateContent", 400),
        ):
            refused = await post(agent, path, {"contents": [ASK]})
            assert refused.status_code == refused.json()["error"]["code"] == status
        assert "alt=sse" in refused.json()["error"]["message"]
