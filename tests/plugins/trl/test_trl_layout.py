"""Reward functions get the arguments that TRL 1.16 itself passed for the same texts, rows, tools and environment.

The expected values were printed by a run of its GRPOTrainer on a CPU, whose policy wrote these texts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.trl.scripted_grpo import Recorder, Safe, make_trainer, price, script_policy
from trainer.template import Template

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
PEAR, NOTHING = CALL.format("price", '{"item": "pear"}'), CALL.format("price", '{"item": "nothing"}')
DIAL_7, DIAL_1 = CALL.format("dial", '{"number": 7}'), CALL.format("dial", '{"number": 1}')
PROMPT = [{"role": "system", "content": "sys"}, {"role": "user", "content": "What do 2 pears cost?"}]

pytestmark = pytest.mark.usefixtures("place")


def called(name: str, **arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_chat_gives_lists_of_messages_with_calls_and_their_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [[f"I look.\n{PEAR}", "It is 9."], [NOTHING, "I do not know."], ["It is 6."], ["It is cut o..."]]
    script_policy(monkeypatch, turns)
    recorder = Recorder()
    make_trainer(model, [{"prompt": PROMPT, "total": 6, "note": None}] * 4, recorder, tools=[price]).train()
    (call,) = recorder.calls
    assert call["prompts"] == [PROMPT] * 4
    assert call["completions"] == [
        [
            {"role": "assistant", "content": "I look.", "tool_calls": [called("price", item="pear")]},
            {"role": "tool", "name": "price", "content": "3"},
            {"role": "assistant", "content": "It is 9."},
        ],
        [
            {"role": "assistant", "tool_calls": [called("price", item="nothing")], "content": ""},
            {"role": "tool", "name": "price", "content": "{'error': \"'nothing'\"}"},
            {"role": "assistant", "content": "I do not know."},
        ],
        [{"role": "assistant", "content": "It is 6."}],
        [{"role": "assistant", "content": "It is cut o"}],
    ]
    assert call["total"] == [6] * 4 and call["note"] == [None] * 4
    assert (call["trainer_state"].global_step, call["trainer_state"].max_steps) == (0, 1)
    assert callable(call["log_extra"]) and callable(call["log_metric"])
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    assert call.keys() == own | {"total", "note"}
    decode = Template.load(model).tokenizer.decode
    texts = [decode(ids) for ids in call["completion_ids"]]
    assert texts[0].startswith(f"I look.\n{PEAR}<|im_end|>\n") and texts[0].endswith("It is 9.<|im_end|>")
    assert "3\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in texts[0]
    assert texts[2:] == ["It is 6.<|im_end|>", "It is cut o"]


def test_reasoning_stands_beside_the_content_where_the_policy_may_call_tools(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [["<think>\nhm\n</think>\n\nIt is 6."]])
    recorder = Recorder()
    make_trainer(model, [{"prompt": PROMPT}], recorder, tools=[price]).train()
    expected = {"role": "assistant", "reasoning_content": "hm", "content": "It is 6."}
    assert recorder.calls[0]["completions"] == [[expected]] * 4


def test_without_tools_the_content_of_a_completion_is_all_that_was_written(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [[f"<think>\nhm\n</think>\n\n{PEAR}"]])
    recorder = Recorder()
    make_trainer(model, [{"prompt": PROMPT}], recorder).train()
    expected = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{PEAR}"}
    assert recorder.calls[0]["completions"] == [[expected]] * 4


def test_a_text_is_continued_as_it_is_and_gives_texts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engines,) = [script_policy(monkeypatch, [[" blue."], [" so red..."], [" b..."], [" c..."]])]
    recorder = Recorder()
    make_trainer(model, [{"prompt": "The sky is", "colour": "blue"}] * 4, recorder).train()
    (call,) = recorder.calls
    assert call["prompts"] == ["The sky is"] * 4
    assert call["completions"] == [" blue.", " so red", " b", " c"]
    assert call["colour"] == ["blue"] * 4
    decode = Template.load(model).tokenizer.decode
    assert [decode(ids) for ids in call["completion_ids"]] == [" blue.<|im_end|>", " so red", " b", " c"]
    assert decode(engines[0].requests[0].ids) == "The sky is"


def test_an_environment_gives_what_it_observes_to_the_prompt_and_itself_to_the_functions(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [[f"{DIAL_7}\n{DIAL_1}", "Open."], ["No."], ["No."], ["No."]])
    recorder, row = Recorder(), {"prompt": [{"role": "user", "content": "Open it. "}], "code": 7, "kind": "x"}
    output = make_trainer(model, [row] * 4, recorder, environment_factory=Safe).train()
    (call,) = recorder.calls
    assert call["prompts"] == [[{"role": "user", "content": "Open it. The dial shows 0."}]] * 4
    assert call["completions"][0] == [
        {"role": "assistant", "tool_calls": [called("dial", number=7), called("dial", number=1)], "content": ""},
        {"role": "tool", "name": "dial", "content": "click"},
        {"role": "tool", "name": "dial", "content": "nothing"},
        {"role": "assistant", "content": "Open."},
    ]
    assert call["completions"][1:] == [[{"role": "assistant", "content": "No."}]] * 3
    assert call["code"] == [7] * 4 and call["kind"] == ["x"] * 4
    assert [type(environment) for environment in call["environments"]] == [Safe] * 4
    assert len({*map(id, call["environments"])}) == 4
    assert all(environment.rows == [row] for environment in call["environments"])
    # TRL logged rewards/Safe/mean 0.5 and, leaving out the rollout without a reward of `recorder`, a mean of 2.
    assert output.metrics["reward/Safe"] == 0.5
