"""A refused chat template: both texts with a mark at their first difference, and the setting that cures it."""

from __future__ import annotations

import pytest

from gateway.types import ToolSpec
from tests.trainer.conversations import make_template
from tests.trainer.tokenizer_families import BROKEN_FAMILIES
from tests.trainer.trl_templates import load_trl_template
from trainer.ledger import Message
from trainer.rollout.settings import BaseRolloutSettings
from trainer.rollout.task import Task
from trainer.setup import probe_for_job
from trainer.template import TemplateError

USER: Message = {"role": "user", "content": "What is a gnu?"}
TASKS = [[Task("a", (USER,))]]
TOOL = ToolSpec("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})


def test_a_template_without_calls_is_cured_by_writing_them_as_text() -> None:
    report = probe_for_job(load_trl_template("phi3", tools=()), BaseRolloutSettings(), [TOOL], TASKS)
    assert not report.is_ok and report.cure == "`template.calls: text`"
    with pytest.raises(TemplateError, match=r"remedy: set `template\.calls: text`$"):
        report.raise_if_failed()


def test_a_template_that_moves_its_tools_is_cured_by_writing_them_as_text() -> None:
    broken = make_template(BROKEN_FAMILIES["broken_moving"], parser="mistral")
    report = probe_for_job(broken, BaseRolloutSettings(stepper="plugins.py:again"), [TOOL], TASKS)
    with pytest.raises(TemplateError) as raised:
        report.raise_if_failed()
    assert "^ here they differ" in str(raised.value) and raised.value.remedy == "set `template.calls: text`"


def test_a_template_that_no_setting_cures_is_shown_with_what_to_change() -> None:
    report = probe_for_job(make_template(BROKEN_FAMILIES["broken_moving"]), BaseRolloutSettings(), [TOOL], [])
    with pytest.raises(TemplateError) as raised:
        report.raise_if_failed()
    assert not report.cure and "^ here they differ" in str(raised.value)
    assert "copy the chat template to a file" in raised.value.remedy
