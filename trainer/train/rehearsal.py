"""Plays scripted rollouts before a run: through tools, interaction, parser, every reward function, and the loss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import anyio

from gateway.errors import GatewayError
from gateway.finding import Finding
from gateway.session import AnyGateway
from gateway.types import Outcome, ToolCall, ToolResult, ToolSpec
from trainer.algorithms.rehearse import rehearse_loss
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Message
from trainer.reward.attempt import TRUNCATED
from trainer.reward.component import NO_ANSWER
from trainer.reward.functions import find_truth_problem
from trainer.reward.scorer import ScoredGroup
from trainer.rollout.observer import NullObserver
from trainer.rollout.rollout import Rollout
from trainer.rollout.task import Task
from trainer.setup import find_empty_folder, is_native_tool
from trainer.template import render_reply
from trainer.template.chat_template import build_call
from trainer.train.alarms import LIMIT_SETTINGS
from trainer.train.job import Job
from trainer.train.preflight import MAX_TASKS, offered_specs

MAX_CALLS = 32
"""Tools that are called at most."""
CALLS_S = 60.0
"""Seconds for all calls; each has its tool's own limit, too."""
MAX_TEXT = 300
NOT_CALLED = ToolResult(outcome=Outcome.CANCELLED, reason="there was no time for it")
MISTAKES = re.compile(r" raised ((Attribute|Import|ModuleNotFound|NotImplemented|Type|Name|UnboundLocal)Error)\b")
"""Exceptions that tools do not raise to say that an argument is wrong: these fit the schema."""


Results = list[tuple[ToolCall, ToolResult]]


async def call_native_tools(gateway: AnyGateway, task: Task, specs: Sequence[ToolSpec]) -> Results:
    """The calls and their results; none if no session can be opened, of which the scripted rollouts tell.

    MCP servers and remote gateways are not asked: their tools may have effects that the operator does not know.
    """
    native = [spec for spec in specs if is_native_tool(gateway, spec.name) and spec.hints.destructive is not True]
    calls = [ToolCall("call00000", spec.name, json.dumps(make_arguments(spec.parameters))) for spec in native]
    results: Results = []
    try:
        async with gateway.open(task.session_task) as session:
            with anyio.move_on_after(CALLS_S):
                for call in calls[:MAX_CALLS]:
                    results.append((call, await session.call(call)))
    except GatewayError:
        return []
    return results + [(call, NOT_CALLED) for call in calls[len(results) :]]


def check_results(results: Results) -> Iterator[Finding]:
    """What the calls say about their tools."""
    called = [call.name for call, result in results if result is not NOT_CALLED]
    for call, result in results:
        if result is not NOT_CALLED:
            yield from _check_result(call, result)
    if called:
        yield Finding("ok", f"native tools were called with made-up arguments: {', '.join(called)}")
    if left := [call.name for call, result in results if result is NOT_CALLED]:
        problem = f"after {len(called)} calls, or {CALLS_S:g} s, these tools were not called: {', '.join(left)}"
        yield Finding("note", problem, "if the first of them hangs, give it a shorter `timeout_s`")


def _check_result(call: ToolCall, result: ToolResult) -> Iterator[Finding]:
    """What a call says about its tool; errors that it may have because the arguments are made up are only noted."""
    called = f"`{call.name}` called with {call.arguments}"
    if result.outcome is Outcome.OK:
        if not result.parts:
            remedy = "return a text, a number, a dict or an image, if the policy is to know what came of it"
            yield Finding("note", f"{called} returned nothing that the policy could read", remedy)
        return
    reason = result.reason or result.text
    problem = f"{called} ended as {result.outcome}: {reason[:MAX_TEXT]}"
    if result.outcome.is_infrastructure:
        yield Finding("wrong", problem, "mend what the reason names; a rollout that ends so is never trained on")
    elif MISTAKES.search(reason):
        yield Finding("wrong", problem, "correct the tool there, or its schema: arguments that fit it must not end so")
    else:
        yield Finding("note", problem, "nothing, if these made-up arguments are to blame; else correct the tool there")


