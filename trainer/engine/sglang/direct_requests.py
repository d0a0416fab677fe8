"""Requests that a worker sends to SGLang servers itself, so that no token passes through the training process.

The training process's engine decides which request goes to which server under which weights, and sees the answers
without their ids and logprobs.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import count
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
from anyio import to_thread

from trainer.engine.base import EngineError, Generation
from trainer.engine.sglang.http_client import CONNECT_S, LIMITS, json_or_none
from trainer.engine.sglang.request import parse_generation

Message = Mapping[str, Any]
MAX_IDS = 1 << 24
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
INDIRECT_S = 60.0
"""How long a worker that cannot reach a server leaves requests to the training process."""
NOT_REACHED, BROKEN, UNREADABLE = "not reached", "broken", "unreadable"
"""Why a request has no answer."""


class NotReachedError(Exception):
    """The worker cannot connect to the server; the training process may."""


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    """An HTTP response to a worker, in which ids and logprobs are placeholders."""

    status_code: int
    content: Any
    text: str = ""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    def json(self) -> Any:
        return self.content


@dataclass(eq=False)
class _Pending:
    done: anyio.Event = field(default_factory=anyio.Event)
    answer: ForwardedAnswer | Exception | None = None


class RequestForwarder:
    """The training process's side of one turn: has the worker send what the engine asks for."""

    def __init__(self, send: Callable[[Message], None], rollout: int, turn: int, *, is_local: bool) -> None:
        """`is_local`: the worker is of this machine, and reaches servers that only this machine reaches."""
        self._send, self._name, self._is_local = send, {"r": rollout, "g": turn}, is_local
        self._numbers = count()
        self._pending: dict[int, _Pending] = {}

    async def post(self, url: str, body: Mapping[str, Any]) -> ForwardedAnswer:
        """The server's answer. Raises NotReachedError, EngineError or what httpx raises where a connection breaks."""
        if not self._is_local and is_loopback(url):
            raise NotReachedError(url)
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        content = {name: value for name, value in body.items() if name != "input_ids"}
        self._send({"t": "send", **self._name, "n": number, "url": url, "body": content})
        try:
            await pending.done.wait()  # The engine's own limit bounds it, and the end of the connection.
        except anyio.get_cancelled_exc_class():
            self._send({"t": "unsend", **self._name, "n": number})
            raise
        finally:
            del self._pending[number]
        if isinstance(pending.answer, ForwardedAnswer):
            return pending.answer
        raise pending.answer or NotReachedError(url)

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes a worker's answer. Raises KeyError, TypeError or ValueError for anything else."""
        pending, answer = self._pending.get(message["n"]), _read_answer(message)
        if pending is not None:
            pending.answer = answer
            pending.done.set()


def _read_answer(message: Mapping[str, Any]) -> ForwardedAnswer | Exception:
    if "failed" in message:
        kinds: Mapping[str, type[Exception]] = {
            NOT_REACHED: NotReachedError,
            BROKEN: httpx2.ReadError,
            UNREADABLE: EngineError,
        }
        return kinds[message["failed"]](str(message["error"])[:2000])
    status, ids, content = message["status"], message["ids"], message["content"]
    if type(status) is not int or type(ids) is not int or not 0 <= ids <= MAX_IDS:
        raise ValueError("an answer has no status, or no number of ids")
    if ids or "meta_info" in (content or {}):
        meta = {**content["meta_info"], "output_token_logprobs": [(0.0, 0)] * ids}
        content = {**content, "output_ids": [0] * ids, "meta_info": meta}
    return ForwardedAnswer(status, content, str(message.get("text", ""))[:2000])


def is_loopback(url: str) -> bool:
    """Whether only the machine itself reaches an address."""
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class DirectClient:
    """The worker's side: sends requests to servers. An async context manager."""

    def __init__(self) -> None:
        self._clients: dict[str, httpx2.AsyncClient] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.move_on_after(5, shield=True):
            await self._stack.aclose()

    async def post(
        self, url: str, body: Mapping[str, Any], ids: Sequence[int]
    ) -> tuple[dict[str, Any], Generation | None]:
        """What the training process is told of the answer; and the generation, if there is one."""
        try:
            client = await self._open(url)
            answer = await client.post(url, json={**body, "input_ids": list(ids)})
        except UNREACHABLE as error:
            return {"failed": NOT_REACHED, "error": f"{type(error).__name__}: {error}"}, None
        except httpx2.HTTPError as error:
            return {"failed": BROKEN, "error": f"{type(error).__name__}: {error}"}, None
        content = json_or_none(answer)
        if not answer.is_success:
            return {"status": answer.status_code, "ids": 0, "content": content, "text": answer.text[:2000]}, None
        try:
            most = int(body["sampling_params"]["max_new_tokens"])
            generation = parse_generation(content, len(ids), most, images=False)
        except (EngineError, KeyError, TypeError, ValueError) as error:
            return {"failed": UNREADABLE, "error": str(error)}, None
        reported = {name: value for name, value in content.items() if name not in ("output_ids", "text")}
        reported["meta_info"] = {
            name: value for name, value in content["meta_info"].items() if name not in TOKEN_FIELDS
        }
        return {"status": answer.status_code, "ids": len(generation.ids), "content": reported}, generation

    async def _open(self, url: str) -> httpx2.AsyncClient:
        scheme = url.partition(":")[0].lower()
        if scheme not in self._clients:
            tls = (
                await to_thread.run_sync(ssl.create_default_context)
                if scheme == "https"
                else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
            timeout = httpx2.Timeout(None, connect=CONNECT_S)
            client = httpx2.AsyncClient(timeout=timeout, limits=LIMITS, verify=tls, trust_env=False)
            self._clients.setdefault(scheme, await self._stack.enter_async_context(client))
        return self._clients[scheme]


TOKEN_FIELDS = ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "input_top_logprobs")
"""Fields of an answer as long as its tokens."""
