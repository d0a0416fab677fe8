"""Every chat template of TRL runs, or is refused for its true reason with a remedy that works."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.types import ToolCall
from tests.trainer.conversations import calling_turn, text_turn
from tests.trainer.trl_templates import (
    BY_FILE,
    NO_CALLS,
    ONE_CALL,
    REFUSALS,
    RUNS,
    load_trl_template,
)
from trainer.ledger import Message
from trainer.template import Settings, TemplateError, probe, render_reply

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
