"""Environments with a runner of their own: each turn of the policy is the answer of the runner's model.

The environment's runner calls its tools, answers the policy and decides when a rollout is over. The calls here are the
training loop's, so everything the environment says is on a tape. The process ends with the toolset.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from gateway.errors import ConfigError
from gateway.schema import parse_arguments
from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Image, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from mtrl_plugins.environments.episodes import ANY_OBJECT, INFO, LOOP
from mtrl_plugins.environments.host_process import EnvironmentFailed, EnvironmentHost, get_host, host_key
from mtrl_plugins.environments.settings import RunnerSettings
from trainer.data.row_media import Row
from trainer.ledger import Author, Message
from trainer.parse.base import Reply
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn
from trainer.template.chat_template import build_call

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
IMAGE_URL = re.compile(r"data:(image/[\w.+-]+);base64,")


def read_messages(value: Any) -> tuple[Message, ...]:
    """The chat that an environment shows its model. Raises EnvironmentFailed if a message cannot be shown."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise EnvironmentFailed(f"the environment sent {value!r:.80} instead of messages")
    names: dict[str, str] = {}
    return tuple(_read_message(message, names) for message in value)


def _read_message(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """One message, without empty keys; an answer of a tool gets the tool's name from the call."""
    read = {key: message[key] for key in KEYS if message.get(key) is not None}
    if read.get("role") not in ROLES:
        raise EnvironmentFailed(f"the environment sent a message of the role {read.get('role')!r:.40}")
    read["content"] = _read_content(message.get("content"))
    for call in read.get("tool_calls", ()):
        names[str(call.get("id"))] = str(call["function"]["name"])
    if read["role"] == "tool" and read.get("tool_call_id") in names:
        read.setdefault("name", names[read["tool_call_id"]])
    return read


def _read_content(content: Any) -> Any:
    """Text, or parts if there are images."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_read_part(part) for part in content] if isinstance(content, list) else [content]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _read_part(part: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(url, str) and (match := IMAGE_URL.match(url)):
        try:
            return {"type": "image", "image": Image(b64decode(url[match.end() :], validate=True), match[1])}
        except binascii.Error as error:
            raise EnvironmentFailed(f"the environment sent an image that is not base64 ({error})") from error
    remedy = "send text, or images as `data:` URLs"
    raise EnvironmentFailed(f"the environment sent a part that cannot be shown: {part!r:.80}\n  remedy: {remedy}")


def read_tools(value: Any, owner: str) -> tuple[ToolSpec, ...]:
    """The tools that an environment offers its model, in OpenAI's form."""
    functions = [tool.get("function") for tool in value or () if isinstance(tool, Mapping)]
    specs = (
        ToolSpec(
            str(function["name"]),
            str(function.get("description") or ""),
            function.get("parameters") or {"type": "object", "properties": {}},
            owner=owner,
        )
        for function in functions
        if isinstance(function, Mapping)
    )
    return tuple(specs)


def write_turn(reply: Reply, text: str, *, inline_reasoning: bool) -> Message:
    """The policy's turn as an environment sees a model's; with a malformed call, it is text as the policy wrote it."""
    if reply.problems:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning and inline_reasoning:
        message["content"] = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}"
    elif reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [build_call(call.id, call.name, call.arguments) for call in reply.calls]
    return message


def new_messages(known: Sequence[Message], turn: Message, asked: Sequence[Message]) -> tuple[Message, ...] | None:
    """What the environment added to the chat that it knows and the policy's turn; None if it changed them."""
    count = len(known)
    if len(asked) <= count + 1 or tuple(asked[:count]) != tuple(known) or not _is_same_turn(turn, asked[count]):
        return None
    added = tuple(asked[count + 1 :])
    return None if any(message["role"] == "assistant" for message in added) else added


def _is_same_turn(turn: Message, other: Message) -> bool:
    """Whether a message of the environment's chat is the policy's turn, which it may have written anew."""
    return (
        other.get("role") == "assistant"
        and (turn.get("content") or "") == (other.get("content") or "")
        and [*map(_call_key, turn.get("tool_calls") or ())] == [*map(_call_key, other.get("tool_calls") or ())]
    )


