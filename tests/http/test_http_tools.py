"""GET /v1/tools: the list as a chat API takes it."""

from __future__ import annotations

from gateway.gateway import Gateway
from gateway.wire import spec_of
from tests.http.rooms import Caller, rooms
from tests.served import Served


def names(listed: dict[str, object]) -> list[str]:
    return [tool["function"]["name"] for tool in listed["data"]]  # type: ignore[attr-defined]


async def test_the_list_holds_what_the_policy_may_call(ask: Caller) -> None:
    listed = (await ask("GET", "/v1/tools")).json()
    assert listed["object"] == "list"
    assert "add" in names(listed) and "feedback_gsm8k" not in names(listed)
    add = listed["data"][0]
    assert add["type"] == "function" and add["function"]["description"] == "Adds two numbers."
    assert add["function"]["parameters"]["required"] == ["a"] and "strict" not in add["function"]


async def test_an_audience_can_be_chosen(ask: Caller) -> None:
    loop = (await ask("GET", "/v1/tools?audience=loop")).json()
    everyone = (await ask("GET", "/v1/tools?audience=all")).json()
    assert names(loop) == ["feedback_gsm8k", "feedback_scripted"]
    assert set(names(everyone)) > {"add", "feedback_gsm8k"}


async def test_strict_schemas_are_given_where_they_can_be(ask: Caller) -> None:
    listed = (await ask("GET", "/v1/tools?strict=true")).json()["data"]
    functions = {tool["function"]["name"]: tool["function"] for tool in listed}
    assert functions["pick"]["strict"] is True
    assert functions["pick"]["parameters"]["required"] == ["colour", "shade", "size"]
    assert functions["pick"]["parameters"]["additionalProperties"] is False
    assert functions["free"]["strict"] is False
    assert functions["free"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": True}


async def test_the_form_spec_loses_nothing(ask: Caller, at: Served) -> None:
    listed = (await ask("GET", "/v1/tools?form=spec&audience=all")).json()["data"]
    assert tuple(spec_of(value) for value in listed) == tuple(at.gateway.specs)


async def test_a_wrong_word_in_the_query_is_named(ask: Caller) -> None:
    answer = await ask("GET", "/v1/tools?audience=everyone")
    assert answer.status_code == 422
    assert answer.json()["error"] == {
        "type": "invalid_request",
        "message": "No such audience.",
        "remedy": "Use one of: policy, loop, all.",
        "param": "audience",
    }


async def test_names_are_safe_for_a_chat_api() -> None:
    async with Gateway(rooms()) as gateway:
        assert all(len(spec.name) <= 64 and spec.name.replace("_", "a").isalnum() for spec in gateway.specs)
