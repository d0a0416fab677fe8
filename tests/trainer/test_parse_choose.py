"""A parser is chosen by the template, named by a person, or brought by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigError
from gateway.types import ToolCall
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.parse.choose import NAMES, choose, named
from trainer.parse.family import Family

SHIPPED = {"qwen3": "hermes", "qwq": "hermes", "deepseek": "deepseek_v3"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_family_is_chosen_by_the_marks_in_a_template(name: str) -> None:
    assert choose(FAMILIES[name].template).name == SHIPPED.get(name, name)


@pytest.mark.parametrize("template", ["[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "<tool_call>{{ call | tojson }}"])
def test_forms_of_one_family_are_told_apart(template: str) -> None:
    assert choose(template).name == ("mistral_args" if "ARGS" in template else "hermes")


def test_a_template_without_calls_is_refused_with_the_names_to_choose_from() -> None:
    with pytest.raises(ConfigError, match="no known way of writing calls") as raised:
        choose("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert all(name in str(raised.value) for name in NAMES)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'") as raised:
        named("hermse")
    assert all(name in str(raised.value) for name in NAMES)


def test_each_name_and_alias_makes_a_parser_with_the_schemas_it_is_given() -> None:
    schemas = {"add": {"properties": {"a": {"type": "integer"}}}}
    for name in NAMES:
        parser = named(name, schemas, thinking_open=True)
        assert isinstance(parser, Family)
        assert (parser.schemas, parser.thinking_open) == (schemas, True)
    assert named("gpt-oss").name == "harmony"


def test_a_users_own_parser_is_found_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parser_for_test.py").write_text(
        "from trainer.parse.hermes import Hermes\n"
        "class Own(Hermes):\n    name = 'own'\n"
        "class Bare:\n    pass\n"
        "class Dumb:\n    def __init__(self, schemas, *, thinking_open): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parser = named("own_parser_for_test:Own")
    assert parser.name == "own"
    assert parser.parse('<tool_call>{"name": "a"}</tool_call>').calls == (ToolCall("", "a", "{}"),)
    with pytest.raises(ConfigError, match="cannot be made"):
        named("own_parser_for_test:Bare")
    with pytest.raises(ConfigError, match="is no parser"):
        named("own_parser_for_test:Dumb")
    with pytest.raises(ConfigError, match="no module"):
        named("no_such_module_for_test:Own")
