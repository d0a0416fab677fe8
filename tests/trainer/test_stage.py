"""What settings name is opened, or told why it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway.client import RemoteGateway
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from trainer.config import RolloutSettings
from trainer.stage import gateway_of, stepper_of
from trainer.steps import ToolsAndFeedback

PLUGINS = """
from trainer.steps import ThinkAgain, ToolsAndFeedback

class Mine(ToolsAndFeedback):
    pass

class Needy(ToolsAndFeedback):
    def __init__(self, what):
        pass

again = ThinkAgain(lambda text, task: True)
half = type("Half", (), {"step": lambda self, turn: None})
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_plugins", raising=False)
    file = tmp_path / "my_plugins.py"
    file.write_text(PLUGINS)
    return file


def settings(stepper: str | None) -> RolloutSettings:
    return RolloutSettings(model=Path("m"), data="d", out=Path("o"), stepper=stepper)


def test_tools_and_feedback_stand_between_turns_where_nothing_is_named() -> None:
    assert type(stepper_of(settings(None))) is ToolsAndFeedback


def test_a_plug_in_comes_from_a_module_or_from_a_file(plugins: Path) -> None:
    assert type(stepper_of(settings("trainer.steps:ToolsAndFeedback"))) is ToolsAndFeedback
    assert type(stepper_of(settings(f"{plugins}:Mine"))).__name__ == "Mine"
    assert stepper_of(settings(f"{plugins}:again")) is stepper_of(settings(f"{plugins}:again"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{file}:Needy", "cannot be made.*made already"),
        ("{file}:half", "lacks check_finished"),
        ("{file}:Mien", "did you mean 'Mine'"),
        ("nowhere.py:Mine", "no such file"),
    ],
)
def test_a_plug_in_that_is_none_is_told_with_a_remedy(plugins: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        stepper_of(settings(name.format(file=plugins)))


def test_tools_are_a_folder_or_a_running_gateway() -> None:
    assert isinstance(gateway_of("http://127.0.0.1:9", None), RemoteGateway)
    assert isinstance(gateway_of("tool_configs", None), Gateway)
