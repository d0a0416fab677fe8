"""`mtrl-train init`: a folder that runs at once, whose every line is explained and whose own tests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gateway.config import editor_schema
from mtrl_plugins.starter.write_job import write_job
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.jobs import demo_model
from trainer.storage.run_files import read_metrics
from trainer.train.run_schema import RUN_SCHEMA

TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
args = GRPOConfig(num_generations=4, per_device_train_batch_size=8, learning_rate=2e-6, max_completion_length=128)
GRPOTrainer(model="models/q", reward_funcs=len, args=args, train_dataset=rows, peft_config=LoraConfig(r=8))
"""
TRL_YAML = """
model_name_or_path: models/q
dataset_name: rows.jsonl
num_generations: 4
per_device_train_batch_size: 8
learning_rate: 2.0e-6
use_peft: true
lora_r: 8
"""
VERL_SCRIPT = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.parquet data.train_batch_size=8 \\
    data.max_prompt_length=256 data.max_response_length=128 actor_rollout_ref.model.path=models/q \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.total_training_steps=9
"""
SWIFT_SCRIPT = """
swift rlhf --rlhf_type grpo --model models/q --tuner_type full --dataset rows.jsonl --split_dataset_ratio 0 \\
    --reward_funcs accuracy --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 \\
    --max_completion_length 128 --max_steps 9 --learning_rate 2e-6 --lr_scheduler_type constant
