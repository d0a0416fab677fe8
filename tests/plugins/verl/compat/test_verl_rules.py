"""The rules that stand in for verl's, beyond the scores, which the laws compare with verl's own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from gateway.config.load_object import load_object
from mtrl_plugins.verl import gsm8k_rule


def test_gsm8k_refuses_a_number_as_ground_truth() -> None:
    with pytest.raises(TypeError, match=r"ground_truth is the number 42; the rule compares texts: write '42'"):
        gsm8k_rule.compute_score("#### 42", 42)


@pytest.fixture
def interaction() -> Any:
    return load_object("verl.interactions.gsm8k_interaction.Gsm8kInteraction")({"name": "gsm8k"})


async def test_gsm8k_interaction_keeps_its_state_where_verls_does(interaction: Any) -> None:
    name = await interaction.start_interaction(ground_truth="42")
    assert interaction._instance_dict == {name: {"response": "", "ground_truth": "42", "reward": 0.0}}
    turn = await interaction.generate_response(name, [{"role": "assistant", "content": "#### 42.0"}])
    assert turn[0] is False and turn[2] == 0.0, "texts are compared"
    turn = await interaction.generate_response(name, [{"role": "assistant", "content": "#### 42"}])
    assert turn == (True, "Your response is correct!", 1.0, {})
    assert interaction._instance_dict[name]["response"] == "#### 42"
    await interaction.finalize_interaction(name)
    with pytest.raises(KeyError):
        await interaction.finalize_interaction(name)


async def test_gsm8k_interaction_calls_the_scorer_by_verls_name(interaction: Any) -> None:
    name = await interaction.start_interaction(ground_truth="42")
    scorer = load_object("verl.utils.reward_score.gsm8k:compute_score")
    assert scorer is gsm8k_rule.compute_score
    with patch("verl.utils.reward_score.gsm8k.compute_score", return_value=1.0) as patched:
        turn = await interaction.generate_response(name, [{"role": "assistant", "content": "no"}])
    patched.assert_called_once_with("no", "42", method="strict", format_score=0.0, score=1.0)
    assert turn[0] is True


async def test_gsm8k_tool_keeps_its_state_where_verls_does() -> None:
    tool = load_object("verl.tools.gsm8k_tool.Gsm8kTool")({})
    name, _ = await tool.create(ground_truth="7")
    response, reward, _ = await tool.execute(name, {"answer": "7"})
    assert (response.text, reward) == ("Current parsed answer='7' reward=1.0", 0.0)
    assert (await tool.execute(name, {"answer": "7"}))[1] == -0.05
    assert tool._instance_dict[name] == {"response": "#### 7", "ground_truth": "7", "reward": 1.0}
    await tool.release(name)
    assert tool._instance_dict == {}
