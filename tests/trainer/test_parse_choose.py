"""The choice of a tool-call parser: by template, by name, or the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigError
from gateway.types import ToolCall
from trainer.parse.base import CallParser
from trainer.parse.choose import PARSERS, choose_parser, load_parser
from trainer.parse.plain import PlainText


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
