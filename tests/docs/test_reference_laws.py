"""What the reference pages have to hold: each option, setting, metric and file, with a text of its own."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from pydantic import BaseModel
from typer.main import get_command

from gateway.cli import app as gateway_app
from tests.docs.reference import FOLDER, _inner, _options
from trainer.cli import app as trainer_app
from trainer.model import SHARDS_FOLDER
from trainer.policy import lora, policy, rng, shards
from trainer.storage import rollout_file, run_files, token_credit
from trainer.train import checkpoint, evaluate, reporters, run_folder
from trainer.train.settings import TrainSettings


def read_page(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def command_options(command: object, path: str) -> dict[str, str]:
    """The help of every option of a command and those below it, by `COMMAND: OPTION`."""
    found = {f"{path}: {name}": str(text) for name, text in _options(command)}
    for name, inner in getattr(command, "commands", {}).items():
        found |= command_options(inner, f"{path} {name}")
    return found


@pytest.mark.parametrize(("name", "app"), [("mtrl-gateway", gateway_app), ("mtrl-train", trainer_app)])
def test_every_option_says_what_it_does(name: str, app: object) -> None:
    options = command_options(get_command(app), name)  # type: ignore[arg-type]
    assert f"{name}: `--version`" in options
    assert [option for option, text in options.items() if len(text) < 8] == []


def settings_without_text(model: type[BaseModel], prefix: str = "") -> list[str]:
    missing = []
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        missing += [] if field.description or inner else [prefix + name]
        missing += settings_without_text(inner, f"{prefix}{name}.") if inner else []
    return missing


def test_every_setting_says_what_it_does() -> None:
    assert settings_without_text(TrainSettings) == ["objects"], "which is not for run files"
    assert "`wandb login`" in read_page("run-file.md")


STEP = f"{checkpoint.CHECKPOINTS_FOLDER}/000012"
FILES = [
    run_files.RUN_INFO_FILE, run_files.METRICS_FILE, rollout_file.ROLLOUTS_FILE, token_credit.CREDITS_FILE,
    checkpoint.BEST_FILE, run_folder.LOCK, f"{run_folder.TAPES}/000000/session.json",
    f"{run_files.LOGS_FOLDER}/rank-1.log", f"{evaluate.EVALUATION_FOLDER}/{evaluate.COMPARISON_FILE}",
    f"{reporters.TENSORBOARD}/events.out.tfevents.1", "reports/wandb",
    f"{STEP}/{checkpoint.STATE_FILE}", f"{STEP}/{policy.STATE_FILE}", f"{STEP}/{rng.STATE_FILE_NAME}",
    f"{STEP}/{lora.ADAPTER_FILE}", f"{STEP}/{lora.ADAPTER_SETTINGS_FILE}", f"{STEP}/{shards.POLICY_FILE}",
    f"{STEP}/{SHARDS_FOLDER}/{shards.INDEX_FILE}", f"{STEP}/{SHARDS_FOLDER}/__0_0.distcp",
    f"{checkpoint.CHECKPOINTS_FOLDER}/{checkpoint.UNFINISHED}-000012-5a1f09c2/model.safetensors",
]  # fmt: skip


PATTERNS = re.findall(r"^\| `(.+?)` \| ", read_page("run-folder.md"), re.M)


@pytest.mark.parametrize("file", FILES)
def test_files_that_the_code_names_are_described(file: str) -> None:
    fitting = (pattern for pattern in PATTERNS if fnmatchcase(file, pattern))
    assert any(pattern.count("/") == file.count("/") or pattern.endswith("/*") for pattern in fitting)


def test_names_that_a_run_would_write_over_are_those_of_the_page() -> None:
    assert {pattern.split("/")[0] for pattern in PATTERNS} == run_files.RUN_NAMES
