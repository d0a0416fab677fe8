"""Tests of building interactions from entries: names, owners, and mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.entries import interaction_name
from gateway.errors import ConfigError, ConfigErrors
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.code import CodeInteraction
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import DeclaredInteraction, FeedbackToolset, build_interactions
from gateway.feedback.simulated import SimulatedInteraction
from mtrl_plugins.verl import gsm8k_rule
from tests.feedback.interactions import OlderInteraction, Recorder


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


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True))
def test_the_suffix_interaction_does_not_change_the_name(stem: str) -> None:
    if not stem.endswith("Interaction"):
        assert interaction_name(stem + "Interaction") == interaction_name(stem) == stem.lower()


def test_interactions_have_their_name_and_specs_their_owner() -> None:
    entries = [DeclaredInteraction(Gsm8kInteraction, owner="maths.yaml"), DeclaredInteraction(Recorder, {}, "mine")]
    toolset = FeedbackToolset.from_entries(entries)
    assert {name: interaction.name for name, interaction in toolset.interactions.items()} == {
        "gsm8k": "gsm8k",
        "mine": "mine",
    }
    assert toolset.specs[0].owner == "maths.yaml"


def test_a_duplicate_name_is_refused_with_both_owners() -> None:
    entries = [
        DeclaredInteraction(Gsm8kInteraction, owner="a.yaml: interaction[0]"),
        DeclaredInteraction(OlderInteraction, {}, "gsm8k", owner="b.yaml: interaction[2]"),
    ]
    with pytest.raises(ConfigError, match=r"'gsm8k'.*a\.yaml: interaction\[0\].*b\.yaml: interaction\[2\]") as caught:
        build_interactions(entries)
    assert "remedy" in str(caught.value)


def test_all_mistakes_are_reported_together_with_file_and_field() -> None:
    entries = [
        DeclaredInteraction(Gsm8kInteraction, {"method": "loose"}, owner="a.yaml"),
        DeclaredInteraction(CodeInteraction, {"wall": 3}, owner="b.yaml"),
    ]
    with pytest.raises(ConfigErrors) as caught:
        build_interactions(entries)
    assert "a.yaml: config: interaction 'gsm8k'" in str(caught.value)
    assert "b.yaml: config.wall: interaction 'code'" in str(caught.value)


def test_the_error_for_a_configuration_has_no_secrets() -> None:
    config = {"base_url": "http://localhost/v1", "model": ["m"], "api_key": ["sk-secret"]}
    with pytest.raises(ConfigError) as caught:
        build_interactions([DeclaredInteraction(SimulatedInteraction, config)])
    assert "sk-secret" not in str(caught.value)


def test_a_class_without_the_methods_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="lacks start_interaction, generate_response, finalize_interaction") as caught:
        build_interactions([DeclaredInteraction(dict, owner="a.yaml")])  # type: ignore[arg-type]
    assert "a.yaml: class_name" in str(caught.value)
    assert "remedy: derive it from gateway.feedback.base.BaseInteraction" in str(caught.value)


@pytest.mark.parametrize("path", ["gateway.feedback.gsm8k.Absent", "no_such_module.Interaction", "builtins.dict"])
def test_a_wrong_judge_of_attempts_is_refused_with_file_and_field(path: str) -> None:
    entry = DeclaredInteraction(AttemptsInteraction, {"interaction": {"class_name": path}}, owner="a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: config\..*class_name: interaction 'attempts'") as caught:
        build_interactions([entry])
    assert "remedy" in str(caught.value)


async def test_verls_class_can_be_the_judge_of_attempts() -> None:
    verl = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    assert isinstance(AttemptsInteraction({"interaction": verl}).judge, gsm8k_rule.Gsm8kInteraction)
