"""Tests of building interactions from entries: names, owners, and mistakes."""

from __future__ import annotations

import pytest

from gateway.config.entries import interaction_name
from gateway.errors import ConfigError
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import DeclaredInteraction, build_interactions
from mtrl_plugins.verl import gsm8k_rule
from tests.feedback.interactions import OlderInteraction


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


def test_a_duplicate_name_is_refused_with_both_owners() -> None:
    entries = [
        DeclaredInteraction(Gsm8kInteraction, owner="a.yaml: interaction[0]"),
        DeclaredInteraction(OlderInteraction, {}, "gsm8k", owner="b.yaml: interaction[2]"),
    ]
    with pytest.raises(ConfigError, match=r"'gsm8k'.*a\.yaml: interaction\[0\].*b\.yaml: interaction\[2\]") as caught:
        build_interactions(entries)
    assert "remedy" in str(caught.value)


async def test_verls_class_can_be_the_judge_of_attempts() -> None:
    verl = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    assert isinstance(AttemptsInteraction({"interaction": verl}).judge, gsm8k_rule.Gsm8kInteraction)
