"""Invalid requests get a documented response, never a 500, and the server keeps working."""

from __future__ import annotations

import anyio
import pytest

from tests.http.api_client import ApiClient
from tests.waiting import PATIENCE_S


@pytest.fixture
async def id(client: ApiClient) -> str:
    return await client.begin(strict=True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"tool_calls": "\xff"}', 400),
        (b"[" * 90_000, 400),
        (b"null", 422),
        (b'{"tool_calls": NaN}', 422),
        (b'{"messages": [3]}', 422),
        (b'[{"function": 3}]', 422),
    ],
)
async def test_malformed_request_is_refused(client: ApiClient, id: str, body: bytes, status: int) -> None:
    with anyio.fail_after(PATIENCE_S):
        for path in (f"/v1/sessions/{id}/calls", "/v1/calls", f"/v1/sessions/{id}/feedback", "/v1/sessions"):
            answer = await client("POST", path, body)
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
