"""The table of mistakes that users make: each is refused before anything starts, in words that name what works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.trainer.train.trainings import Run, write_config

SCHEMA = "tool_schema: {type: function, function: {name: t, description: d}}"
FILES: Mapping[str, str] = {
    "servers.json": '{"mcpServers": {}}',
    "job.yaml": "model: demo\ndata: demo\ntools: tools\nsteps: 3\nn: 4\n",
    "tools.yaml": "tools: []\n",
    "asked.jsonl": '{"prompt": "what is 2 + 2", "ground_truth": "4"}\n',
    "input.jsonl": '{"input": "what is 2 + 2", "output": "4"}\n',
    "target.jsonl": '{"prompt": "what is 2 + 2", "target": "4"}\n',
    "adapters/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B"}',
    "gguf/model.Q4_K_M.gguf": "GGUF",
    "foreign_rewards.py": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def of_trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]
def reads_truth(attempt):
    return float(attempt.ground_truth == "4")
""",
    "odd_tools.py": """
from gateway.native.base import BaseTool
def silent(text):
    return text.upper()
def stream(text: str):
    "Yields words."
    yield text
class Excutes(BaseTool):
    async def excute(self, instance_id, parameters, **kwargs):
        return "x", 0.0, {}
class Plain:
    def run(self, text: str) -> str:
        return text
""",
}


class Mistake(NamedTuple):
    """What is written, and what the message has to name."""

    says: tuple[str, ...]
    changes: Mapping[str, Any] = {}
    """Of a run file that is in order."""
    words: tuple[str, ...] = ()
    """Of the command line, instead of a run file."""
    tool: str = ""
    """An entry of the file of tools."""
    code: int = 2
    """The exit code of the dry run: 1 if the job could be opened."""


def in_file(*says: str, code: int = 2, **changes: Any) -> Mistake:
    return Mistake(says, changes, code=code)


def typed(words: str, *says: str) -> Mistake:
    return Mistake(says, words=tuple(words.split()))


def offered(tool: str, *says: str) -> Mistake:
    return Mistake(says, tool=tool)


def rewarded(function: str, *says: str, **more: Any) -> Mistake:
    return in_file(*says, reward={"components": {"mine": {"function": function}}}, **more)


MISTAKES: Mapping[str, Mistake] = {
    # Keys and values of the run file.
    "a misspelt key": in_file("run.yaml:1: promts: unknown key\n  remedy: did you mean `prompts`?", promts=4),
    "a component's name": in_file(
        "'is right' is not a name that can be used here", reward={"components": {"is right": {"function": "answer"}}}
    ),
    "a reporter without a list": in_file("report: expected a list", "write `report: [...]`", report="wandb"),
    "no rollouts": in_file("n: expected greater than 0, found 0", "leave it out: it is then 8", n=0),
    "a group of one": in_file("n is 1", "nothing would be learned", "set `n: 8`", n=1),
    "compiled layers of several ranks": in_file(
        "`update.compile` works in one process", "leave it off", update={"compile": True}, distributed={"ranks": 2}
    ),
    "a critic that is missing": in_file(
        "needs a critic", "add `update.critic: {}`", algorithm={"credit": {"kind": "gae"}}
    ),
    "greedy training": in_file("a temperature above 0\n  remedy: raise", sampling={"temperature": 0}),
    "a tool of the curriculum": in_file("did you mean 'calculate'?", curriculum={"stages": [{"tools": ["calcluate"]}]}),
    # Rewards.
    "a misspelt reward": rewarded("anser", "unknown reward function 'anser'\n  remedy: did you mean 'answer'?"),
    "a reward of verl": rewarded(
        "foreign_rewards.py:compute_score",
        "takes `solution_str`, as reward functions of verl do",
        "`function: mtrl_plugins.verl.reward_function:custom`, `args: {path: foreign_rewards.py, name: compute_score}`",
    ),
    "a reward of TRL": rewarded(
        "foreign_rewards.py:of_trl", "takes `completions`", "mtrl_plugins.trl.api:GRPOTrainer(reward_funcs=of_trl"
    ),
    "ground_truth of an attempt": rewarded(
        "foreign_rewards.py:reads_truth", "no attribute 'ground_truth'", "did you mean `attempt.truth`?", code=1
    ),
    # Models.
    "peft's adapters": in_file("has only adapters (peft)", "Qwen/Qwen3-0.6B", "merge_and_unload", model="adapters"),
    "a GGUF file": in_file("weights in GGUF", "*.safetensors", model="gguf/model.Q4_K_M.gguf"),
    # Data.
    "columns named input and output": in_file(
        "prompt: is missing",
        "rename the column `input` to `prompt` and `output` to `answer`",
        data="input.jsonl",
        demo=None,
    ),
    "an answer that is called target": in_file(
        "cannot score every row",
        "rename the column `target` to `answer`",
        data="target.jsonl",
        demo=None,
        code=1,
        reward={"components": {"answer": {"function": "answer"}}},
    ),
    "rows of an evaluation": in_file("nosuch.jsonl: cannot be read (No such file", evaluation={"data": "nosuch.jsonl"}),
    # Tools.
    "a function that says nothing": offered(
        "function: odd_tools:silent", "no docstring and no type hint of `text`", "give the entry a `description`"
    ),
    "a generator function": offered("function: odd_tools:stream", "is a generator function", "return a list"),
    "a misspelt execute": offered(
        f"class_name: odd_tools.Excutes, config: {{}}, {SCHEMA}", "has no `execute`", "did you mean it by `excute`?"
    ),
    "a class that is no tool": offered(
        f"class_name: odd_tools.Plain, config: {{}}, {SCHEMA}", "has no `execute`", "`gateway.native.base:BaseTool`"
    ),
    # The command line.
    "a run file that is not there": typed("--config nosuch", "name a YAML file, or one of agent, default, gsm8k"),
    "rows without a model": typed("--data rows.jsonl", "words of its own tasks, not those of `data`", "name a `model`"),
    "an engine that is none": typed("--engine vllm", "mtrl-train: --engine: should be auto, torch, "),
    "tools that are not there": typed("--tools nowhere", "nowhere: there is no such folder"),
    "servers as tools": typed("--tools servers.json", "is a file of MCP servers, not of tools", "name it with --mcp"),
    "a run file as tools": typed("--tools job.yaml", "is a run file, not a file of tools", "`mtrl-train --config`"),
    "a run file as servers": typed("--mcp job.yaml", "job.yaml: is a run file, not a file of MCP servers"),
    "tools as servers": typed("--mcp tools.yaml", "is a file of tools, not of MCP servers", "name it with --tools"),
    "a run file as verl's": typed("translate job.yaml", "job.yaml: is a run file of mtrl already"),
    "no run to resume": typed("--resume", "runs: there is no run to resume", "name its folder with --out"),
    "another run to replay": typed("replay nowhere 2", "nowhere: not a run of `mtrl-train`"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_refused_before_anything_starts_and_the_message_names_what_works(run: Run, mistake: Mistake) -> None:
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    words = mistake.words
    if not words:
        words = ("--config", write_config(**mistake.changes), "--out", "r", "--dry-run")
        if mistake.tool:
            Path("tools/tools.yaml").write_text(f"tools: [{{{mistake.tool}}}]\n")
    output = run(*words, code=mistake.code)
    for part in mistake.says:
        assert part in output, output
    assert output.count("remedy: ") <= 3 and not Path("r").exists() and not [*Path("runs").glob("*")]
