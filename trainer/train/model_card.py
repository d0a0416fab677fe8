"""The model card of an exported model: what it was trained from, with which settings, and how it was evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.storage.run_files import read_run_info
from trainer.train.evaluate import COMPARISON_FILE, VARIANTS
from trainer.view.task_outcomes import EVALUATION_FOLDER

CARD_FILE = "README.md"
CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags: [tool-use, {algorithm}, mtrl]
---

# {name}

Trained with mtrl{version} for {step} steps, starting from `{start}`.

| Setting | Value |
|---|---|
{settings}
"""


def write_card(folder: Path, name: str, run: Path, step: int, *, is_adapter: bool) -> None:
    """Writes the card into an export. Folders of this machine are named without their path."""
    info = read_run_info(run)
    settings = info.get("settings", {})
    algorithm = settings.get("algorithm", {}).get("name", "rl")
    card = CARD.format(
        library="peft" if is_adapter else "transformers",
        algorithm=algorithm,
        name=name,
        version=f" {version}" if (version := info.get("versions", {}).get("mtrl-rl")) else "",
        step=step,
        start=_name_start(Path(str(settings.get("model") or info.get("model", "a model")))),
        settings="\n".join(f"| {key} | `{value}` |" for key, value in _list_settings(settings, algorithm)),
    )
    (folder / CARD_FILE).write_text(card + "".join(_format_evaluation(run, step)), encoding="utf-8")


def _name_start(model: Path) -> str:
    """The model's name, without the path of this machine; for one of the hub, its name and revision there."""
    name = next((part for part in model.parts if part.startswith("models--")), "")
    return f"{name.removeprefix('models--').replace('--', '/')}@{model.name}" if name else model.name


def _list_settings(settings: Mapping[str, Any], algorithm: str) -> Iterator[tuple[str, Any]]:
    yield "algorithm", algorithm
    for key in ("data", "prompts", "n", "mode", "seed"):
        if (value := settings.get(key)) is not None:
            yield key, Path(value).name if key == "data" else value
    update = settings.get("update", {})
    for key in ("optimizer", "lr"):
        if (value := update.get(key)) is not None:
            yield f"update.{key}", value
    if lora := update.get("lora"):
        yield "update.lora.rank", lora.get("rank")
    if components := settings.get("reward", {}).get("components"):
        yield "reward", ", ".join(components)


def _format_evaluation(run: Path, step: int) -> Iterator[str]:
    """Success before and after training, if the exported step is the one that was evaluated."""
    try:
        found = json.loads((run / EVALUATION_FOLDER / COMPARISON_FILE).read_text(encoding="utf-8"))
        is_same, rates = found["step"] == step, {name: float(found[name]) for name in VARIANTS}
        tasks = f"{found['tasks']} {'held-out' if found['held_out'] else 'training'} tasks"
        changes = "".join(f", `{change}`" for change in found.get("changes", ()))
    except (OSError, ValueError, LookupError, TypeError):
        return
    if is_same:
        yield f"\nSuccess on {tasks}{changes}:\n\n| | before | after |\n|---|--:|--:|\n"
        for way in ("sampled", "greedy"):
            yield f"| {way} | {rates[f'{way}_before']:.3f} | {rates[way]:.3f} |\n"
