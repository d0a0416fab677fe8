"""A template is probed for what the job uses: its tools, system messages, feedback and limit on calls."""

from __future__ import annotations

import pytest

from gateway.types import Task as SessionTask
from gateway.types import ToolSpec
from tests.trainer.conversations import make_template
from tests.trainer.tokenizer_families import BROKEN_FAMILIES
from tests.trainer.trl_templates import load_trl_template
from trainer.ledger import Message
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.task import Task
from trainer.setup import probe_for_job
from trainer.template import Template, TemplateError

USER: Message = {"role": "user", "content": "What is a gnu?"}
SYSTEM: Message = {"role": "system", "content": "You answer."}
PLAIN, TOLD = Task("a", (USER,)), Task("b", (SYSTEM, USER))
ANSWERED = Task("c", (USER,), session_task=SessionTask(id="c", feedback="gsm8k"))
TOOL = ToolSpec("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
JUDGE = ToolSpec("feedback_gsm8k", audience="loop")
NONE = BaseRolloutSettings()


def _gemma() -> Template:
    return load_trl_template("gemma", tools=())


def test_system_messages_are_only_probed_where_a_task_has_one() -> None:
    assert probe_for_job(_gemma(), NONE, [], [[PLAIN], [PLAIN]]).is_ok
    with pytest.raises(TemplateError, match="rejects system messages"):
        probe_for_job(_gemma(), NONE, [], [[PLAIN], [PLAIN, TOLD]]).raise_if_failed()


def test_everything_is_probed_where_the_tasks_are_unknown() -> None:
    with pytest.raises(TemplateError, match="rejects system messages"):
        probe_for_job(_gemma(), NONE, [], []).raise_if_failed()


def test_feedback_is_only_probed_where_a_task_or_a_stepper_gives_it() -> None:
    moving = make_template(BROKEN_FAMILIES["broken_moving"], parser="mistral")
    assert probe_for_job(moving, NONE, [TOOL], [[PLAIN]]).is_ok
    assert not probe_for_job(moving, NONE, [TOOL], [[PLAIN, ANSWERED]]).is_ok
    assert not probe_for_job(moving, BaseRolloutSettings(stepper="plugins.py:again"), [TOOL], [[PLAIN]]).is_ok


def test_tools_are_not_probed_where_only_the_training_loop_has_some() -> None:
    deaf = load_trl_template("phi3", tools=())
    assert probe_for_job(deaf, NONE, [JUDGE], [[ANSWERED]]).is_ok
    assert not probe_for_job(deaf, NONE, [JUDGE, TOOL], [[ANSWERED]]).is_ok


def test_limit_on_calls_of_a_turn_is_held_against_the_template() -> None:
    llama = load_trl_template("llama3_1")
    for limit, is_ok in ((None, True), (1, True), (2, False)):
        settings = BaseRolloutSettings(limits=RolloutLimits(parallel_calls=limit))
        assert probe_for_job(llama, settings, [TOOL], [[PLAIN]]).is_ok is is_ok
