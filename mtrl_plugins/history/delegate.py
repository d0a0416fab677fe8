"""Plays sub-agents: chats of the same policy within a rollout, in its session, whose ledgers are the rollout's."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

import anyio

from gateway.errors import unwrap_error
from gateway.feedback.base import plain_text
from gateway.session import AnyGateway, AnySession
from gateway.session_protocols import Reward
from gateway.toolset import unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Outcome, Text, ToolCall, ToolResult, ToolSpec
from gateway.types import Task as SessionTask
from mtrl_plugins.history.delegate_settings import DelegateSettings
from mtrl_plugins.history.settings import HistorySettings
from trainer.engine.base import Generation
from trainer.ledger import OFFERED, SUB_AGENT, Ledger, Message
from trainer.reward.attempt import ENDED
from trainer.rollout.loop import RolloutLoop, RolloutRunner, Slot
from trainer.rollout.observer import NullObserver, RolloutObserver
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import RolloutStart, Step, Stepper, ToolsAndFeedback, open_stepper
from trainer.rollout.task import Task
from trainer.template.chat_template import function_schema

PARAMETERS = {
    "type": "object",
    "properties": {"task": {"type": "string", "description": "what to do, with all that is needed to do it"}},
    "required": ["task"],
}


@dataclass
class DelegatePlayer:
    """Offers the tool in each rollout."""

    settings: DelegateSettings
    stepper: Stepper
    """That of sub-agents."""
    in_order: bool
    """Whether sub-agents of one turn play one after the other, so that a tape has their calls in one order."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def wrap(self, runner: RolloutRunner) -> RolloutRunner:
        return DelegatingRunner(**_fields_of(runner), player=self)

    def describe(self) -> str:
        return ""

    def take_metrics(self) -> Mapping[str, float]:
        return EMPTY


def _fields_of(runner: RolloutRunner) -> dict[str, Any]:
    return {each.name: getattr(runner, each.name) for each in fields(RolloutRunner)}


@dataclass(frozen=True)
class DelegatingRunner(RolloutRunner):
    """Runs rollouts that may have sub-agents."""

    player: DelegatePlayer = field(kw_only=True)

    async def run(
        self, task: Task, *, group: str = "", index: int = 0, attempt: int = 0, slot: Slot | None = None
    ) -> Rollout:
        """Runs one rollout; the ledgers of its sub-agents come before its last one."""
        place = (group, index, attempt, slot or nullcontext())
        family = Family(RolloutRunner(**_fields_of(self)), self.player, task, place)
        rollout = await family.parent.run()
        *before, ledger = (_add_info(each, {OFFERED: family.offered}) for each in rollout.ledgers)
        earlier = (*before, *(ledger for ledger in family.ledgers if ledger.turns))
        chats = (family.parent, *family.children)
        infos = {**rollout.infos, self.player.settings.key: {**family.counts}}
        for key in ("drift", HistorySettings.key):
            if counts := sum((Counter(chat.infos.get(key, {})) for chat in chats), Counter[str]()):
                infos[key] = {**counts}
        return replace(rollout, ledger=ledger, earlier=earlier, infos=infos)


