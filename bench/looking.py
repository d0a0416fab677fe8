"""Whether a policy that learned to look answers from what it sees: the same questions, and other pictures.

python bench/looking.py RUN       # a run of `mtrl-train --config sight`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402

from trainer.demo.data import Drawn  # noqa: E402
from trainer.demo.demos import demo  # noqa: E402
from trainer.demo.sight.house import House, Show, neighbour  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.torch import TorchEngine  # noqa: E402
from trainer.model import load_model, settle  # noqa: E402
from trainer.play import Player  # noqa: E402
from trainer.reward.attempt import Attempt  # noqa: E402
from trainer.reward.scorer import Scorer  # noqa: E402
from trainer.reward.shipped import exact  # noqa: E402
from trainer.run.rollout import Rollout  # noqa: E402
from trainer.stage import gateway_of, template_of  # noqa: E402
from trainer.task import Task  # noqa: E402
from trainer.train.checkpoint import Checkpoints  # noqa: E402
from trainer.train.evaluate import Evaluation, evaluate  # noqa: E402
from trainer.train.folder import settings_of  # noqa: E402
from trainer.train.job import HELD_OUT  # noqa: E402


def controls(run: Path, rows: int | None = None) -> Mapping[str, float]:
    """By the likeliest tokens, on the run's held-out tasks, or so many of them."""
    blank = anyio.run(_shown, run, "nothing", rows)
    other = anyio.run(_shown, run, "neighbour", rows)
    follows = [_as_shown(group.task, one.rollout) for group in other.groups for one in group.scored]
    return {
        "blank": round(blank.all.value, 4),
        "exchanged": round(other.all.value, 4),
        "follows": round(sum(follows) / max(1, len(follows)), 4),
    }


async def _shown(run: Path, show: Show, rows: int | None) -> Evaluation:
    settings, kept = settings_of(run), Checkpoints(run).latest()
    if kept is None:
        raise SystemExit(f"{run}: has no checkpoint")
    settle()
    with tempfile.TemporaryDirectory() as folder:
        asked = settings.model_copy(update=_tools(Path(folder), show))
        async with gateway_of(asked) as gateway:
            template = template_of(kept.folder, settings.template)
            async with TorchEngine(load_model(kept.folder), eyes=template.eyes) as engine:
                likeliest = Sampling(temperature=0, barred=template.barred)
                player = Player(engine, template, gateway, settings.limits, likeliest)
                tasks = Drawn(demo("sight"), HELD_OUT, rows or settings.evaluation.rows, "held_out")
                return await evaluate(player, Scorer(settings.reward), tasks, settings.admission, "kind")


def _tools(folder: Path, show: Show) -> dict[str, object]:
    """The shipped tools, told to show something else."""
    camera = {
        "command": sys.executable,
        "args": [str(ROOT / "tool_configs/servers/camera.py"), "--show", show],
    }
    look = {"class_name": "trainer.demo.sight.look.Look", "config": {"show": show}}
    (folder / "mcp_servers.json").write_text(json.dumps({"mcpServers": {"camera": camera}}))
    (folder / "tools.yaml").write_text(json.dumps({"tools": [look, {"server": "camera"}]}))
    return {"tools": str(folder / "tools.yaml"), "mcp": str(folder / "mcp_servers.json")}


def _as_shown(task: Task, rollout: Rollout) -> bool:
    """Whether the answer is that of the house whose pictures were shown."""
    told = replace(task, truth=House.named(neighbour(task.columns["house"])).answer)
    return exact(Attempt(told, rollout)) == 1.0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path)
    print(json.dumps(controls(options.parse_args().run)))
