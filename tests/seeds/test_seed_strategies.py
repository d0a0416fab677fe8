"""Tests the documents' advanced uses (curricula, scores, several attempts) and troubleshooting sections."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.config.load_object import load_object
from gateway.errors import ConfigError, ConfigErrors
from gateway.gateway import Gateway
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import authors, feedback_texts, load_tasks, open_runners
from trainer.rollout.rollout import StopReason

PIPELINE = """
class MathTrainingPipeline:
    def create_interaction_config(self):
        levels = {
            "basic_math": ("verl.interactions.gsm8k_interaction.Gsm8kInteraction", {"difficulty": "easy"}),
            "advanced_math": ("levels.AdvancedMathInteraction", {"difficulty": "hard", "allow_hints": True}),
            "competition_math": ("levels.CompetitionMathInteraction", {"time_limit": 300, "show_steps": False}),
        }
        return {"interaction": [dict(name=k, class_name=c, config=v) for k, (c, v) in levels.items()]}

    def create_curriculum_data(self, epoch, samples):
        level = "basic_math" if epoch < 5 else "advanced_math" if epoch < 10 else "competition_math"
        return [{"name": level, **sample} for sample in samples]
"""
LEVELS = """
from verl.interactions.base import BaseInteraction


class AdvancedMathInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, ground_truth=None, **kwargs):
        right = ground_truth in messages[-1]["content"]
        return right, "A hint." if self.config["allow_hints"] else "No.", float(right), {}


class CompetitionMathInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, ground_truth=None, **kwargs):
        assert self.config["show_steps"] is False
        return True, f"Over, after {self.config['time_limit']}.", 0.25, {}
"""
SAMPLES = [{"query": "What is 2+2?", "ground_truth": "4"}, {"query": "What is 3+3?", "ground_truth": "6"}]
BY_LEVEL = {"basic_math": "Your response is incorrect!", "advanced_math": "A hint.", "competition_math": "Over, after"}


def _pipeline(lay: Lay) -> tuple[Path, Any]:
    folder = lay({"pipeline.py": PIPELINE, "conf/levels.py": LEVELS, "tools.yaml": ""})
    pipeline = load_object("pipeline:MathTrainingPipeline", folder / "tools.yaml")()
    # YAML has JSON in it.
    lay({"conf/levels.yaml": json.dumps(pipeline.create_interaction_config())})
    return folder / "conf", pipeline


@pytest.mark.parametrize(("epoch", "level"), [(0, "basic_math"), (5, "advanced_math"), (10, "competition_math")])
async def test_curriculum_of_rows_is_answered_level_by_level(epoch: int, level: str, lay: Lay) -> None:
    conf, pipeline = _pipeline(lay)
    rows = pipeline.create_curriculum_data(epoch, SAMPLES)
    asked = load_tasks(*({"prompt": row["query"], "interaction_kwargs": row} for row in rows))
    async with open_runners(conf) as ready:
        for task in asked:
            rollout = await ready.play(task, "I give up.")
            assert feedback_texts(rollout)[0].startswith(BY_LEVEL[level])


ATTEMPTS = """
from verl.interactions.base import BaseInteraction


def custom_evaluation_function(response, ground_truth):
    return response.strip().lower() == ground_truth


class Scoring(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "response": "", "attempts": 0}
        return instance_id

    async def calculate_score(self, instance_id, **kwargs):
        instance = self._instance_dict[instance_id]
        if custom_evaluation_function(instance["response"], instance["ground_truth"]):
            return 1.0
        return 0.0 if len(instance["response"]) > 8 else 0.5


class CustomInteraction(Scoring):
    async def generate_response(self, instance_id, messages, **kwargs):
        self._instance_dict[instance_id]["response"] = messages[-1]["content"]
        return False, "Noted.", None, {}


