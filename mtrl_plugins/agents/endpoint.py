"""The HTTP endpoint for agents: the policy in the protocols of OpenAI, Anthropic and Google; an address per session.

/sessions                                POST: a program opens a session (`agent.external`)
/sessions/{id}/reward                    POST: the reward of the rollout
/sessions/{id}/end                       POST: the rollout is over
/sessions/{id}/mcp                       the rollout's tools as an MCP server
/sessions/{id}/v1/models                 the model with its context length
/sessions/{id}/v1/chat/completions       Chat Completions
/sessions/{id}/v1/responses              Responses
/sessions/{id}/v1/messages               Anthropic Messages
/sessions/{id}/v1/messages/count_tokens  the tokens of a prompt, of which nothing is kept
/sessions/{id}/v1beta/models/{model}:... Gemini: generateContent, streamGenerateContent, countTokens

Requests need the session's key; opening a session needs the run's.
"""

from __future__ import annotations

import hmac
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from anyio import to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.bounded_json import JsonDepthError, JsonLimitError, loads
from gateway.http.endpoint import DisconnectWatcher, Endpoint, Router
from gateway.http.exchange import ClientDisconnected, Request, Response, json_response
from gateway.mcp_server.session_app import SessionMcpApp
from mtrl_plugins.agents import anthropic_dialect, chat_dialect, google_dialect, responses_dialect
from mtrl_plugins.agents.agent_session import AgentSession
from mtrl_plugins.agents.anthropic_dialect import AnthropicEvents
from mtrl_plugins.agents.chat_dialect import ChatEvents
from mtrl_plugins.agents.google_dialect import GoogleDialect, GoogleEvents, GooglePaths
from mtrl_plugins.agents.requests import (
    MessageCache,
    PolicyAnswer,
    PolicyProblem,
    PolicyRequest,
    ProblemKind,
    read_query,
    require,
)
from mtrl_plugins.agents.responses_dialect import ResponsesEvents
from mtrl_plugins.agents.turn_stream import FAILED, AnswerStream, EventWriter

log = logging.getLogger(__name__)
DIRECT_LENGTH = 2**20
"""Longer bodies are parsed beside the event loop, which takes ten times the CPU."""
MODEL = "policy"
"""The name of the model, under which agents ask for it; any other name is served, too."""

NAME_LENGTH, MOST_REWARDS = 100, 100
"""Bounds on the rewards that a program may post."""
_GOOGLE_PATH = re.compile(r"/v1(alpha|beta)(/|$)|/models/[^/]+:|/google/")
"""In paths whose refusals have Google's form."""
BOX_BYTES = 128 * 1024 * 1024
"""Of bodies that one box has under way."""


class Dialect(Protocol):
    """A protocol: a module, or an object, that reads requests and writes answers."""

    @property
    def PATH(self) -> str: ...
    def read_request(self, body: Mapping[str, Any], cache: MessageCache) -> PolicyRequest: ...
    def write_answer(self, answer: PolicyAnswer, request: PolicyRequest) -> bytes: ...
    def write_problem(self, problem: PolicyProblem) -> bytes: ...


GOOGLE = GoogleDialect(stream=False)
DIALECTS: tuple[tuple[Dialect, type[EventWriter]], ...] = (
    (chat_dialect, ChatEvents),
    (responses_dialect, ResponsesEvents),
    (anthropic_dialect, AnthropicEvents),
    (GOOGLE, GoogleEvents),
    (GoogleDialect(stream=True), GoogleEvents),
)
Read = Callable[[Mapping[str, Any], MessageCache], PolicyRequest]
COUNTED: tuple[tuple[str, Dialect, Read, str], ...] = (
    ("/v1/messages/count_tokens", anthropic_dialect, anthropic_dialect.read_request, "input_tokens"),
    (google_dialect.COUNT_PATH, GOOGLE, google_dialect.read_counted, "totalTokens"),
)
"""Where tokens are counted: the path, its protocol, what reads a request, and the field of the answer."""
Answer = Callable[[Request], Awaitable[ASGIApp]]
OpenSession = Callable[[Mapping[str, Any]], Awaitable[AgentSession]]
"""Gives a program that asks for one a session, with what it said."""


