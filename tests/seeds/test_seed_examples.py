"""Tests the documents' examples that no test of the product's rooms runs; README.md lists all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError, ConfigErrors
from gateway.gateway import Gateway
from gateway.types import Image, Outcome, Text, ToolCall, Video
from gateway.types import Task as Asked
from mtrl_plugins.scripts.translate import translate
from mtrl_plugins.swift.schedulers import MultiTurnScheduler
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command
from tests.conftest import Write
from tests.sample_images import png
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import encode_turns, make_gateway, render_calls
from tests.trainer.reward.attempts import CharacterDecoder, feedback_entry, make_rollout, score_group, tool_entry
from tests.trainer.sample_rollouts import policy
from tests.trainer.tokenizer_families import FAMILIES
from trainer.data import load_rows
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.reward.attempt import Attempt
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import Step, ToolsAndFeedback, Turn
from trainer.template import Cause, Settings, Template, probe
from trainer.train.settings import TrainSettings

WAIT_S = 30.0


async def play(gateway: Gateway, template: Template, row: dict[str, Any], *texts: str, **options: Any) -> Rollout:
    """The rollout of a row whose policy writes these texts."""
    turns = iter(encode_turns(template, *texts))

    def next_turn(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        return next(turns)

    (task,) = load_rows([row])
    with anyio.fail_after(WAIT_S):
        async with gateway, ScriptedEngine(next_turn) as engine:
            limits = RolloutLimits(rollout_tokens=100_000)
            return await RolloutRunner(engine, template, gateway, limits, **options).run(task, group="g")


def settings(*words: str) -> TrainSettings:
    needed = (
        "actor_rollout_ref.model.path=models/any",
        "data.train_files=rows.jsonl",
        "trainer.total_training_steps=3",
    )
    return TrainSettings.model_validate(translate(read_command([*words, *needed]), VERL_TABLE).settings)


@pytest.mark.parametrize("value", ["False", "True"])
def test_images_of_rows_need_no_tensors(value: str) -> None:
    assert settings(f"data.return_multi_modal_inputs={value}") == settings()
    (task,) = load_rows([{"prompt": "<image>What is this?", "images": [png()]}])
    assert [part["type"] for part in task.messages[0]["content"]] == ["image", "text"]


NOTE = """
rollout:
  engine: "sglang"
  multiturn:
    enabled: true
    max_turns: 5
    stop_tokens: ["</s>"]
"""
ENVIRONMENT = """
    environment:
      type: "tool_calling"
      tools: [{name: "python", type: "sandbox", endpoint: "http://sandbox:8080"}]
"""


def test_rollout_section_of_the_note_is_read_and_missing_schema_reported(write: Write) -> None:
    write("note.yaml", NOTE)
    assert settings("note.yaml").limits.assistant_turns == 5
    write("whole.yaml", NOTE + ENVIRONMENT)
    with pytest.raises(ConfigErrors) as caught:
        settings("whole.yaml")
    told = str(caught.value)
    assert "whole.yaml:" in told and "rollout.multiturn.environment" in told
    assert "list the tools in a YAML file named by `multi_turn.tool_config_path`" in told


NAMED = """
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  return_raw_chat: True
  train_files: rows.jsonl
actor_rollout_ref:
  hybrid_engine: True
  model: {path: models/any}
  rollout:
    n: 8
    multi_turn: {enable: True, max_user_turns: 5}
"""
COMMAND = r"""
export VERL_LOGGING_LEVEL=DEBUG
CONFIG_PATH="$PWD/config"
PROJECT_DIR="$PWD"

python3 -m verl.trainer.main_ppo \\
    --config-path="$CONFIG_PATH" \\
    --config-name='gsm8k_multiturn_grpo_w_interaction' \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 \\
    data.max_response_length=$((1024 * 3)) \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$PROJECT_DIR/config/interaction.yaml" \\
    trainer.total_epochs=15
"""


@pytest.mark.parametrize("goes_on", ["\\\\", "\\"], ids=["as printed", "as meant"])
def test_training_command_becomes_run_file(goes_on: str, write: Write, tmp_path: Path) -> None:
    write("train.sh", COMMAND.replace("\\\\", goes_on))
    write("config/gsm8k_multiturn_grpo_w_interaction.yaml", NAMED)
    write("rows.jsonl", '{"prompt": "2 + 2?", "data_source": "openai/gsm8k"}\n' * 1024)
    found = TrainSettings.model_validate(translate(read_command(["train.sh"]), VERL_TABLE).settings)
    assert (found.algorithm.name, found.prompts, found.n) == ("grpo", 512, 8)
    assert found.tools == (str(tmp_path / "config/interaction.yaml"),)
    assert found.steps == 15 * 2, "fifteen epochs of two batches"
    assert (found.limits.assistant_turns, found.limits.rollout_tokens) == (6, 1024 + 3072)


OURS = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
SEVERAL = f"""
interaction:
  - {{class_name: verl.interactions.base.BaseInteraction, name: other}}
  - {{class_name: {OURS}}}
