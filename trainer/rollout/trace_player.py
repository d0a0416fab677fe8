"""Plays traces: a trace is a rollout whose engine knows the answers, so that the rollout loop builds its ledger."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gateway.errors import ConfigError
from gateway.types import EMPTY, ToolSpec
from trainer.data.traces import WEIGHT, TraceTask
from trainer.engine.base import Capabilities, Engine, Generation
from trainer.ledger import OFFERED, Author, Message
from trainer.rollout.loop import RolloutRunner, add_instructions
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, Turn
from trainer.template.chat_template import function_schema
from trainer.template.drift import parse_arguments
from trainer.template.errors import TemplateError
from trainer.template.media_layout import join_text
from trainer.template.render_reply import render_reply

if TYPE_CHECKING:
    from trainer.template import Template

UNLIMITED = 2**31
OTHER_PARSER = "name the model's own format with `template.parser`, or change the row"
OF_A_RUN = "leave rollouts with such calls out: `where: invalid == 0`, besides what else is asked of them"


class EncodedTrace(NamedTuple):
    """A trace as it is played: the tools that it offers, the template that knows them, and the ids of its turns."""

    task: TraceTask
    specs: tuple[ToolSpec, ...]
    template: Template
    turns: list[tuple[int, ...]]


def encode_trace(
    task: TraceTask, template: Template, specs: Sequence[ToolSpec], rollout_tokens: int = UNLIMITED
) -> EncodedTrace:
    """Encodes a trace where the run has this template and these tools. Raises ConfigError, with the row."""
    offered = task.offered(specs)
    if task.tools is not None:
        template = template.with_tools(offered)
    task = _fit_call_ids(task, template)
    turns = _encode_turns(template, task, offered)
    before = template.prepare_media([*add_instructions(task.messages, offered), *task.rest[:-1]]).messages
    try:
        tokens = len(template.encode_prompt(before, offered)) + len(turns[-1])
    except TemplateError as error:
        raise ConfigError(error.problem, file=task.location, field="messages", remedy=error.remedy) from error
    if tokens > rollout_tokens + _added_ends(task):
        problem = f"has {tokens:,} tokens, and `limits.rollout_tokens` is {rollout_tokens:,}"
        raise ConfigError(problem, file=task.location, field="messages", remedy="raise it, or leave the row out")
    return EncodedTrace(task, offered, template, turns)


def _added_ends(task: TraceTask) -> int:
    """Tokens by which a run's rollout may be longer than its limit: one that was cut there gets its turn's end."""
    return int(bool(task.recorded))


def _encode_turns(template: Template, task: TraceTask, specs: Sequence[ToolSpec]) -> list[tuple[int, ...]]:
    """The ids of each turn, each with one token at its end that stops sampling. Raises ConfigError, with the row, if
    the parser reads other calls from them than the row has."""
    before = [*add_instructions(task.messages, specs)]
    recorded = iter(task.recorded)
    encoded = []
    for number, message in enumerate(task.rest, len(task.messages)):
        if message["role"] == "assistant":
            ids = next(recorded, ())
            if not ids or not _is_read_again(template, ids, message):
                ids = _encode_turn(template, task, before, number, specs)
            encoded.append(ids)
        before.append(message)
    return encoded


def _encode_turn(
    template: Template, task: TraceTask, before: Sequence[Message], number: int, specs: Sequence[ToolSpec]
) -> tuple[int, ...]:
    message = task.rest[number - len(task.messages)]
    turn = join_text({key: value for key, value in message.items() if key != WEIGHT})
    field = f"messages[{number}]"
    try:
        ids = render_reply(template, template.prepare_media(before).messages, turn, specs)
    except TemplateError as error:
        raise ConfigError(error.problem, file=task.location, field=field, remedy=error.remedy) from error
    if problem := _find_difference(template, ids, turn):
        remedy = OF_A_RUN if task.recorded else OTHER_PARSER
        raise ConfigError(problem, file=task.location, field=field, remedy=remedy)
    return ids


def _is_read_again(template: Template, ids: Sequence[int], message: Message) -> bool:
    """Whether the template reads a message from the ids that a policy sampled for it."""
    if _find_difference(template, ids, message):
        return False
    read = template.build_message(template.parse_turn(ids))
    return all(read.get(part) == message.get(part) for part in ("content", "reasoning_content"))


def _find_difference(template: Template, ids: Sequence[int], turn: Message) -> str:
    """What is read from ids that is not in the turn that they were made from; empty if it is the same."""
    ends = [index for index, id in enumerate(ids) if id in template.stop_ids]
    if ends != [len(ids) - 1]:
        return f"would be trained with {len(ends)} tokens that stop sampling, instead of one at its end"
    reply = template.parse_turn(ids)
    if reply.problems:
        return f"is not read back as calls: {reply.problems[0]}"
    calls = turn.get("tool_calls") or ()
    wanted = [(call["function"]["name"], parse_arguments(call["function"]["arguments"])) for call in calls]
    found = [(call.name, parse_arguments(call.arguments)) for call in reply.calls]
    if wanted != found:
        return f"has the calls {_show_calls(wanted)}, but the parser {template.parser.name} reads {_show_calls(found)}"
    if wanted or reply.content.strip():
        return ""
    return "is only reasoning: there is neither an answer nor a call after it"


def _show_calls(calls: Sequence[tuple[str, Any]]) -> str:
    return json.dumps([f"{name}({json.dumps(arguments)})" for name, arguments in calls])[:200]


def _fit_call_ids(task: TraceTask, template: Template) -> TraceTask:
    """The trace with the ids of calls that the model's format asks for, if it does."""
    make_id = getattr(template.parser, "call_id", None)
    if make_id is None:
        return task
    ids: dict[str, str] = {}
    rest: list[Message] = []
    for message in task.rest:
        calls = message.get("tool_calls") or ()
        named = [(call["id"], make_id(call["function"]["name"], len(ids) + at)) for at, call in enumerate(calls)]
        ids |= dict(named)
        if calls:
            message = {**message, "tool_calls": [{**call, "id": ids[call["id"]]} for call in calls]}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        rest.append(message)
    return replace(task, rest=tuple(rest))