class Family:
    """A rollout and its sub-agents. It is the rollout's gateway, whose session has the tool."""

    def __init__(
        self, runner: RolloutRunner, player: DelegatePlayer, task: Task, place: tuple[str, int, int, Slot]
    ) -> None:
        self.settings, self.player, self.place = player.settings, player, place
        self.runner = runner
        self.parent = RolloutLoop(replace(runner, gateway=cast(AnyGateway, self)), task, *place)
        self.children: list[RolloutLoop] = []
        self.offered: list[Mapping[str, Any]] = []
        """Schemas of the tools of the rollout's own chat, which the run's tools do not have all of."""
        self.counts: Counter[str] = Counter()

    @property
    def ledgers(self) -> list[Ledger]:
        """Those of all sub-agents, also of one that was cancelled."""
        return [
            _add_info(ledger, {SUB_AGENT: child.task.id, **self._restricted})
            for child in self.children
            for ledger in (*child.builder.earlier, child.builder.ledger)
            if ledger.entries
        ]

    @asynccontextmanager
    async def open(self, task: SessionTask) -> AsyncIterator[AnySession]:
        """The rollout's session with the tool."""
        async with self.runner.gateway.open(task) as session:
            parent = ParentSession(session, self)
            self.offered = [function_schema(spec) for spec in parent.specs]
            yield cast(AnySession, parent)

    @property
    def _restricted(self) -> Mapping[str, Any]:
        """The schemas of what sub-agents may use, if that is not all."""
        names = self.parent.task.session_task.tools if self.settings.tools is None else self.settings.tools
        if names is None:
            return {}
        return {OFFERED: [schema for schema in self.offered if schema["function"]["name"] in names]}

    async def answer(self, calls: Sequence[ToolCall], session: AnySession) -> list[ToolResult]:
        """Has a sub-agent play each call. Together they have the tokens that the rollout does not need to read them."""
        parent = self.parent
        reserve = (len(calls) + 1) * parent.limits.turn_tokens
        share = (parent.budget - len(parent.ledger.expanded) - reserve) // len(calls)
        children = [self._make_child(call, session, share, len(calls)) for call in calls]
        lost = ToolResult(outcome=Outcome.UNAVAILABLE, reason="another sub-agent of the turn was lost")
        results = [child if isinstance(child, ToolResult) else lost for child in children]

        async def play(index: int, child: RolloutLoop) -> None:
            results[index] = await self._play(child)
            if results[index].outcome is Outcome.UNAVAILABLE:  # The rollout is lost: nobody reads the others.
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index, child in enumerate(children):
                if isinstance(child, ToolResult):
                    continue
                if self.player.in_order:
                    await play(index, child)
                else:
                    tasks.start_soon(play, index, child)
        return results

    def _make_child(self, call: ToolCall, session: AnySession, tokens: int, wanted: int) -> RolloutLoop | ToolResult:
        """The chat of a sub-agent, or why there is none; `wanted`: the sub-agents that are asked for at once."""
        settings, parent, number = self.settings, self.parent, len(self.children) + 1
        text = read_task(call.arguments)
        if not text:
            problem = '`task` must be a text that says what to do, as in {"task": "..."}.'
            return ToolResult((Text(problem),), Outcome.INVALID, reason="no task")
        is_short = tokens < parent.limits.turn_tokens
        if number > settings.times or is_short:
            why = "too few tokens are left" if is_short else f"there were {settings.times}, as many as may be"
            return ToolResult((Text(f"There is no further sub-agent: {why}."),), Outcome.ERROR)
        most = min(settings.tokens or parent.limits.rollout_tokens, parent.limits.rollout_tokens)
        calls_left = max(0, parent.limits.tool_calls - parent.counts["calls"] - wanted) // wanted
        bounds = {"assistant_turns": settings.turns, "rollout_tokens": most, "tool_calls": calls_left}
        limits = parent.limits.model_copy(update=bounds)
        name = f"sub-agent {number}"
        question: Message = {"role": "user", "content": text}
        chat = ({"role": "system", "content": settings.system}, question) if settings.system else (question,)
        runner = replace(
            self.runner,
            gateway=cast(AnyGateway, SharedGateway(session, settings.tools)),
            limits=limits,
            stepper=cast(Stepper, ChildStepper(self.player.stepper, name)),
            observer=ChildObserver(self.runner.observer, parent.key),
        )
        child = RolloutLoop(runner, Task(f"{parent.task.id}/{name.replace(' ', '-')}", chat), *self.place)
        child.unsampled = tokens
        self.children.append(child)
        return child

    async def _play(self, child: RolloutLoop) -> ToolResult:
        """What a sub-agent answers. Its failed infrastructure is the rollout's, and never its answer."""
        started = time.perf_counter()
        try:
            rollout = await child.run()
        finally:
            self.counts["calls"] += 1
            self.parent.counts["calls"] += child.counts["calls"]
            self.parent.spent_tokens = sum(len(turn.ids) for ledger in self.ledgers for turn in ledger.turns)
            self.counts["tokens"] = self.parent.spent_tokens
        elapsed_s = time.perf_counter() - started
        if rollout.stop.is_infrastructure:
            reason = f"{child.task.id}: {rollout.stop}: {rollout.reason}"
            parts = (Text("The sub-agent is not available."),)
            return ToolResult(parts, Outcome.UNAVAILABLE, reason=reason, elapsed_s=elapsed_s)
        last = rollout.turns[-1:]
        text = plain_text(last[0].messages[-1].get("content")) if last and last[0].messages else ""
        outcome = Outcome.OK if rollout.stop in ENDED else Outcome.ERROR
        if outcome is Outcome.ERROR:
            self.counts["unfinished"] += 1
            text = f"The sub-agent was stopped before it was done. Its last words: {text or 'none'}"
        is_over = rollout.stop is StopReason.TOOL_DONE
        parts = (Text(text or "The sub-agent said nothing."),)
        return ToolResult(parts, outcome, done=is_over, metrics={"turns": len(rollout.turns)}, elapsed_s=elapsed_s)


