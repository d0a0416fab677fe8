"""The words of verl's command lines: each is an override or an option as Hydra reads it, or refused by name."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.verl.hydra_words import read_value
from mtrl_plugins.verl.read_config import read_command
from tests.conftest import Write

LAUNCH = ("python3", "-m", "verl.trainer.main_ppo")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-4", 0.0001), ("-3e5", -300000.0), (".5", 0.5), ("1.", 1.0), ("1_000", 1000), ("inf", inf),
        ("True", True), ("false", False), ("null", None), ("None", "None"), ("on", "on"), ("yes", "yes"), ("No", "No"),
        ("007", "007"), ("0x1f", "0x1f"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("", ""), ("''", ""),
        ("'1'", "1"), ("'x y'", "x y"), ('"x, y"', "x, y"), ("x y", "x y"), (" 1", 1), ("'it\\'s'", "it's"),
        ("a\\,b", "a,b"), ("a:b", "a:b"), ("x@y", "x@y"), ("$x", "$x"), ("*", "*"), ("%", "%"),
        ("http://h:1/x?y", "http://h:1/x?y"), ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("${x.y}", "${x.y}"),
        ("[]", []), ("{}", {}), ("[1,2]", [1, 2]), ("[a,'b']", ["a", "b"]), ("[[1,2],[3]]", [[1, 2], [3]]),
        ("[${x.y},'q']", ["${x.y}", "q"]), ("{c:1,d:e}", {"c": 1, "d": "e"}), ("{c: [1, x]}", {"c": [1, "x"]}),
        ("[a/b.parquet,/c/d-e_f.parquet]", ["a/b.parquet", "/c/d-e_f.parquet"]), ("'[1,2]'", "[1,2]"),
    ],
)  # fmt: skip
def test_values_are_those_that_hydra_1_3_8_reads(text: str, value: Any) -> None:
    read = read_value(text, "here")
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["1,2", "/a,/b", "int(3)", "range(1,3)", "a=b", "x#y", "&x", "!x", "(1)", "{'c d':1}", "\\'x\\'", "[1", "'x", "[1}",
     "{a}", "[1] 2", "[" * 50],
)  # fmt: skip
def test_values_that_hydra_refuses_or_makes_several_trainings_of_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Hydra cannot read"):
        read_value(text, "here")


@pytest.mark.parametrize("path", ["--config-path", "--config-dir", "-cp", "-cd"])
@pytest.mark.parametrize("name", ["--config-name", "-cn"])
@pytest.mark.parametrize("glue", [" ", "="])
def test_options_of_hydra_name_a_file_in_each_form(write: Write, path: str, name: str, glue: str) -> None:
    write("folder/mine.yaml", "algorithm: {adv_estimator: reinforce_plus_plus}\ndata: {train_batch_size: 7}\n")
    words = f"{path}{glue}folder {name}{glue}mine data.train_batch_size=8 --run".split()
    keys = read_command([*LAUNCH, *words])
    assert {key: placed.value for key, placed in keys.items()} == {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "data.train_batch_size": 8,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trainer.nnodes = 1", "'trainer.nnodes' is not `key=value`\n  remedy: write `key=value`, without blanks"),
        ("trainer.nnodes= 1", "'1' is not `key=value`"),
        ("mine.yaml", "'mine.yaml' is not `key=value`"),
        ("-cm folder", "'-cm' is no option of a training; those of Hydra are --config-path, -cp"),
        ("--cfg job", "'--cfg' is no option of a training"),
        ("--multirun a.b=1", "--multirun: starts several trainings"),
        ("--config-name", "--config-name: has no value"),
        ("-cn nowhere", "there is no file nowhere.yaml"),
        ("data.seed=1,2", "commas separate the values of several trainings"),
    ],
)
def test_no_word_after_the_program_is_dropped(write: Write, words: str, says: str) -> None:
    write("run.sh", f"{' '.join(LAUNCH)} {words}\n")
    for command in ([*LAUNCH, *words.split()], ["run.sh"]):
        with pytest.raises(ConfigError) as caught:
            read_command(command)
        assert says in str(caught.value)


def test_a_second_file_is_not_dropped(write: Write) -> None:
    write("run.yaml", "data: {seed: 1}\n")
    with pytest.raises(ConfigError, match=r"'other.yaml' is not `key=value`, and 'run.yaml' is the file"):
        read_command(["run.yaml", "other.yaml", "data.seed=2"])
    assert Path("run.yaml").exists() and read_command(["data.seed=2", "run.yaml"])["data.seed"].value == 2
