"""A chat endpoint is asked until it answers or its deadline comes; what it would refuse for good is asked once."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import anyio
import httpx2

from gateway.errors import Unavailable

ANSWER_BYTES = 1024 * 1024
"""A larger answer is refused while it is read."""
BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0
UNREACHED, BUSY = 0, 429


class ChatEndpoint:
    """`POST {base_url}/chat/completions` of anything that speaks OpenAI's API, over one shared client."""

    def __init__(self, base_url: str, key: str, timeout_s: float, retries: int) -> None:
        self._url = httpx2.URL(base_url.rstrip("/") + "/chat/completions")
        self._key = key
        self._timeout_s = timeout_s
        self._retries = retries
        self._client: httpx2.AsyncClient | None = None

    @property
    def shown(self) -> str:
        """Where it is, without what a URL may hold of a secret."""
        return f"{self._url.scheme}://{self._url.host}" + (f":{self._url.port}" if self._url.port else "")

    async def ask(self, body: dict[str, Any]) -> str:
        """The text of the first choice."""
        with anyio.move_on_after(self._timeout_s):
            return _text(await self._answer(body), self.shown)
        raise TimeoutError(f"{self.shown} gave no answer within {self._timeout_s:g} s")

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _answer(self, body: dict[str, Any]) -> bytes:
        for attempt in count():
            status, wait_s, answer = await self._post(body)
            if status == httpx2.codes.OK:
                break
            passing = status in (UNREACHED, BUSY) or status >= httpx2.codes.INTERNAL_SERVER_ERROR
            if attempt == self._retries or not passing:
                # Never the body: some endpoints repeat the key in it.
                problem = f"answered with status {status}" if status else "cannot be reached"
                raise Unavailable(f"{self.shown} {problem}")
            backoff_s = BACKOFF_S * 2**attempt if wait_s is None else wait_s
            await anyio.sleep(min(backoff_s, LONGEST_BACKOFF_S))
        return answer

    async def _post(self, body: dict[str, Any]) -> tuple[int, float | None, bytes]:
        """Status, the wait that the endpoint asks for, and the answer."""
        if self._client is None:
            # One deadline holds for the whole question; a second one here would only race with it.
            self._client = httpx2.AsyncClient(timeout=None)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        answer = bytearray()
        try:
            async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > ANSWER_BYTES:
                        raise Unavailable(f"{self.shown} answered with more than {ANSWER_BYTES} bytes")
        except httpx2.ConnectError:
            return UNREACHED, None, b""
        except httpx2.HTTPError as error:
            # It may have been heard and paid for: not asked again.
            raise Unavailable(f"{self.shown} broke off: {type(error).__name__}") from None
        wait = response.headers.get("retry-after", "")
        return response.status_code, float(wait) if wait.isdecimal() else None, bytes(answer)


def _text(answer: bytes, where: str) -> str:
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise Unavailable(f"{where} answered with something that is no chat completion") from None
    if not isinstance(text, str):
        raise Unavailable(f"{where} answered without a text")
    return text