"""


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("{class_name: json.Nobody}", "has no 'Nobody'"),
        ("{class_name: nowhere.Interaction}", "no module 'nowhere'"),
        (f"{{class_name: {OURS}}}, {{class_name: {OURS}}}", "two interactions are named 'gsm8k'"),
    ],
    ids=["class", "module", "same name"],
)
def test_configuration_error_is_reported_with_its_place(entries: str, told: str, write: Write) -> None:
    write("conf/steps.yaml", f"interaction: [{entries}]")
    with pytest.raises((ConfigError, ConfigErrors), match=told) as caught:
        Gateway.load("conf", None)
    assert "conf/steps.yaml" in str(caught.value) and "interaction[" in str(caught.value)


async def test_row_without_name_uses_gsm8k(write: Write) -> None:
    write("conf/several.yaml", SEVERAL)
    row = {"prompt": "What is 2+2?", "interaction_kwargs": {"query": "What is 2+2?", "ground_truth": "4"}}
    rollout = await play(Gateway.load("conf", None), make_template(FAMILIES["hermes"]), row, "#### 4")
    assert rollout.ledger.messages[-1]["content"] == "Your response is correct!"
    assert rollout.stop is StopReason.FEEDBACK_DONE and rollout.rewards == {"feedback": 1.0}
    assert [span.phase for span in rollout.timeline].count("interacting") == 1 and rollout.timing["interacting"] > 0


@pytest.mark.parametrize("content", [[], [{}], [{"role": "user", "content": None}], [{"role": "assistant"}]])
async def test_unusual_messages_are_answered(content: list[Any], write: Write) -> None:
    write("conf/several.yaml", SEVERAL)
    asked = Asked(feedback="gsm8k", feedback_args={"ground_truth": "4"})
    async with Gateway.load("conf", None) as gateway, gateway.open(asked) as session:
        turn = await session.feedback(content)
        assert (turn.done, turn.score, turn.outcome) == (False, 0.0, Outcome.OK)


async def test_older_gsm8k_example_scores_the_last_user_message() -> None:
    ours = load_object(OURS)({"role": "user"})
    await ours.start_interaction("one", ground_truth="4")
    for content, right in (("the answer is 4", True), ("#### 4", True), ("#### 5", False)):
        assert (await ours.generate_response("one", [{"role": "user", "content": content}]))[0] is right, content


def test_trajectory_is_the_documented_dict() -> None:
    """The note's rewards: 0 for the question, 0.5 for the call, 0 for its result, 1 for the answer."""
    call = ToolCall("c0", "python", '{"code": "print(math.factorial(10))"}')
    written = render_calls(("python", {"code": "print(math.factorial(10))"}))
    turn = replace(policy(written, call), messages=({"role": "assistant", "content": ""},))
    rollout = make_rollout(
        turn, tool_entry("3628800", reward=0.5), policy("It is 3,628,800."), feedback_entry("Yes.", 1.0)
    )
    (task,) = load_rows([{"prompt": "Calculate the factorial of 10", "ground_truth": "3628800"}])
    attempt = Attempt(task, rollout, decoder=CharacterDecoder())
    assert attempt.given(Author.TOOL) == (0.5, 0.0) and attempt.given(Author.FEEDBACK) == (0.0, 1.0)
    trajectory = attempt.trajectory
    assert [turn["role"] for turn in trajectory["turns"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert trajectory["per_turn_rewards"] == [0.0, 0.5, 0.0, 1.0, 0.0] and trajectory["reward"] == 0.0
    assert trajectory["turns"][1]["content"] == written, "a call is text, as the policy wrote it"
    assert trajectory["turns"][2]["content"] == "3628800" and "It is 3,628,800." in trajectory["response"]
    assert trajectory["prompt"] == "Calculate the factorial of 10"


def test_truncated_response_ends_a_rollout_by_default() -> None:
    scheduler: Any = MultiTurnScheduler(None, max_turns=5)
    choice = type("Choice", (), {"finish_reason": "length"})()
    assert scheduler.check_finished(None, choice, 1) is True
    choice.finish_reason = "stop"
    assert [scheduler.check_finished(None, choice, turn) for turn in (1, 4, 5)] == [False, False, True]


WITHOUT_SELF = """
from swift.plugin import ORM, orms

class Reward(ORM):

   def  __call__(completions, **kwargs):
        return [float(len(chat)) for chat in kwargs.get('messages')]

orms["without_self"] = Reward
"""


async def test_reward_class_whose_call_lacks_self_runs_as_it_is_meant(write: Write, tmp_path: Path) -> None:
    args = {"name": "without_self", "plugins": [str(write("plugin.py", WITHOUT_SELF))]}
    function = {"function": "mtrl_plugins.swift.orm:named", "batched": True, "args": args}
    (scored,) = (await score_group(tmp_path, [make_rollout(policy("It is 12."))], all=function)).scored
    assert scored.reward == 2.0


FIRST = ("user asked about a simple math question.", "2 + 2 = 4.")
SECOND = "user wants to know the reasoning behind the answer. Search for a good explanation"
FOUND = "The sum of two and two is four because it is a basic arithmetic operation."
THIRD = "The tool provided a good explanation."
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
]


async def search(query: str) -> str:
    """Searches."""
    return FOUND


class Explain(ToolsAndFeedback):
    """The user of the documents' conversation, with a second question."""

    def check_finished(self, turn: Turn) -> bool | StopReason:
        return StopReason.DONE if turn.number == 3 else False

    async def step(self, turn: Turn) -> Step:
        if turn.reply.calls:
            return await super().step(turn)
        return Step(messages=({"role": "user", "content": "Explain why."},))


@pytest.mark.parametrize("history", ["full", "inference_template"])
@pytest.mark.parametrize("family", ["qwen3", "qwq"])
async def test_exactly_the_policys_tokens_of_the_conversation_are_trained(family: str, history: Any) -> None:
    used = make_template(FAMILIES[family], Settings(history=history))
    begun = "" if used.prefill else "<think>\n"  # Some prompts end with an opened reasoning tag.
    call = render_calls(("search", {"query": "Why is 2 + 2 = 4?"}))
    turns = ((FIRST[0], FIRST[1]), (SECOND, call), (THIRD, FOUND))
    written = [f"{begun}{thought}\n</think>\n\n{text}" for thought, text in turns]
    rollout = await play(make_gateway(search), used, {"prompt": ASKED}, *written, stepper=Explain())
    assert rollout.stop is StopReason.DONE
    sampled = [used.tokenizer.encode(text) + used.stop_ids[:1] for text in written]
    assert [turn.ids for turn in rollout.turns] == sampled, "the ids themselves, and not their text encoded anew"
    trained = [token for ledger in rollout.ledgers for token, own in zip(ledger.ids, ledger.mask, strict=True) if own]
    assert trained == [token for turn in sampled for token in turn]
    assert "drift" not in rollout.infos or Cause.OTHER not in rollout.infos["drift"]
    assert len(rollout.ledgers) == {"full": 1, "inference_template": {"qwen3": 2, "qwq": 3}[family]}[history]


def test_template_that_removes_reasoning_is_reported() -> None:
    found = [finding.detail for finding in probe(make_template(FAMILIES["qwq"])).findings if finding.is_ok]
    assert any("drops earlier reasoning; history=full" in text for text in found)


GALLERY = """
tools:
  - class_name: gallery.Gallery
    config: {type: native}
    tool_schema:
      {type: function, function: {name: look, description: d, parameters: {type: object, properties: {}}}}
"""
SHOWING = """
from PIL import Image
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Gallery(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        return instance_id, ToolResponse(image=[Image.new("RGB", (56, 28), "red")], text="The gallery.")

    async def execute(self, instance_id, parameters, **kwargs):
        films = [[Image.new("RGB", (56, 56), color) for color in ("red", "blue")]]
        return ToolResponse(image=[Image.new("RGB", (56, 28), "green")], video=films, text="A picture."), 0, {}
"""


async def test_what_create_shows_comes_with_the_first_result(write: Write) -> None:
    write("conf/gallery.yaml", GALLERY)
    write("conf/gallery.py", SHOWING)
    with anyio.fail_after(WAIT_S):
        async with Gateway.load("conf", None) as gateway, gateway.open() as session:
            first, second = [await session.call(ToolCall(id, "look", "{}")) for id in ("1", "2")]
    assert first.outcome is second.outcome is Outcome.OK
    assert [type(part) for part in second.parts] == [Image, Video, Text] and second.text == "A picture."
    assert [type(part) for part in first.parts] == [Image, Text, Image, Video, Text]
    assert first.text.split("\n") == ["The gallery.", "A picture."]
