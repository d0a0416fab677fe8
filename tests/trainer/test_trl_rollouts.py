"""Whole rollouts with the templates of TRL: tools are called, and the ledger is what the template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence

import anyio
import pytest

from gateway.types import ToolCall
from tests.trainer.conversations import calling_turn, text_turn, tool_replies
from tests.trainer.policy_scripts import make_gateway, make_tasks
from tests.trainer.trl_templates import BY_FILE, ONE_CALL, RUNS, load_trl_template
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import StopReason
from trainer.template import Cause, Settings, render_reply

FILES = [family.files[0] for family in BY_FILE.values() if family.outcome in (RUNS, ONE_CALL)]
AS_TEXT = [f"{family.files[0]}:text" for family in BY_FILE.values() if family.outcome not in (RUNS, ONE_CALL)]


@pytest.mark.parametrize("file", dict.fromkeys([*FILES, *AS_TEXT]))
async def test_rollout_calls_its_tools_and_its_ledger_is_what_the_template_renders(file: str) -> None:
    made: list[int] = []

    def add(a: int, b: int) -> int:
        """Adds."""
        made.append(a + b)
        return a + b

    name, _, form = file.partition(":")
    async with make_gateway(add) as gateway:
        specs = [spec for spec in gateway.specs if spec.audience == "policy"]
        template = load_trl_template(name, Settings(calls="text") if form else None, tuple(specs))
        [task] = make_tasks("t")
        words = [{"a": 1, "b": 2}, {"a": 3, "b": 4}][: template.max_calls or 2]
        calls = [ToolCall(f"call0000{index}", "add", json.dumps(row)) for index, row in enumerate(words)]
        asked = calling_turn(calls)
        answered = [*task.messages, asked, *tool_replies(calls, *(str(row["a"] + row["b"]) for row in words))]
        turns = [
            render_reply(template, task.messages, asked, specs),
            render_reply(template, answered, text_turn("Done."), specs),
        ]

        def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
            return turns[len(engine.requests) - 1]

        engine = ScriptedEngine(script)
        with anyio.fail_after(60):
            rollout = await RolloutRunner(engine, template, gateway).run(task)
    assert (rollout.stop, sorted(made)) == (StopReason.DONE, [row["a"] + row["b"] for row in words])
    assert [entry.ids for entry in rollout.ledger if entry.author is Author.POLICY] == turns
    assert Cause.OTHER not in rollout.infos.get("drift", {}) and Cause.WHITESPACE not in rollout.infos.get("drift", {})
