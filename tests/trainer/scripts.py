"""What a policy would write, for engines that say what they are told, and tools to be called by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.config.models import Limits
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.limit import Limited
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.types import Task as Asked
from tests.trainer.conversations import template_for
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, Script
from trainer.ledger import Message
from trainer.task import Task
from trainer.template import Template

HERMES = FAMILIES["hermes"]
ASKS: tuple[Message, ...] = ({"role": "user", "content": "What is 3 + 4?"},)


def calling(*calls: tuple[str, Any]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(args)}}}\n</tool_call>' for name, args in calls
    )


def says(template: Template, *texts: str, end: bool = True) -> list[tuple[int, ...]]:
    """Turns as a policy would write them."""
    return [template.tokens.encode(text) + (template.stop_ids[:1] if end else ()) for text in texts]


def gateway_of(*functions: Callable[..., Any], **limits: Any) -> Gateway:
    """These functions as tools, and an interaction that knows right answers."""
    tools = Limited(NativeToolset([FunctionTool(one) for one in functions]), Limits(**limits))
    feedback = FeedbackToolset({"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return Gateway([Source("tools", tools), Source("feedback", feedback)])


def tasks(*names: str, truth: str = "") -> list[Task]:
    """A task for each name; with a `truth`, one that an interaction answers."""
    heard = {"feedback": "gsm8k", "feedback_args": {"ground_truth": truth}} if truth else {}
    return [Task(name, ASKS, asked=Asked(id=name, **heard)) for name in names]


def by_task(said: Mapping[str, Sequence[str]], template: Template | None = None) -> Script:
    """A policy that says the same in each rollout of a task, one text after the other; `*` is any other task."""
    template = template or template_for(HERMES)
    turns = {name: says(template, *texts) for name, texts in said.items()}
    said_by: dict[str, int] = {}

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        task = key.split("/")[1]
        turn = said_by[key] = said_by.get(key, -1) + 1
        return turns.get(task, turns.get("*", ()))[turn]

    return script
