"""The trainer's command line with a policy that says what a file tells it, for tests in which tools are really called.

    python scripted_train.py SAYS.json rollout ...

SAYS.json holds the texts of each task's turns, by its id.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import trainer.roll
from tests.trainer.scripts import by_task
from trainer.cli import main
from trainer.config import PlaySettings
from trainer.engine.base import Engine
from trainer.engine.scripted import ScriptedEngine
from trainer.stage import template_of


def scripted(file: Path) -> Callable[..., Engine]:
    """In place of `engine_of`: a policy that speaks the model's own template."""

    def engine_of(settings: PlaySettings, model: Path, *_: object, **__: object) -> Engine:
        return ScriptedEngine(by_task(json.loads(file.read_text()), template_of(model, settings.template)))

    return engine_of


if __name__ == "__main__":
    trainer.roll.engine_of = scripted(Path(sys.argv.pop(1)))
    main()