"""


@pytest.fixture
def job(place: Path) -> Path:
    """A new job whose model is one that the tests have."""
    file = write_job(Path("my_job"))
    file.write_text(file.read_text().replace("model: demo", f"model: {demo_model()}"))
    return file


def explained_lines(text: str) -> list[tuple[str, str]]:
    """Each line with a key, and the line above it."""
    lines = [line.strip() for line in text.splitlines()]
    return [(line, above) for above, line in pairwise(lines) if line and not line.startswith("#")]


def test_job_trains_at_once_wherever_it_is_started(run: RunCommand, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no problems found" in run("--config", job, "--dry-run").output
    monkeypatch.chdir("my_job/tools")
    run("--config", "../run.yaml", "--steps", 2, "--out", "../../runs/a")
    assert [line["step"] for line in read_metrics(Path("../../runs/a/metrics.jsonl"))] == [0, 1, 2]


def test_generated_tests_pass_under_plain_pytest(run: RunCommand, place: Path) -> None:
    output = run("init", "my_job").output
    assert "pytest my_job" in output and "mtrl-train --config my_job/run.yaml --dry-run" in output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_every_line_is_explained_and_known_to_the_schema(place: Path) -> None:
    text = write_job(Path("my_job")).read_text()
    names = {"right:"}  # What a component is called is the user's choice.
    assert [line for line, above in explained_lines(text) if not above.startswith("#") and line not in names] == []
    schema = Path("my_job") / text.splitlines()[0].partition("$schema=")[2]
    assert schema.read_text() == RUN_SCHEMA.read_text()
    tools = Path("my_job/tools/tools.yaml").read_text().splitlines()[0].partition("$schema=")[2]
    assert json.loads((Path("my_job/tools") / tools).read_text())["title"] == "mtrl tool_configs/*.yaml"
    assert {file.name for file in Path("my_job/.schemas").iterdir()} == {
        RUN_SCHEMA.name, *(file.name for file in editor_schema.SCHEMA_FILES),
    }  # fmt: skip


def test_job_has_one_of_each_and_ten_tasks(place: Path) -> None:
    write_job(Path("my_job"))
    tools = yaml.safe_load(Path("my_job/tools/tools.yaml").read_text())
    assert [len(tools["tools"]), len(tools["interaction"])] == [2, 1]
    assert len(json.loads(Path("my_job/mcp_servers.json").read_text())["mcpServers"]) == 1
    assert len(Path("my_job/tasks.jsonl").read_text().splitlines()) == 10
    assert "my_job/run.yaml" in Path("my_job/README.md").read_text()


def test_model_of_the_users_own_is_named_from_the_run_file(run: RunCommand, place: Path, model: Path) -> None:
    Path("models").symlink_to(model.parent)
    run("init", "jobs/mine", "--model", f"models/{model.name}")
    settings = yaml.safe_load(Path("jobs/mine/run.yaml").read_text())
    assert settings["model"] == f"../../models/{model.name}" and "update" not in settings
    assert "no problems found" in run("--config", "jobs/mine/run.yaml", "--dry-run").output


@pytest.mark.parametrize(
    ("framework", "file", "text"),
    [
        ("trl", "grpo.py", TRL_SCRIPT),
        ("trl", "grpo.yaml", TRL_YAML),
        ("verl", "train.sh", VERL_SCRIPT),
        ("swift", "train.sh", SWIFT_SCRIPT),
    ],
)
def test_settings_of_other_frameworks_are_taken_over(
    run: RunCommand, place: Path, framework: str, file: str, text: str
) -> None:
    Path(file).write_text(text)
    output = run("init", "my_job", "--from", framework, file).output
    assert "Same meaning" in output
    settings = yaml.safe_load(written := Path("my_job/run.yaml").read_text())
    assert (settings["model"], settings["n"], float(settings["update"]["lr"])) == ("models/q", 4, 2e-6)
    assert settings["data"] == ("./tasks.jsonl" if file == "grpo.py" else settings["data"])
    assert settings["tools"] == ("./tools" if framework == "trl" else [])  # Those scripts have none.
    assert "(`num_generations`)" in written or "(`actor_rollout_ref.rollout.n`)" in written
    if framework == "trl":
        assert settings["update"]["lora"]["rank"] == 8 and settings["steps"] == 100


def test_what_a_script_has_as_python_objects_is_named_instead_of_dropped(run: RunCommand, place: Path) -> None:
    objects = "GRPOTrainer('models/q', my_reward, args, rows, callbacks=[c], tools=[look])"
    Path("grpo.py").write_text(f"args = GRPOConfig('out', max_steps=3)\n{objects}\n")
    output = " ".join(run("init", "my_job", "--from", "trl", "grpo.py").output.split())
    for name in ("reward_funcs", "train_dataset", "callbacks", "tools"):
        assert f"{name} (grpo.py:2)" in output, name
    settings = yaml.safe_load(Path("my_job/run.yaml").read_text())
    assert settings["model"] == "models/q" and settings["out"] == "out"
    Path("grpo.py").write_text("GRPOTrainer(model=load(), args=GRPOConfig(max_steps=3))")
    assert "model (grpo.py:1) - is computed there" in run("init", "other", "--from", "trl", "grpo.py").output


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("GRPOConfig(max_steps=3, **common)", "**: is computed: common"),
        (
            "GRPOTrainer(model='q', peft_config=LoraConfig(r=RANK), args=GRPOConfig(max_steps=3))",
            "r: is computed: RANK",
        ),
        (
            "GRPOTrainer(model='q', peft_config=make(), args=GRPOConfig(max_steps=3))",
            "peft_config: is computed: make()",
        ),
        ("GRPOConfig('out', 3)", "argument 2: unknown key"),
    ],
)
def test_settings_that_only_python_could_compute_are_refused(
    run: RunCommand, place: Path, script: str, problem: str
) -> None:
    Path("grpo.py").write_text(script)
    done = run("init", "my_job", "--from", "trl", "grpo.py", code=2)
    assert f"grpo.py:1: {problem}" in " ".join(done.output.split()) and not Path("my_job").exists()


def test_nothing_is_overwritten(run: RunCommand, place: Path) -> None:
    Path("my_job").mkdir()
    Path("my_job/mine.txt").write_text("mine")
    assert "my_job: is not empty, and nothing is overwritten" in run("init", "my_job", code=2).output
    assert [file.name for file in Path("my_job").iterdir()] == ["mine.txt"]
    Path("empty").mkdir()
    run("init", "empty")
    assert Path("empty/run.yaml").is_file()
    assert sorted(os.listdir()) == ["empty", "my_job"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["file"], "is a file, and nothing is overwritten"),
        ([""], "FOLDER: is empty"),
        (["file/job"], "file/job: cannot be made"),
        (["job", "--model", "nowhere"], "there is no config.json"),
        (["job", "--from", "nemo", "file"], "'nemo' is no framework that can be translated"),
        (["job", "--from", "trl", "nowhere"], "nowhere: --from: there is no such file"),
        (["job", "--from", "swift", "verl.sh"], "is not for swift: it has no command of ms-swift"),
        (["job", "--from", "verl", "swift.sh"], "is not for verl: it has a command of ms-swift"),
        (["job", "--from", "trl", "broken.py"], "broken.py:1: is not Python"),
        (["job", "--from", "trl", "computed.py"], "computed.py:1: learning_rate: is computed: rate * 2"),
        (["job", "--from", "trl", "other.py"], "has no arguments of a GRPO run"),
        (["job", "--from", "trl", "unknown.yaml"], "unknown.yaml:1: learning_rat: unknown key"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    run: RunCommand, place: Path, words: list[str], problem: str
) -> None:
    files = {
        "file": "text",
        "verl.sh": VERL_SCRIPT,
        "swift.sh": SWIFT_SCRIPT,
        "broken.py": "GRPOConfig(",
        "computed.py": "GRPOConfig(learning_rate=rate * 2)",
        "other.py": "print(1)",
        "unknown.yaml": "learning_rat: 1",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    assert problem in run("init", *words, code=2).output
    assert sorted(os.listdir()) == sorted(files)
