"""Tests rows, tools, an interaction and a reward function written for verl, without verl installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gateway.errors import ConfigError
from tests.trainer.cli_data import RunCommand
from trainer.data import load_rows
from trainer.storage.rollout_file import Rollouts

PLUGIN = """
import json
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

def note(**said):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(said) + "\\n")

class CoachInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        note(started=kwargs)
        return await super().start_interaction(instance_id, **kwargs)

class CheckTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        note(created=ground_truth)
        return await super().create(instance_id, **kwargs)
"""
REWARDS = """
import json

def length(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    from verl.utils.reward_score import gsm8k
    with open("seen.jsonl", "a") as file:
        kept = {"index": extra_info["index"], "turns": extra_info["num_turns"]}
        file.write(json.dumps({"scored": [data_source, ground_truth, kept]}) + "\\n")
    assert gsm8k.compute_score("#### 1", "1") == 1.0
    return {"score": scale * len(solution_str), "acc": False}
"""
TOOLS = """
tools:
  - class_name: theirs.CheckTool
    config: {type: native}
    tool_schema: {type: function, function: {name: check, description: d, parameters: {type: object, properties: {}}}}
"""
CONFIG = """
data:
  train_files: rows.parquet
  max_prompt_length: 400
  max_response_length: 24
  train_batch_size: 2
  return_raw_chat: True
actor_rollout_ref:
  model: {path: MODEL, enable_gradient_checkpointing: False}
  actor: {ppo_mini_batch_size: 1, optim: {lr: 1e-4}}
  rollout:
    multi_turn: True
    tool_kwargs: {tools_config_file: conf/tools.yaml}
    interaction_config_file: conf/user.yaml
    n: 2
custom_reward_function: {path: rewards.py, name: length, reward_kwargs: {scale: 0.5}}
algorithm: {adv_estimator: grpo}
trainer: {total_epochs: 1, default_local_dir: runs/moved, logger: [console]}
"""


def row(index: int, truth: str, **extra: Any) -> dict[str, Any]:
    """A row as verl's preprocessing writes it, with numpy values."""
    prompt = np.array([{"role": "user", "content": f"What is {truth}?"}], dtype=object)
    info = {
        "split": "train",
        "index": np.int64(index),
        "need_tools_kwargs": np.bool_(True),
        "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"name": "coach", "query": f"What is {truth}?", "ground_truth": truth},
        "tool_selection": np.array(["check"], dtype=object),
    }
    model = {"style": "rule", "ground_truth": truth}
    return {"data_source": "mine", "prompt": prompt, "ability": "math", "reward_model": model,
            "extra_info": info | extra}  # fmt: skip


def test_numpy_rows_are_equal_from_parquet_and_memory(tmp_path: Path) -> None:
    rows = [row(0, "2"), row(1, "3", tools_kwargs={"check": {"execute_kwargs": {"unit": np.str_("km")}}})]
    file = tmp_path / "rows.parquet"
    pd.DataFrame(rows).to_parquet(file)
    held, read = load_rows(rows), load_rows(file)
    for item, other in zip(held, read, strict=True):
        assert (item.messages, item.truth, item.session_task.tools) == (other.messages, other.truth, ("check",))
        assert dict(item.session_task.create) == dict(other.session_task.create)
        assert (item.session_task.feedback, item.session_task.feedback_args) == (
            other.session_task.feedback,
            other.session_task.feedback_args,
        )
    first, second = read
    assert first.session_task.create["check"] == {"ground_truth": "2"}
    assert second.session_task.create["check"] == {"execute_kwargs": {"unit": "km"}}
    assert (first.session_task.feedback, first.session_task.feedback_args["ground_truth"]) == ("coach", "2")
    json.dumps([dict(first.columns), first.session_task.create["check"], first.session_task.feedback_args])


def test_row_without_interaction_name_uses_the_default(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    named, unnamed = row(0, "2"), row(1, "3", interaction_kwargs={"query": "?", "ground_truth": "3"})
    pd.DataFrame([named, unnamed]).to_parquet(file)
    tasks = load_rows(file)
    assert [task.session_task.feedback for task in tasks] == ["coach", None]
    assert tasks[1].has_feedback and tasks[1].session_task.feedback_args == {"query": "?", "ground_truth": "3"}


def test_invalid_row_is_reported_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pd.DataFrame([row(0, "2"), row(1, "3", tools_kwargs=None, interaction_kwargs={"name": ""})]).to_parquet(file)
    with pytest.raises(ConfigError) as caught:
        load_rows(file)
    assert f"{file}:2: extra_info.interaction_kwargs.name: is an empty text" in str(caught.value)
    assert f"{file}:2: tools_kwargs: is missing, but `need_tools_kwargs` is true" in str(caught.value)


def test_run_for_verl_trains_unchanged(run: RunCommand, model: Path, place: Path) -> None:
    assert importlib.util.find_spec("verl") is None
    (place / "conf").mkdir()
    for name, text in {
        "conf/theirs.py": PLUGIN, "conf/tools.yaml": TOOLS, "rewards.py": REWARDS,
        "conf/user.yaml": "interaction: [{class_name: theirs.CoachInteraction, config: {}}]",
        "run.yaml": CONFIG.replace("MODEL", str(model)),
    }.items():  # fmt: skip
        (place / name).write_text(dedent(text))
    pd.DataFrame([row(0, "2"), row(1, "3"), row(2, "4")]).to_parquet(place / "rows.parquet")
    output = run("--verl-config", "run.yaml", "data.seed=3", "--engine", "torch").output
    assert "actor_rollout_ref.rollout.tool_kwargs.tools_config_file -> tools" in output
    seen = [json.loads(line) for line in (place / "seen.jsonl").read_text().splitlines()]
    started = [item["started"] for item in seen if "started" in item]
    assert len(started) == 4 and all(item["query"] == f"What is {item['ground_truth']}?" for item in started)
    assert sorted(item["created"] for item in seen if "created" in item) == sorted(
        item["ground_truth"] for item in started
    )
    scored = [item["scored"] for item in seen if "scored" in item]
    assert len(scored) >= 4 and {source for source, _, _ in scored} == {"mine"}
    assert all(int(truth) == info["index"] + 2 for _, truth, info in scored)
    metrics = [json.loads(line) for line in (place / "runs/moved/metrics.jsonl").read_text().splitlines()]
    assert any("reward/custom" in item for item in metrics)
    assert len(Rollouts(place / "runs/moved")) >= 4
