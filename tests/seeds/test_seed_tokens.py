"""Tests which tokens of the documents' conversation are trained, with templates like those of Qwen3 and QwQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.tool_table import Source
from gateway.types import Image
from tests.seeds.seed_rollouts import LIMITS, RolloutRunners, load_tasks, trained_texts
from tests.seeds.seed_rollouts import make_template as small
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import make_gateway, render_calls
from tests.trainer.tokenizer_families import FAMILIES, make_tokenizer
from trainer.ledger import Author, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import Step, ToolsAndFeedback, Turn
from trainer.template import Cause, Settings, Template, find_drifts, probe

FIRST = ("user asked about a simple math question.", "2 + 2 = 4.")
SECOND = "user wants to know the reasoning behind the answer. Search for a good explanation"
FOUND = "The sum of two and two is four because it is a basic arithmetic operation."
THIRD = "The tool provided a good explanation."
CALL = render_calls(("search", {"query": "Why is 2 + 2 = 4?"}))
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


STRIPPED = "{{ (message.content or '').split('</think>')[-1].lstrip('\\n') }}"
LAST_KEPT = f"""{{% if loop.last and message.reasoning_content %}}<think>
{{{{ message.reasoning_content }}}}
</think>

{{{{ message.content }}}}{{% elif loop.last %}}{{{{ message.content }}}}{{% else %}}{STRIPPED}{{% endif %}}"""


def template(family: str, history: Any = "full") -> Template:
    """A template like QwQ's, which renders the reasoning of the last message only."""
    if family != "qwq":
        return small(family, Settings(history=history))
    text = FAMILIES[family].template
    assert text.count(STRIPPED) == 1
    return small(family, Settings(history=history, chat_template=text.replace(STRIPPED, LAST_KEPT)))


class Search(BaseTool):
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=FOUND), 0.0, {}


class Explain(ToolsAndFeedback):
    """The user of the documents' conversation, with a second question."""

    def check_finished(self, turn: Turn) -> bool | StopReason:
        return StopReason.DONE if turn.number == 3 else False

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls:
            return await super().step(turn)
        return Step(messages=({"role": "user", "content": "Explain why."},))


def _written(template: Template) -> list[str]:
    """The policy's turns as a model of the family generates them; some prompts end with an opened reasoning tag."""
    begun = "" if template.prefill else "<think>\n"
    return [
        f"{begun}{FIRST[0]}\n</think>\n\n{FIRST[1]}",
        f"{begun}{SECOND}\n</think>\n\n{CALL}",
        f"{begun}{THIRD}\n</think>\n\n{FOUND}",
    ]


async def conversation(used: Template) -> Rollout:
    tools = NativeToolset([ClassTool(Search({}, OpenAIFunctionToolSchema.model_validate(SCHEMA)))])
    async with Gateway([Source("tools", tools)]) as gateway:
        played = RolloutRunners(gateway, used, LIMITS, Explain())
        return await played.play(load_tasks({"prompt": ASKED})[0], *_written(used))


@pytest.mark.parametrize("history", ["full", "inference_template"])
@pytest.mark.parametrize("family", ["qwen3", "qwq"])
async def test_exactly_the_policys_tokens_of_the_conversation_are_trained(family: str, history: Any) -> None:
    used = template(family, history)
    rollout = await conversation(used)
    assert rollout.stop is StopReason.DONE
    assert trained_texts(rollout, used) == [f"{text}<|im_end|>" for text in _written(used)]
    sampled = [used.tokenizer.encode(text) + used.stop_ids[:1] for text in _written(used)]
    assert [turn.ids for turn in rollout.turns] == sampled, "the ids themselves, and not their text encoded anew"
    assert "drift" not in rollout.infos or Cause.OTHER not in rollout.infos["drift"]


async def test_full_history_trains_all_reasoning_in_one_sequence() -> None:
    for family in ("qwen3", "qwq"):
        used = template(family)
        rollout = await conversation(used)
        assert rollout.earlier == ()
        text = used.tokenizer.decode(rollout.ledger.ids)
        assert all(text.count(thought) == 1 for thought in (FIRST[0], SECOND, THIRD))


def _prompts(rollout: Rollout, used: Template) -> list[str]:
    """The policy's input before each of its turns."""
    shown = []
    for ledger in rollout.ledgers:
        starts = dict(zip(map(id, ledger.entries), ledger.starts, strict=True))
        shown += [used.tokenizer.decode(ledger.ids[: starts[id(turn)]]) for turn in ledger.turns]
    return shown


async def test_qwen3_inference_history_has_only_reasoning_after_the_last_question() -> None:
    used = template("qwen3", "inference_template")
    rollout = await conversation(used)
    first, second, third = _prompts(rollout, used)
    assert FIRST[1] in second and FIRST[0] not in second, "what was thought before the last question is gone"
    assert FIRST[0] not in third and SECOND in third, "what was thought since then is there"
    assert len(rollout.ledgers) == 2 and "Explain why." not in first