class StepsInteraction(Scoring):
    async def generate_response(self, instance_id, messages, **kwargs):
        instance = self._instance_dict[instance_id]
        instance["attempts"] += 1
        instance["response"] = messages[-1]["content"]
        reward = await self.calculate_score(instance_id)
        if reward > 0.8:
            return True, "Excellent work!", reward, {}
        if instance["attempts"] < 3:
            return False, "Good attempt, but try to improve...", reward, {}
        return True, "Maximum attempts reached.", reward, {}
"""
STEPS = "interaction: [{class_name: attempts.CustomInteraction}, {class_name: attempts.StepsInteraction}]"


@pytest.mark.parametrize(
    ("said", "answers", "scores"),
    [
        (["gnu"], ["Excellent work!"], [1.0]),
        (["emu", "gnu"], ["Good attempt, but try to improve...", "Excellent work!"], [0.5, 1.0]),
        (["emu"], ["Good attempt, but try to improve..."] * 2 + ["Maximum attempts reached."], [0.5] * 3),
    ],
)
async def test_answer_may_be_improved_twice(said: list[str], answers: list[str], scores: list[float], lay: Lay) -> None:
    folder = lay({"conf/steps.yaml": STEPS, "conf/attempts.py": ATTEMPTS})
    (task,) = load_tasks({"prompt": "Which?", "interaction_kwargs": {"name": "steps", "ground_truth": "gnu"}})
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, *said)
    assert feedback_texts(rollout) == answers
    assert [score for turn in rollout.ledger.rewards for score in turn] == scores
    assert rollout.stop is StopReason.FEEDBACK_DONE and rollout.rewards == {"feedback": sum(scores)}


@pytest.mark.parametrize(
    ("yaml", "told"),
    [
        ("interaction: [{class_name: attempts.Nobody}]", "has no 'Nobody'"),
        ("interaction: [{class_name: nowhere.Interaction}]", "no module 'nowhere'"),
        (STEPS.replace("attempts.Custom", "attempts.Steps"), "two interactions are named 'steps'"),
    ],
    ids=["class", "module", "same name"],
)
def test_configuration_error_is_reported_with_its_place(yaml: str, told: str, lay: Lay) -> None:
    folder = lay({"conf/steps.yaml": yaml, "conf/attempts.py": ATTEMPTS})
    with pytest.raises((ConfigError, ConfigErrors), match=told) as caught:
        Gateway.load(folder / "conf", None)
    assert "conf/steps.yaml" in str(caught.value) and "interaction[" in str(caught.value)


async def test_unknown_interaction_of_a_row_is_reported_with_known_ones(lay: Lay) -> None:
    folder = lay({"conf/steps.yaml": STEPS, "conf/attempts.py": ATTEMPTS})
    (task,) = load_tasks({"prompt": "Which?", "interaction_kwargs": {"name": "stpes", "ground_truth": "gnu"}})
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, "gnu")
    assert rollout.stop is StopReason.TOOL_FAILED and authors(rollout) == []
    assert "no interaction named 'stpes'; known: custom, steps" in rollout.reason


LOGGING = """
import logging
import os

from verl.interactions.base import BaseInteraction

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class ChattyInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        logger.debug("asked with %s messages", len(messages))
        return True, "Yes.", 1.0, {}
"""


@pytest.mark.parametrize("level", ["DEBUG", None])
async def test_interaction_logs_at_verls_level_and_is_timed(
    level: str | None, lay: Lay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("VERL_LOGGING_LEVEL", level)
    folder = lay({"conf/c.yaml": "interaction: [{class_name: chatty.ChattyInteraction}]", "conf/chatty.py": LOGGING})
    (task,) = load_tasks({"prompt": "?", "interaction_kwargs": {"name": "chatty"}})
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, "Yes?")
    assert ("asked with 2 messages" in caplog.text) == (level is not None)
    assert [span.phase for span in rollout.timeline].count("interacting") == 1 and rollout.timing["interacting"] > 0
    logging.getLogger("chatty").setLevel(logging.NOTSET)
