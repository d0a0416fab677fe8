"""Tests the reward settings: the success component, invalid values, and the documentation."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.reward.settings import RewardSettings

RIGHT = {"function": "answer"}


def test_first_component_decides_success_by_default() -> None:
    settings = RewardSettings.model_validate({"components": {"right": RIGHT, "tidy": {"function": "efficiency"}}})
    assert settings.success_component == "right" and settings.components["tidy"].weight == 1.0
    assert settings.model_copy(update={"success": "tidy"}).success_component == "tidy"
    assert RewardSettings().success_component == "answer"
    assert RewardSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"components": {}}, "at least 1"),
        ({"components": {"mean": RIGHT}}, "the component name 'mean' is reserved for a metric of all components"),
        ({"components": {"a b": RIGHT}}, "pattern"),
        ({"components": {"right": RIGHT}, "success": "wrong"}, "success is 'wrong', which is none of right"),
        ({"components": {"right": RIGHT | {"weight": float("nan")}}}, "weight"),
    ],
)
def test_invalid_settings_are_rejected(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardSettings.model_validate(raw)
