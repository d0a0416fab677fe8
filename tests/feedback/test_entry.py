"""A file's entries become interactions by name, or one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.entries import interaction_name
from gateway.errors import ConfigError, ConfigErrors
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.code import CodeInteraction
from gateway.feedback.entry import Declared, build
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.simulated import SimulatedInteraction
from gateway.feedback.toolset import FeedbackToolset
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
def test_a_name_is_made_of_the_class(class_name: str, name: str) -> None:
    assert interaction_name(class_name) == name


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True))
def test_the_suffix_never_changes_the_name(stem: str) -> None:
    if not stem.endswith("Interaction"):
        assert interaction_name(stem + "Interaction") == interaction_name(stem) == stem.lower()


def test_the_name_reaches_the_interaction_and_its_spec_knows_its_owner() -> None:
    entries = [Declared(Gsm8kInteraction, owner="maths.yaml"), Declared(Recorder, {}, "mine")]
    toolset = FeedbackToolset.from_entries(entries)
    assert {name: one.name for name, one in toolset.interactions.items()} == {"gsm8k": "gsm8k", "mine": "mine"}
    assert toolset.specs[0].owner == "maths.yaml"


def test_two_of_one_name_are_refused_and_both_are_named() -> None:
    entries = [
        Declared(Gsm8kInteraction, owner="a.yaml: interaction[0]"),
        Declared(OlderInteraction, {}, "gsm8k", owner="b.yaml: interaction[2]"),
    ]
    with pytest.raises(ConfigError, match=r"'gsm8k'.*a\.yaml: interaction\[0\].*b\.yaml: interaction\[2\]") as caught:
        build(entries)
    assert "remedy" in str(caught.value)


def test_every_mistake_is_reported_at_once_with_file_and_field() -> None:
    entries = [
        Declared(Gsm8kInteraction, {"method": "loose"}, owner="a.yaml"),
        Declared(CodeInteraction, {"wall": 3}, owner="b.yaml"),
    ]
    with pytest.raises(ConfigErrors) as caught:
        build(entries)
    assert "a.yaml: config: interaction 'gsm8k'" in str(caught.value)
    assert "b.yaml: config.wall: interaction 'code'" in str(caught.value)


def test_a_refused_configuration_does_not_repeat_its_secrets() -> None:
    config = {"base_url": "http://localhost/v1", "model": ["m"], "api_key": ["sk-secret"]}
    with pytest.raises(ConfigError) as caught:
        build([Declared(SimulatedInteraction, config)])
    assert "sk-secret" not in str(caught.value)


def test_a_class_that_cannot_serve_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="lacks start_interaction, generate_response, finalize_interaction") as caught:
        build([Declared(dict, owner="a.yaml")])  # type: ignore[arg-type]
    assert "a.yaml: class_name" in str(caught.value)
    assert "remedy: derive it from gateway.feedback.base.BaseInteraction" in str(caught.value)


@pytest.mark.parametrize("path", ["gateway.feedback.gsm8k.Absent", "no_such_module.Interaction", "builtins.dict"])
def test_what_attempts_stand_before_is_refused_with_file_and_field(path: str) -> None:
    entry = Declared(AttemptsInteraction, {"interaction": {"class_name": path}}, owner="a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: config\..*class_name: interaction 'attempts'") as caught:
        build([entry])
    assert "remedy" in str(caught.value)


async def test_a_class_that_verl_shipped_may_stand_under_attempts() -> None:
    verl = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    assert isinstance(AttemptsInteraction({"interaction": verl}).inner, Gsm8kInteraction)
