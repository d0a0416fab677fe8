"""The probe: supported families and TRL's templates run, or are refused for the true reason, with what cures it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall, ToolSpec
from tests.trainer.conversations import TOOL, TagParser, calling_turn, make_template, text_turn
from tests.trainer.tokenizer_families import BROKEN_FAMILIES, FAMILIES, Family, make_tokenizer, save_tokenizer_folder
from tests.trainer.trl_templates import BY_FILE, NO_CALLS, ONE_CALL, REFUSALS, RUNS, load_trl_template
from trainer.ledger import Message
from trainer.parse.base import Reply
from trainer.rollout.settings import BaseRolloutSettings
from trainer.rollout.task import Task
from trainer.setup import probe_for_job
from trainer.template import Settings, Template, TemplateError, probe, render_reply
from trainer.template.probe import Finding, ProbeReport

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_up",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "word": {"type": "string"},
                "flag": {"type": "boolean"},
                "rows": {"type": "array", "items": {"type": "object"}},
                "more": {"type": "object"},
            },
            "required": ["word"],
        },
    },
}
LETTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufdd0\ufdd1<")
WORDS = st.text(LETTERS | st.sampled_from("'\"\\\n{}[](),:="), max_size=12)
KEYS = st.from_regex("[a-z_]{1,5}", fullmatch=True)
VALUES = st.integers(-(10**9), 10**9) | st.booleans() | WORDS
ARGUMENTS = st.fixed_dictionaries(
    {"word": WORDS.map(lambda word: f"a{word}b")},
    optional={
        "count": st.integers(-(10**9), 10**9),
        "share": st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
        "flag": st.booleans(),
        "rows": st.lists(st.dictionaries(KEYS, VALUES, max_size=2), max_size=2),
        "more": st.dictionaries(KEYS, st.lists(VALUES, max_size=2), max_size=2),
    },
)
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "How many?"},)
SUFFIX = "_training"
WITH_TOOLS = sorted(file for file, family in BY_FILE.items() if family.outcome in (RUNS, ONE_CALL))
REPEATED = [file for file in WITH_TOOLS if file.endswith(SUFFIX) and file not in ("qwen3_training", "glm4moe_training")]
"""Variants for training that write the same as their templates, with marks around it."""
PARSED = [file for file in WITH_TOOLS if file not in REPEATED]
UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2")
"""Templates that write quotes and backslashes in a string as they are, which cannot always be read."""
TEXT = Settings(calls="text")


@pytest.mark.parametrize("file", BY_FILE)
def test_job_with_tools_runs_or_is_refused_for_its_true_reason(file: str) -> None:
    family = BY_FILE[file]
    if family.outcome in (RUNS, ONE_CALL):
        template = load_trl_template(file)
        report = probe(template)
        assert report.is_ok, [str(finding) for finding in report.findings]
        assert template.parser.name == family.parser
        assert template.max_calls == (1 if family.outcome == ONE_CALL else None)
        return
    with pytest.raises(TemplateError) as refused:
        probe(load_trl_template(file), system=family.takes_system).raise_if_failed()
    assert REFUSALS[family.outcome] in refused.value.problem
    assert (family.outcome == NO_CALLS) == refused.value.problem.endswith(REFUSALS[NO_CALLS])
    assert "set `template.calls: text`" in refused.value.remedy


@pytest.mark.parametrize("file", [file for file, family in BY_FILE.items() if family.outcome in REFUSALS])
def test_remedy_of_a_refused_template_works(file: str) -> None:
    template = load_trl_template(file, TEXT)
    report = probe(template, system=BY_FILE[file].takes_system)
    assert report.is_ok, [str(finding) for finding in report.findings]
    assert (template.parser.name, template.max_calls) == ("hermes", None)


@pytest.mark.parametrize("file", [*PARSED, "deepseekv3", "gemma3:text", "cohere2:text", "idefics3:text"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.lists(ARGUMENTS, min_size=2, max_size=2))
def test_calls_as_a_template_writes_them_are_read_as_the_same_calls(file: str, arguments: list[Any]) -> None:
    name, _, form = file.partition(":")
    template = load_trl_template(name, TEXT if form else None, (ADD,))
    rows = arguments[: template.max_calls or 2]
    assume(name not in UNESCAPED or not any(mark in row["word"] for row in rows for mark in "'\\"))
    calls = [ToolCall(f"call0000{index}", "add_up", json.dumps(row)) for index, row in enumerate(rows)]
    ids = render_reply(template, QUESTION, calling_turn(calls), [ADD])
    reply = template.parse_turn(ids)
    assert reply.problems == ()
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("add_up", row) for row in rows]
    assert reply.content.strip() == ""
    for end in range(0, len(ids), 7):
        cut = template.parse_turn(ids[:end])
        assert [call.name for call in cut.calls] in ([], ["add_up"], ["add_up"] * 2)
        for call in cut.calls:
            json.loads(call.arguments)


@pytest.mark.parametrize("file", BY_FILE)
def test_text_as_a_template_writes_it_is_read_as_content(file: str) -> None:
    template = load_trl_template(file, tools=())
    reply = template.parse_turn(render_reply(template, QUESTION, text_turn("Two, I think.")))
    assert (reply.content.strip(), reply.calls, reply.problems) == ("Two, I think.", (), ())
    assert not reply.reasoning.strip()


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


TASKS = [[Task("a", QUESTION)]]
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
