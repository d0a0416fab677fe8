"""The host process: runs another framework's environments with the Python that has them, and answers JSON lines.

Run by `child_entry.py`, with an adapter. Only the standard library is available here, and what that Python has. What is
served depends on the adapter: episodes of environments with `reset` and `step` (`EpisodeHost`), or rollouts of
environments with a runner of their own (`ConversationHost`), whose model is an endpoint in this process.

A request is `{"do": "open", ...}`; its answer is `{"ok": {...}}` or `{"error": {"problem": "...", "remedy": "..."}}`.
Answers come in any order. The first request is `load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib
import importlib.util
import json
import os
import random
import secrets
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, Self

from gateway.process.child_entry import MAX_BODY_BYTES, Wire, load_file

KEY_VARIABLE = "MTRL_POLICY_TOKEN"
"""The environment variable with the endpoint's key, which frameworks take keys from."""
OVER = "the policy can write no more turns: this rollout reached its maximum context length"
"""Clients of all frameworks recognise a prompt that is too long by these words."""
STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class ModelEndpoint:
    """Serves `POST /v1/chat/completions`; each request waits until the trainer has the policy's turn."""

    def __init__(self) -> None:
        self.conversations: OrderedDict[str, Any] = OrderedDict()
        """The rollouts by name."""
        self.key = secrets.token_urlsafe(24)
        os.environ[KEY_VARIABLE] = self.key
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL, which ends in `/v1`."""
        if self._server is None:
            raise RuntimeError("the endpoint is not open")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**16)
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the requests of one connection."""
        ends = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError)
        with suppress(*ends, ConnectionError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                length = int(headers.get("content-length", "0"))
                if not 0 <= length <= MAX_BODY_BYTES:
                    break
                status, answer = await self._answer(head[0], headers, await reader.readexactly(length))
                body = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} {STATUS[status]}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()

    async def _answer(self, request: str, headers: Mapping[str, str], body: bytes) -> tuple[int, Any]:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()):
            return 401, _refusal("the key is wrong")
        method, _, path = request.partition(" ")
        if (method, path.split(" ")[0]) != ("POST", "/v1/chat/completions"):
            return 404, _refusal("this endpoint only serves /v1/chat/completions")
        asked = json.loads(body)
        conversation = self.conversations.get(asked.get("model"))
        if conversation is None:
            return 404, _refusal("the `model` is no rollout of this process")
        if asked.get("stream"):
            return 400, _refusal("this endpoint does not stream")
        reply = await conversation.ask({"messages": asked.get("messages"), "tools": asked.get("tools") or []})
        return (400, _refusal(OVER)) if reply is None else (200, _completion(asked["model"], reply))


def _refusal(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "code": None}}


def _completion(model: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion with the policy's turn."""
    choice = {"index": 0, "message": reply["message"], "finish_reason": reply["finish_reason"], "logprobs": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": reply["usage"],
    }


MAX_EPISODES = 4096
"""Episodes that may be open at once."""
CLOSE_S = 3.0
"""How long all episodes may take to close once the trainer has gone."""


class EpisodeHost:
    """One environment and its open episodes.

    The adapter's `make(options)` returns an episode with `reset(seed, options)`, `step(action)` and `close()`.
    """

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.episodes: dict[str, EpisodeThread] = {}
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "open": self.open,
            "step": self.step,
            "close": self.close,
        }

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Any:
        """Makes an environment and begins its episode, under a name that the trainer chose."""
        if len(self.episodes) >= MAX_EPISODES:
            raise HostError(f"{MAX_EPISODES} episodes are open", "lower `sessions`")
        self.episodes[episode] = thread = EpisodeThread(self.adapter)
        return await thread.open(seed, options)

    async def step(self, episode: str, action: Mapping[str, Any]) -> Any:
        """Takes one step."""
        if episode not in self.episodes:
            raise HostError(f"{episode} is not open here")
        return await self.episodes[episode].step(action)

    async def close(self, episode: str) -> Any:
        """Ends an episode."""
        if (thread := self.episodes.pop(episode, None)) is not None:
            await thread.close()
        return {}

    async def close_all(self) -> None:
        """Ends all episodes, as far as they let themselves be ended."""
        closing = [asyncio.ensure_future(self.close(name)) for name in [*self.episodes]]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)