class AgentEndpoint:
    """The ASGI application, and the sessions that it serves."""

    def __init__(self, run_key: str, open_session: OpenSession) -> None:
        self.sessions: dict[str, AgentSession] = {}
        self.url = ""
        """Where agents reach it."""
        self.run_key = run_key
        self._open_session = open_session
        self.disconnects = DisconnectWatcher()
        self.tools = SessionMcpApp()
        apps: dict[str, ASGIApp] = {
            "/sessions": self._endpoint("POST", self._open),
            "/sessions/{id}/reward": self._endpoint("POST", self._reward),
            "/sessions/{id}/end": self._endpoint("POST", self._end),
            "/sessions/{id}/mcp": _Tools(self),
            "/sessions/{id}/v1/models": self._endpoint("GET", self._models),
        }
        for path, dialect, read, field in COUNTED:
            apps[f"/sessions/{{id}}{path}"] = self._endpoint("POST", partial(self._count_tokens, read, field), dialect)
        for dialect, events in DIALECTS:
            generate = self._endpoint("POST", partial(self._generate, dialect, events), dialect)
            apps[f"/sessions/{{id}}{dialect.PATH}"] = generate
        self.app: ASGIApp = GooglePaths(Router(apps, _not_found))

    def _endpoint(self, method: str, answer: Answer, dialect: Dialect = chat_dialect) -> Endpoint:
        """An endpoint that says what went wrong in a protocol's form."""

        async def handle(request: Request) -> ASGIApp:
            try:
                return await answer(request)
            except PolicyProblem as problem:
                return Response(dialect.write_problem(problem), problem.status)
            except ClientDisconnected:
                raise
            except Exception:  # boundary: one request must not end the run
                log.exception("a request of an agent failed")
                failed = PolicyProblem("unavailable", FAILED)
                return Response(dialect.write_problem(failed), failed.status)

        return Endpoint({method: handle})

    def base_url(self, session: AgentSession) -> str:
        """The address under which clients of OpenAI reach the policy."""
        return f"{self.url}/sessions/{session.id}/v1"

    def find(self, request: Request) -> AgentSession:
        """The session of a request. Raises the same problem for a wrong key and for an unknown session."""
        session = self.sessions.get(request.path_params["id"])
        if session is None or not is_key(request.scope, session.api_key):
            raise PolicyProblem("not_found", "there is no such session, or it has ended, or its key is another")
        session.use.touch()
        return session

    async def _open(self, request: Request) -> ASGIApp:
        if not is_key(request.scope, self.run_key):
            raise PolicyProblem("unauthorized", "opening a session needs the run's key")
        body = await read_body(request)
        session = await self.disconnects.run_until_disconnect(request.receive, lambda: self._open_session(body))
        return json_response(self.describe(session))

    def describe(self, session: AgentSession, address: str = "") -> dict[str, Any]:
        """What a program needs to play a session; it may reach the endpoint at another address."""
        url = f"{address or self.url}/sessions/{session.id}"
        about = {"id": session.id, "base_url": f"{url}/v1", "anthropic_base_url": url, "api_key": session.api_key}
        return about | {"mcp_url": f"{url}/mcp" if session.tools else "", "model": MODEL, **session.opening}

    async def _reward(self, request: Request) -> ASGIApp:
        session, body = self.find(request), await read_body(request)
        value, name = body.get("reward"), body.get("name", "agent")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        require(is_number, "must be a finite number", "reward")
        require(isinstance(name, str) and 0 < len(name) <= NAME_LENGTH, "must be a short text", "name")
        require(name in session.rewards or len(session.rewards) < MOST_REWARDS, "there are too many rewards", "name")
        session.rewards[name] = float(value)  # type: ignore[arg-type]
        return json_response({"rewards": session.rewards})

    async def _end(self, request: Request) -> ASGIApp:
        session = self.find(request)
        session.ended.set()
        return json_response({"turns": len(session.tree.turns), "rewards": session.rewards})

    async def _count_tokens(self, read: Read, field: str, request: Request) -> ASGIApp:
        session = self.find(request)
        asked = read(await read_body(request), session.messages)
        return json_response({field: await session.count_tokens(asked)})

    async def _models(self, request: Request) -> ASGIApp:
        limit = self.find(request).context_length
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mtrl"}
        model |= {"context_length": limit, "context_window": limit, "max_model_len": limit}
        return json_response({"object": "list", "data": [model], "has_more": False})

    async def _generate(self, dialect: Dialect, events: type[EventWriter], request: Request) -> ASGIApp:
        session, watcher = self.find(request), self.disconnects
        asked = dialect.read_request(await read_body(request), session.messages)
        if asked.stream:
            write_problem = dialect.write_problem
            return AnswerStream(lambda stream: session.answer(asked, stream), events(asked), write_problem, watcher)
        turn = await watcher.run_until_disconnect(request.receive, lambda: session.answer(asked))
        return Response(dialect.write_answer(turn, asked))


