"""Makes training commands of a page small enough for a test, without changing what they try."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from trainer.data.tasks import example_names
from trainer.train.settings import TrainSettings

JOBS = Path(__file__).parents[2] / "mtrl_plugins" / "demo" / "jobs"
SUBCOMMANDS = ("rollout", "render", "translate", "show", "why", "replay", "view", "eval", "compare", "export", "init")
TRANSLATED = ("--verl-config", "--swift", "--trl")
MOST_ROWS = 4
MOST_STEPS = 4
"""One more than the finished run has, so that it can go on."""


def shrink_command(words: list[str], place: Path, small_job: Callable[[], TrainSettings]) -> tuple[list[str], str]:
    """The command in small, and a note about what was replaced."""
    if words[0] != "mtrl-train":
        return words, ""
    if len(words) > 1 and words[1] in SUBCOMMANDS:
        return _limited(words, "--rows", MOST_ROWS), ""
    if {"--help", "-h", "--resume"} & {*words} or any(word.partition("=")[0] in TRANSLATED for word in words):
        return _limited([word for word in words if word != "--view"], "--steps", MOST_STEPS), ""
    return _small_training([word for word in words if word != "--view"], place, small_job)


def _limited(words: list[str], option: str, most: int) -> list[str]:
    """The same command, with a smaller number behind an option."""
    if option not in words:
        return words
    at = words.index(option) + 1
    return [*words[:at], str(min(int(words[at]), most)), *words[at + 1 :]]


def _small_training(words: list[str], place: Path, small_job: Callable[[], TrainSettings]) -> tuple[list[str], str]:
    config = _option(words, "--config")
    if config is not None and (place / config).is_file():
        settings = yaml.safe_load((place / config).read_text(encoding="utf-8"))
    elif config is not None:
        file = JOBS / f"{config}.yaml"
        assert file.is_file(), f"there is neither a file nor a job {config}"
        settings = TrainSettings.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))).model_dump()
    else:
        settings = {}
    if (_option(words, "--model") or settings.get("model", "demo")) in example_names():
        if "--out" not in words:  # The finished run shows that it trains; once more would show nothing.
            words = [*words, "--dry-run"]
        small, note = small_job().model_dump(mode="json", exclude_unset=True), "(the small job stands in)\n"
    else:
        small, note = shrink_settings(settings), ""
        if "--dry-run" in words:
            small = settings
    file = place / "shrunk.yaml"
    file.write_text(yaml.safe_dump(small), encoding="utf-8")
    kept = _without(words, "--config", "--steps")
    named = _option(words, "--out") or small.get("out")
    return [*kept, "--config", str(file), *([] if named or "--dry-run" in words else _out(config, place))], note


def _out(config: str | None, place: Path) -> list[str]:
    """The folder that the command itself would take: the shrunk file has another name."""
    name = Path(config).stem if config else "default"
    taken = [f"runs/{name}", *(f"runs/{name}-{number}" for number in range(2, 100))]
    return ["--out", next(folder for folder in taken if not (place / folder).exists())]


def shrink_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with a step or two of few short rollouts."""
    small = {**settings, "steps": min(settings.get("steps", 2), 2), "prompts": 2, "n": 2}
    small["limits"] = {**settings.get("limits", {}), "turn_tokens": 8, "assistant_turns": 2}
    evaluation = settings.get("evaluation", {})
    small["evaluation"] = {**evaluation, "every": min(evaluation.get("every", 0), 1), "rows": 2, "final_rows": 2}
    small["checkpoint"] = {"every": 1}
    return small


def _option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def _without(words: list[str], *names: str) -> list[str]:
    kept = [*words]
    for name in names:
        if name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return kept
