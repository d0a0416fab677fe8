"""Gateway, stepper, parsers and plug-ins are opened from settings, or refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gateway.config.models import ResultLimit
from gateway.errors import ConfigError
from gateway.types import ToolCall
from trainer.parse.base import CallParser
from trainer.parse.choose import PARSERS, choose_parser, load_parser
from trainer.parse.plain import PlainText
from trainer.rollout.settings import BaseRolloutSettings, RolloutSettings
from trainer.rollout.steppers import ToolsAndFeedback
from trainer.setup import make_gateway, make_stepper

PLUGINS = """
from trainer.rollout.steppers import ThinkAgain, ToolsAndFeedback

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


def test_plugin_is_loaded_from_a_module_or_a_file(plugins: Path) -> None:
    assert type(make_stepper(settings("trainer.rollout.steppers:ToolsAndFeedback"))) is ToolsAndFeedback
    assert type(make_stepper(settings(f"{plugins}:Mine"))).__name__ == "Mine"
    assert make_stepper(settings(f"{plugins}:again")) is make_stepper(settings(f"{plugins}:again"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("Needy", "cannot be instantiated.*existing object"), ("half", "lacks check_finished")],
)
def test_invalid_plugin_is_reported_with_a_remedy(plugins: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make_stepper(settings(f"{plugins}:{name}"))


async def test_result_limit_of_the_run_applies_to_tools_without_one(tmp_path: Path) -> None:
    (tmp_path / "lengthy.py").write_text(
        "def long() -> str:\n    return 'a' * 50\ndef own() -> str:\n    return 'b' * 50\n"
    )
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("tools: [{function: lengthy:long}]")
    two.write_text("tools: [{function: lengthy:own, result_limit: 40}]")
    settings = BaseRolloutSettings(tools=(str(one), str(two)), result_limit=ResultLimit(chars=20, side="right"))
    with anyio.fail_after(60):
        async with make_gateway(settings) as gateway, gateway.open() as session:
            long, own = [await session.call(ToolCall("1", name, "{}")) for name in ("long", "own")]
    assert long.text.startswith("a" * 5) and not long.text.endswith("a") and len(long.text) < 50
    assert len(own.text) > len(long.text)


@pytest.mark.parametrize("template", ["[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "<tool_call>{{ call | tojson }}"])
def test_formats_of_one_family_are_distinguished(template: str) -> None:
    assert choose_parser(template).name == ("mistral_args" if "ARGS" in template else "hermes")


def test_each_name_and_alias_makes_a_parser_with_its_schemas() -> None:
    schemas = {"add": {"properties": {"a": {"type": "integer"}}}}
    for name in PARSERS:
        parser = load_parser(name, schemas, thinking_open=True)
        assert isinstance(parser, CallParser | PlainText)
        assert (parser.schemas, parser.thinking_open) == (schemas, True)
    assert load_parser("gpt-oss").name == "harmony"


def test_user_parser_is_loaded_from_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parser_for_test.py").write_text(
        "from trainer.parse.hermes import Hermes\n"
        "class Own(Hermes):\n    name = 'own'\n"
        "class Bare:\n    pass\n"
        "class Dumb:\n    def __init__(self, schemas, *, thinking_open): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = load_parser("own_parser_for_test:Own")
    assert parser.name == "own"
    assert parser.parse('<tool_call>{"name": "a"}</tool_call>').calls == (ToolCall("", "a", "{}"),)
    with pytest.raises(ConfigError, match="cannot be created"):
        load_parser("own_parser_for_test:Bare")
    with pytest.raises(ConfigError, match="is not a parser"):
        load_parser("own_parser_for_test:Dumb")
    with pytest.raises(ConfigError, match="no module"):
        load_parser("no_such_module_for_test:Own")
