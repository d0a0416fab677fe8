"""Property tests: any request gets a documented response, never a 500, and the server keeps working."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.api_client import ApiClient, tool_call
from tests.waiting import PATIENCE_S

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NEAR_VALID = st.fixed_dictionaries(
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
async def id(client: ApiClient) -> str:
    return await client.begin(strict=True)


@many
@given(body=JSON | NEAR_VALID | CALLS)
async def test_arbitrary_json_never_breaks_the_calls_route(client: ApiClient, id: str, body: Any) -> None:
    for path in (f"/v1/sessions/{id}/calls", "/v1/calls"):
        answer = await client("POST", path, body)
        assert answer.status_code in (200, 400, 409, 422)


@many
@given(body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
async def test_arbitrary_bytes_never_break_the_other_routes(client: ApiClient, id: str, body: bytes) -> None:
    for path in ("/v1/sessions", f"/v1/sessions/{id}/feedback"):
        answer = await client("POST", path, body)
        assert answer.status_code in (201, 400, 409, 422) or (path.endswith("feedback") and answer.status_code == 200)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"tool_calls": "\xff"}', 400),
        (b"[" * 90_000, 400),
        (b"null", 422),
        (b'{"tool_calls": NaN}', 422),
    ],
)
async def test_malformed_request_is_refused(client: ApiClient, id: str, body: bytes, status: int) -> None:
    with anyio.fail_after(PATIENCE_S):
        answer = await client("POST", f"/v1/sessions/{id}/calls", body)
    assert answer.status_code == status and "Traceback" not in answer.text


async def test_unknown_and_closed_ids_get_the_same_error(client: ApiClient) -> None:
    for id in ("nobody", "%2e%2e", "a" * 5000, "%00", "ü"):
        answer = await client("GET", f"/v1/sessions/{id}")
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "id"


async def test_unknown_paths_methods_and_parameters_use_the_error_format(client: ApiClient) -> None:
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/tools/", 404), ("GET", "/v1/sessions/a/b/c", 404),
                                 ("PUT", "/v1/tools", 405), ("GET", "/v1/calls", 405), ("HEAD", "/healthz", 200),
                                 ("GET", "/v1/tools?audience=everyone", 422)):  # fmt: skip
        answer = await client(method, path)
        assert answer.status_code == status and (status == 200 or answer.json()["error"]["remedy"])
    assert (await client("PATCH", "/v1/sessions/x")).headers["allow"] == "GET, DELETE"


async def test_non_finite_numbers_become_null(client: ApiClient, id: str) -> None:
    (result,) = (await client.call(id, "odd"))["results"]
    assert result["structured"] == {"nan": None, "thing": "<thing>"} and result["reward"] is None
