"""Tests of building interactions from entries: names, and verl's classes."""

from __future__ import annotations

import pytest

from gateway.config.entries import interaction_name
from gateway.feedback.attempts import AttemptsInteraction
from mtrl_plugins.verl import gsm8k_rule


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("Gsm8kInteraction", "gsm8k"),
        ("verl.interactions.gsm8k_interaction.Gsm8kInteraction", "gsm8k"),
        ("CustomSolver", "customsolver"),
        ("Interaction", "interaction"),
    ],
)
def test_the_default_name_comes_from_the_class(class_name: str, name: str) -> None:
    assert interaction_name(class_name) == name


async def test_verls_class_can_be_the_judge_of_attempts() -> None:
    verl = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    assert isinstance(AttemptsInteraction({"interaction": verl}).judge, gsm8k_rule.Gsm8kInteraction)
