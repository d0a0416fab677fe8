"""Tests of reading invalid and malicious YAML and JSON files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.reader import MAX_BYTES, read_file
from gateway.errors import ConfigError
from tests.conftest import Write

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def _error_of(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_file(file)
    assert caught.value.remedy
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tools:\n  - a: [1, 2\nb: hunter2", "a.yaml: line 3, column 2: is not valid YAML: "),
        ("tools:\n\t- a", "a.yaml: line 2, column 1: is not valid YAML: found character '\\t'"),
        ("a: 'hunter2", "a.yaml: line 1, column 12: is not valid YAML: found unexpected end of stream"),
        ("a: 1\n---\nb: 2", "a.yaml: line 2, column 1: is not valid YAML: but found another document"),
        ("a: 1\nb: 2\na: 3", "a.yaml: line 3, column 1: duplicate key 'a'"),
        ("on: 1", "a.yaml: line 1, column 1: a key is not a string"),
        ("a: !!python/object/apply:os.system [true]", "a.yaml: line 1, column 4: the tag 'python/object/apply:os"),
        ("a: &a [*a]", "a.yaml: line 1, column 4: contains itself"),
        (BOMB, "a.yaml: line 6, column 5: contains more than 200000 values"),
        ("[" * 150 + "]" * 150, "a.yaml: line 1, column 101: is nested too deeply"),
        ("[" * 20000, "a.yaml: is nested too deeply"),
        ("a: \x07", "a.yaml: contains a character that YAML forbids"),
        (f"a: {'9' * 5000}", "a.yaml: contains a number that cannot be parsed"),
        ("#" * (MAX_BYTES + 1), f"a.yaml: is larger than {MAX_BYTES} bytes"),
    ],
)
def test_unsafe_yaml_is_refused_with_the_location(text: str, expected: str, write: Write) -> None:
    refusal = _error_of(write("a.yaml", text))
    assert refusal.startswith(expected)
    assert "hunter2" not in refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a"\n: 1; "hunter2"}', "a.json: line 2, column 4: is not valid JSON: "),
        ('{"a": {"b": 1, "b": 2}}', "a.json: duplicate key 'b'"),
        ('{"a": Infinity}', "a.json: Infinity is not JSON"),
        ("[" * 100_000, "a.json: is nested too deeply"),
    ],
)
def test_invalid_json_is_refused_with_the_location(text: str, expected: str, write: Write) -> None:
    assert _error_of(write("a.json", text)).startswith(expected)


def test_dates_stay_text_exponents_are_numbers_and_merged_keys_are_overridden(write: Write) -> None:
    text = "{a: 2024-01-01, b: 1e-5, c: -2E3, d: 1.5, e: 1e, f: yes, g: ~, h: &h {a: 1, b: 2}, i: {<<: *h, b: 3}}"
    assert read_file(write("a.yaml", text)) == {
        "a": "2024-01-01",
        "b": 1e-5,
        "c": -2000.0,
        "d": 1.5,
        "e": "1e",
        "f": True,
        "g": None,
        "h": {"a": 1, "b": 2},
        "i": {"a": 1, "b": 3},
    }


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_empty_file_is_none_and_what_is_no_text_is_refused(name: str, write: Write) -> None:
    file = write(name, "\n")
    assert read_file(file) is None
    file.write_bytes(b"tools: \xff\xfe")
    assert _error_of(file) == f"{name}: is not UTF-8 text (byte 7)"
    assert ": cannot be read: " in _error_of(file.parent)
