"""Whether the demo's task can be learned: warm start, GRPO in plain, and success by kind before and after.

python -m bench.demo_proof --seeds 0 1 2      # writes bench/results/demo.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gateway.session import AnyGateway
from trainer.config import Admission, RolloutLimits
from trainer.demo.demonstrate import Writer
from trainer.demo.model import build
from trainer.demo.task import TOOLS, Split, problems, score
from trainer.demo.warm import Recipe, Rows, warm
from trainer.engine.base import Sampling
from trainer.engine.torch import TorchEngine
from trainer.groups import Group, Groups
from trainer.model import load_model
from trainer.play import Player
from trainer.stage import gateway_of
from trainer.task import Task
from trainer.template import Template

CONFIGS = Path("trainer/demo/tools")
RESULTS = Path("bench/results/demo.json")
EVALUATED = 300
LIMITS = RolloutLimits(assistant_turns=6, user_turns=2, tool_calls=6, turn_tokens=40, rollout_tokens=200, wall_s=120)


@dataclass(frozen=True, slots=True)
class Plain:
    """GRPO with one update per batch, so that nothing is off the policy."""

    steps: int = 50
    prompts: int = 15
    siblings: int = 8
    lr: float = 1e-3
    rise: int = 5


@dataclass
class Job:
    player: Player
    model: PreTrainedModel
    plain: Plain
    seed: int

    async def play(self, tasks: Sequence[Task], count: int) -> list[Group]:
        async with Groups(self.player, count, admission=Admission(open=256, writing=128)).play(tasks) as done:
            return [group async for group in done]

    async def evaluated(self, temperature: float) -> dict[str, Any]:
        player = replace(self.player, sampling=Sampling(temperature=temperature), seed=10**6)
        job = replace(self, player=player)
        kinds, right = Counter[str](), Counter[str]()
        for group in await job.play(_tasks(10**6, EVALUATED, "held_out"), 1):
            for rollout in group.rollouts:
                kind = str(group.task.columns["kind"])
                kinds[kind] += 1
                right[kind] += score(group.task, rollout) == 1.0
        rate = sum(right.values()) / sum(kinds.values())
        return {"rate": round(rate, 4), "by_kind": {kind: [right[kind], kinds[kind]] for kind in kinds}}

    async def learn(self) -> list[float]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.plain.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        drawn = problems(self.seed + 1000)
        curve = []
        for step in range(self.plain.steps):
            groups = await self.play([one.task for one in islice(drawn, self.plain.prompts)], self.plain.siblings)
            rewards = [[score(group.task, one) for one in group.rollouts] for group in groups]
            curve.append(sum(map(sum, rewards)) / max(1, sum(map(len, rewards))))
            if (loss := grpo(self.model, groups, rewards)) is not None:
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            await self.player.engine.publish(self.model.state_dict(), step + 1)
            print(f"  step {step + 1}: reward {curve[-1]:.2f}, {core_seconds():.0f} core-s", flush=True)
        return curve

    def _rate(self, step: int) -> float:
        fall = 1 - 0.9 * step / self.plain.steps
        return min((step + 1) / self.plain.rise, fall)


def grpo(model: PreTrainedModel, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> Tensor | None:
    """The policy gradient of what set a rollout apart from its group; groups that agree say nothing."""
    ledgers, advantages = [], []
    for group, given in zip(groups, rewards, strict=True):
        values = torch.tensor(given)
        if len(given) > 1 and values.std() > 0:
            ledgers += [one.ledger for one in group.rollouts]
            advantages += ((values - values.mean()) / (values.std() + 1e-6)).tolist()
    if not ledgers:
        return None
    rows = Rows.of(ledgers)
    logits = model(input_ids=rows.ids).logits[:, :-1]
    mask = rows.mask[:, 1:]
    logprobs = logits[mask].log_softmax(-1).gather(-1, rows.ids[:, 1:][mask][:, None])[:, 0]
    weights = torch.tensor(advantages)[:, None].expand_as(mask)[mask]
    ratio = (logprobs - logprobs.detach()).exp()
    loss: Tensor = -(ratio * weights).mean()
    return loss


def core_seconds() -> float:
    """Of this process and of the servers that it started."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)


def _tasks(seed: int, count: int, split: Split) -> list[Task]:
    return [one.task for one in islice(problems(seed, split), count)]


async def prove(seed: int, recipe: Recipe, plain: Plain, folder: Path, gateway: AnyGateway) -> dict[str, Any]:
    began = core_seconds()
    build(folder, seed)
    template, model = Template.load(folder), load_model(folder)
    warm(model, Writer(template, TOOLS), recipe)
    warmed = core_seconds() - began
    engine = TorchEngine(model, rows=128)
    async with engine:
        job = Job(Player(engine, template, gateway, LIMITS, seed=seed), model, plain, seed)
        told: dict[str, Any] = {"seed": seed, "warm_core_s": round(warmed, 1)}
        told["before"] = {"sampled": await job.evaluated(1.0), "greedy": await job.evaluated(0.0)}
        print(json.dumps(told), flush=True)
        began = core_seconds()
        curve = await job.learn()
        told |= {"grpo_core_s": round(core_seconds() - began, 1), "curve": [round(value, 3) for value in curve]}
        told["after"] = {"sampled": await job.evaluated(1.0), "greedy": await job.evaluated(0.0)}
    print(json.dumps({key: told[key] for key in ("seed", "warm_core_s", "grpo_core_s", "after")}), flush=True)
    return told


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    plain = Plain(steps=options.steps)
    told: dict[str, Any] = {"recipe": asdict(Recipe()), "grpo": asdict(plain), "seeds": []}
    async with gateway_of(str(CONFIGS), None) as gateway:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                told["seeds"].append(await prove(seed, Recipe(seed=seed), plain, Path(folder), gateway))
            options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=Plain().steps)
    parser.add_argument("--out", type=Path, default=RESULTS)
    anyio.run(main, parser.parse_args())
