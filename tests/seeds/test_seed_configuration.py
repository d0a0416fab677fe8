"""Tests the configuration examples of the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigErrors
from mtrl_plugins.scripts.translate import translate
from mtrl_plugins.verl.conversions import VERL_TABLE
from mtrl_plugins.verl.read_config import read_command
from tests.sample_images import png
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import feedback_texts, load_tasks, open_runners
from trainer.data import load_rows
from trainer.rollout.rollout import StopReason
from trainer.train.settings import TrainSettings

NEEDED = ("actor_rollout_ref.model.path=models/any", "data.train_files=rows.jsonl", "trainer.total_training_steps=3")
INTERACTION = """
interaction:
  - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""


def settings(*words: str) -> TrainSettings:
    return TrainSettings.model_validate(translate(read_command([*words, *NEEDED]), VERL_TABLE).settings)


SETUP = """
actor_rollout_ref:
    rollout:
        multi_turn:
            enable: true
            interaction_config_path: "path/to/interaction_config.yaml"
            max_user_turns: 10
            max_assistant_turns: 10
"""


async def test_basic_setup_with_interaction_and_turn_limits(lay: Lay) -> None:
    lay({"setup.yaml": SETUP, "path/to/interaction_config.yaml": INTERACTION})
    found = settings("setup.yaml")
    assert found.tools == ("path/to/interaction_config.yaml",)
    assert (found.limits.user_turns, found.limits.assistant_turns) == (10, 10)
    (task,) = load_tasks({"prompt": "2 + 2?", "interaction_kwargs": {"ground_truth": "4"}})
    async with open_runners(Path(found.tools[0]), limits=found.limits) as ready:
        rollout = await ready.play(task, "#### 5")
    assert rollout.stop is StopReason.ASSISTANT_TURNS and len(rollout.turns) == 10


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
    data.return_raw_chat=True \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$PROJECT_DIR/config/interaction.yaml" \\
    trainer.total_epochs=15
"""


@pytest.mark.parametrize("goes_on", ["\\\\", "\\"], ids=["as printed", "as meant"])
def test_training_command_becomes_run_file(goes_on: str, lay: Lay) -> None:
    folder = lay({
        "train.sh": COMMAND.replace("\\\\", goes_on),
        "config/gsm8k_multiturn_grpo_w_interaction.yaml": NAMED,
        "config/interaction.yaml": INTERACTION,
        "rows.jsonl": "\n".join([json.dumps({"prompt": "2 + 2?", "data_source": "openai/gsm8k"})] * 1024),
    })  # fmt: skip
    found = TrainSettings.model_validate(translate(read_command(["train.sh"]), VERL_TABLE).settings)
    assert (found.algorithm.name, found.prompts, found.n) == ("grpo", 512, 8)
    assert found.tools == (str(folder / "config/interaction.yaml"),)
    assert found.steps == 15 * 2, "fifteen epochs of two batches"
    assert found.limits.assistant_turns == 6 and found.engine == "auto"


BASIC = """
actor_rollout_ref:
    rollout:
        multi_turn: True
        name: "sglang"
        tool_kwargs:
            tools_config_file: conf/tools.yaml
        interaction_config_file: conf/interaction.yaml
"""
TOOLS = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
        type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Says whether an answer is right."
        parameters:
          type: "object"
          properties: {answer: {type: "string", description: "The answer"}}
          required: ["answer"]
"""


async def test_tool_and_interaction_files_have_the_documented_keys(lay: Lay) -> None:
    lay({"basic.yaml": BASIC, "conf/tools.yaml": TOOLS, "conf/interaction.yaml": INTERACTION})
    found = settings("basic.yaml")
    assert found.tools == ("conf/tools.yaml", "conf/interaction.yaml")
    given = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}}
    (task,) = load_tasks({"prompt": "2 + 2?", "tools_kwargs": given, "interaction_kwargs": {"ground_truth": "4"}})
    call = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}\n</tool_call>'
    async with open_runners(Path("conf")) as ready:
        rollout = await ready.play(task, call, "#### 4")
    assert "reward=1.0" in str(rollout.ledger.messages[2]["content"])
    assert feedback_texts(rollout) == ["Your response is correct!"]
    assert rollout.rewards["end"] == 1.0


@pytest.mark.parametrize("value", ["False", "True"])
def test_images_of_rows_need_no_tensors(value: str, lay: Lay) -> None:
    assert settings(f"data.return_multi_modal_inputs={value}") == settings()
    row: dict[str, Any] = {"prompt": "<image>What is this?", "images": [png()]}
    (task,) = load_rows([row])
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
      tools:
        - name: "python"
          type: "sandbox"
          endpoint: "http://sandbox:8080"
        - name: "search"
          type: "api"
          endpoint: "http://search:3000"
"""


def test_rollout_section_of_the_note_is_read_and_missing_schema_reported(lay: Lay) -> None:
    lay({"note.yaml": NOTE, "whole.yaml": NOTE + ENVIRONMENT})
    assert settings("note.yaml").limits.assistant_turns == 5
    with pytest.raises(ConfigErrors) as caught:
        settings("whole.yaml")
    told = str(caught.value)
    assert "whole.yaml:" in told and "rollout.multiturn.environment" in told
    assert "list the tools in a YAML file named by `multi_turn.tool_config_path`" in told
