"""The checks before a run: what users mistake is refused in words that name what works, and two rollouts are played."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.errors import ConfigError
from gateway.finding import Finding
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from tests.sample_images import png
from tests.trainer.train.jobs import demo_model, small_job
from tests.trainer.train.trainings import Run, user_reward, write_config
from trainer.data.tasks import iterate_texts, load_rows
from trainer.ledger import Message
from trainer.policy.settings import LoraSettings
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task
from trainer.template.media_layout import has_media
from trainer.train.job import Job, TrainTasks, open_job
from trainer.train.preflight import find_problems, require_ready
from trainer.train.rehearsal import make_arguments

SCHEMA = "tool_schema: {type: function, function: {name: t, description: d}}"
FILES: Mapping[str, str] = {
    "servers.json": '{"mcpServers": {}}',
    "gone.json": '{"mcpServers": {"gone": {"command": "/nowhere/server"}}}',
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


ANSWERED = {"components": {"answer": {"function": "answer"}}}
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
        "rename the column `input` to `prompt` and `output` to `answer`", data="input.jsonl", demo=None
    ),
    "an answer that is called target": in_file(
        "cannot score every row",
        "rename the column `target` to `answer`",
        data="target.jsonl",
        demo=None,
        code=1,
        reward=ANSWERED,
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
    "a server that cannot be started": in_file("server gone is down: cannot start '/nowhere/server'", mcp="gone.json"),
    # The command line.
    "a run file that is not there": typed("--config nosuch", "name a YAML file, or one of agent, bandit, default"),
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
    file = write_config(data="rows.jsonl", demo={}, reward=ANSWERED)
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


def test_state_that_a_server_or_a_sandbox_has_not_is_named_by_row_with_the_closest_one(run: Run, place: Path) -> None:
    server = json.loads((FOLDER / "servers.json").read_text())["mcpServers"]["shelves"]
    del server["state"]
    server |= {"cwd": str(FOLDER), "states": str(place / "tools/states")}
    Path("mcp_servers.json").write_text(json.dumps({"mcpServers": {"shelves": server}}))
    write_config(data="t.jsonl", mcp="mcp_servers.json")
    Path("tools/states/full").mkdir(parents=True)
    Path("tools/box.yaml").write_text("tools:\n  - sandbox_tools: [files]\n    states: states\n")
    Path("t.jsonl").write_text("".join(json.dumps(row | {"ground_truth": "7"}) + "\n" for row in ROWS))
    output = run("--config", "run.yaml", "--dry-run", code=2)
    for source in ("shelves", "sandbox"):
        assert f"t.jsonl:3: state: {source}: there is no state 'ful'" in output
    assert output.count("(1 more row names it)") == output.count("did you mean 'full'?") == 2


@pytest.fixture(scope="module")
async def job(anyio_backend: str) -> AsyncIterator[Job]:
    async with open_job(small_job()) as job:
        yield job


def with_tasks(job: Job, *tasks: Task) -> Job:
    settings = job.settings.model_copy(update={"data": "rows.jsonl"})
    return replace(job, settings=settings, tasks=TrainTasks({None: tasks}, tasks, is_held_out=True))


def with_settings(job: Job, **changes: Any) -> Job:
    settings = small_job(**changes)
    return replace(job, settings=settings.model_copy(update={"update": job.settings.update, **changes}))


def make_task(number: int = 0, truth: Any = "7", words: int = 3) -> Task:
    asked: tuple[Message, ...] = ({"role": "user", "content": "what is it " * words},)
    return Task(f"t{number}", asked, truth, location=f"rows.jsonl:{number + 1}")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


async def test_a_job_in_order_has_no_findings(job: Job) -> None:
    assert require_ready(job) == []


async def test_sglang_has_to_be_installed_where_it_is_to_be_started(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", "/nowhere/python")
    missing = only(list(find_problems(with_settings(job, engine="sglang"))))
    assert missing.grade == "wrong" and "cannot be executed" in missing.text and "install SGLang" in missing.remedy


async def test_many_more_ranks_than_cores_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    crowded = job.settings.distributed.model_copy(update={"ranks": 8})
    with pytest.raises(ConfigError, match="8`, but there is no GPU and there are 2 cores"):
        require_ready(with_settings(job, distributed=crowded))
    require_ready(with_settings(job, distributed=crowded.model_copy(update={"ranks": 4})))


async def test_rows_without_the_truth_that_their_reward_needs_are_counted(job: Job) -> None:
    broken = only(list(find_problems(with_tasks(job, make_task(0, None), make_task(1, None)))))
    assert broken.grade == "wrong" and "'outcome' cannot score every row: the task has no right answer" in broken.text
    assert "(rows.jsonl:1)" in broken.text and "give each row a `ground_truth`" in broken.remedy
    tasks = [make_task(number, "seven" if number == 4 else "7") for number in range(9)]
    some = only(list(find_problems(with_tasks(job, *tasks))))
    assert some.grade == "note" and "cannot score 1 of 9 rows: the task's right answer is not a number" in some.text
    with pytest.raises(ConfigError, match="every row"):
        require_ready(with_tasks(job, make_task(0, None)))


async def test_messages_in_a_json_text_are_read_and_the_operator_is_told(job: Job) -> None:
    asked = [{"role": "system", "content": "short"}, {"role": "user", "content": "[2, 3]?"}]
    rows = [{"messages": json.dumps(asked), "answer": "7"}, {"prompt": "[1, 2] has a role?", "answer": "7"}]
    tasks = load_rows(rows)
    assert [list(task.messages) for task in tasks] == [asked, [{"role": "user", "content": "[1, 2] has a role?"}]]
    told = only(list(find_problems(with_tasks(job, *tasks))))
    assert told.grade == "note" and told.text == "messages are read from JSON in a text: 1 prompt"


async def test_a_limit_that_prompts_exceed_is_compared_with_the_longest_and_the_shortest(job: Job) -> None:
    long, short = make_task(0, words=60), make_task(1)
    every = only(list(find_problems(with_tasks(job, long))))
    assert every.grade == "wrong" and every.text.startswith("limits.rollout_tokens is 160, which leaves the policy no")
    assert "every prompt" in every.text and "set `limits.rollout_tokens` to " in every.remedy
    some = only(list(find_problems(with_tasks(job, short, long))))
    assert some.grade == "note" and "some prompts" in some.text


async def test_rollouts_that_may_grow_beyond_the_models_positions_are_told(job: Job) -> None:
    finding = only([*find_problems(with_settings(job, limits=RolloutLimits(rollout_tokens=513)))])
    assert finding.grade == "note" and "the model's configuration has 512 positions" in finding.text


async def test_adapters_for_layers_that_the_model_lacks_are_refused_even_beside_ones_that_it_has(job: Job) -> None:
    targets = ("q_proj", "layers.0.mlp.up_proj", "v_porj", "nothing_like_it")
    adapted = with_settings(job).settings.update.model_copy(update={"lora": LoraSettings(target_modules=targets)})
    settings = job.settings.model_copy(update={"update": adapted})
    misspelt, unknown = find_problems(replace(job, settings=settings))
    assert misspelt.grade == "wrong" and "the model has no layer 'v_porj'" in misspelt.text
    assert misspelt.remedy == "did you mean 'v_proj'?" and unknown.remedy.startswith(
        "name some of embed_tokens, q_proj"
    )


async def test_the_first_rows_are_checked_without_loading_their_media(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "which <image>? " * 2, "images": ["a.png", "a.png"], "answer": "red"} for _ in range(3)]
    (tmp_path / "a.png").write_bytes(png(8, 8))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "why?"}]))
    loaded = load_rows(tmp_path / "rows.jsonl")
    (tmp_path / "a.png").unlink()
    texts = list(iterate_texts(loaded))
    assert [has_media(task.messages) for task in texts] == [True, True, True, False]
    found = find_problems(replace(with_tasks(job), tasks=TrainTasks({None: loaded}, loaded, is_held_out=True)))
    assert "cannot score every row: the task's right answer is not a number" in only(list(found)).text


ROWS = [
    {"prompt": "x"},
    {"prompt": "x", "state": "full"},
    {"prompt": "x", "state": "ful"},
    {"prompt": "y", "state": "ful"},
]
