"""Tests of the scores that stand in for verl's: the same values as verl 0.7's own functions give."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from gateway.config.load_object import load_object
from gateway.feedback import gsm8k as by_value
from mtrl_plugins.verl import geo3k_rule, gsm8k_rule
from mtrl_plugins.verl.registry import default_compute_score

FAR = "so it goes " * 40
"""More text than the rule reads."""


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("#### 42", "42", 1.0, 1.0),
        ("It is 42", "42", 0, 1.0),
        ("#### 1,000", "1000", 1.0, 0.1),
        ("#### 42.0", "42", 0.1, 0.1),
        ("#### 42.", "42", 0.1, 0.1),
        ("#### $42", "42", 0, 1.0),
        ("#### +42", "42", 0, 1.0),
        ("#### -5", "-5", 1.0, 1.0),
        ("#### 3 then #### 4", "4", 1.0, 1.0),
        ("#### 3 then 4", "3", 1.0, 0.1),
        ("####42", "42", 0, 1.0),
        ("#### 42" + FAR, "42", 0, 0),
        (FAR + "#### 42", "42", 1.0, 1.0),
        ("10-7=3", "3", 0, 1.0),
        ("5-3", "3", 0, 0.1),
        ("#### .", ".", 1.0, 1.0),
        ("4 . .", "4", 0, 1.0),
        ("4 ..", "4", 0, 0.1),
        ("no number", "4", 0, 0),
        ("", "4", 0, 0),
    ],
)
def test_gsm8k_scores_as_verl_does(text: str, truth: str, strict: float, flexible: float) -> None:
    scores = [gsm8k_rule.compute_score(text, truth, method, format_score=0.1) for method in ("strict", "flexible")]
    assert scores == [strict, flexible]
    assert default_compute_score("openai/gsm8k", text, truth) == (1.0 if strict == 1.0 else 0.0)


def test_gsm8k_refuses_a_number_as_ground_truth() -> None:
    with pytest.raises(TypeError, match=r"ground_truth is the number 42; the rule compares texts: write '42'"):
        gsm8k_rule.compute_score("#### 42", 42)


def test_our_own_rule_compares_numbers_of_the_whole_text() -> None:
    assert by_value.compute_score("#### 42.0" + FAR, "42") == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"<think>hm</think> so \boxed{3}", "3", 1.0),
        (r"<think>hm</think> so \boxed{4}", "3", 0.1),
        (r"so \boxed{3}", "3", 0.9),
        ("3", "3", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 0.9),
    ],
)
def test_geometry3k_scores_as_verl_does(text: str, truth: str, score: float) -> None:
    assert default_compute_score("hiyouga/geometry3k", text, truth) == pytest.approx(score)


def test_geometry3k_reads_the_whole_text_without_a_box() -> None:
    assert geo3k_rule.compute_score("3", "3", use_boxed=False, format_score=0.0) == 1.0


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