def _add_info(ledger: Ledger, info: Mapping[str, Any]) -> Ledger:
    if not ledger.entries:
        return ledger
    first = ledger.entries[0]
    return Ledger((replace(first, info={**first.info, **info}), *ledger.entries[1:]))


def read_task(arguments: str) -> str:
    """The task in a call's arguments; empty if there is none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    task = value.get("task") if isinstance(value, dict) else None
    return task.strip() if isinstance(task, str) else ""


class _SessionView:
    """A session whose calls are partly answered here."""

    in_order = False
    """Whether they are answered after the others, so that a tape has all calls in one order."""

    def __init__(self, session: AnySession, specs: Sequence[ToolSpec]) -> None:
        self.session, self.specs = session, specs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def is_own(self, call: ToolCall) -> bool:
        """Whether a call is answered here."""
        raise NotImplementedError

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answers such calls."""
        raise NotImplementedError

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        return (await self.calls((call,), context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]:
        own = [call for call in calls if self.is_own(call)]
        others = [call for call in calls if not self.is_own(call)]
        if not own:
            return await self.session.calls(calls, context)
        if self.in_order:
            results = iter(await self.session.calls(others, context) if others else [])
            own_results = iter(await self.answer(own))
            return [next(own_results if self.is_own(call) else results) for call in calls]
        answers: list[ToolResult] = []

        async def answer_own() -> None:
            answers.extend(await self.answer(own))

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer_own)
                results = iter(await self.session.calls(others, context) if others else [])
        except ExceptionGroup as group:
            raise unwrap_error(group) from group
        own_results = iter(answers)
        return [next(own_results if self.is_own(call) else results) for call in calls]


class ParentSession(_SessionView):
    """The rollout's session with the tool, in place of another one of its name."""

    def __init__(self, session: AnySession, family: Family) -> None:
        settings = family.settings
        spec = ToolSpec(settings.name, settings.description, PARAMETERS, owner="`delegate`")
        super().__init__(session, [*(one for one in session.specs if one.name != spec.name), spec])
        self.family, self.in_order = family, family.player.in_order

    def is_own(self, call: ToolCall) -> bool:
        return call.name == self.family.settings.name

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return await self.family.answer(calls, self.session)


class ChildSession(_SessionView):
    """The rollout's session as a sub-agent has it: with the tools that it may use, and without an end."""

    rewards: Sequence[Reward] = ()
    states: Mapping[str, str] = EMPTY

    def __init__(self, session: AnySession, tools: Sequence[str] | None) -> None:
        super().__init__(session, [spec for spec in session.specs if tools is None or spec.name in tools])
        self.names = {spec.name for spec in self.specs}

    def is_own(self, call: ToolCall) -> bool:
        return call.name not in self.names

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [unknown_tool_result(call.name, self.specs) for call in calls]

    async def finish(self) -> Mapping[str, float]:
        return EMPTY


@dataclass
class SharedGateway:
    """Has one session, which stays open."""

    session: AnySession
    tools: Sequence[str] | None

    @asynccontextmanager
    async def open(self, task: SessionTask) -> AsyncIterator[AnySession]:
        yield cast(AnySession, ChildSession(self.session, self.tools))


class ChildStepper(ToolsAndFeedback):
    """A stepper whose rollouts begin with a name for their ledger."""

    def __init__(self, inner: Stepper, name: str) -> None:
        self.inner, self.name = inner, name

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, Stepper]]:
        async with open_stepper(self.inner, start) as (first, inner):
            yield replace(first, branch=self.name), inner


class ChildObserver(NullObserver):
    """Counts what a sub-agent does as its rollout's."""

    def __init__(self, observer: RolloutObserver, key: str) -> None:
        self.observer, self.key = observer, key

    def on_generation(self, key: str, generation: Generation, prompt_tokens: int) -> None:
        self.observer.on_generation(self.key, generation, prompt_tokens)

    def on_step(self, key: str, step: Step, seconds: float) -> None:
        self.observer.on_step(self.key, step, seconds)
