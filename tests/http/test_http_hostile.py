"""Whatever is sent, the answer is a documented one, never a 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.rooms import Caller, tool_call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON}, optional={"id": JSON, "type": JSON})),
        "messages": JSON | st.lists(st.fixed_dictionaries({}, optional={"tool_calls": JSON})),
        "layout": JSON,
        "audience": JSON,
    },
)
CALLS = st.fixed_dictionaries(
    {
        "tool_calls": st.lists(
            st.builds(tool_call, st.sampled_from(["add", "facts", "pick"]) | st.text(), st.text() | JSON, st.text()),
            max_size=4,
        )
    }
)
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def id(ask: Caller) -> str:
    return await ask.begin(strict=True)


@many
@given(body=JSON | NEAR | CALLS)
async def test_no_json_breaks_the_calls(ask: Caller, id: str, body: Any) -> None:
    for path in (f"/v1/sessions/{id}/calls", "/v1/calls"):
        answer = await ask("POST", path, body)
        assert answer.status_code in (200, 400, 409, 422)


@many
@given(body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
async def test_no_bytes_break_the_other_rooms(ask: Caller, id: str, body: bytes) -> None:
    for path in ("/v1/sessions", f"/v1/sessions/{id}/feedback"):
        answer = await ask("POST", path, body)
        assert answer.status_code in (201, 400, 409, 422) or (path.endswith("feedback") and answer.status_code == 200)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"tool_calls": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"tool_calls":' * 50_000, 400),
        (b'{"tool_calls": [' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"]}", 400),
        (b"null", 422),
        (b'"calls"', 422),
        (b"1e999", 422),
        (b'{"tool_calls": NaN}', 422),
    ],
)
async def test_what_is_no_request_is_refused(ask: Caller, id: str, body: bytes, status: int) -> None:
    with anyio.fail_after(10):
        answer = await ask("POST", f"/v1/sessions/{id}/calls", body)
    assert answer.status_code == status and "Traceback" not in answer.text


async def test_arguments_of_any_depth_are_the_policys_mistake(ask: Caller, id: str) -> None:
    for arguments in ("[" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000, '{"a": 1e999}', "9" * 10_000):
        said = await ask.call(id, "add", arguments)
        assert said["results"][0]["outcome"] == "invalid"


async def test_names_may_be_any_text(ask: Caller, id: str) -> None:
    for name in ("добавить", "<script>", "a" * 10_000, "\0", "../../etc/passwd"):
        said = await ask.call(id, name)
        assert said["results"][0]["outcome"] == "invalid" and said["results"][0]["name"] == name


async def test_an_id_that_never_was_is_like_one_that_is_gone(ask: Caller) -> None:
    for id in ("nobody", "%2e%2e", "a" * 5000, "%00", "ü"):
        answer = await ask("GET", f"/v1/sessions/{id}")
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "id"


async def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_shape(ask: Caller) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/tools/", 404),
        ("GET", "/v1/sessions/a/b/c", 404),
        ("PUT", "/v1/tools", 405),
        ("GET", "/v1/calls", 405),
    ):
        answer = await ask(method, path)
        assert answer.status_code == status and answer.json()["error"]["remedy"]
    assert (await ask("PATCH", "/v1/sessions/x")).headers["allow"] == "GET, DELETE"


async def test_a_head_request_is_a_get_without_its_body(ask: Caller) -> None:
    answer = await ask("HEAD", "/healthz")
    assert answer.status_code == 200 and answer.content == b""


async def test_numbers_that_json_does_not_know_become_null(ask: Caller, id: str) -> None:
    said = await ask.call(id, "odd", audience="policy")
    (result,) = said["results"]
    assert result["structured"] == {"nan": None, "thing": "<thing>"} and result["reward"] is None
