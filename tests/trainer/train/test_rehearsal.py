"""The dry run plays two scripted rollouts through tools, parser, interaction, rewards and the loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gateway.types import Hints, ToolSpec
from tests.trainer.train.jobs import ROOT, demo_model
from tests.trainer.train.trainings import Run, user_reward, write_config
from trainer.train.rehearsal import choose_tool, make_arguments

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
        ("return (1.0, 'why')", "returned (1.0, 'why'), which is not a usable number"),
        ("return math.nan", "returned nan"),
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
    assert "FAIL `shapeless` called with {} returned an object" in output and "2 problems to fix" in output
    assert f"ok   native tools were called with made-up arguments: {', '.join(names)}" in output
    assert "ok   two scripted rollouts were played" in output


def test_tools_of_mcp_servers_are_not_called_beyond_the_one_of_the_rollout(run: Run) -> None:
    server = {"command": "${MTRL_PYTHON}", "args": [str(ROOT / "tool_configs/servers/calculator.py")]}
    Path("mcp_servers.json").write_text(json.dumps({"mcpServers": {"sums": server}}))
    file = write_config()
    Path("tools/servers.yaml").write_text("tools: [{server: sums, prefix: mcp_}]\n")
    output = run("--config", file, "--dry-run")
    assert "ok   native tools were called with made-up arguments: look_up, calculate\n" in output


def test_tools_that_there_was_no_time_for_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.rehearsal.MAX_CALLS", 1)
    output = run("--config", write_config(), "--dry-run")
    assert "note after 1 calls, or 60 s, these tools were not called: calculate" in output


def test_a_slow_reward_is_told_with_the_setting_that_gives_it_more_time(run: Run) -> None:
    output = run("--config", write_config(reward=user_reward("time.sleep(20)", timeout_s=0.05)), "--dry-run", code=1)
    assert "returned nothing within 0.05 s, its `timeout_s`" in output
    assert "or raise its `timeout_s`" in output and "finite number" not in output


def test_a_prompt_that_takes_the_whole_limit_is_told_instead_of_what_was_played(run: Run) -> None:
    output = run("--config", write_config(limits={"rollout_tokens": 5}), "--dry-run", code=1)
    assert "note no turn of scripted rollouts was played: the prompt of " in output
    assert "two scripted rollouts were played" not in output and "a loss over" not in output


def test_a_call_that_a_limit_cuts_off_is_told_with_that_limit(run: Run) -> None:
    output = run("--config", write_config(limits={"turn_tokens": 3}), "--dry-run", code=1)
    assert "is cut off by `limits.turn_tokens`" in output and "remedy: raise `limits.turn_tokens`" in output
    assert "stop ids" not in output


def test_a_configuration_that_belongs_to_other_weights_is_refused_before_they_are_loaded(run: Run) -> None:
    shutil.copytree(demo_model(), "model")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    for words in (("--dry-run",), ("--out", "r")):
        output = run("--config", write_config(model="model"), *words, code=2)
        assert "config.json: model: model.layers.0.mlp." in output and "in the weight files; so are " in output


def test_weights_under_other_names_than_the_configuration_expects_are_refused_before_they_are_loaded(run: Run) -> None:
    shutil.copytree(demo_model(), "model")
    weights = load_file("model/model.safetensors")
    save_file({name.replace("self_attn", "attn"): value for name, value in weights.items()}, "model/model.safetensors")
    for words in (
        ("--config", write_config(model="model"), "--dry-run"),
        ("--config", "run.yaml", "--out", "r"),
        ("check", "--tools", "tools", "--model", "model"),
    ):
        output = run(*words, code=1 if "check" in words else 2)
        assert "config.json: model: model.layers.0.self_attn." in output and "are in no weight file" in output
        assert "the model does not know model.layers.0.attn." in output and "`save_pretrained`" in output
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, "model/model.safetensors")
    assert run("--config", "run.yaml", "--dry-run").endswith("no problems found\n"), "transformers finds these"


def test_rows_without_the_truth_that_rewards_read_are_told_once_wherever_they_are(run: Run) -> None:
    rows = ['{"prompt": "what"}\n', *[TRUTH] * 3]
    for lines in (rows, rows[::-1]):
        Path("rows.jsonl").write_text("".join(lines))
        components = {
            "answer": {"function": "answer"}, **user_reward("return float(attempt.truth == '7')")["components"],
        }  # fmt: skip
        file = write_config(data="rows.jsonl", demo={}, reward={"components": components, "success": "answer"})
        output = run("--config", file, "--dry-run")
        assert "note reward.components.answer: 'answer' cannot score 1 of 4 rows" in output
        assert "reads `attempt.truth`, which is None where a row has no `ground_truth`: 1 of 4 lack it" in output
        assert "note reward.components.mine:" in output and "two scripted rollouts were played and scored" in output
        assert "FAIL" not in output


def test_tools_that_no_server_has_and_cut_off_weights_are_refused_at_the_start(run: Run) -> None:
    import shutil

    from tests.trainer.train.jobs import ROOT, demo_model

    shutil.copytree(demo_model(), "model")
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-5])
    file = write_config(model="model")
    for words in (("--dry-run",), ("--out", "r")):
        output = run("--config", file, *words, code=2)
        assert "model.safetensors: model: has " in output and "it is cut off or damaged" in output
    server = {"command": "${MTRL_PYTHON}", "args": [str(ROOT / "tool_configs/servers/calculator.py")]}
    Path("mcp_servers.json").write_text(json.dumps({"mcpServers": {"sums": server}}))
    file = write_config()
    Path("tools/servers.yaml").write_text("tools: [{server: sums, allow: [calc]}]\n")
    output = run("--config", file, "--dry-run", code=2)
    assert "sums has no tool 'calc'" in output


def test_a_run_whose_rollouts_cannot_teach_is_refused_before_its_model_is_loaded(run: Run) -> None:
    output = run("--config", write_config(n=1), "--out", "r", code=2)
    assert "n is 1, but dapo compares the rollouts of a task with each other" in output and "set `n: 8`" in output
    assert not Path("r").exists()


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


def test_a_tool_that_changes_nothing_is_preferred() -> None:
    write, read = ToolSpec("write"), ToolSpec("read", hints=Hints(read_only=True))
    assert choose_tool([write, read]) is read and choose_tool([write]) is write