async def play_trace(runner: RolloutRunner, task: TraceTask, *, group: str = "") -> Rollout:
    """Builds a trace's ledger by the rollout loop of `runner`, with its template and limits of tokens.

    Raises ConfigError, with the row, for a trace that does not come to its end.
    """
    limit = runner.limits.rollout_tokens
    task, specs, template, turns = encode_trace(task, runner.template, runner.gateway.specs, limit)
    limits = RolloutLimits.model_construct(
        **runner.limits.model_dump()
        | dict.fromkeys(("assistant_turns", "user_turns", "tool_calls", "invalid_turns", "turn_tokens"), UNLIMITED)
    )
    played = replace(
        runner,
        engine=cast(Engine, TraceEngine(turns, runner.engine.version)),
        template=template,
        gateway=cast(Any, TraceGateway(specs)),
        limits=limits,
        stepper=TraceStepper(task, turns),
    )
    rollout = await played.run(task, group=group)
    is_long = len(rollout.ledger.expanded) > limit + _added_ends(task)
    if rollout.stop is StopReason.LENGTH_ROLLOUT or is_long:
        problem = f"does not fit into `limits.rollout_tokens` ({limit:,})"
        raise ConfigError(problem, file=task.location, remedy="raise it, or leave the row out")
    if rollout.stop is not StopReason.DONE:
        problem = f"cannot be played ({rollout.stop}: {rollout.reason})"
        raise ConfigError(problem, file=task.location, remedy="correct the row, or leave it out")
    return rollout


class TraceEngine:
    """Answers with the turns of a trace, one after the other; their logprobs are unknown and stand as 0."""

    counters: Mapping[str, float] = EMPTY

    def __init__(self, turns: Sequence[tuple[int, ...]], version: int) -> None:
        self._turns, self.version = iter(turns), version

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("trace", is_exact=False, supports_images=True)

    async def generate(self, *_: Any, **__: Any) -> Generation:
        ids = next(self._turns)
        return Generation(ids, (0.0,) * len(ids), "stop", self.version)


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A session that offers the tools of a trace; their results are in the trace."""

    specs: Sequence[ToolSpec]
    rewards = ()
    states = EMPTY

    async def finish(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class TraceGateway:
    """Opens such sessions."""

    specs: Sequence[ToolSpec]

    @asynccontextmanager
    async def open(self, _: Any) -> AsyncIterator[TraceSession]:
        yield TraceSession(self.specs)


@dataclass(slots=True)
class TraceStepper:
    """Answers each turn with the trace's messages up to the next one."""

    task: TraceTask
    turns: Sequence[tuple[int, ...]]
    _place: int = 1

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, TraceStepper]]:
        tools = self.task.tools
        info = EMPTY if tools is None else {OFFERED: [function_schema(spec) for spec in tools]}
        yield Step(history=start.task.messages, info=info), self

    async def check_finished(self, turn: Turn) -> bool | StopReason:
        return StopReason.DONE if self._place >= len(self.task.rest) else False

    async def step(self, turn: Turn) -> Step:
        left = islice(self.task.rest, self._place, None)
        messages = tuple(takewhile(lambda message: message["role"] != "assistant", left))
        self._place += len(messages) + 1
        author = Author.TOOL if messages and messages[0]["role"] == "tool" else Author.FEEDBACK
        return Step(author, messages, source="trace")

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """Excludes the turns of weight 0 from the loss."""
        weights = [message.get(WEIGHT, 1) for message in self.task.turns]
        spans = zip(self.turns, weights, strict=True)
        return RolloutEnd(excluded_spans=[() if weight else ((0, len(ids)),) for ids, weight in spans])
