"""Rows, tools, an interaction and a reward function written for verl, run as they are, with verl not installed."""

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
from tests.trainer.typed import Run
from trainer.data import load
from trainer.run.file import Rollouts

THEIRS = """
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
    """As verl's own preprocessing writes it, its values in numpy's kinds."""
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


def test_rows_in_numpys_kinds_are_the_same_from_parquet_and_from_memory(tmp_path: Path) -> None:
    rows = [row(0, "2"), row(1, "3", tools_kwargs={"check": {"execute_kwargs": {"unit": np.str_("km")}}})]
    file = tmp_path / "rows.parquet"
    pd.DataFrame(rows).to_parquet(file)
    held, read = load(rows), load(file)
    for one, other in zip(held, read, strict=True):
        assert (one.messages, one.truth, one.asked.tools) == (other.messages, other.truth, ("check",))
        assert dict(one.asked.create) == dict(other.asked.create)
        assert (one.asked.feedback, one.asked.feedback_args) == (other.asked.feedback, other.asked.feedback_args)
    first, second = read
    assert first.asked.create["check"] == {"ground_truth": "2"}
    assert second.asked.create["check"] == {"execute_kwargs": {"unit": "km"}}
    assert (first.asked.feedback, first.asked.feedback_args["ground_truth"]) == ("coach", "2")
    json.dumps([dict(first.columns), first.asked.create["check"], first.asked.feedback_args])


def test_a_row_without_a_name_asks_whoever_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    named, unnamed = row(0, "2"), row(1, "3", interaction_kwargs={"query": "?", "ground_truth": "3"})
    pd.DataFrame([named, unnamed]).to_parquet(file)
    tasks = load(file)
    assert [task.asked.feedback for task in tasks] == ["coach", None]
    assert tasks[1].has_feedback and tasks[1].asked.feedback_args == {"query": "?", "ground_truth": "3"}


def test_a_wrong_row_is_told_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pd.DataFrame([row(0, "2"), row(1, "3", tools_kwargs=None, interaction_kwargs={"name": ""})]).to_parquet(file)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert f"{file}:2: extra_info.interaction_kwargs.name: is an empty text" in str(caught.value)
    assert f"{file}:2: tools_kwargs: is missing, and `need_tools_kwargs` is true" in str(caught.value)


def test_a_run_of_verls_runs_here_as_it_is(run: Run, model: Path, place: Path) -> None:
    assert importlib.util.find_spec("verl") is None
    (place / "conf").mkdir()
    for name, text in {
        "conf/theirs.py": THEIRS, "conf/tools.yaml": TOOLS, "rewards.py": REWARDS,
        "conf/user.yaml": "interaction: [{class_name: theirs.CoachInteraction, config: {}}]",
        "run.yaml": CONFIG.replace("MODEL", str(model)),
    }.items():  # fmt: skip
        (place / name).write_text(dedent(text))
    pd.DataFrame([row(0, "2"), row(1, "3"), row(2, "4")]).to_parquet(place / "rows.parquet")
    told = run("--verl-config", "run.yaml", "data.seed=3", "--engine", "torch").output
    assert "actor_rollout_ref.rollout.tool_kwargs.tools_config_file -> tools" in told
    seen = [json.loads(line) for line in (place / "seen.jsonl").read_text().splitlines()]
    started = [one["started"] for one in seen if "started" in one]
    assert len(started) == 4 and all(one["query"] == f"What is {one['ground_truth']}?" for one in started)
    assert sorted(one["created"] for one in seen if "created" in one) == sorted(one["ground_truth"] for one in started)
    scored = [one["scored"] for one in seen if "scored" in one]
    assert len(scored) >= 4 and {source for source, _, _ in scored} == {"mine"}
    assert all(int(truth) == kept["index"] + 2 for _, truth, kept in scored)
    metrics = [json.loads(line) for line in (place / "runs/moved/metrics.jsonl").read_text().splitlines()]
    assert any("reward/custom" in one for one in metrics)
    assert len(Rollouts(place / "runs/moved")) >= 4
