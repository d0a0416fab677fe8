"""Tests the interaction examples of the documents."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.load_object import load_object
from gateway.gateway import Gateway
from gateway.types import Outcome
from gateway.types import Task as Asked
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import authors, feedback_texts, load_tasks, open_runners
from trainer.rollout.rollout import StopReason

REGISTRY = "verl.interactions.utils.interaction_registry:initialize_interactions_from_config"
OURS = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"

SEVERAL = f"""
interaction:
  - name: "gsm8k"
    class_name: "{OURS}"
    config: {{}}
  - name: "custom_solver"
    class_name: "custom.interactions.CustomInteraction"
    config:
      solver_type: "advanced"
      timeout: 30
  - name: "code_verifier"
    class_name: "verl.interactions.base.BaseInteraction"
    config:
      verification_mode: "strict"
"""
SOLVER = """
from typing import Any, Dict, List, Optional, Tuple

from verl.interactions.base import BaseInteraction


class CustomInteraction(BaseInteraction):
    def __init__(self, config: Dict[str, Any]):
        super().__init__(config)
        self.solutions = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth=None, **kwargs) -> str:
        instance_id = await super().start_interaction(instance_id, **kwargs)
        self.solutions[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: List[Dict[str, Any]], **kwargs
    ) -> Tuple[bool, str, float, Dict[str, Any]]:
        solved = messages[-1]["content"] == self.solutions[instance_id]
        return solved, f"{self.name}, {self.config['solver_type']}: {solved}", float(solved), {"turns": len(messages)}

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        self.solutions.pop(instance_id)
"""
FILES = {"config.yaml": SEVERAL, "custom/interactions.py": SOLVER}


def test_interactions_are_loaded_from_one_file_by_name(lay: Lay) -> None:
    lay(FILES)
    interaction_map = load_object(REGISTRY)("config.yaml")
    assert [*interaction_map] == ["gsm8k", "custom_solver", "code_verifier"]
    assert type(interaction_map["gsm8k"]).__name__ == "Gsm8kInteraction"
    solver = interaction_map["custom_solver"]
    assert (solver.config["solver_type"], solver.config["timeout"], solver.name) == ("advanced", 30, "custom_solver")
    assert interaction_map["code_verifier"].config["verification_mode"] == "strict"


WITNESS = """
from verl.interactions.base import BaseInteraction

SEEN = []


class WitnessInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        SEEN.append("start")
        return await super().start_interaction(instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        written = [message["role"] for message in messages].count("assistant")
        SEEN.append(f"answered turn {written}")
        return written == 2, "And?", 0.5 * written, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        SEEN.append("finalize")
"""


async def test_interaction_methods_are_called_in_the_documented_order(lay: Lay) -> None:
    yaml = "interaction: [{class_name: witness.WitnessInteraction, config: {}}]"
    folder = lay({"conf/config.yaml": yaml, "conf/witness.py": WITNESS})
    (task,) = load_tasks({"prompt": "Go.", "interaction_kwargs": {"name": "witness"}})
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, "One.", "Two.")
    assert load_object("witness:SEEN", folder / "conf" / "config.yaml") == [
        "start",
        "answered turn 1",
        "answered turn 2",
        "finalize",
    ]
    assert authors(rollout) == ["task", "policy", "feedback", "policy", "feedback"]
    assert rollout.stop is StopReason.FEEDBACK_DONE and rollout.rewards == {"feedback": 1.5}


@pytest.mark.parametrize("name", ['name: "gsm8k"\n    ', ""], ids=["named", "unnamed"])
async def test_single_interaction_is_the_default(name: str, lay: Lay) -> None:
    folder = lay({"conf/one.yaml": f"interaction:\n  - {name}class_name: {OURS}\n    config: {{}}"})
    rows = [{"query": "What is 2+2?", "ground_truth": "4"}, {"query": "What is 3+3?", "ground_truth": "6"}]
    async with open_runners(folder / "conf") as ready:
        for row in rows:
            (task,) = load_tasks({"prompt": row["query"], "interaction_kwargs": row})
            rollout = await ready.play(task, f"#### {row['ground_truth']}")
            assert rollout.stop is StopReason.FEEDBACK_DONE and rollout.rewards == {"feedback": 1.0}


MATHS = """
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k


class Gsm8kInteraction(BaseInteraction):
    role, method = "assistant", "strict"

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = dict(response="", ground_truth=ground_truth, reward=0.0)
        return instance_id

    def heard(self, messages):
        return next((one.get("content", "") for one in reversed(messages) if one.get("role") == self.role), "")

    async def generate_response(self, instance_id, messages, **kwargs):
        self._instance_dict[instance_id]["response"] = self.heard(messages)
        if await self.calculate_score(instance_id) == 1.0:
            return True, "Correct!", 1.0, {}
        return False, "Incorrect! Reflect on it, and try again.", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):
        state = self._instance_dict[instance_id]
        given, right = state["response"], state["ground_truth"]
        return gsm8k.compute_score(given, right, method=self.method, format_score=0.0, score=1.0)

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]


