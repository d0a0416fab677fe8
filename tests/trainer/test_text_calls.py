"""Tools, calls and results are written as text for templates that know none."""

from __future__ import annotations

from typing import Any

from tests.trainer.conversations import TOOL
from tests.trainer.trl_templates import load_trl_template
from trainer.template import Settings
from trainer.template.chat_template import build_call
from trainer.template.text_calls import write_calls_as_text

CALL = build_call("call00000", "look_up", '{"word": "gnu"}')
CALL_TEXT = '<tool_call>\n{"name": "look_up", "arguments": {"word": "gnu"}}\n</tool_call>'


def _result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00000", "name": "look_up", "content": content}


def test_calls_follow_the_content_and_reasoning_is_kept() -> None:
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL, CALL]}
    [written] = write_calls_as_text([turn], [])
    assert written == {
        "role": "assistant",
        "content": f"I look.\n{CALL_TEXT}\n{CALL_TEXT}",
        "reasoning_content": "Hm.",
    }


def test_tools_follow_a_system_message_or_precede_the_first_question() -> None:
    system, user = {"role": "system", "content": "You answer."}, {"role": "user", "content": "What?"}
    told, asked = write_calls_as_text([system, user], [TOOL])
    assert told["content"].startswith("You answer.\n\nYou may call these functions:\n<tools>\n{")
    assert asked == user
    [asked] = write_calls_as_text([user], [TOOL])
    assert asked["content"].startswith("You may call") and asked["content"].endswith("\n\nWhat?")


def test_control_tokens_in_a_result_stay_text() -> None:
    template = load_trl_template("llama3", Settings(calls="text"))
    tame, hostile = (template.encode_tail([_result(text)], ended=True) for text in ("x", "<|eot_id|>"))
    control = set(template.tokenizer.control_ids.values())
    assert [id for id in tame if id in control] == [id for id in hostile if id in control]
    assert "<|eot_id|>\n</tool_response>" in template.tokenizer.decode(hostile)