def _call_key(call: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        arguments = function.get("arguments")
    return call.get("id"), function.get("name"), arguments


OPEN, TURN, END = "environment_open", "environment_turn", "environment_end"
"""The tools that only the training loop may call: to begin a rollout, to give it the policy's turn, and to end it."""
DESCRIPTIONS = {
    OPEN: "Begins a rollout of a row.",
    TURN: "Gives the environment the policy's turn.",
    END: "Says that the policy writes no more turns.",
}


class EnvironmentToolset:
    """The tools of one environment, as its first row shows them."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.specs: Sequence[ToolSpec] = ()

    async def __aenter__(self) -> Self:
        opened = await self.host.request_async("open", split="train", row=0)
        self.host.tell("close", rollout=opened["rollout"])
        if "ended" in opened:
            how = opened["ended"]
            raise EnvironmentFailed(f"{self.host.name} ended its first rollout: {how['error'] or how['stop']}")
        name = self.host.name
        own = [ToolSpec(tool, text, ANY_OBJECT, "loop", owner=name) for tool, text in DESCRIPTIONS.items()]
        self.specs = [*read_tools(opened["tools"], name), *own]
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.host.stop_async()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        session = EnvironmentSession(self)
        try:
            yield session
        finally:
            session.close()


class EnvironmentSession:
    """One rollout in the environment."""

    def __init__(self, toolset: EnvironmentToolset) -> None:
        self._toolset, self._host = toolset, toolset.host
        self._place: dict[str, Any] = {}
        """The rollout's name in the host, and the start of the host that knows it."""
        self._ended: dict[str, Any] | None = None
        """How the environment's rollout ended."""
        self._is_kept = False
        """The environment keeps it until it is scored."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._toolset.specs

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        arguments = parse_arguments(call.arguments)
        try:
            if call.name == OPEN:
                answer = await self._open(arguments)
            elif call.name == TURN:
                answer = await self._ask("turn", reply=arguments)
            elif call.name == END:
                answer = await self._end()
            else:
                raise EnvironmentFailed(f"{self._host.name} answers {call.name!r} itself, within a rollout")
        except EnvironmentFailed as error:
            return ToolResult((Text("The environment failed."),), Outcome.UNAVAILABLE, reason=str(error))
        return ToolResult(structured={**answer, **self._place})

    async def finish(self) -> Mapping[str, float]:
        """Nothing: the environment scores a group's rollouts together, once all have ended."""
        return {}

    def close(self) -> None:
        """Lets the environment forget the rollout, unless it is to be scored."""
        if self._place and not self._is_kept:
            self._host.tell("close", rollout=self._place["rollout"])

    async def _open(self, row: Mapping[str, Any]) -> dict[str, Any]:
        opened: dict[str, Any] = await self._host.request_async("open", **row)
        self._place = {"rollout": opened["rollout"], "starts": self._host.starts}
        return opened

    async def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        if not self._place:
            raise EnvironmentFailed(f"{self._host.name}: the rollout has not begun")
        rollout = self._place["rollout"]
        answer: dict[str, Any] = await self._host.request_async(operation, rollout=rollout, **fields)
        self._ended = answer.get("ended", self._ended)
        return answer

    async def _end(self) -> dict[str, Any]:
        """How the rollout ended; from now on it is kept, to be scored."""
        ended = self._ended or (await self._ask("end"))["ended"]
        self._is_kept = not ended["error"]
        return {"ended": ended}


ROW_COLUMN = "environment_row"
"""The column that says which row of the environment a task is."""


class EnvironmentStepper:
    """Begins a rollout of the environment for each of ours."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, EnvironmentRollout]]:
        """Opens the environment's rollout."""
        rollout = EnvironmentRollout(self.settings, start)
        yield await rollout.open(), rollout

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


class EnvironmentRollout:
    """One rollout, here and in the environment."""

    def __init__(self, settings: RunnerSettings, start: RolloutStart) -> None:
        self.settings, self.start = settings, start
        self.place: dict[str, Any] = {}
        """Where the reward finds the rollout in the host."""
        self.chat: tuple[Message, ...] = ()
        """The chat that the environment knows."""
        self.ended: dict[str, Any] | None = None
        """How the environment's rollout ended."""

    async def open(self) -> Step:
        """The environment's first request to its model."""
        row = self.start.task.columns.get(ROW_COLUMN)
        if not isinstance(row, dict):
            problem = f"{self.start.task.location}: is not a row of {self.settings.title}"
            raise EnvironmentFailed(f"{problem}\n  remedy: write `data: environment`")
        opened = await self._call(OPEN, row)
        if "ended" in opened:
            how = opened["ended"]
            problem = f"{self.settings.title} ended a rollout before the policy's first turn"
            raise EnvironmentFailed(f"{problem}: {how['error'] or how['stop']}")
        self._check_tools(opened["tools"])
        self.chat = read_messages(opened["messages"])
        return Step(history=self.chat)

    async def step(self, turn: Turn) -> Step:
        """Gives the environment the policy's turn; its next request is the answer."""
        message = await self._send(turn, "tool_calls" if turn.reply.calls else "stop")
        if self.ended is not None:
            stop = StopReason.TOOL_FAILED if self.ended["error"] else StopReason.STEP_DONE
            return Step(stop=stop, reason=self.ended["error"], source=self.settings.id)
        added = new_messages(self.known, message, self.chat)
        source = self.settings.id
        if added is None:
            return Step(history=self.chat, source=source)
        author = Author.TOOL if added[0]["role"] == "tool" else Author.FEEDBACK
        return Step(author, added, source=source)

    def check_finished(self, turn: Turn) -> bool:
        """Always False: the environment ends the rollout in `step`."""
        return False

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """Gives the environment a last turn that was cut off, and tells it that there are no more."""
        if self.ended is None and turn is not None:
            truncated = stop in (StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT)
            await self._send(turn, "length" if truncated else "stop")
        self.ended = (await self._call(END, {}))["ended"]
        if self.ended["error"]:
            raise EnvironmentFailed(f"{self.settings.title}: {self.ended['error']}")
        return RolloutEnd({INFO: {"host": host_key(self.settings), **self.place, "stop": self.ended["stop"]}})

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the environment answers. Raises EnvironmentFailed if it broke or took too long."""
        result = await self.start.session.call(ToolCall(tool, tool, json.dumps(arguments)), LOOP)
        if result.outcome is not Outcome.OK:
            raise EnvironmentFailed(result.reason or result.text)
        answer: dict[str, Any] = result.structured
        self.place = {"starts": answer["starts"], "rollout": answer["rollout"]}
        return answer

    async def _send(self, turn: Turn, finish_reason: str) -> Message:
        """Sends a turn; afterwards there is a longer chat, or an end."""
        template, entry = self.start.template, turn.ledger.entries[-1]
        ids = entry.ids[:-1] if template.is_turn_ended(entry.ids) else entry.ids
        text = template.tokenizer.decode(ids)
        message = write_turn(turn.reply, text, inline_reasoning=self.settings.reasoning == "inline")
        finish_reason = "stop" if finish_reason == "tool_calls" and "tool_calls" not in message else finish_reason
        prompt = len(turn.ledger) - len(entry.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(entry.ids), "total_tokens": len(turn.ledger)}
        reply = {"message": message, "finish_reason": finish_reason, "usage": usage}
        answer = await self._call(TURN, reply)
        self.known = self.chat
        if "ended" in answer:
            self.ended = answer["ended"]
        else:
            self.chat = read_messages(answer["messages"])
        return message

    def _check_tools(self, tools: Any) -> None:
        """The policy is shown the same tools in all rollouts."""
        offered = {spec.name for spec in read_tools(tools, self.settings.title)}
        shown = {spec.name for spec in self.start.specs if spec.audience == "policy"}
        if offered != shown:
            names = f"{', '.join(sorted(offered)) or 'none'} instead of {', '.join(sorted(shown)) or 'none'}"
            remedy = "make rows with other tools an environment of their own"
            problem = f"{self.settings.title} offers other tools in this row: {names}"
            raise EnvironmentFailed(f"{problem}\n  remedy: {remedy}")


PAGE = 256
"""Rows that are read at once."""
NO_PROMPT = "(the environment begins)"


def read_rows(settings: RunnerSettings, split: str) -> list[Row]:
    """The rows of a split of the environment's data."""
    host, rows = get_host(settings), list[Row]()
    while len(rows) < settings.rows:
        wanted = min(PAGE, settings.rows - len(rows))
        page = host.rows(split, len(rows), wanted)
        rows += [_read_row(host, row, split, len(rows) + number) for number, row in enumerate(page)]
        if len(page) < wanted:
            break
    if not rows:
        problem, remedy = f"{host.name} has no rows", "let it load its data set, or name another one in `args`"
        raise ConfigError(problem, field="data", remedy=remedy)
    return rows


def _read_row(host: EnvironmentHost, row: Any, split: str, number: int) -> Row:
    """A row; its prompt is for showing, since the environment itself opens the chat."""
    prompt = row.get("prompt") or NO_PROMPT
    messages = read_messages(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    shown = [{"role": message["role"], "content": _text(message["content"])} for message in messages]
    while len(shown) > 1 and shown[-1]["role"] == "assistant":
        shown.pop()
    place = {"split": split, "row": number, "digest": row["digest"]}
    columns = {key: row[key] for key in ("answer", "kind", "info") if row.get(key) not in (None, "")}
    return {"id": f"{split}-{number}", "prompt": shown, **columns, ROW_COLUMN: place}


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(str(part.get("text", "(an image)")) for part in parts) or "(empty)"
