"""The trainer's command line with a scripted policy, for tests in which tools are really called.

    python scripted_train.py TEXTS.json rollout ...

TEXTS.json has the texts of each task's turns, by the task's id.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import trainer.collect_rollouts
from tests.trainer.policy_scripts import script_by_task
from trainer.cli import main
from trainer.engine.base import Engine
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import load_template


def make_scripted_engine(file: Path) -> Callable[..., Engine]:
    """A replacement for `make_engine`: a policy that uses the model's own template."""

    def make_engine(settings: BaseRolloutSettings, model: Path, *_: object, **__: object) -> Engine:
        return ScriptedEngine(script_by_task(json.loads(file.read_text()), load_template(model, settings.template)))

    return make_engine


if __name__ == "__main__":
    trainer.collect_rollouts.make_engine = make_scripted_engine(Path(sys.argv.pop(1)))
    main()
