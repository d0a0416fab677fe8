"""What settings name is opened, or told why it cannot be."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gateway.client import RemoteGateway
from gateway.config.models import ResultLimit
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import ToolCall
from trainer.config import PlaySettings, RolloutSettings
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
def plugins(tmp_path: Path) -> Path:
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
    assert isinstance(gateway_of(PlaySettings(tools="http://127.0.0.1:9")), RemoteGateway)
    assert isinstance(gateway_of(PlaySettings()), Gateway)


async def test_tools_of_several_files_are_cut_as_the_run_says_where_they_do_not(tmp_path: Path) -> None:
    (tmp_path / "lengthy.py").write_text(
        "def long() -> str:\n    return 'a' * 50\ndef own() -> str:\n    return 'b' * 50\n"
    )
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("tools: [{function: lengthy:long}]")
    two.write_text("tools: [{function: lengthy:own, result_limit: 40}]")
    settings = PlaySettings(tools=(str(one), str(two)), result_limit=ResultLimit(chars=20, side="right"))
    with anyio.fail_after(20):
        async with gateway_of(settings) as gateway, gateway.open() as session:
            long, own = [await session.call(ToolCall("1", name, "{}")) for name in ("long", "own")]
    assert long.text.startswith("a" * 5) and not long.text.endswith("a") and len(long.text) < 50
    assert len(own.text) > len(long.text)


def test_a_gateway_elsewhere_is_not_told_how_to_cut() -> None:
    with pytest.raises(ConfigError, match="result_limit: a gateway elsewhere cuts results itself"):
        gateway_of(PlaySettings(tools="http://127.0.0.1:9", result_limit=ResultLimit(chars=20)))
