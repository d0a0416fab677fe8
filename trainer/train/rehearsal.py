"""Plays scripted rollouts before a run: through tools, interaction, parser, every reward function, and the loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gateway.types import ToolSpec
from trainer.algorithms.rehearse import rehearse_loss
from trainer.check import Finding
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author, Message
from trainer.reward.attempt import TRUNCATED
from trainer.reward.functions import find_truth_problem
from trainer.reward.scorer import ScoredGroup
from trainer.rollout.observer import NullObserver
from trainer.rollout.rollout import Rollout
from trainer.rollout.task import Task
from trainer.template import render_reply
from trainer.template.chat_template import build_call
from trainer.train.alarms import LIMIT_SETTINGS
from trainer.train.job import Job
from trainer.train.preflight import MAX_TASKS, offered_specs

GROUP = "0-0-0"
WALL_S = 120.0
"""Seconds for each rollout, if `limits.wall_s` allows more."""
WRONG_ANSWER = "I do not know."
CALLING, ANSWERING = 0, 1
"""The indexes of the two rollouts: one calls a tool before it answers, the other only answers."""
MAX_TURNS = 3
"""Turns of each: somebody may be paid for answers to them."""
SHOWN = 300


async def rehearse(job: Job) -> list[Finding]:
    """Plays two rollouts of the first task. Tools are really called, with made-up arguments."""
    stage = job.settings.curriculum.stages[0]
    task = stage.apply(_choose_task(job, job.tasks.train[stage.data]))
    specs = offered_specs(job.gateway.specs, task)
    limits = job.settings.limits
    runner = replace(
        job.make_runner(ScriptedEngine(_make_script(job, task, specs)), NullObserver()),
        limits=limits.model_copy(
            update={
                "wall_s": min(limits.wall_s, WALL_S),
                "assistant_turns": min(limits.assistant_turns, MAX_TURNS),
            }
        ),
    )
    rollouts = [await runner.run(task, group=GROUP, index=index) for index in (CALLING, ANSWERING)]
    findings = list(_check_offer(job, specs))
    findings += [finding for rollout in rollouts for finding in _check_rollout(rollout, specs)]
    if any(rollout.stop.is_infrastructure for rollout in rollouts):
        return findings
    group = await job.scorer.score(task, rollouts, log_failures=False)
    return [*findings, *_check_rewards(job, group), *_check_loss(job, group)]


def _choose_task(job: Job, tasks: Sequence[Task]) -> Task:
    """The first task that every built-in reward function can score: rows that lack something are told by themselves."""
    functions = [component.function for component in job.settings.reward.components.values()]
    scorable = (
        task
        for task in islice(tasks, MAX_TASKS)
        if all(find_truth_problem(function, task) is None for function in functions)
    )
    return next(scorable, tasks[0])


def _make_script(job: Job, task: Task, specs: Sequence[ToolSpec]) -> Callable[[Sequence[int], Sampling, str], Answer]:
    """The policy of both rollouts: it calls the first tool once, and gives the same wrong answer from then on."""
    asked: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
    answer = render_reply(job.template, asked, {"role": "assistant", "content": WRONG_ANSWER}, specs)
    turns: dict[str, int] = {}
    tool = choose_tool(specs)

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        turn = turns[key] = turns.get(key, -1) + 1
        if turn or tool is None or not key.endswith(f"/{CALLING}"):
            return answer
        call = build_call("call00000", tool.name, json.dumps(make_arguments(tool.parameters)))
        message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return render_reply(job.template, asked, message, specs)

    return script


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


def _check_offer(job: Job, specs: Sequence[ToolSpec]) -> Iterator[Finding]:
    if not specs and job.settings.curriculum.stages[0].tools != ():
        remedy = "if that is not meant: name them with `tools` (--tools), and look at `allow` and at the rows' `tools`"
        yield Finding("note", "the policy is offered no tools", remedy)


def _check_rollout(rollout: Rollout, specs: Sequence[ToolSpec]) -> Iterator[Finding]:
    """Whether the turn with a call was read, and the call answered."""
    name = "that calls a tool" if rollout.index == CALLING else "that answers wrong"
    if rollout.stop.is_infrastructure:
        remedy = "mend what the reason names; such rollouts are never trained on"
        yield Finding("wrong", f"a scripted rollout {name} ended with {rollout.stop}: {rollout.reason}", remedy)
        return
    tool = choose_tool(specs)
    if rollout.index != CALLING or tool is None or not rollout.turns:
        return
    if rollout.stop in TRUNCATED and len(rollout.turns) == 1:
        setting = LIMIT_SETTINGS[rollout.stop]
        yield Finding("wrong", f"a call of `{tool.name}` is cut off by `{setting}`", f"raise `{setting}`")
    elif not rollout.turns[0].calls:
        remedy = "correct the model's stop ids or `template.parser`; `mtrl-train render` shows the template"
        yield Finding("wrong", f"a call of `{tool.name}` is not read: the turn ended before it", remedy)
    for entry in rollout.ledger:
        if entry.author is Author.TOOL and any(outcome != "ok" for outcome in entry.outcomes):
            text = " ".join(str(message.get("content")) for message in entry.messages)[:SHOWN]
            call = rollout.turns[0].calls[0]
            problem = f"`{entry.source}` called with {call.arguments} ended as {entry.outcomes[0]}: {text}"
            yield Finding("note", problem, "nothing, if these made-up arguments are to blame")


def _check_rewards(job: Job, group: ScoredGroup) -> Iterator[Finding]:
    for reason in dict.fromkeys(unscored.reason.partition("; rollout")[0] for unscored in group.failed):
        remedy = "return a finite number for every rollout; one that cannot be scored is not trained on"
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
    yield Finding("ok", f"a loss over {tokens} tokens was computed from them")
