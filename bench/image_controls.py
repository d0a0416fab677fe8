"""Control experiments of the vision job: the same questions with blank images, or with those of another house.

python bench/image_controls.py RUN       # a run of `mtrl-train --config sight`
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

from mtrl_plugins.demo.demos import (  # noqa: E402
    HELD_OUT_SEED,
    DemoTasks,
    load_demo,
)
from mtrl_plugins.demo.sight.house import House, Show, neighbour_of  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.torch.torch_engine import TorchEngine  # noqa: E402
from trainer.model import configure_torch, load_model  # noqa: E402
from trainer.reward.attempt import Attempt  # noqa: E402
from trainer.reward.functions import exact  # noqa: E402
from trainer.reward.scorer import Scorer  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.rollout.rollout import Rollout  # noqa: E402
from trainer.rollout.task import Task  # noqa: E402
from trainer.setup import load_template, make_gateway  # noqa: E402
from trainer.train.checkpoint import Checkpoints  # noqa: E402
from trainer.train.evaluate import Evaluation, evaluate  # noqa: E402
from trainer.train.run_folder import load_run_settings  # noqa: E402


def run_controls(run: Path, rows: int | None = None) -> Mapping[str, float]:
    """Success by greedy decoding on the run's held-out tasks, or on the first `rows` of them."""
    blank = anyio.run(_evaluate_with, run, "nothing", rows)
    exchanged = anyio.run(_evaluate_with, run, "neighbour", rows)
    follows = [_matches_shown_house(group.task, item.rollout) for group in exchanged.groups for item in group.scored]
    return {
        "blank": round(blank.all.value, 4),
        "exchanged": round(exchanged.all.value, 4),
        "follows": round(sum(follows) / max(1, len(follows)), 4),
    }


async def _evaluate_with(run: Path, show: Show, rows: int | None) -> Evaluation:
    settings, checkpoint = load_run_settings(run), Checkpoints(run).find_latest()
    if checkpoint is None:
        raise SystemExit(f"{run}: has no checkpoint")
    configure_torch()
    with tempfile.TemporaryDirectory() as folder:
        changed = settings.model_copy(update=_write_tool_files(Path(folder), show))
        async with make_gateway(changed) as gateway:
            template = load_template(checkpoint.folder, settings.template)
            async with TorchEngine(load_model(checkpoint.folder), image_processor=template.image_processor) as engine:
                greedy = Sampling(temperature=0, banned_ids=template.banned_ids)
                runner = RolloutRunner(engine, template, gateway, settings.limits, greedy)
                tasks = DemoTasks(load_demo("sight"), HELD_OUT_SEED, rows or settings.evaluation.final_rows, "held_out")
                return await evaluate(runner, Scorer(settings.reward), tasks, settings.concurrency)


def _write_tool_files(folder: Path, show: Show) -> dict[str, object]:
    """The shipped tools, configured to show something else."""
    camera = {
        "command": sys.executable,
        "args": [str(ROOT / "tool_configs/servers/camera.py"), "--show", show],
    }
    look = {"class_name": "mtrl_plugins.demo.sight.look.Look", "config": {"show": show}}
    (folder / "mcp_servers.json").write_text(json.dumps({"mcpServers": {"camera": camera}}))
    (folder / "tools.yaml").write_text(json.dumps({"tools": [look, {"server": "camera"}]}))
    return {"tools": str(folder / "tools.yaml"), "mcp": str(folder / "mcp_servers.json")}


def _matches_shown_house(task: Task, rollout: Rollout) -> bool:
    """Whether the answer is right for the house whose images were shown."""
    shown_task = replace(task, truth=House.from_name(neighbour_of(task.columns["house"])).answer)
    return exact(Attempt(shown_task, rollout)) == 1.0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", type=Path)
    print(json.dumps(run_controls(options.parse_args().run)))
