"""Files that are no YAML, no JSON, or no friend."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.read import MOST_BYTES, read
from gateway.errors import ConfigError
from tests.conftest import Write

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def _refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert caught.value.remedy
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tools:\n  - a: [1, 2\nb: hunter2", "a.yaml: line 3, column 2: is no YAML: "),
        ("tools:\n\t- a", "a.yaml: line 2, column 1: is no YAML: found character '\\t'"),
        ("a: 'hunter2", "a.yaml: line 1, column 12: is no YAML: found unexpected end of stream"),
        ("a: *nowhere", "a.yaml: line 1, column 4: is no YAML: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2", "a.yaml: line 2, column 1: is no YAML: but found another document"),
        ("a: 1\nb: 2\na: 3", "a.yaml: line 3, column 1: the key 'a' is there twice"),
        ("on: 1", "a.yaml: line 1, column 1: a key is no text"),
        ("{1: 2}", "a.yaml: line 1, column 2: a key is no text"),
        ("[a]: 2", "a.yaml: line 1, column 1: a key is no text"),
        ("a: !!python/object/apply:os.system [true]", "a.yaml: line 1, column 4: the tag 'python/object/apply:os"),
        ("a: !!binary aGk=", "a.yaml: line 1, column 4: the tag 'binary' is no plain value"),
        ("a: &a [*a]", "a.yaml: line 1, column 4: holds itself"),
        (BOMB, "a.yaml: line 6, column 5: stands for more than 200000 values"),
        ("[" * 150 + "]" * 150, "a.yaml: line 1, column 101: is nested too deeply"),
        ("[" * 20000, "a.yaml: is nested too deeply"),
        ("a: \x07", "a.yaml: holds a character that YAML forbids"),
        (f"a: {'9' * 5000}", "a.yaml: holds a number that cannot be read"),
        ("#" * (MOST_BYTES + 1), f"a.yaml: is larger than {MOST_BYTES} bytes"),
    ],
)
def test_a_yaml_file_that_cannot_be_trusted_is_refused_at_its_place(text: str, told: str, write: Write) -> None:
    refusal = _refusal(write("a.yaml", text))
    assert refusal.startswith(told)
    assert "hunter2" not in refusal


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a"\n: 1; "hunter2"}', "a.json: line 2, column 4: is no JSON: "),
        ('{"a": {"b": 1, "b": 2}}', "a.json: the key 'b' is there twice"),
        ('{"a": Infinity}', "a.json: Infinity is no JSON"),
        ("[" * 100_000, "a.json: is nested too deeply"),
    ],
)
def test_a_json_file_that_cannot_be_read_is_refused_at_its_place(text: str, told: str, write: Write) -> None:
    assert _refusal(write("a.json", text)).startswith(told)


def test_a_file_that_is_no_text_is_refused(write: Write) -> None:
    file = write("a.yaml", "")
    file.write_bytes(b"tools: \xff\xfe")
    assert _refusal(file) == "a.yaml: is no UTF-8 text (byte 7)"


def test_a_folder_in_place_of_a_file_is_refused(write: Write) -> None:
    file = write("folder/a.yaml", "")
    assert _refusal(file.parent).startswith("folder: cannot be read: ")


def test_dates_stay_text_and_numbers_are_numbers(write: Write) -> None:
    assert read(write("a.yaml", "{a: 2024-01-01, b: 1e-5, c: -2E3, d: 1.5, e: 1e, f: yes, g: ~}")) == {
        "a": "2024-01-01",
        "b": 1e-5,
        "c": -2000.0,
        "d": 1.5,
        "e": "1e",
        "f": True,
        "g": None,
    }


def test_merged_keys_may_be_replaced(write: Write) -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}"
    assert read(write("a.yaml", text))["other"] == {"a": 1, "b": 3}


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_an_empty_file_says_nothing(name: str, write: Write) -> None:
    assert read(write(name, "\n")) is None
