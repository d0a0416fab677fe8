"""A template that cannot be trusted stops the run, and says what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.conversations import TOOL, Tags, template_for
from tests.trainer.tokenizers_for_tests import BROKEN, FAMILIES, Family, folder_for, tokenizer_for
from trainer.parse.base import Reply
from trainer.template import Settings, Template, TemplateError, probe
from trainer.template.probe import Finding, ProbeReport


class Deaf:
    name = "deaf"

    def parse(self, text: str) -> Reply:
        return Reply(text)


def _failed(report: ProbeReport) -> list[Finding]:
    return [finding for finding in report.findings if not finding.ok]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_is_known_by_its_template_and_can_be_trusted(family: Family, tmp_path: Path) -> None:
    template = Template.load(folder_for(family, tmp_path), tools=[TOOL])
    assert template.parser.name == family.parser
    report = probe(template)
    assert report.ok, [str(finding) for finding in report.findings]
    report.require()


@pytest.mark.parametrize("family", [one for one in FAMILIES.values() if not one.strips], ids=lambda one: one.name)
def test_only_the_parser_can_fail_a_family_that_appends(family: Family) -> None:
    failed = _failed(probe(template_for(family, parser=Deaf())))
    assert [finding.check for finding in failed] == ["the parser"]
    assert "'deaf'" in failed[0].text and "`template.parser`" in failed[0].remedy


BREAKS = {
    "broken_numbered": ("is not what the template writes in the end", "Reply 5"),
    "broken_clocked": ("writes the time of rendering",),
    "broken_deaf": ("does not write the tools", "drops what a tool replies"),
    "broken_toolless": ("refuses a conversation", "only system, user and assistant"),
    "broken_moving": ("is not what the template writes in the end", "[AVAILABLE_TOOLS]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_template_stops_the_run_and_says_why(name: str) -> None:
    report = probe(template_for(BROKEN[name]))
    assert not report.ok
    with pytest.raises(TemplateError) as error:
        report.require()
    assert all(words in str(error.value) for words in BREAKS[name])
    assert "`template.chat_template`" in error.value.remedy


def test_a_template_without_tools_will_do_where_none_are_called() -> None:
    assert probe(template_for(BROKEN["broken_toolless"]), tools=False).ok


def test_a_template_that_moves_its_tools_will_do_without_feedback() -> None:
    failed = _failed(probe(template_for(BROKEN["broken_moving"], parser=Deaf()), feedback=False))
    assert [finding.check for finding in failed] == ["the parser"]


def test_an_end_of_turn_that_would_not_stop_the_policy_is_found() -> None:
    template = Template.load(tokenizer_for(FAMILIES["glm"]), Tags())
    remedies = {finding.remedy for finding in _failed(probe(template)) if finding.check == "the end of a turn"}
    assert remedies == {"name it in `eos_token_id` of the model's generation_config.json"}


def test_a_missing_generation_prompt_is_found() -> None:
    mute = FAMILIES["hermes"].template.replace("add_generation_prompt", "false")
    failed = _failed(probe(template_for(FAMILIES["hermes"], Settings(chat_template=mute))))
    assert any(finding.check == "the generation prompt" and "adds none" in finding.text for finding in failed)


def test_what_is_worth_knowing_is_told_without_stopping() -> None:
    told = {finding.text for finding in probe(template_for(FAMILIES["hermes"])).findings}
    assert any("adds its own" in text and "You are of use." in text for text in told)
    told = {finding.text for finding in probe(template_for(FAMILIES["qwen3"])).findings}
    assert any("takes earlier reasoning away; history=full" in text for text in told)
    told = {finding.text for finding in probe(template_for(FAMILIES["qwq"])).findings}
    assert any("begins the policy's turn with '<think>" in text for text in told)
    told = {finding.text for finding in probe(template_for(FAMILIES["llama3"])).findings}
    assert "the template writes one call per turn only" in told


def test_a_control_token_that_slips_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_for(replace(FAMILIES["hermes"], name="hermes"))
    monkeypatch.setattr(template.tokens, "fenced", lambda value, markup=False: value)
    failed = {finding.text for finding in _failed(probe(template))}
    assert {"what a user says becomes control tokens", "what a tool says becomes control tokens"} <= failed


def test_a_turn_that_changes_the_prompt_before_it_is_found() -> None:
    source = FAMILIES["hermes"].template
    restless = source.replace("{{ told }}", "{{ told }} {{ messages | length }}", 1)
    failed = _failed(probe(template_for(FAMILIES["hermes"], Settings(chat_template=restless))))
    assert any("changes what stands before it" in finding.text for finding in failed)


def test_a_finding_reads_as_a_line_and_a_remedy() -> None:
    assert str(Finding("tools", False, "none", "add some")) == "FAILED: tools: none\n  remedy: add some"
    assert str(Finding("tools", True)) == "ok: tools"


def test_transformers_is_not_imported_before_a_model_is_loaded() -> None:
    code = "import sys, trainer.template; print('transformers' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
