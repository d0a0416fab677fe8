"""The template probe: accepts supported families, tells what is wrong with others, and which setting cures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.types import ToolSpec
from tests.trainer.conversations import TOOL, TagParser, make_template
from tests.trainer.tokenizer_families import BROKEN_FAMILIES, FAMILIES, Family, make_tokenizer, save_tokenizer_folder
from trainer.ledger import Message
from trainer.parse.base import Reply
from trainer.rollout.settings import BaseRolloutSettings
from trainer.rollout.task import Task
from trainer.setup import probe_for_job
from trainer.template import Settings, Template, TemplateError, probe
from trainer.template.probe import Finding, ProbeReport


class Deaf:
    name = "deaf"

    def parse(self, text: str) -> Reply:
        return Reply(text)


def _failed(report: ProbeReport) -> list[Finding]:
    return [finding for finding in report.findings if not finding.is_ok]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_supported_family_passes_the_probe(family: Family, tmp_path: Path) -> None:
    template = Template.load(save_tokenizer_folder(family, tmp_path), tools=[TOOL])
    assert template.parser.name == family.parser
    report = probe(template)
    assert report.is_ok, [str(finding) for finding in report.findings]
    report.raise_if_failed()


def test_appending_family_can_fail_only_by_its_parser() -> None:
    failed = _failed(probe(make_template(FAMILIES["hermes"], parser=Deaf())))
    assert [finding.check for finding in failed] == ["the parser"]
    assert "'deaf'" in failed[0].detail and "`template.parser`" in failed[0].remedy


BREAKS = {
    "broken_numbered": ("is not what the template renders in the end", "Reply 5"),
    "broken_clocked": ("writes the time of rendering",),
    "broken_deaf": ("does not write the tools", "drops the tools' replies"),
    "broken_toolless": ("does not write the assistant's calls",),
    "broken_moving": ("is not what the template renders in the end", "[AVAILABLE_TOOLS]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_template_fails_the_probe_with_a_reason(name: str) -> None:
    report = probe(make_template(BROKEN_FAMILIES[name]))
    assert not report.is_ok
    with pytest.raises(TemplateError) as error:
        report.raise_if_failed()
    assert all(words in str(error.value) for words in BREAKS[name])
    assert "`template.chat_template`" in error.value.remedy or "`template.calls: text`" in error.value.remedy


def test_template_that_moves_tools_is_accepted_without_feedback() -> None:
    failed = _failed(probe(make_template(BROKEN_FAMILIES["broken_moving"], parser=Deaf()), feedback=False))
    assert [finding.check for finding in failed] == ["the parser"]


def test_probe_finds_an_end_of_turn_that_does_not_stop() -> None:
    template = Template.load(make_tokenizer(FAMILIES["glm"]), TagParser())
    remedies = {finding.remedy for finding in _failed(probe(template)) if finding.check == "the end of a turn"}
    assert remedies == {"add the id that ends it to `eos_token_id` in the model's generation_config.json"}


def test_probe_finds_a_turn_that_changes_its_prompt() -> None:
    source = FAMILIES["hermes"].template
    restless = source.replace("{{ system }}", "{{ system }} {{ messages | length }}", 1)
    failed = _failed(probe(make_template(FAMILIES["hermes"], Settings(chat_template=restless))))
    assert any("changes the text before it" in finding.detail for finding in failed)


def test_template_that_rejects_text_before_a_call_only_stops_a_run_that_renders_it_again() -> None:
    reject = "{% if m.tool_calls and m.content %}{{ raise_exception('no text') }}{% endif %}"
    picky = "{% for m in messages %}" + reject + "{% endfor %}"
    source = picky + FAMILIES["hermes"].template
    report = probe(make_template(FAMILIES["hermes"], Settings(chat_template=source)))
    assert any("rejects it, so that it is counted as drift" in finding.detail for finding in report.findings)
    assert report.is_ok
    again = Settings(chat_template=source, history="inference_template")
    [failed] = _failed(probe(make_template(FAMILIES["hermes"], again)))
    assert (failed.check, failed.remedy[:29]) == ("text before a call", "set `template.history: full`,")


USER: Message = {"role": "user", "content": "What is a gnu?"}
TASKS = [[Task("a", (USER,))]]
SPEC = ToolSpec("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})


def test_a_template_that_moves_its_tools_is_cured_by_writing_them_as_text() -> None:
    broken = make_template(BROKEN_FAMILIES["broken_moving"], parser="mistral")
    report = probe_for_job(broken, BaseRolloutSettings(stepper="plugins.py:again"), [SPEC], TASKS)
    with pytest.raises(TemplateError) as raised:
        report.raise_if_failed()
    assert "^ here they differ" in str(raised.value) and raised.value.remedy == "set `template.calls: text`"


def test_a_template_that_no_setting_cures_is_shown_with_what_to_change() -> None:
    report = probe_for_job(make_template(BROKEN_FAMILIES["broken_moving"]), BaseRolloutSettings(), [SPEC], [])
    with pytest.raises(TemplateError) as raised:
        report.raise_if_failed()
    assert not report.cure and "^ here they differ" in str(raised.value)
    assert "copy the chat template to a file" in raised.value.remedy
