"""Settings on the command line, and mistakes in options and run files: exit code 2, and a message with the place."""

from __future__ import annotations

import errno
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.main import get_command
from typer.testing import CliRunner

from gateway.errors import ConfigError
from trainer.cli import app
from trainer.cli.errors import report_errors
from trainer.cli.meant_settings import MEANT_SETTINGS
from trainer.cli.run_file import load_settings
from trainer.rollout.settings import RolloutSettings, flatten_settings
from trainer.train.settings import TrainSettings

WRONG_VALUES: tuple[Any, ...] = (
    None, "", "no/such", "\0", "a" * 5000, -1, 0, 3.5, True, float("nan"), float("inf"), 10**30, [], [1], [None], [[]],
    {}, {"a": 1}, {"": {}}, {1: 2},
)  # fmt: skip
WRONG_PATHS = (
    "",  "file.txt", "folder",  "broken.yaml", "./file.txt/deeper", "loop", "a" * 5000, "\0",
    "module.py:missing", "no_module:name",
)  # fmt: skip
PATH_KEYS = (
    "tools", "mcp", "model", "data", "evaluation.data", "template.chat_template", "template.parser", "stepper",
    "reward.components.mine.function", "algorithm.credit.trained_turns", "agent.function",
)  # fmt: skip
COMMANDS = ("", "eval", "render", "replay", "rollout", "show", "why", "translate")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.data.dataset.HUB_NAME", re.compile("(?!)"))  # Nothing is looked up on a hub.
    Path("folder").mkdir()
    Path("file.txt").write_text("hello")
    Path("broken.yaml").write_text("a: [")
    Path("binary.yaml").write_bytes(b"\xff\xfe\0")
    Path("module.py").write_text("there = 3\n")
    Path("loop").symlink_to("loop")
    return tmp_path


def settings_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from settings_models(part)


def iterate_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a run file."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for inner in settings_models(field.annotation):
            yield from iterate_keys(inner, (*prefix, name))


def nest(key: str | tuple[str, ...], value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".") if isinstance(key, str) else key):
        value = {part: value}
    return typing.cast(dict[str, Any], value)


def run_words(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{words!r:.200}: {done.exception!r:.300}"
    assert done.exit_code in (0, 1, 2) and "Traceback" not in done.output, f"{words!r:.200}: {done.output[-500:]}"
    return done.exit_code, done.output


def test_every_key_of_a_run_file_takes_or_refuses_every_value_by_its_name() -> None:
    keys = list(dict.fromkeys(iterate_keys(TrainSettings)))
    assert len(keys) > 150
    for key in keys:
        for value in WRONG_VALUES:
            try:
                load_settings(TrainSettings, None, nest(key, value))
            except ConfigError as error:
                assert key[-1] in str(error) or key[0] in str(error), f"{key}: {value!r:.40}: {error}"


@pytest.mark.parametrize("key", PATH_KEYS)
def test_every_path_and_name_in_a_run_file_is_refused_by_its_key(place: Path, key: str) -> None:
    for value in WRONG_PATHS:
        small = {"model": "folder", "data": "file.txt", "tools": "folder", **nest(key, value)}
        Path("run.json").write_text(json.dumps(small))
        code, output = run_words("--config", "run.json", "--dry-run")
        assert code == 2 and "mtrl-train: " in output, f"{value!r:.40}: {output[-500:]}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_refused_by_its_name_or_by_what_it_names(place: Path, command: str) -> None:
    group: Any = get_command(app)
    parsed = group.commands[command] if command else group
    required = sum(param.param_type_name == "argument" and param.required for param in parsed.params)
    for param in parsed.params:
        if param.param_type_name != "option" or param.is_flag or param.name == "ray":
            continue
        for value in ("", "./no/such", "file.txt", "folder", "loop", "a" * 5000):
            first = [command] if command else ["--tools", "./no/such"]  # The demo's would do.
            words = [*first, *["folder"] * required, param.opts[0], value]
            code, output = run_words(*words, *([] if command else ["--dry-run"]))
            assert code or value == "folder", f"{words!r:.100}: {output[-300:]}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "folder"], "is a folder, not a run file remedy: name the run file in it: folder/job.yaml"),
        (["--config", "."], "remedy: name the run file in it: binary.yaml"),
        (["--resume", "runs/mine"], "A run is resumed with: --resume --out runs/mine"),
        (["folder/job.yaml"], "A run file is named with: --config folder/job.yaml"),
        (["default"], "A run file is named with: --config default"),
        (["shw"], "No such command 'shw'. Did you mean 'show'?"),
    ],
)
def test_a_word_in_the_wrong_place_is_told_with_the_option_it_belongs_to(
    place: Path, words: list[str], says: str
) -> None:
    Path("folder/job.yaml").touch()
    code, output = run_words(*words)
    assert code == 2 and says in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "folder", "--rows", "0"], "'--rows': Input should be greater than or equal to 1"),
        (["eval", "folder", "--json", "--rows", "-3"], "'--rows': Input should be greater than or equal to 1"),
        *(
            (["sft", "--from", "folder", "--epochs", epochs], f"--epochs: is a finite number above 0, not {epochs}")
            for epochs in ("0", "-1", "inf", "nan")
        ),
    ],
)
def test_a_number_out_of_its_range_is_refused_at_once(place: Path, words: list[str], says: str) -> None:
    code, output = run_words(*words)
    assert code == 2 and says in " ".join(output.replace("│", " ").split())