class OlderInteraction(Gsm8kInteraction):
    role, method = "user", "flexible"

    def heard(self, messages):
        said = super().heard(messages)
        return said if said.startswith("#### ") else "#### " + said
"""
JUDGES = "interaction:\n  - {class_name: sums.Gsm8kInteraction, config: {}}\n  - {class_name: sums.OlderInteraction}"


async def test_gsm8k_example_scores_the_last_assistant_message(lay: Lay) -> None:
    folder = lay({"conf/judges.yaml": JUDGES, "conf/sums.py": MATHS})
    (task,) = load_tasks({"prompt": "What is 2+2?", "interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"}})
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, "It is 4.", "#### 5", "#### 4")
        judge: Any = ready.gateway.sources[0].toolset
        assert judge.interactions["gsm8k"]._instance_dict == {}, "nothing is held when the rollout is over"
    assert feedback_texts(rollout) == ["Incorrect! Reflect on it, and try again."] * 2 + ["Correct!"]
    assert rollout.ledger.rewards == ((0.0,), (0.0,), (1.0,))
    assert rollout.stop is StopReason.FEEDBACK_DONE


async def test_older_gsm8k_example_scores_the_last_user_message(lay: Lay) -> None:
    folder = lay({"conf/judges.yaml": JUDGES, "conf/sums.py": MATHS})
    asked = Asked(feedback="older", feedback_args={"ground_truth": "4"})
    async with Gateway.load(folder / "conf", None) as gateway, gateway.open(asked) as session:
        for content, right in (("the answer is 4", True), ("#### 4", True), ("#### 5", False)):
            turn = await session.feedback([{"role": "user", "content": content}])
            assert (turn.done, turn.score) == (right, float(right)), content
    ours = load_object(OURS)({"role": "user"})
    await ours.start_interaction("one", ground_truth="4")
    assert (await ours.generate_response("one", [{"role": "user", "content": "the answer is 4"}]))[0] is True


async def test_rows_use_the_interaction_they_name(lay: Lay) -> None:
    folder = lay({f"conf/{name}": text for name, text in FILES.items()})
    rows: list[dict[str, Any]] = [
        {"name": "gsm8k", "query": "What is 2+2?", "ground_truth": "4"},
        {"name": "custom_solver", "query": "Solve: x^2 + 5x + 6 = 0", "ground_truth": "x = -2, -3"},
        {"name": "gsm8k", "query": "What is 3+3?", "ground_truth": "6"},
        {"name": "code_verifier", "code_type": "python", "expected_behavior": "return True for prime numbers"},
    ]
    asked = load_tasks(*({"prompt": row.get("query", "Write `is_prime`."), "interaction_kwargs": row} for row in rows))
    async with open_runners(folder / "conf") as ready:
        first, second, third = [await ready.play(one, "#### 4", "x = -2, -3") for one in asked[:3]]
        last = await ready.play(asked[3], "def is_prime(n): ...")
    assert feedback_texts(first) == ["Your response is correct!"]
    assert feedback_texts(second) == ["custom_solver, advanced: False", "custom_solver, advanced: True"]
    assert "incorrect" in feedback_texts(third)[0] and third.rewards == {"feedback": 0.0}
    assert "acceptable" in feedback_texts(last)[0], "the base class answers as it does by itself"


async def test_row_without_name_uses_gsm8k(lay: Lay) -> None:
    folder = lay({f"conf/{name}": text for name, text in FILES.items()})
    (task,) = load_tasks(
        {"prompt": "What is 2+2?", "interaction_kwargs": {"query": "What is 2+2?", "ground_truth": "4"}}
    )
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(task, "#### 4")
    assert feedback_texts(rollout) == ["Your response is correct!"] and rollout.stop is StopReason.FEEDBACK_DONE


@pytest.mark.parametrize("content", [[], [{}], [{"role": "user", "content": None}], [{"role": "assistant"}]])
async def test_unusual_messages_are_answered(content: list[Any], lay: Lay) -> None:
    folder = lay({f"conf/{name}": text for name, text in FILES.items()})
    asked = Asked(feedback="gsm8k", feedback_args={"ground_truth": "4"})
    async with Gateway.load(folder / "conf", None) as gateway, gateway.open(asked) as session:
        turn = await session.feedback(content)
        assert (turn.done, turn.score, turn.outcome) == (False, 0.0, Outcome.OK)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "#### 4"}],
        [{"role": "user", "content": "#### 4"}],
    ],
    ids=["newer", "older"],
)
async def test_documented_test_of_an_interaction_passes(messages: list[dict[str, Any]]) -> None:
    interaction = load_object(OURS)({})
    instance_id = await interaction.start_interaction(ground_truth="4")
    should_terminate, response, reward, metadata = await interaction.generate_response(instance_id, messages)
    assert should_terminate is True and isinstance(response, str)
    assert isinstance(reward, float) and metadata == {}
    await interaction.finalize_interaction(instance_id)