def choose_tool(specs: Sequence[ToolSpec]) -> ToolSpec | None:
    """The first tool that says it changes nothing, or else the first that does not say it destroys something."""
    harmless = [spec for spec in specs if spec.hints.read_only or not spec.hints.destructive]
    return next((spec for spec in harmless if spec.hints.read_only), harmless[0] if harmless else None)


def make_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the required parameters of a tool."""
    properties = schema.get("properties") or {}
    return {name: _make_value(properties.get(name)) for name in schema.get("required") or ()}


def _make_value(schema: Any) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _make_value(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        return make_arguments(schema)
    if kind == "array":
        return [_make_value(schema.get("items"))] * int(schema.get("minItems", 0))
    numbers = {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1), "boolean": True, "null": None}
    return numbers[kind] if kind in numbers else "1".ljust(int(schema.get("minLength", 1)), "1")


GROUP = "0-0-0"
WALL_S = 120.0
"""Seconds for each rollout, if `limits.timeout_s` allows more."""
WRONG_ANSWER = "I do not know."
CALLING, ANSWERING = 0, 1
"""The indexes of the two rollouts: one calls a tool before it answers, the other only answers."""
MAX_TURNS = 3
"""Turns of each: somebody may be paid for answers to them."""
SHOWN = 300


async def rehearse(job: Job) -> tuple[list[Finding], Rollout]:
    """Plays two rollouts of the first task, and returns what they show and the first of them.

    Tools are really called, with made-up arguments: native ones once each.
    """
    stage = job.settings.curriculum.stages[0]
    task = stage.apply(_choose_task(job, job.tasks.train[stage.data]))
    specs = offered_specs(job.gateway.specs, task)
    results = await call_native_tools(job.gateway, task, specs)
    findings = list(check_results(results))
    broken = {call.name for call, result in results if result.outcome.is_infrastructure}
    tool = choose_tool([spec for spec in specs if spec.name not in broken])
    noted = {call.name for call, _ in results}
    limits = job.settings.limits
    runner = replace(
        job.make_runner(ScriptedEngine(_make_script(job, tool, specs)), NullObserver()),
        limits=limits.model_copy(
            update={
                "timeout_s": min(limits.timeout_s, WALL_S),
                "assistant_turns": min(limits.assistant_turns, MAX_TURNS),
            }
        ),
    )
    rollouts = [await runner.run(task, group=GROUP, index=index) for index in (CALLING, ANSWERING)]
    findings += _check_offer(job, specs)
    findings += [finding for rollout in rollouts for finding in _check_rollout(rollout, tool, noted)]
    if any(rollout.stop.is_infrastructure for rollout in rollouts):
        return findings, rollouts[CALLING]
    if not all(rollout.turns for rollout in rollouts):
        problem = (
            f"no turn of scripted rollouts was played: the prompt of {task.location} takes all tokens of a rollout"
        )
        remedy = "raise `limits.rollout_tokens`, or shorten the prompt"
        return [*findings, Finding("wrong", problem, remedy)], rollouts[CALLING]
    group = await job.scorer.score(task, rollouts, log_failures=False)
    return [*findings, *_check_rewards(job, group), *_check_loss(job, group)], rollouts[CALLING]


def _choose_task(job: Job, tasks: Sequence[Task]) -> Task:
    """The first task that every built-in reward function can score: rows that lack something are told by themselves."""
    functions = [component.function for component in job.settings.reward.components.values()]
    scorable = (
        task
        for task in islice(tasks, MAX_TASKS)
        if all(find_truth_problem(function, task) is None for function in functions)
    )
    return next(scorable, tasks[0])


def _make_script(
    job: Job, tool: ToolSpec | None, specs: Sequence[ToolSpec]
) -> Callable[[Sequence[int], Sampling, str], Answer]:
    """The policy of both rollouts: one calls the tool once, and both give the same wrong answer from then on."""
    asked: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
    answer = render_reply(job.template, asked, {"role": "assistant", "content": WRONG_ANSWER}, specs)
    turns: dict[str, int] = {}

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        turn = turns[key] = turns.get(key, -1) + 1
        if turn or tool is None or not key.endswith(f"/{CALLING}"):
            return answer
        call = build_call("call00000", tool.name, json.dumps(make_arguments(tool.parameters)))
        message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return render_reply(job.template, asked, message, specs)

    return script


def _check_offer(job: Job, specs: Sequence[ToolSpec]) -> Iterator[Finding]:
    if not specs and job.settings.curriculum.stages[0].tools != ():
        remedy = "if that is not meant: name them with `tools` (--tools), and look at `allow` and at the rows' `tools`"
        remedy = find_empty_folder(job.settings.tools) or remedy
        yield Finding("note", "the policy is offered no tools", remedy)


def _check_rollout(rollout: Rollout, tool: ToolSpec | None, noted: Collection[str]) -> Iterator[Finding]:
    """Whether the turn with a call was read, and the call answered; failures of tools in `noted` are known."""
    name = "that calls a tool" if rollout.index == CALLING else "that answers wrong"
    if rollout.stop.is_infrastructure:
        remedy = "mend what the reason names; such rollouts are never trained on"
        yield Finding("wrong", f"a scripted rollout {name} ended with {rollout.stop}: {rollout.reason}", remedy)
        return
    if rollout.index != CALLING or tool is None or not rollout.turns:
        return
    if rollout.stop in TRUNCATED and len(rollout.turns) == 1:
        setting = LIMIT_SETTINGS[rollout.stop]
        yield Finding("wrong", f"a call of `{tool.name}` is cut off by `{setting}`", f"raise `{setting}`")
    elif not rollout.turns[0].calls:
        remedy = "correct the model's stop ids or `template.parser`"
        yield Finding("wrong", f"a call of `{tool.name}` is not read: the turn ended before it", remedy)
    for entry in rollout.ledger:
        if (
            entry.author is Author.TOOL
            and entry.source not in noted
            and any(outcome != "ok" for outcome in entry.outcomes)
        ):
            text = " ".join(str(message.get("content")) for message in entry.messages)[:SHOWN]
            call = rollout.turns[0].calls[0]
            problem = f"`{entry.source}` called with {call.arguments} ended as {entry.outcomes[0]}: {text}"
            yield Finding("note", problem, "nothing, if these made-up arguments are to blame")


def _check_rewards(job: Job, group: ScoredGroup) -> Iterator[Finding]:
    for reason in dict.fromkeys(unscored.reason.partition("; rollout")[0] for unscored in group.failed):
        remedy = "return a finite number for every rollout; one that cannot be scored is not trained on"
        if NO_ANSWER in reason:
            remedy = "make the function faster, or raise its `timeout_s`; what cannot be scored is not trained on"
        yield Finding("wrong", f"a scripted rollout cannot be scored: {reason}", remedy)
    if any(scored.success and scored.rollout.index == ANSWERING for scored in group.scored):
        name = job.settings.reward.success_component
        problem = (
            f"the answer {WRONG_ANSWER!r} counts as a success: {name!r} gives it {group.scored[-1].components[name]:g}"
        )
        yield Finding("note", problem, "look at `reward.success` and `reward.success_at`, and at that function")
    if group.scored and not group.failed:
        rewards = ", ".join(f"{scored.reward:g}" for scored in group.scored)
        yield Finding("ok", f"two scripted rollouts were played and scored: {rewards}")


def _check_loss(job: Job, group: ScoredGroup) -> Iterator[Finding]:
    if len(group.scored) < 2:
        return
    first, second = group.scored
    different = replace(group, scored=(replace(first, reward=1.0), replace(second, reward=0.0)))
    try:
        tokens = rehearse_loss([different], job.settings.algorithm, job.token_weight_fn)
    except Exception as error:  # boundary: weights of tokens may come from a user's function
        yield Finding("wrong", f"no loss can be computed from two rollouts: {error}", "correct `algorithm`")
        return
    if tokens:
        yield Finding("ok", f"a loss over {tokens} tokens was computed from them")
    else:
        yield Finding("note", "no token of them would be trained on", "look at `limits` and at `algorithm.credit`")