class BoxApp:
    """The endpoint as a box sees it: one session's, without rewards, which what the policy runs could post there, and
    with few bytes under way, since what it sends lies in our memory."""

    def __init__(self, app: ASGIApp, session: AgentSession) -> None:
        self._app, self._place, self._bytes = app, f"/sessions/{session.id}/", 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        if scope["type"] == "http" and path == f"{self._place}reward":
            text = "no reward is taken from a box; use `agent.grade`, a reward function, or `agent.sandbox: none`"
            problem = PolicyProblem("unauthorized", text)
            await _refuse(problem, scope, receive, send)
        elif scope["type"] == "http" and not path.startswith(self._place):
            await _not_found(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request whose body counts until the answer; the one that is too much is given up."""
        taken, is_refused, has_started = 0, False, False

        async def count() -> Message:
            nonlocal taken, is_refused
            message = await receive()
            size = len(message.get("body", b""))
            taken, self._bytes = taken + size, self._bytes + size
            is_refused = is_refused or self._bytes > BOX_BYTES
            return {"type": "http.disconnect"} if is_refused else message

        async def start(message: Message) -> None:
            nonlocal has_started
            if has_started or not is_refused:  # What the application says of a lost client is left out.
                has_started = True
                await send(message)

        try:
            await self._app(scope, count, start)
        finally:
            self._bytes -= taken
        if is_refused and not has_started:
            text = f"requests of more than {BOX_BYTES} bytes are under way; ask again when some are answered"
            problem = PolicyProblem("unavailable", text)
            await _refuse(problem, scope, receive, send)


class _Tools:
    """The MCP server of a session's tools."""

    def __init__(self, endpoint: AgentEndpoint) -> None:
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            session = self.endpoint.find(Request(scope, receive))
            if (tools := session.tools) is None:
                raise PolicyProblem("not_found", "the session has no tools")
        except PolicyProblem as problem:
            await _refuse(problem, scope, receive, send)
        else:
            with session.use.under_way():
                await self.endpoint.tools.serve(tools, scope, receive, send)


async def read_body(request: Request) -> Mapping[str, Any]:
    """The JSON object in a request's body."""
    data = await request.receive_body()
    try:
        if len(data) <= DIRECT_LENGTH:
            body = loads(data or b"{}")
        else:
            body = await to_thread.run_sync(loads, data)
    except JsonLimitError as error:
        kind: ProblemKind = "invalid_request" if isinstance(error, JsonDepthError) else "too_large"
        raise PolicyProblem(kind, f"the body is too much: {error}") from error
    except ValueError as error:
        raise PolicyProblem("invalid_request", f"the body is no JSON: {error}") from error
    require(isinstance(body, dict), "the body must be a JSON object", "")
    return dict(body)


def read_key(scope: Scope) -> str:
    """The key of a request, as clients of OpenAI, Anthropic or Google send it."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:]
    key = (headers.get(b"x-api-key") or headers.get(b"x-goog-api-key", b"")).decode("latin-1")
    return key or read_query(scope, "key")


def is_key(scope: Scope, key: str) -> bool:
    """Whether a request has the key, compared in constant time. Where the key is empty, any request does."""
    return not key or hmac.compare_digest(read_key(scope).encode(), key.encode())


async def _refuse(problem: PolicyProblem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in the form of the path's protocol."""
    dialect = GOOGLE if _GOOGLE_PATH.search(scope["path"]) else chat_dialect
    await Response(dialect.write_problem(problem), problem.status)(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    problem = PolicyProblem("not_found", f"there is nothing at {scope.get('path', '')[:200]}")
    await _refuse(problem, scope, receive, send)
