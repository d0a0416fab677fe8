"""Settings that make no sense are refused; those that do say which component tells success."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.reward.settings import RewardSettings
from trainer.reward.shipped import SHIPPED

RIGHT = {"function": "answer"}


def test_the_first_component_tells_success_unless_another_is_named() -> None:
    made = RewardSettings.model_validate({"components": {"right": RIGHT, "tidy": {"function": "efficiency"}}})
    assert made.telling == "right" and made.components["tidy"].weight == 1.0
    assert made.model_copy(update={"success": "tidy"}).telling == "tidy"
    assert RewardSettings().telling == "answer"
    assert RewardSettings.model_validate(made.model_dump()) == made


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"components": {}}, "at least 1"),
        ({"components": {"mean": RIGHT}}, "'mean' is a metric of all components together"),
        ({"components": {"a b": RIGHT}}, "pattern"),
        ({"components": {"right": RIGHT}, "success": "wrong"}, "success is 'wrong', which is none of right"),
        ({"components": {"right": RIGHT | {"timeout_s": 0}}}, "timeout_s"),
        ({"components": {"right": RIGHT | {"weight": float("nan")}}}, "weight"),
        ({"components": {"right": RIGHT | {"wait": 1.0}}}, "wait"),
        ({"components": {"right": {"function": ""}}}, "function"),
    ],
)
def test_settings_that_make_no_sense_are_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RewardSettings.model_validate(raw)


def test_the_documentation_names_every_shipped_function() -> None:
    described = RewardSettings.model_json_schema()["$defs"]["ComponentSettings"]["properties"]["function"][
        "description"
    ]
    assert all(f"`{name}`" in described for name in SHIPPED)
