"""A recorded run is played again: the tape answers for the tools, the ledgers for the engine; the ids must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from gateway.errors import ConfigError
from gateway.tape import Replay
from trainer.data.tasks import load
from trainer.engine.base import Sampling, Written
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.play import Player
from trainer.roll import settings_of
from trainer.run.file import Rollouts
from trainer.run.rollout import Rollout
from trainer.stage import sampling_of, stepper_of, template_of


async def replay(run: Path, console: Console) -> bool:
    """True where every rollout has the same ids, masks, stop reasons and rewards as when it was recorded."""
    settings = settings_of(run)
    if not (run / "tape").exists():
        raise ConfigError("has no tape", file=run, remedy="make the run with --record")
    tasks = {task.id: task for task in load(settings.data, system=settings.system, columns=settings.columns)}
    recorded = list(attempts(Rollouts(run)))
    different = 0
    async with Replay(run / "tape") as gateway:
        template = template_of(settings.model, settings.template, gateway.specs)
        for before, attempt in recorded:
            task = tasks.get(before.task)
            if task is None:
                remedy = "replay it beside the data that it was made from"
                raise ConfigError(f"the task {before.task!r} is no longer there", file=settings.data, remedy=remedy)
            engine = ScriptedEngine(says(before))
            sampling, stepper = sampling_of(settings), stepper_of(settings)
            player = Player(engine, template, gateway, settings.limits, sampling, stepper, seed=settings.seed)
            async with engine:
                after = await player.play(task, group=before.group, index=before.index, attempt=attempt)
            if problem := differs(before, after):
                different += 1
                console.print(f"{before.task} {before.group}/{before.index}: {problem}", markup=False, soft_wrap=True)
    console.print(f"{len(recorded)} rollouts replayed, {different} of them differ", markup=False)
    return not different


def attempts(rollouts: Iterable[Rollout]) -> Iterator[tuple[Rollout, int]]:
    """Those to be replayed, and how often each was begun before: what infrastructure ended stands before its refill."""
    failed: Counter[tuple[str, int]] = Counter()
    for rollout in rollouts:
        if rollout.stop.infrastructure:
            failed[rollout.group, rollout.index] += 1
        else:
            yield rollout, failed[rollout.group, rollout.index]


def says(rollout: Rollout) -> Callable[[Sequence[int], Sampling, str], Answer]:
    """What the policy wrote, in order; under a template that takes words back, over all ledgers."""
    turns = iter(rollout.turns)

    def say(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        turn = next(turns)
        stop = turn.stop if turn.stop in ("stop", "length", "abort") else "stop"
        return Written(turn.ids, turn.logprobs or (), stop, turn.version or 0, turn.cached, turn.before)  # type: ignore[arg-type]

    return say


def differs(before: Rollout, after: Rollout) -> str:
    for what, one, other in (
        ("ids", [one.ids for one in before.ledgers], [one.ids for one in after.ledgers]),
        ("masks", [one.mask for one in before.ledgers], [one.mask for one in after.ledgers]),
        ("stop", before.stop, after.stop),
        ("rewards", dict(before.rewards), dict(after.rewards)),
    ):
        if one != other:
            return f"other {what}: {one!r:.200} was recorded, {other!r:.200} came ({after.reason})"
    return ""