async def test_qwq_inference_history_has_no_earlier_reasoning() -> None:
    used = template("qwq", "inference_template")
    rollout = await conversation(used)
    _, second, third = _prompts(rollout, used)
    assert FIRST[0] not in second and FIRST[0] not in third and SECOND not in third
    assert "Why is 2 + 2 = 4?" in third and len(rollout.ledgers) == 3


MESSAGES: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": f"<think>{FIRST[0]}</think> {FIRST[1]}"},
    {"role": "user", "content": "Explain why."},
    {
        "role": "assistant",
        "content": f"<think>{SECOND}</think>",
        "tool_calls": [
            {
                "id": "tool1",
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "Why is 2 + 2 = 4?"}},
            }
        ],
    },
    {"role": "tool", "content": FOUND},
    {"role": "assistant", "content": f"<think>{THIRD}</think>{FOUND}"},
]


@pytest.mark.parametrize(("family", "kept"), [("qwen3", [SECOND, THIRD]), ("qwq", [THIRD])])
def test_templates_render_as_documented(family: str, kept: list[str]) -> None:
    text = template(family).chat.render(MESSAGES)
    assert [thought for thought in (FIRST[0], SECOND, THIRD) if thought in text] == kept
    assert "2 + 2 = 4.<|im_end|>" in text and "<tool_response>" in text


def _difference(family: str, messages: list[dict[str, Any]], before: list[dict[str, Any]]) -> tuple[int, ...]:
    """The documents' recipe for one message: the token difference of two renders."""
    tokenizer: Any = make_tokenizer(FAMILIES[family])
    prev = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
    curr = tokenizer.apply_chat_template([*before, *messages], add_generation_prompt=False, tokenize=False)
    assert curr.startswith(prev)
    return tuple(tokenizer.encode(curr[len(prev) :], add_special_tokens=False))


PLAIN = [{"role": "assistant", "content": "It is 4."}, {"role": "assistant", "content": "By counting."}]


async def test_documented_render_difference_trains_the_ledgers_tokens() -> None:
    used = template("hermes")
    async with Gateway([]) as gateway:
        stepper = Explain()
        stepper.check_finished = lambda turn: turn.number == 2  # type: ignore[method-assign]
        played = RolloutRunners(gateway, used, LIMITS, stepper)
        rollout = await played.play(load_tasks({"prompt": ASKED})[0], *(one["content"] for one in PLAIN))
    messages = [dict(message) for message in rollout.ledger.messages]
    told = [_difference("hermes", messages[at : at + 1], messages[:at]) for at in (2, 4)]
    newline = used.tokenizer.encode("\n")
    assert [turn.ids + newline for turn in rollout.turns] == told, "but for what the template writes behind the turn"
    assert find_drifts(used, Ledger(tuple(rollout.ledger.entries))) == ()


BASE: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]


async def test_fixed_base_conversation_gives_the_ledgers_tokens_for_qwen3() -> None:
    used = template("qwen3")
    rollout = await conversation(used)
    (tool,) = [entry for entry in rollout.ledger if entry.author is Author.TOOL]
    last = rollout.turns[-1]
    thought = {"role": "assistant", "content": f"<think>\n{THIRD}\n</think>\n\n{FOUND}"}
    assert _difference("qwen3", [thought], BASE) == (*last.ids, *used.tokenizer.encode("\n"))
    assert FOUND in used.tokenizer.decode(tool.ids) and not any(
        mine for at, mine in enumerate(rollout.ledger.mask) if rollout.ledger.author_at(at) is not Author.POLICY
    )


async def test_template_that_removes_reasoning_is_reported_and_replaceable(tmp_path: Path) -> None:
    """Like the documents' repaired QwQ, whose template is not in the model's folder."""
    found = [finding.detail for finding in probe(template("qwq")).findings if finding.is_ok and finding.detail]
    assert any("drops earlier reasoning; history=full" in text for text in found)
    file = tmp_path / "mended.jinja"
    file.write_text(FAMILIES["qwen3"].template)
    mended = make_template(FAMILIES["qwq"], Settings(chat_template=file.read_text()))
    text = mended.chat.render(MESSAGES)
    assert THIRD in text and SECOND in text and FIRST[0] not in text
    assert probe(mended).is_ok


async def test_only_the_policys_tokens_are_trained_with_images(tmp_path: Path) -> None:
    """The documents' recipe with a processor; the ledger has an image's expanded width."""
    from tests.trainer.vision.vision_models import picture, seeing_model

    used = Template.load(seeing_model(tmp_path))
    shown = picture(1)

    async def look() -> Image:
        """Shows a picture."""
        return shown

    texts = [render_calls(("look", {})), "A house."]
    async with make_gateway(look) as gateway:
        rollout = await RolloutRunners(gateway, used, LIMITS, None).play(load_tasks({"prompt": ASKED})[0], *texts)
    assert trained_texts(rollout, used) == [f"{text}<|im_end|>" for text in texts]
    wide = rollout.ledger.expanded
    (place,) = wide.media_spans
    assert place.medium == shown and place.stop - place.start == 4
    assert not any(wide.mask[place.start : place.stop]) and sum(wide.mask) == sum(rollout.ledger.mask)