def test_a_file_that_another_account_keeps_for_itself_is_told_with_the_remedy(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda file, mode: False)  # Root may read every file.
    with pytest.raises(typer.Exit), report_errors():
        raise PermissionError(errno.EACCES, "Permission denied", "file.txt")
    told = capsys.readouterr().err
    assert "file.txt: cannot be read by this user (Permission denied)" in told and "chmod a+r file.txt" in told


@pytest.mark.parametrize("out", ["file.txt", "file.txt/deeper", "", "loop", "a" * 5000])
def test_a_run_folder_that_cannot_be_one_is_refused(place: Path, out: str) -> None:
    Path("run.json").write_text(json.dumps({"model": "folder", "data": "file.txt", "tools": "folder"}))
    for more in ((), ("--dry-run",)):
        code, output = run_words("--config", "run.json", "--out", out, *more)
        assert code == 2 and ("out" in output or more), output
    assert Path("file.txt").read_text() == "hello"


def load(tmp_path: Path, *words: str, **values: Any) -> TrainSettings:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": "m", "data": "d.jsonl", **values}))
    return load_settings(TrainSettings, file, {}, overrides=words)


def test_words_set_nested_settings_lists_and_mappings(tmp_path: Path) -> None:
    words = "update.lr=1e-4", "steps=7", "report=[wandb]", "update.lora={rank: 4}", "reward.components.a.function=exact"
    settings = load(
        tmp_path, *words, update={"weight_decay": 0.1}, reward={"components": {"a": {"function": "answer"}}}
    )
    assert (settings.update.lr, settings.update.weight_decay, settings.steps) == (1e-4, 0.1, 7)
    assert settings.report == ("wandb",) and settings.update.lora is not None and settings.update.lora.rank == 4
    assert settings.reward.components["a"].function == "exact"
    assert load(tmp_path, "update.lora.rank=2").update.model_dump()["lora"]["rank"] == 2


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("updates.lr=1", "updates: unknown key\n  remedy: did you mean `update`?"),
        ("update.lr=much", "update.lr: expected a valid number"),
        ("model.path=x", "model.path=x: `model` is no section there"),
        ("steps=[", "steps=[: has no YAML value"),
        ("lora={rank: 8}", "lora: unknown key\n  remedy: you probably mean `update.lora`"),
        ("update.warmup=4", "update.warmup: unknown key\n  remedy: you probably mean `update.warmup_steps`"),
    ],
)
def test_a_word_that_sets_nothing_is_refused(word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, word)
    assert told in str(raised.value)


@pytest.mark.parametrize("command", ["rollout", "sft"])
def test_every_command_with_settings_takes_words(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: m\ndata: d.jsonl\n" + ("out: o\n" if command == "rollout" else ""))
    done = CliRunner().invoke(app, [command, "--config", "run.yaml", "limits.turns=3"])
    assert done.exit_code == 2 and "limits.turns: unknown key" in done.output
    assert "you probably mean `limits.assistant_turns`" in done.output


def test_an_evaluation_refuses_words_that_it_would_not_feel(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "update.lr=1"])
    assert done.exit_code == 2 and "update.lr=1: an evaluation does not read `update`" in done.output
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "limits.turn_tokens=1"])
    assert done.exit_code == 2 and "not a run of `mtrl-train`" in done.output
    (tmp_path / "run.json").write_text('{"settings": {"early_stop": {"window": 5}}}')
    done = CliRunner().invoke(app, ["eval", str(tmp_path)])
    assert done.exit_code == 2 and "settings.early_stop.window: a setting of the run does not fit" in done.output


def test_every_answer_names_a_setting() -> None:
    settings = TrainSettings.model_validate(
        {
            "model": "m", "data": "d", "update": {"lora": {}, "critic": {}},
            "algorithm": {"overlong": {"limit": 2, "buffer": 1}},
        }
    )  # fmt: skip
    known = {
        *flatten_settings(settings.model_dump()),
        *flatten_settings(RolloutSettings(model="m", data="d", out="o").model_dump()),
    }  # type: ignore[arg-type]
    parts = {part for name in known for part in name.split(".")} | {"heartbeat_timeout_s"}
    for meant in MEANT_SETTINGS.values():
        assert set(meant.partition(":")[0].split(".")) <= parts, meant
