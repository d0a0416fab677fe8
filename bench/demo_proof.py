"""Whether the demo's tasks can be learned: skill, habit, GRPO in plain, and success by kind after each of them.

python -m bench.demo_proof                    # writes bench/results/proof_demo.json
python -m bench.demo_proof --task second      # no habit, and tasks that are never demonstrated: proof_second.json
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
from trainer.data.sampler import Sampler
from trainer.demo.data import Drawn
from trainer.demo.demonstrate import Writer
from trainer.demo.model import build
from trainer.demo.task import KINDS, TOOLS, TRAILS, score
from trainer.demo.warm import PLAIN, Recipe, Rows, warm
from trainer.engine.base import Sampling
from trainer.engine.torch import TorchEngine
from trainer.groups import Group, Groups
from trainer.model import load_model
from trainer.play import Player
from trainer.stage import gateway_of
from trainer.task import Task
from trainer.template import Template

CONFIGS = Path("tool_configs")
RESULTS = Path("bench/results")
DRAWN = 4096
LIMITS = RolloutLimits(assistant_turns=6, user_turns=2, tool_calls=6, turn_tokens=40, rollout_tokens=200, wall_s=120)


@dataclass(frozen=True, slots=True)
class Plain:
    """GRPO with one update per batch, so that nothing is off the policy."""

    steps: int = 60
    prompts: int = 16
    siblings: int = 8
    lr: float = 1e-3
    rise: int = 5


@dataclass(frozen=True, slots=True)
class Proof:
    kinds: tuple[str, ...]
    recipe: Recipe
    plain: Plain


PROOFS = {
    "demo": Proof(tuple(KINDS), Recipe(), Plain()),
    "second": Proof(tuple(TRAILS), PLAIN, Plain(steps=110, prompts=10, siblings=12)),
}


@dataclass
class Job:
    player: Player
    model: PreTrainedModel
    plain: Plain
    kinds: tuple[str, ...]
    seed: int

    async def play(self, tasks: Sequence[Task], count: int, name: str = "") -> list[Group]:
        """In the order of the tasks, so that sums over them come out the same each time."""
        groups = Groups(self.player, count, admission=Admission(open=256, writing=128))
        async with groups.play(tasks, name) as done:
            found = {group.task.id: group async for group in done}
        return [found[task.id] for task in tasks]

    async def told(self) -> dict[str, Any]:
        return {"sampled": await self.evaluated(1.0), "greedy": await self.evaluated(0.0)}

    async def evaluated(self, temperature: float) -> dict[str, Any]:
        player = replace(self.player, sampling=Sampling(temperature=temperature), seed=10**6)
        job = replace(self, player=player)
        kinds, right = Counter[str](), Counter[str]()
        for group in await job.play(Drawn(10**6, 300, "held_out", self.kinds), 1):
            for rollout in group.rollouts:
                kind = str(group.task.columns["kind"])
                kinds[kind] += 1
                right[kind] += score(group.task, rollout) == 1.0
        rate = sum(right.values()) / sum(kinds.values())
        return {"rate": round(rate, 4), "by_kind": {kind: [right[kind], kinds[kind]] for kind in kinds}}

    async def learn(self) -> list[float]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.plain.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        drawn = Sampler(Drawn(self.seed, DRAWN, kinds=self.kinds), seed=self.seed)
        curve = []
        for step in range(self.plain.steps):
            groups = await self.play(list(islice(drawn, self.plain.prompts)), self.plain.siblings, f"{step}-")
            rewards = [[score(group.task, one) for one in group.rollouts] for group in groups]
            curve.append(sum(map(sum, rewards)) / max(1, sum(map(len, rewards))))
            if (loss := grpo(self.model, groups, rewards)) is not None:
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            await self.player.engine.publish(self.model.state_dict(), step + 2)
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


async def prove(seed: int, proof: Proof, folder: Path, gateway: AnyGateway) -> dict[str, Any]:
    recipe, began = replace(proof.recipe, seed=seed), core_seconds()
    build(folder, seed)
    template, model = Template.load(folder), load_model(folder)
    writer, spent = Writer(template, TOOLS), {}
    warm(model, writer, replace(recipe, habit=0))
    spent["clean"] = core_seconds() - began
    async with TorchEngine(model, rows=128) as engine:
        job = Job(Player(engine, template, gateway, LIMITS, seed=seed), model, proof.plain, proof.kinds, seed)
        told = {"clean" if recipe.habit else "before": await job.told()}
        if recipe.habit:
            began = core_seconds()
            warm(model, writer, replace(recipe, clean=0))
            await engine.publish(model.state_dict(), 1)
            spent["habit"] = core_seconds() - began
            told["before"] = await job.told()
        began = core_seconds()
        curve = await job.learn()
        spent["grpo"] = core_seconds() - began
        told["after"] = await job.told()
    for name, found in told.items():
        print(f"seed {seed} {name}:", *(f"{how} {of['rate']:.3f}" for how, of in found.items()), flush=True)
    rounded = {name: round(value, 1) for name, value in spent.items()}
    return {"seed": seed, "core_s": rounded, **told, "curve": [round(value, 3) for value in curve]}


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    proof = PROOFS[options.task]
    proof = replace(proof, plain=replace(proof.plain, steps=options.steps or proof.plain.steps))
    told: dict[str, Any] = {"recipe": asdict(proof.recipe), "grpo": asdict(proof.plain), "seeds": []}
    async with gateway_of(str(CONFIGS), None) as gateway:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                told["seeds"].append(await prove(seed, proof, Path(folder), gateway))
            (options.out or RESULTS / f"proof_{options.task}.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--task", choices=PROOFS, default="demo")
    parser.add_argument("--steps", type=int, help="of GRPO, where the proof's own number is not wanted")
    parser.add_argument("--out", type=Path)
    anyio.run(main, parser.parse_args())
