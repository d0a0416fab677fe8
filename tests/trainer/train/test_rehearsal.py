"""The dry run plays two scripted rollouts through tools, parser, interaction, rewards and the loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.train.jobs import demo_model
from tests.trainer.train.trainings import Run, user_reward, write_config
from trainer.train.rehearsal import make_arguments

TRUTH = '{"prompt": "what", "ground_truth": "7"}\n'
SEVERAL_TOOLS = '''def fits(a: int) -> str:
    """Fits."""
    return str(a)


def misspelt(a: int) -> str:
    """Has a mistake."""
    return strng(a)


def refuses(a: int) -> str:
    """Refuses."""
    raise ValueError("only 7")


def silent() -> None:
    """Says nothing."""


def shapeless() -> object:
    """Returns what is no result."""
    return object()
'''


def test_a_job_in_order_is_played_and_scored(run: Run) -> None:
    output = run("--config", write_config(), "--dry-run")
    assert "two scripted rollouts were played and scored: 0, 0" in output and "a loss over " in output
    assert output.rstrip().endswith("no problems found") and "learning rate 0.001" in output


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return None", "returned None, which is not a usable number"),
        ("raise KeyError('score')", "raised KeyError: 'score'"),
    ],
)
def test_a_reward_function_that_gives_no_number_fails_the_dry_run(run: Run, body: str, says: str) -> None:
    output = run("--config", write_config(reward=user_reward(body)), "--dry-run", code=1)
    assert "FAIL a scripted rollout cannot be scored: component 'mine'" in output and output.count(says) == 1
    assert "1 problem to fix" in output and "return a finite number" in output


def test_a_reward_that_takes_any_answer_and_a_tool_that_breaks_are_told(run: Run) -> None:
    file = write_config(reward=user_reward("return 1.0"))
    Path("tools/broken_calculator.py").write_text(
        'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    raise ConnectionResetError("gone")\n'
    )
    Path("tools/tools.yaml").write_text(
        "tools: [{function: broken_calculator:calculate}, {class_name: mtrl_plugins.demo.facts.lookup.LookUp}]\n"
    )
    output = run("--config", file, "--dry-run", code=1)
    assert "FAIL `calculate` called with" in output and "ended as unknown" in output and output.count("gone") == 1
    assert "note the answer 'I do not know.' counts as a success" in output, "the other tool is called in a rollout"


def test_every_native_tool_is_called_once_and_each_mistake_is_told_with_its_line(run: Run) -> None:
    Path("rows.jsonl").write_text(TRUTH)
    file = write_config(data="rows.jsonl", demo={}, reward={"components": {"answer": {"function": "answer"}}})
    Path("tools/several.py").write_text(SEVERAL_TOOLS)
    names = ["fits", "misspelt", "refuses", "silent", "shapeless"]
    Path("tools/tools.yaml").write_text(json.dumps({"tools": [{"function": f"several:{name}"} for name in names]}))
    output = run("--config", file, "--dry-run", code=1)
    assert 'FAIL `misspelt` called with {"a": 1} ended as error' in output and "raised NameError" in output
    assert "several.py:8)" in output and "correct the tool there, or its schema" in output
    assert "note `refuses` called with" in output and "several.py:13)" in output and "are to blame; else" in output
    assert "note `silent` called with {} returned nothing that the policy could read" in output
    assert "FAIL `shapeless` called with {} ended as error" in output and "2 problems to fix" in output
    assert f"ok   native tools were called with made-up arguments: {', '.join(names)}" in output
    assert "ok   two scripted rollouts were played" in output


def test_a_configuration_that_belongs_to_other_weights_is_refused_before_they_are_loaded(run: Run) -> None:
    shutil.copytree(demo_model(), "model")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    for words in (("--dry-run",), ("--out", "r")):
        output = run("--config", write_config(model="model"), *words, code=2)
        assert "config.json: model: model.layers.0.mlp." in output and "in the weight files; so are " in output


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({}, {}),
        ({"properties": {"a": {"type": "string"}}, "required": []}, {}),
        ({"properties": {"a": {"type": "string", "minLength": 3}}, "required": ["a"]}, {"a": "111"}),
        ({"properties": {"a": {"type": ["integer", "null"], "minimum": 5}}, "required": ["a"]}, {"a": 5}),
        ({"properties": {"a": {"enum": ["x", "y"]}, "b": {"const": 3}}, "required": ["a", "b"]}, {"a": "x", "b": 3}),
        ({"properties": {"a": {"anyOf": [{"type": "boolean"}, {}]}}, "required": ["a"]}, {"a": True}),
        ({"properties": {"a": {"type": "array", "items": {"type": "number"}, "minItems": 2}}, "required": ["a"]},
         {"a": [1, 1]}),
        ({"properties": {"a": {"properties": {"b": {}}, "required": ["b"], "type": "object"}}, "required": ["a"]},
         {"a": {"b": "1"}}),
        ({"required": ["unknown"]}, {"unknown": "1"}),
    ],
)  # fmt: skip
def test_made_up_arguments_follow_the_schema(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert make_arguments(schema) == arguments