class EpisodeThread:
    """One episode and the thread in which all its methods run."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._random = GlobalRandom() if adapter.uses_global_random else None
        self._episode: Any = None

    async def open(self, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the environment and resets it."""

        def run() -> Any:
            if self._random is not None:  # The environment may draw from them before its `reset` seeds them.
                random.seed(seed)
                if importlib.util.find_spec("numpy") is not None:  # It may be imported only when the game is made.
                    importlib.import_module("numpy").random.seed(seed % 2**32)
            self._episode = self._adapter.make(options)
            return self._episode.reset(seed, options)

        answer: dict[str, Any] = await self._run(run)
        return answer

    async def step(self, action: Mapping[str, Any]) -> Any:
        """Takes a step."""
        return await self._run(lambda: self._episode.step(action))

    async def close(self) -> None:
        """Closes the environment, after the step that it is taking."""
        try:
            await self._run(lambda: self._episode and self._episode.close())
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[[], Any]) -> Any:
        def run() -> Any:
            if self._random is None:
                return function()
            with self._random:
                return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


class GlobalRandom:
    """The global random generators of one episode, for environments that draw from them.

    An episode's thread holds them while the environment runs, and lets go while it waits for others (`waiting`).

    Only one episode runs at a time, with its own state of the generators; so the same seed is the same episode, however
    many are open.
    """

    _lock = threading.Lock()
    _holder: GlobalRandom | None = None
    """The one whose state the generators have."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @classmethod
    @contextmanager
    def waiting(cls) -> Iterator[None]:
        """Lets other episodes run meanwhile: for the holder's thread, around a wait that draws nothing."""
        held = cls._holder
        if held is None:
            yield
            return
        held.__exit__()
        try:
            yield
        finally:
            held.__enter__()

    def __enter__(self) -> None:
        self._lock.acquire()
        GlobalRandom._holder = self
        if self._states is not None:
            random.setstate(self._states[0])
            if self._states[1] is not None:
                sys.modules["numpy"].random.set_state(self._states[1])

    def __exit__(self, *_: object) -> None:
        numpy = sys.modules.get("numpy")
        self._states = random.getstate(), numpy.random.get_state() if numpy is not None else None
        GlobalRandom._holder = None
        self._lock.release()


MAX_KEPT = 8192
"""Rollouts that are kept, with their scores, until the trainer closes them."""


class Conversation:
    """One rollout: what the environment asks of its model, and what the policy answers."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.run: asyncio.Task[Any] | None = None
        self.result: Any = None
        """What the environment's runner returned; dropped once it is scored."""
        self.score: dict[str, Any] | None = None
        self.is_over = False
        """The policy writes no more turns."""
        self.problem = ""
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The policy's next turn, for the endpoint; None if it can write no more."""
        if self._reply is not None:
            self.problem = "the environment asked for two turns at once; a rollout is one chat"
            return None
        if self.is_over:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(request)
        try:
            return await self._reply
        finally:
            self._reply = None

    def answer(self, reply: dict[str, Any] | None) -> None:
        """Gives the environment the policy's turn; None if there is none."""
        self.is_over = reply is None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)


