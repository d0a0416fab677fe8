"""Scripts for a scripted policy: texts encoded as turns, tasks, and a gateway with tools to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.config.models import Limits
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Task as SessionTask
from tests.trainer.conversations import make_template
from tests.trainer.tokenizer_families import FAMILIES
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, Script
from trainer.ledger import Message
from trainer.rollout.task import Task
from trainer.template import Template

HERMES = FAMILIES["hermes"]
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "What is 3 + 4?"},)


def render_calls(*calls: tuple[str, Any]) -> str:
    """Tool calls, by name and arguments, in the Hermes format."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(args)}}}\n</tool_call>' for name, args in calls
    )


def encode_turns(template: Template, *texts: str, end: bool = True) -> list[tuple[int, ...]]:
    """Texts as the ids of the policy's turns."""
    return [template.tokenizer.encode(text) + (template.stop_ids[:1] if end else ()) for text in texts]


def make_gateway(*functions: Callable[..., Any], **limits: Any) -> Gateway:
    """A gateway with these functions as tools, and the gsm8k interaction."""
    tools = LimitedToolset(NativeToolset([FunctionTool(function) for function in functions]), Limits(**limits))
    feedback = FeedbackToolset({"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return Gateway([Source("tools", tools), Source("feedback", feedback)])


def make_tasks(*names: str, truth: str = "") -> list[Task]:
    """A task for each name; with a `truth`, the gsm8k interaction answers it."""
    feedback = {"feedback": "gsm8k", "feedback_args": {"ground_truth": truth}} if truth else {}
    return [Task(name, QUESTION, session_task=SessionTask(id=name, **feedback)) for name in names]


def script_by_task(texts: Mapping[str, Sequence[str]], template: Template | None = None) -> Script:
    """A script with the same turns for each rollout of a task; `*` is any other task."""
    template = template or make_template(HERMES)
    turns = {name: encode_turns(template, *task_texts) for name, task_texts in texts.items()}
    turn_by_key: dict[str, int] = {}

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        task = key.split("/")[1]
        turn = turn_by_key[key] = turn_by_key.get(key, -1) + 1
        return turns.get(task, turns.get("*", ()))[turn]

    return script