class ConversationHost:
    """One environment and its rollouts."""

    def __init__(self, adapter: Any, endpoint: Any) -> None:
        self.adapter, self.endpoint = adapter, endpoint
        self.conversations: OrderedDict[str, Conversation] = endpoint.conversations
        self.count = 0
        self._scoring = asyncio.Lock()
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "rows": self.rows,
            "open": self.open,
            "turn": self.turn,
            "end": self.end,
            "score": self.score,
            "close": self.close,
        }

    async def close_all(self) -> None:
        """Cancels all runners."""
        for rollout in [*self.conversations]:
            self.close_one(rollout)

    async def rows(self, split: str, start: int, count: int) -> Any:
        """Some rows of the environment's data, each with a prompt, an answer and a digest of them."""
        rows = await asyncio.to_thread(self.adapter.rows, split, start, count)
        texts = [json.dumps(row, sort_keys=True, default=str) for row in rows]
        return [{**row, "digest": sha256(texts[at].encode()).hexdigest()[:16]} for at, row in enumerate(rows)]

    async def open(self, split: str, row: int, digest: str | None = None) -> Any:
        """Starts a rollout; returns what the environment asks of its model first."""
        if digest is not None and [digest] != [found["digest"] for found in await self.rows(split, row, 1)]:
            raise HostError(f"row {row} is no longer what it was", "let the environment order its rows by a fixed seed")
        self.count += 1
        name, conversation = f"rollout-{self.count}", Conversation()
        self.conversations[name] = conversation
        while len(self.conversations) > MAX_KEPT:
            self.close_one(next(iter(self.conversations)))
        conversation.run = asyncio.create_task(self.adapter.run(split, row, name))
        return {"rollout": name, **await self._next(conversation)}

    async def turn(self, rollout: str, reply: dict[str, Any]) -> Any:
        """Gives the environment a turn of the policy; returns what it asks next, or how it ended."""
        conversation = self._find(rollout)
        conversation.answer(reply)
        return await self._next(conversation)

    async def end(self, rollout: str) -> Any:
        """Tells the environment that the policy can write no more turns; returns how it ended."""
        conversation = self._find(rollout)
        conversation.answer(None)
        while "ended" not in (step := await self._next(conversation)):
            conversation.answer(None)
        return step

    async def score(self, rollouts: list[str]) -> Any:
        """The scores of a group's rollouts, which are computed once and together."""
        async with self._scoring:
            found = [self._find(rollout) for rollout in rollouts]
            todo = [conversation for conversation in found if conversation.score is None]
            if todo:
                scores = await self.adapter.score([conversation.result for conversation in todo])
                for conversation, score in zip(todo, scores, strict=True):
                    conversation.score, conversation.result = score, None
            return [conversation.score for conversation in found]

    async def close(self, rollout: str) -> Any:
        """Ends a rollout and forgets it."""
        self.close_one(rollout)
        return {}

    def close_one(self, rollout: str) -> None:
        """Cancels the environment's runner."""
        conversation = self.conversations.pop(rollout, None)
        if conversation is not None and conversation.run is not None:
            conversation.is_over = True
            conversation.run.cancel()

    def _find(self, rollout: str) -> Conversation:
        if rollout not in self.conversations:
            raise HostError(f"{rollout} is not known here", "it was closed, or the environment's process was restarted")
        return self.conversations[rollout]

    async def _next(self, conversation: Conversation) -> dict[str, Any]:
        """What the environment asks next, or how its runner ended."""
        run = conversation.run
        if run is None:
            raise HostError("the rollout has not started")
        asked = asyncio.ensure_future(conversation.asked.get())
        try:
            await asyncio.wait({asked, run}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.problem:
                raise HostError(conversation.problem, "see what the guide says cannot be had")
            if not run.done():
                return asked.result()
        finally:
            asked.cancel()
        conversation.result = run.result()
        return {"ended": self.adapter.describe(conversation.result)}


EXIT_S = 5.0
"""How long environments may take to close once the trainer has gone."""


class HostError(Exception):
    """A request that cannot be served; the remedy is for the operator."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


def import_framework(name: str) -> Any:
    """The framework's package; raises HostError if this Python has none."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = f"install {name} into a virtual environment, and name its Python as `environment.python`"
        raise HostError(f"{sys.executable} has no {name} ({error})", remedy) from error


def describe_problem(error: BaseException) -> tuple[str, str]:
    """Why a request failed, and the remedy; the traceback goes to standard error."""
    if isinstance(error, HostError):
        return str(error), error.remedy
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}", ""


def serve(adapter_file: str) -> None:
    """Loads the environment and serves requests until the trainer is gone."""
    here = os.getcwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # For its children.
    wire = Wire.claim()
    message = wire.receive()
    if message is None:
        return
    number, request = message[0], json.loads(message[1])
    try:
        endpoint = ModelEndpoint()
        adapter = load_file("host_adapter", adapter_file).load(request["environment"], request["args"], endpoint)
    except BaseException as error:  # boundary: the environment's own code; a script may exit
        wire.send_problem(number, *describe_problem(error))
        raise SystemExit(1) from error
    try:
        asyncio.run(_serve(wire, number, adapter, endpoint))
    finally:
        os._exit(0)  # Threads of an environment may never end.


async def _serve(wire: Wire, number: int, adapter: Any, endpoint: Any) -> None:
    is_episodic = hasattr(adapter, "make")
    host = EpisodeHost(adapter) if is_episodic else ConversationHost(adapter, endpoint)
    loop, stopped, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def accept(number: int, request: dict[str, Any]) -> None:
        task = loop.create_task(_handle(wire, host, number, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            while (message := wire.receive()) is not None:
                loop.call_soon_threadsafe(accept, message[0], json.loads(message[1]))
            loop.call_soon_threadsafe(stopped.set)
        finally:
            time.sleep(EXIT_S)
            os._exit(1)  # Whatever the environment is doing.

    async with endpoint, contextlib.nullcontext() if is_episodic else adapter:
        wire.send_value(number, adapter.about())
        threading.Thread(target=read, daemon=True).start()
        await stopped.wait()
        await host.close_all()


async def _handle(wire: Wire, host: Any, number: int, request: dict[str, Any]) -> None:
    """Serves one request."""
    try:
        wire.send_value(number, await host.operations[request.pop("do")](**request))
    except Exception as error:  # boundary: an environment may raise anything
        wire.send_problem(number, *describe_problem(error))
